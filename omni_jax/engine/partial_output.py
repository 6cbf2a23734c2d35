"""The output of a request while its deltas arrive."""

import dataclasses
from array import array
from collections.abc import Iterable

from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.requests import Completion, Delta, RequestOutput, SamplingParams, TokenLogprob
from omni_jax.requests.outputs import FinishReason


class TokenIds:
    """Makes tuples of token ids that share the integers. A Python integer has 28 bytes, and a list of millions of
    outputs has few different ones."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def tuple_of(self, ids: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._known.setdefault(token, token) for token in ids)


@dataclasses.dataclass(kw_only=True, slots=True)
class _PartialCompletion:
    """A continuation so far, without an object for each token, which would take ten times the memory."""

    token_ids: array = dataclasses.field(default_factory=lambda: array("i"))
    text: bytearray = dataclasses.field(default_factory=bytearray)  # UTF-8
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


class PartialOutput:
    """The output of a request while its deltas arrive.

    Attributes:
        request_id: id of the request.
        unfinished: number of continuations that have not ended.
    """

    def __init__(self, request_id: str, prompt_ids: tuple[int, ...], params: SamplingParams, text: str | None):
        """`text` is that of the prompt; None if token ids were given."""
        self.request_id, self.unfinished = request_id, params.n
        self._prompt_ids, self._params, self._text = prompt_ids, params, text
        self._completions = [_PartialCompletion() for _ in range(params.n)]
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._cached = 0

    def take(self, delta: Delta) -> None:
        """Add a delta of the request."""
        own = self._completions[delta.index]
        own.token_ids.extend(delta.token_ids)
        own.text += delta.text.encode()
        own.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        self._cached = max(self._cached, delta.cached_tokens)
        if delta.finish_reason is not None:
            own.finish_reason, own.stop_reason, own.error = delta.finish_reason, delta.stop_reason, delta.error
            self.unfinished -= 1

    def output(self, tokenizer: Tokenizer, ids: TokenIds, failure: str | None = None) -> RequestOutput:
        """The output so far.

        Args:
            tokenizer: gives the texts of tokens in log-probabilities.
            ids: makes its tuples of token ids.
            failure: the error of continuations that have not ended; None means that they were interrupted.
        """

        def named(entry: TokenLogprob) -> TokenLogprob:
            return dataclasses.replace(entry, texts={token: tokenizer.token_text(token) for token in entry})

        completions, error = [], None
        for index, own in enumerate(self._completions):
            reason = own.finish_reason or ("abort" if failure is None else "error")
            if reason == "error" and error is None:
                error = own.error or failure or "the engine gave no reason"
            completions.append(
                Completion(
                    index=index,
                    text=own.text.decode(),
                    token_ids=ids.tuple_of(own.token_ids),
                    logprobs=None if self._params.logprobs is None else tuple(map(named, own.logprobs)),
                    finish_reason=reason,
                    stop_reason=own.stop_reason,
                )
            )
        prompt_logprobs = self._prompt_logprobs
        if prompt_logprobs is not None and self._params.prompt_logprobs:
            prompt_logprobs = tuple(None if entry is None else named(entry) for entry in prompt_logprobs)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._text,
            prompt_ids=self._prompt_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=tuple(completions),
            num_cached_tokens=self._cached,
            error=error,
        )
