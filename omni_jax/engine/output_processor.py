"""What is done to the outputs of an engine core before a reader gets them: text, stop strings, log-probabilities."""

import dataclasses
import logging
from collections.abc import Iterable

import numpy as np

from omni_jax.engine.detokenizer import Detokenizer
from omni_jax.engine.messages import Abort, End, SequenceOutput
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.requests import Delta, InvalidRequest, Request, SamplingParams, TokenLogprob
from omni_jax.requests.outputs import FinishReason

logger = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True, slots=True)
class _Live:
    """A live request: the id that its deltas have, its parameters, and the detokenizers of the continuations that have
    not ended, by index."""

    name: str
    params: SamplingParams
    detokenizers: dict[int, Detokenizer]
    tokens: dict[int, int]  # so far, by index


class OutputProcessor:
    """Turns outputs of engine cores into deltas.

    Attributes:
        finished: Number of continuations that have ended, by finish reason (counters).
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._live: dict[str, _Live] = {}
        self.finished: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}

    def add(self, request: Request, name: str | None = None) -> None:
        """Expect outputs of a request. Its deltas have the id `name`, by default its own.

        Raises:
            InvalidRequest: Its id is in use.
        """
        if request.id in self._live:
            raise InvalidRequest(f"request id {request.id!r} is in use by a live request", param="request_id")
        indices = range(request.params.n)
        self._live[request.id] = _Live(
            name=request.id if name is None else name,
            params=request.params,
            detokenizers={i: Detokenizer(self._tokenizer, request.params, request.prompt_ids) for i in indices},
            tokens=dict.fromkeys(indices, 0),
        )

    def drop(self, request_id: str) -> None:
        """Expect no outputs of a request any more."""
        self._live.pop(request_id, None)

    def process(self, outputs: Iterable[SequenceOutput]) -> tuple[list[Delta], list[End | Abort]]:
        """The deltas of new outputs, and what to tell the core: the continuations that a stop string has ended, and
        the requests that could not be processed. Later outputs of these are dropped."""
        deltas: list[Delta] = []
        ends: list[End | Abort] = []
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None or output.index not in live.detokenizers:
                continue
            try:
                delta = self._delta(live, output)
            except Exception:  # a fault of ours must end this stream, and no other
                logger.exception("an output of request %s could not be processed", live.name)
                deltas += self._failed(live)
                del self._live[output.request_id]
                ends.append(Abort([output.request_id]))
                continue
            if delta.finish_reason is not None:
                del live.detokenizers[output.index]
                self.finished[delta.finish_reason] += 1
                if output.finish_reason is None:
                    assert isinstance(delta.stop_reason, str)
                    kept = live.tokens[output.index]
                    ends.append(End(output.request_id, output.index, delta.stop_reason, kept))
                if not live.detokenizers:
                    del self._live[output.request_id]
            deltas.append(delta)
        return deltas, ends

    def end(self, request_id: str, reason: FinishReason, error: str | None = None) -> list[Delta]:
        """End a request that no core has any more, and return its last deltas."""
        live = self._live.get(request_id)
        indices = [] if live is None else list(live.detokenizers)
        ended = [SequenceOutput(request_id, index, finish_reason=reason, error=error) for index in indices]
        return self.process(ended)[0]

    def _failed(self, live: _Live) -> list[Delta]:
        """The last deltas of a request whose outputs cannot be processed."""
        self.finished["error"] += len(live.detokenizers)
        error = "the engine could not process the output of this request"
        return [Delta(request_id=live.name, index=i, finish_reason="error", error=error) for i in live.detokenizers]

    def _delta(self, live: _Live, output: SequenceOutput) -> Delta:
        detokenizer, params, reason = live.detokenizers[output.index], live.params, output.finish_reason
        stop: str | int | None = output.stop_reason
        text, logprobs, last = "", (), None
        if output.token is not None:
            live.tokens[output.index] += 1
            entry = None
            if output.logprob is not None and params.logprobs is not None:
                entry = token_logprob(np.frombuffer(output.logprob, np.int32), params.logprobs)
            if reason == "stop":  # by the token, which is not part of the text
                last = entry
            else:
                piece = detokenizer.push(output.token, entry)
                text, logprobs = piece.text, piece.logprobs
                if piece.stopped is not None:  # also at the last token that max_tokens allows
                    reason, stop = "stop", piece.stopped
        if reason is not None:
            rest = detokenizer.finish(last)
            text, logprobs = text + rest.text, logprobs + rest.logprobs
        return Delta(
            request_id=live.name,
            index=output.index,
            text=text,
            token_ids=() if output.token is None else (output.token,),
            logprobs=logprobs,
            prompt_logprobs=_prompt_logprobs(output.prompt_logprobs, params.prompt_logprobs),
            finish_reason=reason,
            stop_reason=stop,
            cached_tokens=output.cached_tokens,
            error=output.error,
        )


def _prompt_logprobs(found: bytes | None, top: int | None) -> tuple[TokenLogprob | None, ...] | None:
    if found is None or top is None:
        return None
    rows = np.frombuffer(found, np.int32).reshape(-1, 2 + 2 * top)
    return (None, *(token_logprob(row, top) for row in rows))


def token_logprob(found: np.ndarray, top: int) -> TokenLogprob:
    """Convert a row of a head's result (functions.head) to a TokenLogprob with `top` alternatives."""
    alternatives = (len(found) - 2) // 2
    floats = found.view(np.float32)
    ids = found[2 : 2 + top].tolist()
    logprobs = floats[2 + alternatives : 2 + alternatives + top].tolist()
    return TokenLogprob(token_id=int(found[0]), logprob=float(floats[1]), top=tuple(zip(ids, logprobs, strict=True)))
