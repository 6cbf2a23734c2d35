"""GET /stats: figures of recent requests, segments and memory as JSON, for people with curl or a notebook."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import web

from serving.http.state import SERVER, Server

if TYPE_CHECKING:  # imports JAX
    from omni_jax.engine.async_engine import AsyncEngine
    from omni_jax.engine.stats import EngineStats


async def stats(request: web.Request) -> web.Response:
    server = request.app[SERVER]
    return await server.in_thread(_response, server)


def _response(server: Server) -> web.Response:
    summary = server.engine.recorder.summary()
    stats, info = server.engine.stats(), server.engine.info
    return web.json_response(
        {
            "model": server.names[0],
            "running": stats.num_requests_running,
            "waiting": stats.num_requests_waiting,
            "attention": {**info.attention, "fallbacks": list(info.attention_fallbacks)},
            **_memory(stats),
            **_replicas(server.engine),
            **summary,
            "segments": {**summary["segments"], "by_policy": server.metrics.segment_counts()},
        }
    )


def _replicas(engine: "AsyncEngine") -> dict[str, Any]:
    """Figures of each replica, if there are several."""
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
                **_memory(stats),
            }
            for stats in replicas
        ]
    }


def _memory(stats: "EngineStats") -> dict[str, Any]:
    """Figures of the KV cache. `pool` is null before the engine starts, and `swap` without a host tier."""
    return {
        "pool": None if stats.pool is None else {**_plain(stats.pool), "swapped": stats.blocks_swapped},
        "swap": _plain(stats.swap),
        "prefix_cache": {"queries": dict(stats.prefix_queries), "hits": dict(stats.prefix_hits)},
        "blocks_swapped": {"out": stats.blocks_swapped_out, "in": stats.blocks_swapped_in},
        "tokens_dropped": stats.tokens_dropped,
    }


def _plain(value: Any) -> Any:
    """Dataclasses and mappings as dictionaries for JSON."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
