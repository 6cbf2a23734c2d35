"""Token ids of one continuation -> the text a client may see, with stop strings and log-probabilities in step."""

import collections
import dataclasses

from omni_jax.inputs import Tokenizer
from omni_jax.requests import SamplingParams, TokenLogprob


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """What a token made visible.

    Attributes:
        text: newly visible characters.
        logprobs: of the tokens whose text is visible now, with text_offset set.
        stopped: the stop string that ended the text, or None.
    """

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    stopped: str | None = None


class Detokenizer:
    """Incremental detokenisation of one continuation.

    Push each generated token; call finish once when generation ends for any reason but a stop string. The token that
    ended it (EOS, one of stop_token_ids) is not pushed: it is not part of the text. (vLLM shows it when
    include_stop_str_in_output is set; an engine that wants that pushes it then. Special tokens stay hidden under
    skip_special_tokens all the same.)

    - The pieces' text, one after another, is `tokenizer.decode(ids)` up to a stop string. No piece holds half a
      character; one left unfinished at the end is a single U+FFFD.
    - A token ends the text as soon as a stop string is complete in it. Of several, the one that begins first counts,
      of those the first listed. Nothing of it is shown, unless include_stop_str_in_output, and nothing behind it ever.
      Text that may be the beginning of a stop string waits.
    - As in vLLM, a stop string that is complete within the first min_tokens tokens is ordinary text; one that only
      begins there counts.
    - A log-probability comes with the last character its token has a part in. At a stop string those whose text lies
      wholly behind the cut are dropped. A token without text (a skipped special token) has none. So the bytes of the
      tokens that came with log-probabilities are those of the visible text, unless a cut fell inside a token.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        self._stream = tokenizer.stream(skip_special_tokens=params.skip_special_tokens)
        self._stop = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._tokens = 0
        self._shown = 0  # characters handed out
        self._held = ""  # characters behind them that wait: a stop string may begin there
        self._immune = 0  # characters of the first min_tokens tokens: a stop string must end behind them
        self._waiting: collections.deque[tuple[int, TokenLogprob]] = collections.deque()  # with the end of their text
        self._ended = False

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> Piece:
        """Takes the next token and its log-probability (its text_offset is set here)."""
        if self._ended:
            raise ValueError(f"token {token_id} was pushed behind the end of its text")
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
        """What was held back, when generation ended otherwise than by a stop string; nothing after one."""
        if self._ended:
            return Piece()
        self._ended = True
        self._held += self._stream.close()
        return self._show(len(self._held))

    def _find_stop(self) -> tuple[int, str] | None:
        """Where in the held text the first stop string begins, and which."""
        immune = self._immune - self._shown
        places = [(self._held.find(stop, max(0, immune - len(stop) + 1)), stop) for stop in self._stop]
        return min((place for place in places if place[0] >= 0), key=lambda place: place[0], default=None)

    def _stop_begun(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        return max(_overlap(self._held, stop) for stop in self._stop)

    def _show(self, count: int, *, stopped: str | None = None) -> Piece:
        """Hands out the first `count` held characters."""
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
    """Length of the longest end of text that is a beginning of stop, and not all of it."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0
