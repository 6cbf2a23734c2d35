"""Connections: malformed requests, time limits for slow clients, compressed bodies."""

import asyncio
import contextlib
import gzip
import json
import logging
import re
import socket
import zlib

import pytest
from aiohttp import web

from serving.http import lifecycle
from serving.http.connections import listen
from serving.http.server import make_app
from serving.http.settings import ServerSettings
from tests.serving.conftest import serving
from tests.serving.http.test_streaming import wait_until

GOOD = b'{"prompt": "hello", "max_tokens": 2}'
GET = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
MALFORMED = {
    "long request id": (431, GET + b"X-Request-Id: " + b"x" * 20_000 + b"\r\n\r\n"),
    "control character in the request id": (400, GET + b"X-Request-Id: a\x01\x1b[31mb\r\n\r\n"),
    "long target": (431, b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n"),
    "many headers": (400, GET + b"".join(b"X-%d: 1\r\n" % i for i in range(500)) + b"\r\n"),
    "TLS": (400, b"\x16\x03\x01hello\r\n\r\n"),
    "no HTTP": (400, b"hello \x1b[31m world\r\n\r\n"),
    "unknown method": (400, GET.replace(b"GET", b"BREW") + b"\r\n"),
    "HTTP/2": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "Content-Length of letters": (400, POST + b"Content-Length: abc\r\n\r\n"),
    "negative Content-Length": (400, POST + b"Content-Length: -1\r\n\r\n"),
    "two Content-Lengths": (400, POST + b"Content-Length: 3\r\nContent-Length: 36\r\n\r\n" + GOOD),
    "Content-Length and chunks": (400, POST + b"Content-Length: 36\r\nTransfer-Encoding: chunked\r\n\r\n" + GOOD),
    "other Transfer-Encoding": (400, POST + b"Transfer-Encoding: gzip\r\n\r\n" + GOOD),
    "chunk without size": (400, POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n"),
    "no host": (400, b"GET /v1/models HTTP/1.1\r\n\r\n"),
    "header without colon": (400, GET + b"no colon\r\n\r\n"),
    "bytes in the target": (400, b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n"),
    "other expectation": (417, POST + b"Expect: 200-maybe\r\nContent-Length: 36\r\n\r\n" + GOOD),
}


async def talk(client, data: bytes, *, until_closed: bool = False) -> tuple[int, bytes, bytes]:
    """Status, headers and body of the response to raw bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(client.base.rpartition(":")[2]))
    with contextlib.suppress(ConnectionError):  # the server may close while this sends
        writer.write(data)
        await writer.drain()
    try:
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            body = await reader.readexactly(int(length.split(b":")[1]))
            assert not until_closed or await reader.read() == b""
    finally:
        writer.close()
    return int(head.split()[1]), head, body


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_request_gets_one_line_in_the_log_and_the_error_body(client, caplog, name):
    status, data = MALFORMED[name]
    with caplog.at_level(logging.INFO):
        got, head, body = await talk(client, data, until_closed=True)
    error = json.loads(body)["error"]
    assert (got, error["code"], error["type"]) == (status, status, "invalid_request_error")
    assert len(error["message"]) <= 300
    assert b"application/json" in head
    assert re.search(rb"x-request-id: [0-9a-f]{32}\r", head.lower())
    [record] = [record for record in caplog.records if record.name.startswith(("serving", "aiohttp"))]
    assert record.exc_info is None
    assert len(line := record.getMessage()) <= 400
    assert line.isascii()
    assert line.isprintable()
    assert (await client.chat())[0] == 200


async def test_the_access_line_is_bounded_and_escaped(client, caplog):
    with caplog.at_level(logging.INFO):
        await talk(client, b"GET /" + b"a" * 8000 + b" HTTP/1.1\r\nHost: a\r\n\r\n")
        await talk(client, b"GET /a%0d%0aX:1%1b[31m%C3%A9 HTTP/1.1\r\nHost: a\r\n\r\n")
    lines = [record.getMessage() for record in caplog.records if "404" in record.getMessage()]
    assert len(lines) == 2
    for line in lines:
        assert len(line) < 400
        assert line.isascii()
        assert line.isprintable()


@pytest.mark.parametrize(
    "data",
    [
        b"GET /v1/models HTTP/1.0\r\n\r\n",
        b"GET http://a/v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
        GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: a\r\n\r\n",
        POST.replace(b"1.1", b"1.0") + b"Content-Length: 36\r\n\r\n" + GOOD,
        POST + b"Transfer-Encoding: chunked\r\n\r\n24\r\n" + GOOD + b"\r\n0\r\n\r\n",
    ],
)
async def test_unusual_requests_that_are_valid(client, data):
    assert (await talk(client, data))[0] == 200


async def test_a_client_may_wait_for_100_continue(client):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(client.base.rpartition(":")[2]))
    writer.write(POST + b"Expect: 100-continue\r\nContent-Length: 36\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(GOOD)
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()


def raw_deflate(data: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(data) + compressor.flush()


async def test_compressed_bodies(engine):
    async with serving(engine, max_body_size=100_000) as client:

        async def status(encoding: str, body: bytes) -> tuple[int, str]:
            headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
            code, answer = await client.post("/v1/completions", body, headers=headers)
            return code, answer.get("error", {}).get("message", "")

        whole = gzip.compress(GOOD)
        for encoding, body in (("gzip", whole), ("deflate", zlib.compress(GOOD)), ("deflate", raw_deflate(GOOD))):
            assert await status(encoding, body) == (200, "")
        assert await status("identity", GOOD) == (200, "")
        for body in (GOOD, whole[:-12], whole[:-1], whole + b"x", b""):
            code, message = await status("gzip", body)
            assert (code, "gzip" in message) == (400, True), body
        for encoding in ("br", "zstd", "gzip, gzip", "x" * 1000):
            code, message = await status(encoding, GOOD)
            assert (code, len(message) < 300) == (415, True)
        bomb = gzip.compress(b"[" * 50_000_000)
        assert len(bomb) < 100_000
        code, message = await status("gzip", bomb)
        assert (code, "100000 bytes" in message) == (413, True)


@pytest.mark.parametrize("before", [b"", GET + b"\r\n"])
async def test_half_a_head_is_answered_and_closed(engine, before, caplog):
    caplog.set_level("INFO", logger="serving.http.connections")
    async with serving(engine, header_timeout=0.2) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(client.base.rpartition(":")[2]))
        if before:
            writer.write(before)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
        writer.write(GET)
        async with asyncio.timeout(60):
            answer = await reader.read()  # until the server closes
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 408
        headers = dict(line.split(": ", 1) for line in answer.decode().partition("\r\n\r\n")[0].splitlines()[1:])
        assert {"X-Request-Id", "Date", "Server"} <= headers.keys()
        (line,) = [record.getMessage() for record in caplog.records if "408" in record.getMessage()]
        assert line.startswith("127.0.0.1: 408, the head of the request did not arrive")
        assert line.endswith(f"({headers['X-Request-Id']})")


async def test_a_connection_without_a_request_is_closed(engine):
    async with serving(engine, header_timeout=0.2) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(client.base.rpartition(":")[2]))
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()
    async with serving(engine, keep_alive_timeout=0.2) as client:
        assert (await talk(client, GET + b"\r\n", until_closed=True))[0] == 200


async def test_a_request_may_take_longer_than_the_time_limits_of_its_head(engine):
    engine.hold_after = 1
    async with serving(engine, header_timeout=0.1, keep_alive_timeout=0.1) as client:
        answer = asyncio.create_task(client.chat())
        await wait_until(lambda: engine.requests)
        await asyncio.sleep(0.3)
        engine.gate.set()
        assert (await answer)[0] == 200


@pytest.mark.parametrize("head", [b"Content-Length: 36", b"Transfer-Encoding: chunked"])
async def test_a_body_that_trickles_is_answered(engine, head):
    async with serving(engine, body_timeout=0.2) as client:
        status, _, body = await talk(client, POST + head + b"\r\n\r\n1")
        assert status == json.loads(body)["error"]["code"] == 408
        assert engine.requests == []
        assert (await client.chat())[0] == 200


@contextlib.asynccontextmanager
async def reader_of_nothing(engine, data: bytes, send_timeout: float):
    """A client that sends a request and reads nothing, over sockets with small buffers."""
    settings = ServerSettings(served_model_name=("fake",), send_timeout=send_timeout)
    runner = web.AppRunner(make_app(engine, settings=settings), handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    sock = lifecycle.bind("127.0.0.1", 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    listener = await listen(runner, sock, settings)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, sock.getsockname())
        await asyncio.get_running_loop().sock_sendall(client, data)
        yield runner.server
    listener.close()
    await runner.cleanup()


async def test_a_client_that_does_not_read_its_response_loses_its_connection(engine, caplog):
    data = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 20
    with caplog.at_level(logging.INFO):
        async with reader_of_nothing(engine, data, 0.2) as server:
            await wait_until(lambda: server.requests_count > 0)
            await wait_until(lambda: not server.connections)
    assert "does not read its response" in caplog.text


async def test_a_client_that_does_not_read_its_stream_has_its_request_aborted(engine):
    engine.answers = lambda request, index: "word " * 3000
    body = b'{"prompt": "hello", "stream": true, "max_tokens": 250}'
    async with reader_of_nothing(engine, POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body), 0.2) as server:
        await wait_until(lambda: engine.requests)
        await wait_until(lambda: not server.connections)
        assert engine.stats().num_requests_running == 0
