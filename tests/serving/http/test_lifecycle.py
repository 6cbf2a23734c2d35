"""The server process: port, signals and exit code."""

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from serving.http import lifecycle
from tests.serving.conftest import Client

ROOT = Path(__file__).parents[3]
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@contextlib.asynccontextmanager
async def server(drain: float) -> AsyncIterator[tuple[asyncio.subprocess.Process, Client]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.serving.fake_server", "0", str(drain)),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async for line in process.stderr:
            if b"omni-jax serving fake at " in line:
                break
        async with aiohttp.ClientSession() as session:
            yield process, Client(line.decode().split(" at ")[1].strip(), session)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def open_streams(client: Client, count: int) -> list[asyncio.Task]:
    """Opens streams and waits until each has its first token."""
    metrics = client.base + "/metrics"
    streams = [asyncio.create_task(client.events(CHAT, HELLO)) for _ in range(count)]
    while True:
        async with client.session.get(metrics) as response:
            text = await response.text()
        if f'vllm:generation_tokens_total{{model_name="fake"}} {count}.0' in text:
            return streams
        await asyncio.sleep(0.02)


async def wait_until_rejecting(client: Client) -> None:
    while (await client.get("/version", allow_redirects=False))[0] == 200:
        async with client.session.get(client.base + "/health") as response:
            if response.status == 503:
                break
        await asyncio.sleep(0.02)
    status, answer = await client.chat()
    assert (status, answer["error"]["type"]) == (503, "service_unavailable_error")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_op_01_streams_finish_within_the_drain_time(number):
    async with server(drain=60) as (process, client):
        streams = await open_streams(client, 3)
        process.send_signal(number)
        await wait_until_rejecting(client)
        assert not any(stream.done() for stream in streams)
        process.send_signal(signal.SIGUSR1)
        for events in await asyncio.gather(*streams):
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["choices"][0]["finish_reason"] == "stop"
        assert await process.wait() == 0


async def test_op_01_streams_that_exceed_the_drain_time_get_an_error_event():
    async with server(drain=0.2) as (process, client):
        streams = await open_streams(client, 2)
        process.send_signal(signal.SIGTERM)
        for events in await asyncio.gather(*streams):
            assert json.loads(events[-1])["error"]["code"] == 503
        assert await process.wait() == 0


async def test_op_01_a_second_signal_ends_the_process_at_once():
    async with server(drain=600) as (process, client):
        streams = await open_streams(client, 2)
        process.send_signal(signal.SIGTERM)
        await wait_until_rejecting(client)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 128 + signal.SIGTERM
        for result in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(result, aiohttp.ClientError)


async def test_a_port_in_use_is_an_error_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.serving.fake_server", str(port), "0"),
            cwd=ROOT,
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
    assert process.returncode == 1
    assert b"loading" not in out
    assert f"cannot listen on 127.0.0.1:{port}".encode() in err
    assert b"--port" in err
    assert b"Traceback" not in err


def test_invalid_addresses():
    for host in ("203.0.113.7", "no such host"):
        with pytest.raises(lifecycle.CannotListen, match=host):
            lifecycle.bind(host, 0)


def test_connections_are_refused_while_the_model_is_loading():
    with lifecycle.bind("127.0.0.1", 0) as sock, pytest.raises(ConnectionRefusedError):
        socket.create_connection(sock.getsockname(), timeout=5)


def test_two_servers_cannot_load_their_models_for_one_address():
    """Neither listens yet, so the kernel would let both bind."""
    with lifecycle.bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    first = lifecycle.bind("127.0.0.1", port)
    with pytest.raises(lifecycle.CannotListen, match=r"already in use; stop the process.*--port"):
        lifecycle.bind("127.0.0.1", port)
    first.close()
    del first
    lifecycle.bind("127.0.0.1", port).close()


def test_url_of_an_ipv6_socket():
    with lifecycle.bind("::1", 0) as sock:
        assert lifecycle.url(sock) == f"http://[::1]:{sock.getsockname()[1]}"
