"""Keeps what a client typed apart from what the chat template wrote, down to the token ids.

`<|im_end|>` in a message is eleven characters of text; `<|im_end|>` in the template is a control token. Both meet in
one rendered string, so they are told apart by name:

1. before rendering, the spelling of a control token in client data becomes a sentinel, digits drawn for this request;
2. after rendering, a control token's spelling can only come from the template: it becomes an alias, a secret of this
   process that the encoder below knows as a token;
3. sentinels become the client's text again, and the whole is encoded in one call by an encoder that reads aliases as
   control tokens and spellings as plain text. What stands around a token is tokenised just as without all this.
"""

import re
import secrets
from collections.abc import Iterable

import tokenizers
from tokenizers import AddedToken

from omni_jax.requests import InvalidRequest

_NONCE_DIGITS = 24  # 80 bits: nobody guesses it within one request


class ControlTokens:
    """The special tokens of a tokenizer (those marked `special`), and encoding that takes them from a template only.

    Other added tokens (`<think>`, `<tool_call>`) are ordinary vocabulary: templates and clients both write them.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        specials = {i: token for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._spelling_of = {i: token.content for i, token in specials.items()}
        self._spellings = list(self._spelling_of.values())
        self._index = {spelling: i for i, spelling in enumerate(self._spellings)}
        self._pattern = re.compile(_any_of(self._spellings) or r"(?!)")
        self._width = len(str(len(self._spellings)))
        secret = secrets.token_hex(16)
        self._aliases = {token.content: f"<{secret}:{i}>" for i, token in specials.items()}
        self._encoder = tokenizers.Tokenizer.from_str(backend.to_str())
        self._encoder.encode_special_tokens = True  # read the special tokens' spellings as text
        self._encoder.add_tokens(
            [
                AddedToken(
                    self._aliases[token.content],
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    single_word=token.single_word,
                    normalized=False,
                    special=False,
                )
                for token in specials.values()
            ]
        )
        self._real_id = {self._encoder.token_to_id(self._aliases[token.content]): i for i, token in specials.items()}

    def nonce(self) -> str:
        """What this request's sentinels begin with. Digits, so that no trim, case change or JSON dump alters them."""
        return "".join(str(secrets.randbelow(10)) for _ in range(_NONCE_DIGITS))

    def hide(self, text: str, nonce: str) -> str:
        """Client text, with sentinels for the spellings of control tokens."""
        return self._pattern.sub(lambda match: f"{nonce}{self._index[match[0]]:0{self._width}d}", text)

    def reveal(self, text: str, nonce: str) -> str:
        """The inverse of hide."""
        return "".join(self._parts(text, nonce))

    def _parts(self, text: str, nonce: str) -> list[str]:
        """The text cut at sentinels: what stands between them at even places, their spellings at odd ones."""
        parts = re.split(rf"{nonce}(\d{{{self._width}}})", text) if nonce in text else [text]
        parts[1::2] = [self._spellings[int(index)] for index in parts[1::2]]
        return parts

    def encode(self, rendered: str, nonce: str) -> list[int]:
        """Token ids of a rendered chat whose client texts went through `hide`.

        Raises InvalidRequest when the vocabulary itself makes a control token of plain text (a Unigram model with `<s>`
        among its pieces does): then the spelling is refused.
        """
        parts = self._parts(rendered, nonce)
        parts[::2] = [self._pattern.sub(lambda match: self._aliases[match[0]], part) for part in parts[::2]]
        text = "".join(parts)
        ids = self._encoder.encode(text, add_special_tokens=False).ids
        for i in self._spelling_of.keys() & ids:
            spelling = self._spelling_of[i]
            if spelling in text:  # else it is the unknown token, which a model without byte tokens may well need
                raise InvalidRequest(
                    f"the messages spell out the control token {spelling!r}, which this model's vocabulary cannot tell "
                    "from the real one; leave it out",
                    param="messages",
                )
        return [self._real_id.get(i, i) for i in ids]


def _any_of(words: Iterable[str]) -> str:
    """A pattern for the longest of the words at a place: a prefix tree, so that many words cost no more than one."""
    by_first: dict[str, set[str]] = {}
    for word in words:
        if word:
            by_first.setdefault(word[0], set()).add(word[1:])
    branches = []
    for first, rests in sorted(by_first.items()):
        prefix = first
        while len(rests) == 1 and (rest := next(iter(rests))):  # a chain: no group for it, groups nest in the parser
            prefix, rests = prefix + rest[0], {rest[1:]}
        optional = "?" if "" in rests and len(rests) > 1 else ""
        branches.append(re.escape(prefix) + _any_of(rests) + optional)
    return f"(?:{'|'.join(branches)})" if branches else ""
