"""A fake engine behind the real app, on a real socket, run the way serving.run does it."""

import contextlib
import io
import json
from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest
from aiohttp import web

from serving import run
from serving.server import make_app
from tests.serving.fake_engine import FakeEngine
from tests.serving.listener import Listener, listening, response
from tests.serving.pictures import BLUE, RED, png


class Client:
    """Raw requests: nothing between the test and the bytes."""

    def __init__(self, base: str, session: aiohttp.ClientSession):
        self.base = base
        self.session = session

    async def get(self, path: str, **kwargs) -> tuple[int, dict]:
        async with self.session.get(self.base + path, **kwargs) as response:
            return response.status, await response.json(content_type=None)

    async def post(self, path: str, body, **kwargs) -> tuple[int, dict]:
        """`body` is bytes, or becomes JSON."""
        kwargs.setdefault("headers", {}).setdefault("Content-Type", "application/json")
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.base + path, data=io.BytesIO(data), **kwargs) as response:
            assert response.content_type == "application/json", await response.text()
            return response.status, json.loads(await response.text(), parse_constant=pytest.fail)

    async def chat(self, content: str = "hello", **fields) -> tuple[int, dict]:
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    async def complete(self, prompt="hello world", **fields) -> tuple[int, dict]:
        return await self.post("/v1/completions", {"prompt": prompt, **fields})

    async def events(self, path: str, body: dict) -> list[str]:
        """The data of each server-sent event, until the connection ends."""
        body = json.dumps(body | {"stream": True}).encode()
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.base + path, data=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            text = await response.text()
        assert text.endswith("\n\n")
        blocks = text.removesuffix("\n\n").split("\n\n")
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        return [block.removeprefix("data: ") for block in blocks]

    async def chunks(self, path: str, body: dict) -> list[dict]:
        """The chunks of a stream that ended well."""
        *chunks, done = await self.events(path, body)
        assert done == "[DONE]"
        return [json.loads(chunk, parse_constant=pytest.fail) for chunk in chunks]


@contextlib.asynccontextmanager
async def serving(engine: FakeEngine, **options) -> AsyncIterator[Client]:
    options.setdefault("served_model_names", ["fake", "org/fake-2"])
    runner = web.AppRunner(make_app(engine, **options), handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    sock = run.bind("127.0.0.1", 0)
    await web.SockSite(runner, sock).start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Client(run.url(sock), session)
    finally:
        await runner.cleanup()


@pytest.fixture
async def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[Client]:
    async with serving(engine) as client:
        yield client


@pytest.fixture
async def official(client: Client) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, which retries nothing so that every status is seen."""
    async with openai.AsyncOpenAI(base_url=client.base + "/v1", api_key="none", max_retries=0) as official:
        yield official


@pytest.fixture
async def host() -> AsyncIterator[Listener]:
    """A host on loopback that has a picture or two."""
    async with listening() as listener:
        listener.answers |= {"/red.png": response(png(RED)), "/blue.png": response(png(BLUE))}
        yield listener
