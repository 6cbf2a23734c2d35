"""Segments: the policies that cut a prompt into them, and their deadlines. Plain data and pure functions: no JAX, no
I/O, no clock."""

from omni_jax.requests.segment import MODALITIES, Compute, Modality, Segment
from omni_jax.requests.slo import SLO
from omni_jax.segments.cover import check_cover
from omni_jax.segments.deadlines import decode_deadline, with_deadlines
from omni_jax.segments.policies import (
    POLICIES,
    Policy,
    by_length,
    by_modality,
    by_region,
    by_sentence,
    custom,
    hybrid,
    make_policy,
    request,
)
from omni_jax.segments.prompt_view import MediaView, PromptView, prompt_view

__all__ = [
    "MODALITIES",
    "POLICIES",
    "SLO",
    "Compute",
    "MediaView",
    "Modality",
    "Policy",
    "PromptView",
    "Segment",
    "by_length",
    "by_modality",
    "by_region",
    "by_sentence",
    "check_cover",
    "custom",
    "decode_deadline",
    "hybrid",
    "make_policy",
    "prompt_view",
    "request",
    "with_deadlines",
]
