"""What the engine returns: deltas while a request runs, whole outputs at the end."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


class Logprob(NamedTuple):
    """One of the tokens of a TokenLogprob, with vLLM's names.

    Attributes:
        logprob: Natural logarithm of its probability.
        rank: Its place among the most likely tokens, from 1; None if it is not among those that were asked for.
        decoded_token: Its text; None in the engine's own outputs, which have ids only.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprob(Mapping[int, Logprob]):
    """Log-probability of one token under the model, before temperature, penalties and cut-offs.

    It is also vLLM's mapping from token id to Logprob: of this token, and of the most likely ones.

    Attributes:
        token_id: Token id.
        logprob: Natural logarithm of its probability; always finite.
        top: The most likely (token id, logprob) pairs at this position, best first. Empty unless requested.
        text_offset: Offset in characters of the token's text in the continuation's text; 0 for prompt tokens.
        hidden: Whether the text shows nothing of the token: a special token that is skipped, the token that ended the
            output, or one behind the stop string.
        removed_spaces: Number of leading spaces of the token that the text lacks because the text begins with it.
        texts: Texts of these tokens by id; LLM adds them.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text_offset: int = 0
    hidden: bool = False
    removed_spaces: int = 0
    texts: Mapping[int, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def __getitem__(self, token_id: int) -> Logprob:
        for rank, (candidate, logprob) in enumerate(self.top, 1):
            if candidate == token_id:
                return Logprob(logprob, rank, self.texts.get(token_id))
        if token_id == self.token_id:
            return Logprob(self.logprob, None, self.texts.get(token_id))
        raise KeyError(token_id)

    def __iter__(self) -> Iterator[int]:
        yield self.token_id
        yield from (token_id for token_id, _ in self.top if token_id != self.token_id)

    def __len__(self) -> int:
        return sum(1 for _ in self)


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One continuation, with the names of vLLM's CompletionOutput.

    Attributes:
        index: Its number, 0 to n - 1.
        text: Generated text.
        token_ids: Generated token ids, including those that a stop string hides.
        logprobs: Logprobs of the tokens in `text`; None unless requested.
        finish_reason: "stop", "length", "abort" for one that was interrupted, "error" for one that failed.
        stop_reason: The stop string or token id that ended it, if one did.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the logprobs of its tokens; None unless they were requested."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)

    def finished(self) -> bool:
        """Whether it came to its end, and was neither interrupted nor failed."""
        return self.finish_reason in ("stop", "length")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """A request that has ended: its prompt and its continuations, ordered by index.

    Attributes:
        request_id: Id of the request.
        prompt: Text of the prompt; for a chat, the rendered template. None if token ids were given.
        prompt_ids: Token ids of the prompt; empty for a request that was refused.
        prompt_logprobs: One entry per prompt token, the first None; None unless requested.
        outputs: The continuations.
        num_cached_tokens: Number of prompt tokens found in the prefix cache.
        error: Why it was refused or failed; None for any other. `outputs` then hold what was generated before.
    """

    request_id: str
    prompt: str | None = None
    prompt_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    outputs: tuple[Completion, ...]
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """vLLM's name of `prompt_ids`."""
        return self.prompt_ids

    @property
    def finished(self) -> bool:
        """Whether all continuations came to their end, and none was interrupted or failed."""
        return all(completion.finished() for completion in self.outputs)
