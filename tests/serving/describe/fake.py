"""Fake OpenAI-compatible server on loopback, and helpers for tests of describe-images."""

import asyncio
import base64
import contextlib
import io
import json
import threading
from pathlib import Path

from aiohttp import web
from rich.console import Console

from serving.describe import job as describe
from serving.describe import report as describe_report
from serving.describe.job import Options
from serving.http.lifecycle import bind, url

ROOT = Path(__file__).parents[3]


class Fake:
    """OpenAI-compatible server in its own thread, which calls `answer` with the body of each request."""

    def __init__(self):
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.in_flight = self.peak = 0
        self.answer = self.describe
        self.models = ["fake-vl"]

    async def describe(self, body: dict) -> web.Response:
        return described(f"an image of {image_of(body)!r}")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            body = await request.json()
            self.requests.append(body)
            self.headers.append(dict(request.headers))
            answer = await self.answer(body)
            if answer is None:  # close the connection without a response
                request.transport.abort()
                return web.Response()
            return answer
        finally:
            self.in_flight -= 1

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    @contextlib.contextmanager
    def running(self):
        sock = bind("127.0.0.1", 0)
        loop = asyncio.new_event_loop()
        stop = asyncio.Event()
        ready = threading.Event()

        async def serve() -> None:
            app = web.Application(client_max_size=2**30)
            app.router.add_post("/v1/chat/completions", self.completions)
            app.router.add_get("/v1/models", self.list_models)
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
            await runner.setup()
            await web.SockSite(runner, sock).start()
            ready.set()
            await stop.wait()
            await runner.cleanup()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
        thread.start()
        ready.wait()
        try:
            yield f"{url(sock)}/v1"
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()
            sock.close()


def described(text: str) -> web.Response:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return web.json_response({"choices": [choice], "usage": usage})


def refused(status: int, message: str, headers: dict | None = None) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": "messages[0].content[0]", "code": status}
    return web.json_response({"error": error}, status=status, headers=headers)


def image_of(body: dict) -> str:
    """Return the bytes of the file as text, or the URL."""
    address = body["messages"][-1]["content"][0]["image_url"]["url"]
    return base64.b64decode(address.partition(",")[2]).decode() if address.startswith("data:") else address


def fill(folder: Path, count: int) -> list[str]:
    for number in range(count):
        (folder / f"{number:03}.png").write_bytes(f"image {number}".encode())
    return [str(folder / f"{number:03}.png") for number in range(count)]


def options(source, server: str, out: Path, **more) -> Options:
    return Options(source=str(source), server=server, out=out, **({"prompt": "What is it?"} | more))


def run(given: Options) -> describe_report.Summary:
    return describe.run(given, Console(file=io.StringIO()))


def rows(out: Path) -> dict[str, dict]:
    """Return the rows by source, and check that every line is a row and no source has two."""
    data = out.read_bytes()
    assert data.endswith(b"\n") or not data
    parsed = [json.loads(line) for line in data.splitlines()]
    assert len({row["source"] for row in parsed}) == len(parsed)
    return {row["source"]: row for row in parsed}


def in_turn(*answers):
    """Return an `answer` that gives the answers one by one, then repeats the last."""
    waiting = list(answers)

    async def answer(body):
        make = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return make()

    return answer
