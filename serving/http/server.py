"""The app: routes, keys and the order in which they are checked."""

import hashlib
import hmac
import importlib.metadata
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from omni_jax.requests import EngineError
from serving.http.chat import chat_completions
from serving.http.completions import completions
from serving.http.errors import REQUEST_ID, ApiError, error_middleware
from serving.http.media import MediaOptions, open_session
from serving.http.memory_metrics import figures as memory_figures
from serving.http.metrics import CONTENT_TYPE, Metrics
from serving.http.prompts import check_token_ids, render
from serving.http.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest, read_object, validate
from serving.http.response_models import Detokenized, ModelCard, ModelList, Tokenized, Version
from serving.http.segment_options import Cutter, SegmentOptions
from serving.http.state import SERVER, Server
from serving.http.wire import header_safe, json_response, new_id, read_body

if TYPE_CHECKING:
    from omni_jax.engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

MAX_BODY_SIZE = 64 * 2**20  # bytes: several photographs in base64
TEXT_THREADS = 2
MEDIA_THREADS = max(2, min(8, (os.cpu_count() or 2) // 2))
OPEN_PATHS = frozenset({"/health", "/metrics", "/version"})  # probes and scrapers carry no key

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(
    engine: "AsyncEngine",
    *,
    served_model_names: Sequence[str],
    api_keys: Sequence[str] = (),
    max_body_size: int = MAX_BODY_SIZE,
    media: MediaOptions | None = None,
    segments: SegmentOptions | None = None,
) -> web.Application:
    """An OpenAI-compatible app over an engine that was started.

    Serve it with `handler_cancellation=True`, as `serving.http.lifecycle` does: then a disconnect aborts its request.

    Args:
        served_model_names: at least one; requests may use any of them.
        api_keys: any of them opens all routes; none leaves the server open.
        max_body_size: bytes of a request's body; a larger one gets a 413.
        media: what images and videos requests may have, and from where; by default MediaOptions().
        segments: how prompts are cut, and who may say so; by default SegmentOptions().
    """
    if not served_model_names:
        raise ValueError("served_model_names needs at least one name")
    cutter = Cutter(engine, segments or SegmentOptions())
    server = Server(
        engine=engine,
        names=tuple(served_model_names),
        max_body_size=max_body_size,
        metrics=Metrics(
            stats=engine.stats,
            info=engine.info,
            model_name=served_model_names[0],
            recorder=lambda: engine.recorder,
            cuts=cutter.counts,
        ),
        cutter=cutter,
        media=media or MediaOptions(),
        pool=ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text"),
        media_pool=ThreadPoolExecutor(MEDIA_THREADS, thread_name_prefix="media"),
        created=int(time.time()),
    )
    app = web.Application(
        client_max_size=max_body_size, middlewares=[_name_request, error_middleware, _key_check(api_keys)]
    )
    app[SERVER] = server
    app.add_routes(
        [
            web.get("/health", _health),
            web.get("/metrics", _metrics),
            web.get("/stats", _stats),
            web.get("/version", _version),
            web.get("/v1/models", _models),
            web.get("/v1/models/{model:.+}", _model),
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.post("/tokenize", _tokenize),
            web.post("/detokenize", _detokenize),
            web.post("/reset_prefix_cache", _reset_prefix_cache),
        ]
    )
    app.on_response_prepare.append(_send_request_id)
    app.cleanup_ctx.append(_resources)
    return app


async def _resources(app: web.Application) -> AsyncIterator[None]:
    server = app[SERVER]
    async with open_session(server.media.policy) as server.session:
        yield
    for pool in (server.pool, server.media_pool):
        pool.shutdown(wait=False, cancel_futures=True)


@web.middleware
async def _name_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The client's own id goes back in the header and into the log; the engine's ids are always ours."""
    given = request.headers.get("X-Request-Id")
    request[REQUEST_ID] = given if header_safe(given) else new_id("req")
    return await handler(request)


async def _send_request_id(request: web.Request, response: web.StreamResponse) -> None:
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]


def _key_check(api_keys: Sequence[str]) -> Any:
    """Middleware that asks for a bearer key on every path but the open ones, unknown paths included."""
    if not all(api_keys):
        raise ValueError("an API key must not be empty")
    digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if digests and request.path not in OPEN_PATHS:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            given = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
            # Digests of one length, all of them compared: the time taken says nothing about any key.
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
    try:
        server.engine.check_health()
    except EngineError as error:
        logger.error("health check: %s", error)
        raise ApiError(503, "the engine is not healthy; the server's log has the reason") from None
    return web.Response()


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[SERVER].metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


async def _stats(request: web.Request) -> web.Response:
    return await request.app[SERVER].in_thread(_figures, request.app[SERVER])


def _figures(server: Server) -> web.Response:
    """What became of the latest requests and segments, for a person with curl or a notebook."""
    summary = server.engine.recorder.summary()
    stats = server.engine.stats()
    return web.json_response(
        {
            "model": server.names[0],
            "running": stats.num_requests_running,
            "waiting": stats.num_requests_waiting,
            "attention": {**server.engine.info.attention, "fallbacks": list(server.engine.info.attention_fallbacks)},
            **memory_figures(stats),
            **_replicas(server.engine),
            **summary,
            "segments": {**summary["segments"], "by_policy": server.cutter.counts()},
        }
    )


def _replicas(engine: "AsyncEngine") -> dict[str, Any]:
    """Figures of each replica, where there are several."""
    replicas = engine.replica_stats()
    if len(replicas) == 1:
        return {}
    return {
        "replicas": [
            {
                "running": stats.num_requests_running,
                "waiting": stats.num_requests_waiting,
                "steps": stats.steps,
                "generation_tokens": stats.generation_tokens,
                **memory_figures(stats),
            }
            for stats in replicas
        ]
    }


async def _reset_prefix_cache(request: web.Request) -> web.Response:
    """Forgets every cached block; those in use stay with who uses them. As in vLLM, the answer is empty."""
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


async def _tokenize(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    body, asked = await server.in_thread(_asked_to_tokenize, server, await read_body(request))
    if isinstance(asked, TokenizeChatRequest):
        ids = (await render(server, asked, body)).ids
    else:
        special = asked.add_special_tokens is not False
        ids = await server.in_thread(partial(server.engine.tokenizer.encode, asked.prompt, add_special_tokens=special))
    return await server.in_thread(_tokenized, server, ids, bool(asked.return_token_strs))


def _asked_to_tokenize(server: Server, raw: bytes) -> tuple[dict[str, Any], TokenizeRequest | TokenizeChatRequest]:
    body = read_object(raw)
    asked = validate(TokenizeRequest if body.get("messages") is None else TokenizeChatRequest, body)
    server.model_name(asked.model)
    return body, asked


def _tokenized(server: Server, ids: Sequence[int], with_texts: bool) -> web.Response:
    return json_response(
        Tokenized(
            count=len(ids),
            max_model_len=server.engine.info.max_model_len,
            tokens=list(ids),
            token_strs=[server.engine.tokenizer.token_text(token) for token in ids] if with_texts else None,
        )
    )


async def _detokenize(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    return await server.in_thread(_detokenized, server, await read_body(request))


def _detokenized(server: Server, raw: bytes) -> web.Response:
    asked = validate(DetokenizeRequest, read_object(raw))
    server.model_name(asked.model)
    check_token_ids(asked.tokens, server.engine.info.vocab_size, param="tokens")
    text = server.engine.tokenizer.decode(asked.tokens, skip_special_tokens=False)
    return json_response(Detokenized(prompt=text))
