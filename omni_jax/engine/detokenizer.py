"""Incremental detokenisation of one continuation, with stop strings and log-probabilities."""

import collections
import dataclasses

from omni_jax.inputs import Tokenizer
from omni_jax.requests import SamplingParams, TokenLogprob


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Output that became visible with a token.

    Attributes:
        text: newly visible text.
        logprobs: log-probabilities of the tokens whose text is now visible, with text_offset set.
        stopped: the stop string that ended the text, or None.
    """

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    stopped: str | None = None


class Detokenizer:
    """Turns the tokens of one continuation into text, token by token.

    Push each generated token, and call finish once if generation ends for any reason other than a stop string. Do not
    push the token that ended it (EOS or one of stop_token_ids), as it is not part of the text. (vLLM includes it with
    include_stop_str_in_output.)

    - The concatenated text of the pieces is `tokenizer.decode(ids)` up to a stop string. No piece contains a part of a
      character; a character that is incomplete at the end becomes a single U+FFFD.
    - Text ends with the token that completes a stop string. Of several, the one that begins first counts; of those, the
      first listed. The stop string is shown only with include_stop_str_in_output, and text after it never. Text that
      may be the beginning of a stop string is held back.
    - As in vLLM, a stop string that is complete within the first min_tokens tokens is ordinary text; one that only
      begins there counts.
    - A log-probability is returned with the last character of its token's text. After a stop string, those of tokens
      whose text is wholly cut off are dropped. A token without text (a skipped special token) returns none. So the
      bytes of the tokens with log-probabilities are the bytes of the visible text, unless a cut is inside a token.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        self._stream = tokenizer.stream(skip_special_tokens=params.skip_special_tokens)
        self._stop = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._tokens = 0
        self._shown = 0  # number of characters returned
        self._held = ""  # text after them that may begin a stop string
        self._immune = 0  # characters of the first min_tokens tokens; a stop string must end after them
        self._waiting: collections.deque[tuple[int, TokenLogprob]] = collections.deque()  # (end of its text, entry)
        self._ended = False

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> Piece:
        """Add the next token and its log-probability, whose text_offset is set here."""
        if self._ended:
            raise ValueError(f"token {token_id} was pushed after the end of the text")
        self._tokens += 1
        self._held += self._stream.push(token_id)
        first, last = self._stream.span
        if logprob is not None and first < last:
            self._waiting.append((last, dataclasses.replace(logprob, text_offset=first)))
        if not self._stop:
            return self._show(len(self._held))
        if self._tokens <= self._min_tokens:
            self._immune = self._shown + len(self._held)
        if found := self._find_stop():
            at, stop = found
            return self._show(at + len(stop) * self._include_stop, stopped=stop)
        return self._show(len(self._held) - self._stop_begun())

    def finish(self) -> Piece:
        """Return the text held back. Returns nothing after a stop string."""
        if self._ended:
            return Piece()
        self._ended = True
        self._held += self._stream.close()
        return self._show(len(self._held))

    def _find_stop(self) -> tuple[int, str] | None:
        """Place in the held text of the first stop string, and the stop string."""
        immune = self._immune - self._shown
        places = [(self._held.find(stop, max(0, immune - len(stop) + 1)), stop) for stop in self._stop]
        return min((place for place in places if place[0] >= 0), key=lambda place: place[0], default=None)

    def _stop_begun(self) -> int:
        """Length of the longest suffix of the held text that a stop string begins with."""
        return max(_overlap(self._held, stop) for stop in self._stop)

    def _show(self, count: int, *, stopped: str | None = None) -> Piece:
        """Return the first `count` held characters."""
        text = self._held[:count]
        self._shown += count
        self._held = "" if stopped else self._held[count:]
        self._ended = self._ended or stopped is not None
        ready = []
        while self._waiting and self._waiting[0][0] <= self._shown:
            ready.append(self._waiting.popleft()[1])
        if stopped:
            ready += [entry for _, entry in self._waiting if entry.text_offset < self._shown]
            self._waiting.clear()
        return Piece(text=text, logprobs=tuple(ready), stopped=stopped)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of text that is a proper prefix of stop."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0
