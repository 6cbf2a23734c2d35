"""The app: routes, middleware and small endpoints."""

import asyncio
import hashlib
import hmac
import importlib.metadata
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from aiohttp import web

from omni_jax.requests import EngineError
from serving.http.chat import chat_completions
from serving.http.completions import completions
from serving.http.connections import OPEN_PATHS, Connection
from serving.http.cors import preflight, response_headers
from serving.http.errors import ARRIVAL, REQUEST_ID, ApiError, error_middleware
from serving.http.media import open_session
from serving.http.metrics import CONTENT_TYPE, Metrics
from serving.http.prompt_cutter import PolicySpec, PromptCutter
from serving.http.response_models import ModelCard, ModelList, Version
from serving.http.settings import MediaAccessSettings, MediaSettings, SecuritySettings, ServerSettings
from serving.http.state import SERVER, Server
from serving.http.stats import stats
from serving.http.tokenization import detokenize, tokenize
from serving.http.wire import json_response, name_request

if TYPE_CHECKING:
    from omni_jax.engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

TEXT_THREADS = 2
INTAKE = 8  # new requests given to the text threads: more than threads, which need not wait for a busy event loop
MEDIA_THREADS = max(2, min(8, (os.cpu_count() or 2) // 2))

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    engine: "AsyncEngine",
    *,
    settings: ServerSettings,
    security: SecuritySettings | None = None,
    media: MediaSettings | None = None,
    access: MediaAccessSettings | None = None,
    segment_policy: PolicySpec = "request",
) -> web.Application:
    """The OpenAI-compatible app over a started engine.

    Run it with `handler_cancellation=True` and `serving.http.connections.listen`, as `serving.http.lifecycle` does, so
    that a client's disconnect aborts its request, and a client that is too slow loses its connection.

    Args:
        settings: they must have at least one served_model_name.
        security, media, access: None is their defaults.
        segment_policy: the engine's, for requests that set none.
    """
    if not settings.served_model_name:
        raise ValueError("served_model_name must have at least one name")
    security = security or SecuritySettings()
    metrics = Metrics(
        stats=engine.stats,
        info=engine.info,
        model_name=settings.served_model_name[0],
        recorder=lambda: engine.totals,
        shared=settings.api_server_count > 1,
    )
    server = Server(
        engine=engine,
        names=settings.served_model_name,
        paths=_paths(engine.info.model_dir),
        max_body_size=settings.max_body_size,
        body_timeout=settings.body_timeout,
        metrics=metrics,
        cutter=PromptCutter(
            engine,
            segment_policy,
            allow_request_policy=security.allow_request_segment_policy,
            count=metrics.prompt_cut,
        ),
        media=media or MediaSettings(),
        access=access or MediaAccessSettings(),
        text_pool=ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text"),
        intake=asyncio.Semaphore(INTAKE),
        media_pool=ThreadPoolExecutor(MEDIA_THREADS, thread_name_prefix="media"),
        metrics_pool=ThreadPoolExecutor(1, thread_name_prefix="metrics"),
        created=int(time.time()),
    )
    app = web.Application(
        client_max_size=settings.max_body_size,
        middlewares=[_arrived, error_middleware, preflight(security), _key_check(security.api_key)],
    )
    app[SERVER] = server
    app.add_routes(
        [
            web.get("/health", _health),
            web.get("/metrics", _metrics),
            web.get("/stats", stats),
            web.get("/version", _version),
            web.get("/v1/models", _models),
            web.get("/v1/models/{model:.+}", _model),
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.post("/reset_prefix_cache", _reset_prefix_cache),
        ]
    )
    app.on_response_prepare.extend([_send_request_id, _count_response, response_headers(security)])
    app.cleanup_ctx.append(_resources)
    return app


def _paths(model_dir: str) -> frozenset[str]:
    """What clients may call the model besides its names: its path, as vLLM does, which they know from the command."""
    return frozenset({os.path.normpath(model_dir), os.path.realpath(model_dir)})


async def _resources(app: web.Application) -> AsyncIterator[None]:
    server = app[SERVER]
    async with open_session(server.access) as server.session:
        yield
    for pool in (server.text_pool, server.media_pool, server.metrics_pool):
        pool.shutdown(wait=False, cancel_futures=True)


@web.middleware
async def _arrived(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Notes the time and the id of a request, before the body is read."""
    request[ARRIVAL] = time.monotonic()
    if isinstance(request.protocol, Connection):
        request.protocol.head_was_read()
    name_request(request)
    return await handler(request)


async def _send_request_id(request: web.Request, response: web.StreamResponse) -> None:
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]


async def _count_response(request: web.Request, response: web.StreamResponse) -> None:
    resource = request.match_info.route.resource  # None: there is no such route
    request.app[SERVER].metrics.responded(resource.canonical if resource else "other", response.status)


def _key_check(api_keys: Sequence[str]) -> Any:
    """Middleware that requires a bearer key on every path except OPEN_PATHS, unknown paths included."""
    if not all(api_keys):
        raise ValueError("an API key must not be empty")
    digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if digests and request.path not in OPEN_PATHS:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
            # Compares all digests, which have equal lengths, so that the time taken reveals nothing about any key.
            matches = [hmac.compare_digest(given, digest) for digest in digests]
            if scheme.lower() != "bearer" or not any(matches):
                raise ApiError(
                    401,
                    "missing or wrong API key; send it as 'Authorization: Bearer KEY'",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        return await handler(request)

    return check


async def _health(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    if server.draining:
        raise ApiError(503, "the server is shutting down")
    reason = ""
    try:
        server.engine.check_health()
    except EngineError as error:
        reason = str(error)
    if reason and not server.unhealthy:  # once, though probes come every few seconds
        logger.error("the engine is not healthy: %s", reason)
    elif server.unhealthy and not reason:
        logger.info("the engine is healthy again")
    server.unhealthy = reason
    if reason:
        raise ApiError(503, "the engine is not healthy; see the server's log for the reason")
    return web.Response()


async def _metrics(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    loop = asyncio.get_running_loop()
    body = await loop.run_in_executor(server.metrics_pool, server.metrics.exposition)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def _reset_prefix_cache(request: web.Request) -> web.Response:
    """Removes all blocks from the prefix cache; sequences keep those they use. As in vLLM, the response is empty."""
    request.app[SERVER].engine.reset_prefix_cache()
    return web.Response()


async def _version(request: web.Request) -> web.Response:
    return json_response(Version(version=importlib.metadata.version("omni-jax")))


async def _models(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    return json_response(ModelList(object="list", data=[_card(server, name) for name in server.names]))


async def _model(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    return json_response(_card(server, server.model_name(request.match_info["model"])))


def _card(server: Server, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=server.created,
        owned_by="omni-jax",
        root=server.names[0],
        parent=None,
        max_model_len=server.engine.info.max_model_len,
        permission=[],
    )
