"""State that the handlers of one app share."""

import asyncio
import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
from aiohttp import web

from serving.http.errors import ApiError
from serving.http.metrics import Metrics
from serving.http.prompt_cutter import PromptCutter
from serving.http.settings import MediaAccessSettings, MediaSettings

if TYPE_CHECKING:  # imports JAX, which tests with a fake engine do not need
    from omni_jax.engine.async_engine import AsyncEngine

T = TypeVar("T")

MAX_PATH = 4096  # characters; a longer name is no path


@dataclasses.dataclass(kw_only=True)
class Server:
    """State that the handlers of one app share.

    Attributes:
        engine: runs the requests.
        names: model names that requests may use; responses to requests that name none have the first.
        paths: the model's directory, as given and resolved, by which requests may name it, too.
        max_body_size: maximum size of a request body in bytes, before and after decompression.
        body_timeout: seconds in which the body of a request must arrive.
        metrics: for /metrics.
        cutter: cuts prompts into segments.
        media: limits of images and videos.
        access: where images and videos may be fetched from.
        text_pool: threads for work on text, which takes too long for the event loop if a prompt is long.
        intake: requests whose work is in these threads or on its way back; others wait for their turn, in order.
        media_pool: threads that decode images and videos, so that text does not wait for them.
        metrics_pool: a thread that writes /metrics, which waits for no request.
        created: Unix seconds of the start.
        unhealthy: why the engine is not healthy, at the latest look at /health; empty if it is.
        draining: whether the server is shutting down and rejects new requests.
        session: HTTP session that fetches media; set while the app runs.
    """

    engine: "AsyncEngine"
    names: tuple[str, ...]
    paths: frozenset[str]
    max_body_size: int
    body_timeout: float
    metrics: Metrics
    cutter: PromptCutter
    media: MediaSettings
    access: MediaAccessSettings
    text_pool: ThreadPoolExecutor
    intake: asyncio.Semaphore
    media_pool: ThreadPoolExecutor
    metrics_pool: ThreadPoolExecutor
    created: int
    unhealthy: str = ""
    draining: bool = False
    session: aiohttp.ClientSession | None = None

    def model_name(self, requested: str | None) -> str:
        """The model name for the response. Raises ApiError 404 if the server does not serve the requested model."""
        if requested is None:
            return self.names[0]
        if requested and os.path.normpath(requested[:MAX_PATH]) in self.paths:
            return requested
        if requested not in self.names:
            served = ", ".join(repr(name) for name in self.names)
            raise ApiError(
                404, f"the model {requested[:200]!r} does not exist; this server has {served}", param="model"
            )
        return requested

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Runs work on text in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.text_pool, function, *args)

    async def in_turn(self, function: Callable[..., T], *args: Any) -> T:
        """Runs work on the text of a new request in a thread, once those before it have had theirs. So responses wait
        for no crowd of requests, and the event loop gets few results at a time."""
        async with self.intake:
            return await self.in_thread(function, *args)

    async def in_media_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Runs work on images and videos in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.media_pool, function, *args)


SERVER: web.AppKey[Server] = web.AppKey("server", Server)
