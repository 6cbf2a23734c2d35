"""Thousands of clients at once: probes are answered between their requests."""

import asyncio
import socket

from serving.http.connections import TURNS, Connection, Turns
from serving.http.server import TEXT_THREADS
from tests.serving.conftest import serving
from tests.serving.fake_engine import FakeEngine
from tests.serving.http.test_streaming import wait_until

BODY = b'{"prompt": "hello", "max_tokens": 2}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 36\r\n\r\n"


def connect(client, count: int) -> list[socket.socket]:
    address = "127.0.0.1", int(client.base.rpartition(":")[2])
    return [socket.create_connection(address) for _ in range(count)]


async def answers(connection: socket.socket) -> bytes:
    """The first line of the response."""
    connection.setblocking(False)
    async with asyncio.timeout(60):
        return (await asyncio.get_running_loop().sock_recv(connection, 65536)).partition(b"\r\n")[0]


async def test_a_few_turns_in_an_iteration_in_order():
    turns, taken = Turns(asyncio.get_running_loop()), []
    for number in range(3 * TURNS + 1):
        turns.take(lambda number=number: taken.append(number))
    for count in (TURNS, 2 * TURNS, 3 * TURNS, 3 * TURNS + 1, 3 * TURNS + 1):
        assert taken == list(range(count))
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    turns.take(lambda: taken.append("at once"))
    assert taken[-1] == "at once"


class Watched(FakeEngine):
    """Notes how many requests it has when it is asked for its health."""

    def check_health(self) -> None:
        self.had = len(self.requests)


async def test_a_probe_passes_a_crowd_that_came_before_it():
    engine = Watched()
    engine.queue = 10_000
    async with serving(engine) as client:
        crowd, [probe] = connect(client, 200), connect(client, 1)
        probe.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert await answers(probe) == b"HTTP/1.1 200 OK"  # so all are accepted
        for connection in crowd:
            connection.sendall(HEAD + BODY)
        probe.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert await answers(probe) == b"HTTP/1.1 200 OK"
        assert engine.had < 100
        assert {await answers(connection) for connection in crowd} == {b"HTTP/1.1 200 OK"}
        for connection in (*crowd, probe):
            connection.close()


async def test_clients_that_leave_before_their_turn_have_none(monkeypatch):
    engine, begun = FakeEngine(), []
    monkeypatch.setattr(Connection, "head_was_read", lambda self: begun.append(self))
    engine.queue = 10_000
    async with serving(engine) as client:
        crowd = connect(client, 200)
        await asyncio.sleep(0.1)
        for connection in crowd:
            connection.sendall(HEAD + BODY)
        for connection in crowd[100:]:
            connection.close()
        assert {await answers(connection) for connection in crowd[:100]} == {b"HTTP/1.1 200 OK"}
        assert (await client.complete())[0] == 200
        assert len(engine.requests) == 101
        assert len(begun) < 150
        for connection in crowd[:100]:
            connection.close()
        await wait_until(lambda: not engine._live)


async def test_bodies_that_do_not_come_keep_nobody_from_a_turn(client):
    slow = connect(client, 2 * TEXT_THREADS)
    for connection in slow:
        connection.sendall(HEAD + BODY[:-1])
    assert (await client.complete())[0] == 200
    for connection in slow:
        connection.sendall(BODY[-1:])
    assert {await answers(connection) for connection in slow} == {b"HTTP/1.1 200 OK"}
    for connection in slow:
        connection.close()


async def test_a_request_in_many_pieces_that_waits_for_its_turn_is_whole(engine):
    """The second client's pieces arrive while it waits; they are more than are held, so reading pauses."""
    engine.queue = 10_000
    prompt = b'{"prompt": "hello", "user": "' + b"x" * 100_000 + b'", "max_tokens": 2}'
    async with serving(engine) as client:
        crowd, [large] = connect(client, 100), connect(client, 1)
        await asyncio.sleep(0.1)
        for connection in crowd:
            connection.sendall(HEAD + BODY)
        whole = HEAD.replace(b"36", b"%d" % len(prompt)) + prompt
        for start, stop in ((0, 60_000), (60_000, 80_000), (80_000, len(whole))):
            large.sendall(whole[start:stop])
            for _ in range(10):
                await asyncio.sleep(0)
        assert await answers(large) == b"HTTP/1.1 200 OK"
        assert len(engine.requests) == 101
        for connection in (*crowd, large):
            connection.close()


async def test_a_whole_answer_wakes_its_reader_at_the_end_only(engine, monkeypatch):
    batches = []
    from serving.http import engine_streams

    monkeypatch.setattr(
        engine_streams, "merged", lambda deltas, merge=engine_streams.merged: batches.append(1) or merge(deltas)
    )
    async with serving(engine) as client:
        status, answer = await client.complete(max_tokens=5)
        assert (status, answer["usage"]["completion_tokens"], len(batches)) == (200, 5, 1)
        await client.chunks("/v1/completions", {"prompt": "hello", "max_tokens": 5})
        assert len(batches) > 2
