"""What the handlers of one app share."""

import asyncio
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
from aiohttp import web

from serving.http.errors import ApiError
from serving.http.media import MediaOptions
from serving.http.metrics import Metrics
from serving.http.segment_options import Cutter

if TYPE_CHECKING:  # the engine brings JAX with it; a fake one in tests does not
    from omni_jax.engine.async_engine import AsyncEngine

T = TypeVar("T")


@dataclasses.dataclass(kw_only=True)
class Server:
    """What the handlers of one app share.

    Attributes:
        engine: where requests go.
        names: the model's names; a request may use any, the first stands for it in responses that name none.
        max_body_size: bytes.
        metrics: what /metrics shows.
        cutter: cuts prompts into segments.
        media: what may be fetched, and how many images and videos a request may have.
        pool: threads for text work, which can take long for a long prompt and must not hold up the event loop.
        media_pool: threads that decode images and videos; text does not wait for them.
        created: Unix seconds of the start.
        draining: set on shutdown: no new requests.
        session: what media are fetched with, while the app runs.
    """

    engine: "AsyncEngine"
    names: tuple[str, ...]
    max_body_size: int
    metrics: Metrics
    cutter: Cutter
    media: MediaOptions
    pool: ThreadPoolExecutor
    media_pool: ThreadPoolExecutor
    created: int
    draining: bool = False
    session: aiohttp.ClientSession | None = None

    def model_name(self, asked: str | None) -> str:
        """The name to answer under; a 404 when the model asked for is not served here."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            served = ", ".join(repr(name) for name in self.names)
            raise ApiError(404, f"the model {asked[:200]!r} does not exist; this server has {served}", param="model")
        return asked

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.pool, function, *args)

    async def in_media_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.media_pool, function, *args)


SERVER: web.AppKey[Server] = web.AppKey("server", Server)
