"""An inference engine in JAX: paged KV cache, one compiled step, an OpenAI-compatible server."""

from typing import TYPE_CHECKING, Any

from omni_jax.requests import InvalidRequest, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from omni_jax.engine.llm import LLM, Score

__all__ = ["LLM", "InvalidRequest", "RequestOutput", "SamplingParams", "Score"]


def __getattr__(name: str) -> Any:
    """LLM and Score bring JAX with them: imported when they are asked for, so that `omni-jax --help` is quick."""
    if name in ("LLM", "Score"):
        from omni_jax.engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
