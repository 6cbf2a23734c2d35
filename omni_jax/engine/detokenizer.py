"""Incremental detokenisation of one continuation, with stop strings and log-probabilities."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.requests import SamplingParams, TokenLogprob


class Piece(NamedTuple):
    """Output that became visible with a token.

    Attributes:
        text: newly visible text.
        logprobs: log-probabilities of the tokens whose text is now visible, and of hidden ones, with their places.
        stopped: the stop string that ended the text, or None.
    """

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    stopped: str | None = None


class Detokenizer:
    """Turns the tokens of one continuation into text, token by token.

    Push each generated token, and call finish once if generation ends for any reason other than a stop string. The
    token that ended it (EOS or one of stop_token_ids) goes to finish, as it is not part of the text. (vLLM includes it
    with include_stop_str_in_output.)

    - The concatenated text of the pieces is `tokenizer.decode(prompt + ids)` less `tokenizer.decode(prompt)`, up to a
      stop string; see TextStream for a character that begins in the prompt. No piece contains a part of a character; a
      character that is incomplete at the end becomes a single U+FFFD.
    - Text ends with the token that completes a stop string. Of several, the one that begins first counts; of those, the
      first listed. The stop string is shown only with include_stop_str_in_output, and text after it never. Text that
      may be the beginning of a stop string is held back.
    - A special token's spelling in a stop string stands for the token, too, so `<|im_end|>` and `\n<|im_start|>user`
      stop although the text shows no special tokens, not even with include_stop_str_in_output. A special token counts
      as a whole: `<` does not stop at one.
    - As in vLLM, a stop string that is complete within the first min_tokens tokens is ordinary text; one that only
      begins there counts.
    - Each token's log-probability is returned once, in order: with the last character of its token's text, or, for a
      token without text, with the text before it. Those of tokens of which the text shows nothing are marked as hidden.
      So the bytes of the other ones are the bytes of the visible text, unless a cut is inside a token.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int] = ()):
        """
        Args:
            prompt_ids: the tokens that the continuation follows.
        """
        self._stream = tokenizer.stream(skip_special_tokens=params.skip_special_tokens, prompt=prompt_ids)
        self._marks: dict[int, str] = {}  # special token in a stop string -> what stands for it in the held text
        self._stop: dict[str, str] = {}  # stop string as it is matched -> as the client wrote it
        for stop in params.stop:
            self._stop[stop] = stop
            if params.skip_special_tokens:
                self._stop.setdefault(self._marked(tokenizer.split_specials(stop)), stop)
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._tokens = 0
        self._held = ""  # text that may begin a stop string, with marks
        self._passed = 0  # number of characters before the held text, marks included
        self._num_marks = 0  # among the characters of both
        self._shown = 0  # number of characters returned
        self._immune = 0  # characters of the first min_tokens tokens, marks included; a stop string must end after them
        self._waiting: collections.deque[tuple[int, int, TokenLogprob]] = collections.deque()  # (first, last, entry)
        self._ended = False

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> Piece:
        """Add the next token and its log-probability, whose place in the text is set here."""
        if self._ended:
            raise ValueError(f"token {token_id} was pushed after the end of the text")
        self._tokens += 1
        text = self._stream.push(token_id)
        if logprob is None and not self._stop:  # nothing is held back
            self._passed += len(text)
            self._shown += len(text)
            return Piece(text=text)
        self._held += text
        if logprob is not None:
            first, last = self._stream.span
            entry = dataclasses.replace(
                logprob, text_offset=first, hidden=first == last, removed_spaces=self._stream.removed
            )
            self._waiting.append((first + self._num_marks, last + self._num_marks, entry))
        if not self._stop:
            return self._show(len(self._held))
        if mark := self._marks.get(token_id):
            self._held += mark
            self._num_marks += 1
        if self._tokens <= self._min_tokens:
            self._immune = self._passed + len(self._held)
        if found := self._find_stop():
            at, stop = found
            return self._show(at + len(stop) * self._include_stop, stopped=self._stop[stop])
        return self._show(len(self._held) - self._stop_begun())

    def finish(self, logprob: TokenLogprob | None = None) -> Piece:
        """Return the text held back, and the log-probability of the token that ended the text, if one did. Returns
        nothing after a stop string."""
        if self._ended:
            return Piece()
        self._ended = True
        self._held += self._stream.close()
        piece = self._show(len(self._held))
        if logprob is None:
            return piece
        entry = dataclasses.replace(logprob, text_offset=self._shown, hidden=True)
        return piece._replace(logprobs=(*piece.logprobs, entry))

    def _marked(self, parts: Sequence[str | int]) -> str:
        """A stop string with its special tokens as marks: halves of surrogate pairs, which decoded text never has."""
        return "".join(
            part if isinstance(part, str) else self._marks.setdefault(part, chr(0xDC00 + len(self._marks)))
            for part in parts
        )

    def _find_stop(self) -> tuple[int, str] | None:
        """Place in the held text of the first stop string, and the stop string as it is matched."""
        immune = self._immune - self._passed
        places = [(self._held.find(stop, max(0, immune - len(stop) + 1)), stop) for stop in self._stop]
        return min((place for place in places if place[0] >= 0), key=lambda place: place[0], default=None)

    def _stop_begun(self) -> int:
        """Length of the longest suffix of the held text that a stop string begins with."""
        return max(_overlap(self._held, stop) for stop in self._stop)

    def _show(self, count: int, *, stopped: str | None = None) -> Piece:
        """Return the first `count` held characters without marks."""
        text = self._held[:count]
        for mark in self._marks.values():
            text = text.replace(mark, "")
        self._passed += count
        self._shown += len(text)
        self._held = "" if stopped else self._held[count:]
        self._ended = self._ended or stopped is not None
        ready = []
        while self._waiting and self._waiting[0][1] <= self._passed:
            ready.append(self._waiting.popleft()[2])
        if stopped:
            for first, _, entry in self._waiting:
                cut = {} if first < self._passed else {"hidden": True, "text_offset": self._shown}
                ready.append(dataclasses.replace(entry, **cut))
            self._waiting.clear()
        return Piece(text=text, logprobs=tuple(ready), stopped=stopped)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of text that is a proper prefix of stop."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0
