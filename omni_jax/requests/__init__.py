"""Requests, their parameters and the engine's outputs: plain data, no JAX, no I/O."""

from omni_jax.requests.errors import EngineError, Interrupted, InvalidRequest, RequestsFailed, Unavailable
from omni_jax.requests.media import MediaModality, MediaSpan
from omni_jax.requests.outputs import Completion, Delta, Logprob, RequestOutput, TokenLogprob
from omni_jax.requests.request import Request
from omni_jax.requests.sampling_params import MAX_LOGPROBS, SamplingParams
from omni_jax.requests.segment import Segment
from omni_jax.requests.sequence import Sequence
from omni_jax.requests.slo import SLO

__all__ = [
    "MAX_LOGPROBS",
    "SLO",
    "Completion",
    "Delta",
    "EngineError",
    "Interrupted",
    "InvalidRequest",
    "Logprob",
    "MediaModality",
    "MediaSpan",
    "Request",
    "RequestOutput",
    "RequestsFailed",
    "SamplingParams",
    "Segment",
    "Sequence",
    "TokenLogprob",
    "Unavailable",
]
