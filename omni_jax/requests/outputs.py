"""What the engine hands back: deltas while it runs, whole outputs at the end."""

import dataclasses
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one token under the model, before temperature, penalties and cut-offs.

    Attributes:
        token_id: the token.
        logprob: natural logarithm of its probability; always finite.
        top: the most likely (token id, logprob) pairs at this place, best first; empty when none were asked for.
        text_offset: where the token's text begins in the continuation's text, in characters; 0 for prompt tokens.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text_offset: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """What one step added to one continuation of one request.

    Attributes:
        request_id: the request.
        index: which of its n continuations.
        text: newly visible text; never half a character, never part of a stop string.
        token_ids: newly generated ids, those hidden by a stop string included.
        logprobs: of the tokens whose text has become visible; empty unless asked for.
        prompt_logprobs: only in the first delta of index 0 when asked for: one entry a prompt token, the first None.
        finish_reason: set in the last delta of this continuation.
        stop_reason: the stop string or token id that ended it, when one did.
        cached_tokens: prompt tokens that came from the prefix cache.
        error: what went wrong, with finish_reason "error"; safe to show to a client.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    error: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished continuation."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A finished request: its prompt and all of its continuations, by index."""

    request_id: str
    prompt_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    outputs: tuple[Completion, ...]
