"""Fixtures: the real app over a fake engine on a real socket, and commands without a model."""

import contextlib
import io
import json
import os
import sys
import types
from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest
from aiohttp import web

import omni_jax
from omni_jax.requests import Completion, RequestOutput, RequestsFailed
from serving.cli import main as cli
from serving.http import lifecycle
from serving.http.connections import listen
from serving.http.server import make_app
from serving.http.settings import SecuritySettings, ServerSettings
from serving.http.state import SERVER
from tests.command_line import run_command
from tests.serving.fake_engine import FakeEngine, FakeInfo, make_tokenizer
from tests.serving.images import BLUE, RED, png
from tests.serving.listener import Listener, listening, response


class Client:
    """Sends raw HTTP requests."""

    def __init__(self, base: str, session: aiohttp.ClientSession):
        self.base = base
        self.session = session

    async def get(self, path: str, **kwargs) -> tuple[int, dict]:
        async with self.session.get(self.base + path, **kwargs) as response:
            return response.status, await response.json(content_type=None)

    async def post(self, path: str, body, **kwargs) -> tuple[int, dict]:
        """Posts `body`: bytes as they are, anything else as JSON."""
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
        """The chunks of a stream that ends without error."""
        *chunks, done = await self.events(path, body)
        assert done == "[DONE]"
        return [json.loads(chunk, parse_constant=pytest.fail) for chunk in chunks]


@contextlib.asynccontextmanager
async def serving(
    engine: FakeEngine, *, served_model_name=("fake", "org/fake-2"), max_body_size=64 * 2**20, api_key=(), **options
) -> AsyncIterator[Client]:
    """A client of the app over an engine. `options`: fields of SecuritySettings, or arguments of `make_app`."""
    limits = {name: options.pop(name) for name in list(options) if name.endswith("_timeout")}
    options["settings"] = settings = ServerSettings(
        served_model_name=tuple(served_model_name), max_body_size=max_body_size, **limits
    )
    security = {name: options.pop(name) for name in vars(SecuritySettings()) if name in options}
    options["security"] = SecuritySettings(api_key=tuple(api_key), **security)
    """A client of a server over the engine."""
    runner = web.AppRunner(make_app(engine, **options), handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    sock = lifecycle.bind("127.0.0.1", 0)
    listener = await listen(runner, sock, settings)
    try:
        async with aiohttp.ClientSession() as session:
            yield Client(lifecycle.url(sock), session)
    finally:
        listener.close()
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
    """The official client, without retries, so that tests see every status."""
    async with openai.AsyncOpenAI(base_url=client.base + "/v1", api_key="none", max_retries=0) as official:
        yield official


@pytest.fixture
async def host() -> AsyncIterator[Listener]:
    """A host on loopback with two images."""
    async with listening() as listener:
        listener.answers |= {"/red.png": response(png(RED)), "/blue.png": response(png(BLUE))}
        yield listener


@pytest.fixture
def invoke(monkeypatch):
    """Runs a command. The fixtures below replace what would load a model."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "unset")  # so that it is restored after the test
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    for command in (cli.serve, cli.generate, cli.chat, cli.ablate, cli.kv_study):
        monkeypatch.setattr(sys.modules[command.__module__], "log_to_stderr", lambda level, named=False: None)
    return run_command


@pytest.fixture
def served(monkeypatch, invoke):
    """The arguments of run_server in `serve`, by name."""
    arguments = {}
    engine = types.ModuleType("omni_jax.engine.async_engine")

    def make(config, progress, *, make_cores):
        arguments.update(config=config, xla_share=os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"])
        return FakeEngine()

    engine.AsyncEngine = make
    monkeypatch.setitem(sys.modules, "omni_jax.engine.async_engine", engine)

    def run_server(make_engine, make_app, sock, settings, *, alone, launch):
        arguments.update(
            server=make_app(make_engine())[SERVER],
            port=sock.getsockname()[1],
            timeout=settings.shutdown_timeout,
            access_log=settings.access_log,
            alone=alone,
        )
        return 0

    monkeypatch.setattr(lifecycle, "run_server", run_server)
    return arguments


class FakeLLM:
    fault = None
    vision = None
    default_sampling = {"temperature": 0.5, "top_k": 7, "max_tokens": 3}  # noqa: RUF012
    ends = "stop"

    def __init__(self, model_dir, **options):
        if FakeLLM.fault:
            raise FakeLLM.fault
        self.info = FakeInfo(default_sampling=dict(FakeLLM.default_sampling))
        self.tokenizer = make_tokenizer()
        self.engine = types.SimpleNamespace(vision=FakeLLM.vision)
        FakeLLM.made = (model_dir, options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        FakeLLM.closed = True

    def stream(self, prompt, params):
        FakeLLM.asked = (prompt, params)
        yield from ("one ", "two")
        if FakeLLM.ends == "error":
            raise RequestsFailed("the model produced NaN logits")
        answer = Completion(index=0, text="one two", token_ids=(1, 2), logprobs=None, finish_reason=FakeLLM.ends)
        return RequestOutput(request_id="1", prompt_ids=(), prompt_logprobs=None, outputs=(answer,))


@pytest.fixture
def llm(monkeypatch):
    monkeypatch.setitem(vars(omni_jax), "LLM", FakeLLM)  # setattr would import the real one first
    monkeypatch.setattr(FakeLLM, "fault", None)
    monkeypatch.setattr(FakeLLM, "ends", "stop")
    return FakeLLM
