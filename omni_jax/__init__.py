"""An inference engine in JAX: paged KV cache, one compiled step, an OpenAI-compatible server."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni_jax.engine.llm import LLM, Score
    from omni_jax.requests import (
        EngineError,
        Interrupted,
        InvalidRequest,
        RequestOutput,
        RequestsFailed,
        SamplingParams,
    )

_HOMES = {
    "LLM": "omni_jax.engine.llm",
    "Score": "omni_jax.engine.llm",
    "EngineError": "omni_jax.requests",
    "Interrupted": "omni_jax.requests",
    "InvalidRequest": "omni_jax.requests",
    "RequestOutput": "omni_jax.requests",
    "RequestsFailed": "omni_jax.requests",
    "SamplingParams": "omni_jax.requests",
}
__all__ = [
    "LLM",
    "EngineError",
    "Interrupted",
    "InvalidRequest",
    "RequestOutput",
    "RequestsFailed",
    "SamplingParams",
    "Score",
]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used: JAX and numpy are slow to import, and `omni-jax --help` needs
    neither."""
    if name not in _HOMES:
        raise AttributeError(f"module 'omni_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
