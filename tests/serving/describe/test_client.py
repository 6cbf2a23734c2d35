"""Rate and retries, on a clock of their own."""

import asyncio
import email.utils
import time
from pathlib import Path

import pytest
from aiohttp import web

from serving.describe import client as describe_client
from serving.describe.client import RateLimit
from serving.describe.job import connect
from serving.http.lifecycle import bind, url
from tests.serving.describe.fake import in_turn, options, refused, said


class Clock:
    def __init__(self):
        self.now = 1000.0
        self.slept = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


async def test_the_rate_is_kept_and_saved_up_for_one_second_only():
    clock = Clock()
    limit = RateLimit(10, clock=clock, sleep=clock.sleep)
    starts = []

    async def take(count: int) -> None:
        for _ in range(count):
            await limit.wait()
            starts.append(clock.now)

    await take(31)
    assert starts == pytest.approx([1000 + number / 10 for number in range(31)])  # no burst at the start
    clock.now += 1000
    starts.clear()
    await take(31)
    burst = [start - starts[0] for start in starts]
    assert burst[:10] == [0] * 10  # a second's worth
    assert burst[10:] == pytest.approx([number / 10 for number in range(1, 22)])
    for rate in (0.5, 3):
        clock, starts = Clock(), []
        limit = RateLimit(rate, clock=clock, sleep=clock.sleep)
        for pause in (0, 0, 0.9, 50, 0, 0, 0.3, 0, 0, 0):
            clock.now += pause
            await take(1)
        for index, start in enumerate(starts):  # what a bucket of that size allows, from every start on
            for later in range(index, len(starts)):
                assert later - index + 1 <= max(1, rate) + rate * (starts[later] - start) + 1e-6


async def test_turns_are_taken_by_all_workers_together():
    clock = Clock()
    starts = []

    async def sleep(seconds: float) -> None:
        starts.append(seconds)

    limit = RateLimit(4, clock=clock, sleep=sleep)
    await asyncio.gather(*(limit.wait() for _ in range(5)))
    assert starts == [0.25, 0.5, 0.75, 1.0]
    unlimited = RateLimit(0, clock=clock, sleep=sleep)
    await asyncio.gather(*(unlimited.wait() for _ in range(100)))
    assert len(starts) == 4


async def post(server: str, clock: Clock, **more) -> describe_client.Reply:
    """One request, whose every backoff is the longest possible."""
    given = options("x", server, Path("x"), **more)
    async with connect(given, clock=clock, sleep=clock.sleep, uniform=lambda low, high: high) as client:
        return await client.post("/chat/completions", b'{"messages": []}')


async def test_a_503_with_retry_after_is_tried_again_when_it_says(fake, server, monkeypatch):
    monkeypatch.setattr(describe_client, "FIRST_BACKOFF", 1.0)
    fake.answer = in_turn(lambda: refused(503, "busy", {"Retry-After": "7"}), lambda: said("yes"))
    clock = Clock()
    reply = await post(server, clock)
    assert (reply.answer["choices"][0]["message"]["content"], reply.attempts) == ("yes", 2)
    assert clock.slept == [8.0]  # 7 and the jitter: those who were sent away together must not return together


async def test_backoff_doubles_up_to_a_bound_and_ends(fake, server, monkeypatch):
    monkeypatch.setattr(describe_client, "FIRST_BACKOFF", 1.0)
    fake.answer = in_turn(lambda: refused(500, "broken"))
    clock = Clock()
    reply = await post(server, clock, retries=8)
    assert (reply.error["status"], reply.error["message"], reply.attempts) == (500, "broken", 9)
    assert clock.slept == [1, 2, 4, 8, 16, 32, 60, 60]
    assert len(fake.requests) == 9


async def test_every_attempt_waits_for_its_turn(fake, server):
    fake.answer = in_turn(lambda: refused(429, "slow down"))
    clock = Clock()
    await post(server, clock, retries=3, rate=0.5)
    assert [seconds for seconds in clock.slept if seconds] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 422])
async def test_other_statuses_are_final_and_keep_the_reason(fake, server, status):
    fake.answer = in_turn(lambda: refused(status, "the image is broken", {"Retry-After": "1"}))
    clock = Clock()
    reply = await post(server, clock)
    assert (reply.attempts, clock.slept) == (1, [])
    assert reply.error == {
        "status": status,
        "message": "the image is broken",
        "type": "invalid_request_error",
        "param": "messages[0].content[0]",
        "code": status,
    }


async def test_reasons_that_are_not_in_openais_shape(fake, server):
    for text, message in (("<h1>Bad</h1>", "<h1>Bad</h1>"), ('{"error": "no"}', "no"), ("", "no reason given")):
        fake.answer = in_turn(lambda text=text: web.Response(status=400, text=text))
        assert (await post(server, Clock())).error == {"status": 400, "message": message}


async def test_redirects_are_not_followed(fake, server):
    fake.answer = in_turn(lambda: web.Response(status=307, headers={"Location": "/v1/chat/completions"}))
    reply = await post(server, Clock(), api_key="secret")
    assert (reply.error["status"], reply.attempts, len(fake.requests)) == (307, 1, 1)


async def test_broken_connections_and_timeouts_are_tried_again(fake, server):
    fake.answer = in_turn(lambda: None, lambda: None, lambda: said("yes"))
    reply = await post(server, Clock())
    assert (reply.error, reply.attempts) == (None, 3)

    async def hang(body):
        await asyncio.Event().wait()

    fake.answer = hang
    reply = await post(server, Clock(), timeout=0.05, retries=1)
    assert reply.attempts == 2
    assert (reply.error["status"], reply.error["type"], reply.error["message"]) == (
        None,
        "timeout",
        "no answer in 0.05 s",
    )


async def test_connection_refused():
    with bind("127.0.0.1", 0) as sock:  # bound and not listening
        reply = await post(f"{url(sock)}/v1", Clock(), retries=2)
    assert (reply.attempts, reply.error["status"], reply.error["type"]) == (3, None, "connection_error")
    assert "Connect call failed" in reply.error["message"]


def test_retry_after():
    seconds = describe_client._seconds
    assert (seconds("3"), seconds("0.5"), seconds("0")) == (3.0, 0.5, 0.0)
    assert 100 < seconds(email.utils.formatdate(time.time() + 120, usegmt=True)) <= 120
    for text in ("", "-1", "nan", "inf", "soon", "9" * 20, "Wed, 99 Foo 99999", email.utils.formatdate(0)):
        assert seconds(text) == 0.0
    pause = describe_client._pause
    assert (pause(429, None), pause(503, "5"), pause(400, "5")) == (0.0, 5.0, None)
    assert pause(503, "86400") is None  # nobody waits for a day
