"""What the engine returns: deltas while a request runs, whole outputs at the end."""

import dataclasses
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one token under the model, before temperature, penalties and cut-offs.

    Attributes:
        token_id: Token id.
        logprob: Natural logarithm of its probability; always finite.
        top: The most likely (token id, logprob) pairs at this position, best first. Empty unless requested.
        text_offset: Offset in characters of the token's text in the continuation's text; 0 for prompt tokens.
        hidden: Whether the text shows nothing of the token: a special token that is skipped, the token that ended the
            output, or one behind the stop string.
        removed_spaces: Number of leading spaces of the token that the text lacks because the text begins with it.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text_offset: int = 0
    hidden: bool = False
    removed_spaces: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """The output that one step added to one continuation of a request.

    Attributes:
        request_id: Id of the request.
        index: Index of the continuation, 0 to n - 1.
        text: New text. Never ends inside a character and never contains part of a stop string.
        token_ids: New token ids, including those that a stop string hides.
        logprobs: Logprobs of the tokens in `text`, and of hidden ones among and after them; over all deltas, one for
            each of token_ids. Empty unless requested.
        prompt_logprobs: One entry per prompt token, the first None. Only in the first delta of index 0, if requested.
        finish_reason: Set in the last delta of the continuation.
        stop_reason: The stop string or token id that ended it, if one did.
        cached_tokens: Number of prompt tokens found in the prefix cache.
        error: Error message that is safe to show to a client; set with finish_reason "error".
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
    """A finished request: its prompt and its continuations, ordered by index."""

    request_id: str
    prompt_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    outputs: tuple[Completion, ...]
