"""Separation of client text from template text in a rendered chat, so that clients cannot inject control tokens.

`<|im_end|>` in a message is ten characters of text; `<|im_end|>` in the template is a control token. The rendered
string contains both. They are separated in three steps:

1. Before rendering, each spelling of a control token in client text is replaced by a sentinel: digits that are random
   for this request.
2. After rendering, the remaining spellings are the template's. Each is replaced by an alias: a secret of this process
   that the encoder has as a token.
3. Sentinels are replaced by the client's text, and the whole string is encoded in one call, with aliases as control
   tokens and spellings as plain text. The text around a token is tokenised as it is without these steps.
"""

import re
import secrets
from collections.abc import Iterable
from functools import partial

import tokenizers
from tokenizers import AddedToken

from omni_jax.inputs.token_bounds import count_unlocked, encode_unlocked, exceeds, max_token_bytes, too_long
from omni_jax.requests import InvalidRequest

_NONCE_DIGITS = 24  # 80 bits: cannot be guessed within one request


class ControlTokens:
    """The control tokens of a tokenizer (its special tokens), and an encoder that accepts them from a template only.

    Other added tokens (`<think>`, `<tool_call>`) are ordinary vocabulary, allowed in templates and client text.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        specials = {i: token for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._spelling_of = {i: token.content for i, token in specials.items()}
        self._id_of = {spelling: i for i, spelling in self._spelling_of.items()}
        self._spellings = list(self._spelling_of.values())
        self._index = {spelling: i for i, spelling in enumerate(self._spellings)}
        self._pattern = re.compile(_any_of(self._spellings) or r"(?!)")
        self._width = len(str(len(self._spellings)))
        secret = secrets.token_hex(16)
        self._aliases = {token.content: f"<{secret}:{i}>" for i, token in specials.items()}
        self._alias_start = f"<{secret}:"
        self._alias_pattern = re.compile(rf"<{secret}:(\d+)>")
        self._encoder = tokenizers.Tokenizer.from_str(backend.to_str())
        self._encoder.encode_special_tokens = True  # encode spellings of special tokens as text
        self._encoder.add_tokens(
            [
                AddedToken(
                    self._aliases[token.content],
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    single_word=token.single_word,
                    normalized=token.normalized,  # such a token takes SentencePiece's space before it
                    special=False,
                )
                for token in specials.values()
            ]
        )
        self._max_token_bytes = max_token_bytes(self._encoder)  # aliases are longer than spellings
        self._real_id = {self._encoder.token_to_id(self._aliases[token.content]): i for i, token in specials.items()}

    def nonce(self) -> str:
        """A prefix for one request's sentinels. Only digits: trimming, case changes and JSON dumps keep them."""
        return "".join(str(secrets.randbelow(10)) for _ in range(_NONCE_DIGITS))

    def escape(self, text: str, nonce: str) -> str:
        """Replace the spellings of control tokens in client text by sentinels."""
        return self._pattern.sub(lambda match: f"{nonce}{self._index[match[0]]:0{self._width}d}", text)

    def split(self, text: str) -> list[str | int]:
        """The text with the ids of control tokens in place of their spellings."""
        parts: list[str | int] = []
        end = 0
        for match in self._pattern.finditer(text):
            parts += [text[end : match.start()], self._id_of[match[0]]]
            end = match.end()
        return [*parts, text[end:]]

    def unescape(self, text: str, nonce: str) -> str:
        """Replace sentinels by the spellings they stand for."""
        return "".join(self._parts(text, nonce))

    def _parts(self, text: str, nonce: str) -> list[str]:
        """Split the text at sentinels: text at even indices, the spellings of sentinels at odd ones."""
        parts = re.split(rf"{nonce}(\d{{{self._width}}})", text) if nonce in text else [text]
        parts[1::2] = [self._spellings[int(index)] for index in parts[1::2]]
        return parts

    def encode(self, rendered: str, nonce: str, *, max_tokens: int | None = None) -> list[int]:
        """Encode a rendered chat whose client text was escaped. Other threads run meanwhile.

        Args:
            max_tokens: refuse a chat that certainly has more tokens, before all of it is encoded.

        Raises:
            InvalidRequest: the chat is refused; or client text spells a control token, and the vocabulary encodes it as
                one even as plain text (a Unigram model with `<s>` among its pieces does).
        """
        parts = self._parts(rendered, nonce)
        parts[::2] = [self._pattern.sub(lambda match: self._aliases[match[0]], part) for part in parts[::2]]
        text = "".join(parts)
        count = partial(count_unlocked, self._encoder)
        if max_tokens is not None and exceeds(text, max_tokens, max_bytes=self._max_token_bytes, count=count):
            raise too_long(len(rendered), max_tokens, "messages")
        ids = encode_unlocked(self._encoder, text, add_special_tokens=False)
        if sum(i in self._real_id for i in ids) < text.count(self._alias_start):
            text = self._spell_unread(text)
            ids = encode_unlocked(self._encoder, text, add_special_tokens=False)
        for i in self._spelling_of.keys() & ids:
            spelling = self._spelling_of[i]
            if spelling in text:  # otherwise it is the unknown token, for characters the vocabulary lacks
                raise InvalidRequest(
                    f"the messages contain the text {spelling!r}, which this model's vocabulary can only encode as a "
                    "control token; remove it",
                    param="messages",
                )
        return [self._real_id.get(i, i) for i in ids]

    def _spell_unread(self, text: str) -> str:
        """Replace the aliases that the encoder does not read as tokens by the spellings they stand for.

        Whether it reads a token may depend on the text beside it: on a space before a normalized one in SentencePiece,
        on letters beside one that must be a single word. The library encodes the others as text.
        """
        encoding = self._encoder.encode_batch([text], add_special_tokens=False)[0]
        spans = (span for i, span in zip(encoding.ids, encoding.offsets, strict=True) if i in self._real_id)
        read = {text.find(self._alias_start, *span) for span in spans}
        return self._alias_pattern.sub(
            lambda match: match[0] if match.start() in read else self._spelling_of[int(match[1])], text
        )


def _any_of(words: Iterable[str]) -> str:
    """A pattern that matches the longest of the words. Built as a prefix tree, so its cost does not grow with them."""
    by_first: dict[str, set[str]] = {}
    for word in words:
        if word:
            by_first.setdefault(word[0], set()).add(word[1:])
    branches = []
    for first, rests in sorted(by_first.items()):
        prefix = first
        while len(rests) == 1 and (rest := next(iter(rests))):  # one branch needs no group; the parser nests groups
            prefix, rests = prefix + rest[0], {rest[1:]}
        optional = "?" if "" in rests and len(rests) > 1 else ""
        branches.append(re.escape(prefix) + _any_of(rests) + optional)
    return f"(?:{'|'.join(branches)})" if branches else ""
