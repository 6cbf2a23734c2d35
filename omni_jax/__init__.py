"""An inference engine in JAX: paged KV cache, one compiled step, an OpenAI-compatible server."""

from typing import TYPE_CHECKING, Any

from omni_jax.requests import InvalidRequest, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from omni_jax.engine.llm import LLM, Score

__all__ = ["LLM", "InvalidRequest", "RequestOutput", "SamplingParams", "Score"]


def __getattr__(name: str) -> Any:
    """Import LLM and Score on first use: they import JAX, which would slow down `omni-jax --help`."""
    if name in ("LLM", "Score"):
        from omni_jax.engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
