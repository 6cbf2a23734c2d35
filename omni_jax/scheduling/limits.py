"""Limits of a batch, the maximum output of a request, and when a sequence ends."""

import dataclasses

from omni_jax.requests import InvalidRequest, Request, Sequence
from omni_jax.requests.outputs import FinishReason
from omni_jax.scheduling.buckets import Buckets


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of a batch.

    Attributes:
        max_num_seqs: Maximum number of running sequences; the device has as many slots.
        max_num_batched_tokens: Maximum number of tokens per step; at least max_num_seqs, so that all can decode.
        max_model_len: Maximum number of tokens of prompt plus output. The block pool holds at least one such sequence.
        buckets: Compiled sizes.
        eos_token_ids: Token ids that end a sequence unless it ignores them.
        chunked_prefill: Whether a prompt may be computed over several steps. Without it (first come, first served
            only), max_num_batched_tokens must be at least max_model_len plus max_num_seqs.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    buckets: Buckets
    eos_token_ids: frozenset[int] = frozenset()
    chunked_prefill: bool = True

    def __post_init__(self):
        if not self.chunked_prefill and self.max_num_batched_tokens < self.max_model_len + self.max_num_seqs:
            raise ValueError(
                f"without chunked prefill a step must hold a whole prompt and all decoding rows: "
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_model_len "
                f"({self.max_model_len}) plus max_num_seqs ({self.max_num_seqs})"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running sequence decodes one token per step"
            )
        if self.buckets.rows < self.max_num_seqs or self.buckets.mixed[-1] < self.max_num_batched_tokens:
            raise ValueError(
                f"the largest buckets ({self.buckets.rows} rows, {self.buckets.mixed[-1]} tokens) must hold a full "
                f"step: max_num_seqs is {self.max_num_seqs}, max_num_batched_tokens {self.max_num_batched_tokens}"
            )


def output_room(request: Request, max_model_len: int) -> int:
    """Maximum number of tokens that a request may generate: its max_tokens, or what the context leaves, if less.

    Raises:
        InvalidRequest: The prompt is empty, or leaves no room for the tokens requested.
    """
    prompt, asked = len(request.prompt_ids), request.params.max_tokens
    if not prompt:
        raise InvalidRequest("the prompt is empty; it must have at least one token", param="prompt")
    room = max_model_len - prompt
    if room < 0 or (room == 0 and asked != 0):
        more = "" if asked is None else f" and asks for {asked} more"
        raise InvalidRequest(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt has {prompt} tokens{more}. "
            "Shorten the prompt.",
            param="prompt",
        )
    return room if asked is None else min(asked, room)


def ending(sequence: Sequence, token: int, eos_token_ids: frozenset[int]) -> tuple[FinishReason, int | None] | None:
    """How the latest token ends a sequence: (finish reason, the stop token id if one did), or None if it does not."""
    params, count = sequence.request.params, len(sequence.output)
    if count > params.min_tokens:
        if token in eos_token_ids and not params.ignore_eos:
            return "stop", None
        if token in params.stop_token_ids:
            return "stop", token
    return ("length", None) if count >= sequence.max_output else None
