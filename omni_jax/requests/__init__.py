"""What a client asked for and what it gets back: plain frozen data, no JAX, no I/O."""

from omni_jax.requests.errors import EngineError, InvalidRequest, Unavailable
from omni_jax.requests.media import MediaSpan, Modality
from omni_jax.requests.outputs import Completion, Delta, RequestOutput, TokenLogprob
from omni_jax.requests.request import Request
from omni_jax.requests.sampling_params import MAX_LOGPROBS, SamplingParams
from omni_jax.requests.sequence import Sequence

__all__ = [
    "MAX_LOGPROBS",
    "Completion",
    "Delta",
    "EngineError",
    "InvalidRequest",
    "MediaSpan",
    "Modality",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Sequence",
    "TokenLogprob",
    "Unavailable",
]
