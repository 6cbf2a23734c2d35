"""The bytes of a vocabulary's tokens, and incremental decoding of bytes to text.

Two families of vocabulary are supported, which cover Llama, Qwen, SmolLM, Mistral, Gemma and GPT: byte-level BPE (a
printable character for each byte) and SentencePiece (`▁` for a space, `<0xE4>` for a byte that no token covers). In
both, text is the UTF-8 decoding of the tokens' concatenated bytes, so decoding one token at a time is cheap and exact.
"""

import codecs
import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's table, character -> byte: printable Latin-1 characters stand for their own bytes, U+0100 and on for the
    others."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_level_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """The rule that converts token strings to bytes, parsed from the `decoder` of a tokenizer.json.

    Attributes:
        byte_level: each character of a token stands for a byte. An added token is its own UTF-8: `café` consists of
            characters that stand for bytes, but those bytes are not its text (the library decodes them all the same).
        byte_tokens: tokens such as `<0xE4>` stand for one byte.
        replacements: (old, new) pairs to replace in each token's string, in order; for example `▁` by a space.
        leading_spaces: number of spaces to remove at the start of a text.
    """

    byte_level: bool = False
    byte_tokens: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    leading_spaces: int = 0

    @classmethod
    def from_tokenizer(cls, backend: tokenizers.Tokenizer) -> "TokenBytes":
        """Parse the decoder of a tokenizer; raise ValueError for an unsupported one."""
        decoder: dict[str, Any] = (
            json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": None}
        )
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        rule = cls()
        for step in steps:
            match step:
                case {"type": "ByteLevel"}:
                    rule = dataclasses.replace(rule, byte_level=True)
                case {"type": "ByteFallback"}:
                    rule = dataclasses.replace(rule, byte_tokens=True)
                case {"type": "Fuse"}:
                    pass
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    rule = dataclasses.replace(rule, replacements=(*rule.replacements, (old, new)))
                case {"type": "Strip", "content": " ", "start": start, "stop": 0} if step is steps[-1]:
                    rule = dataclasses.replace(rule, leading_spaces=start)
                case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                    rule = dataclasses.replace(
                        rule, replacements=((mark, " "),), leading_spaces=0 if scheme == "never" else 1
                    )
                case _:
                    raise ValueError(
                        f"tokenizer.json has an unsupported decoder step {step['type']!r}; supported: ByteLevel "
                        "(GPT-2, Llama 3, Qwen) and Metaspace, or Replace, ByteFallback, Fuse and a final Strip of "
                        "leading spaces (SentencePiece)"
                    )
        return rule

    def __call__(self, token: str, *, added: bool = False) -> bytes:
        """The bytes of one token's string, including leading spaces. `added`: whether it is an added token."""
        if self.byte_level:
            if added:
                return token.encode()
            try:
                return bytes([BYTE_OF[char] for char in token])
            except KeyError:
                return token.encode()
        if self.byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


class TextStream:
    """An incremental decoder: the text of a token stream, one token at a time, in whole characters.

    Up to three bytes that begin a character are held back until it is complete. Invalid bytes become U+FFFD at once, as
    Unicode recommends: one for each maximal prefix of a character. An incomplete character at the end is one U+FFFD.

    A stream that continues a prompt has the text of prompt and output together, less the prompt's. A character that
    begins in the prompt is text of the output if the output's first byte continues it; otherwise its U+FFFD is text of
    the prompt.

    Attributes:
        span: [first, last) indices of the characters that the last token contributed to, including a character that it
            leaves incomplete. Empty if the token adds nothing.
        removed: number of leading spaces that were removed from the last token.
        joined: whether the output's first byte continued a character of the prompt.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], *, leading_spaces: int = 0, prompt: Sequence[int] = ()):
        """
        Args:
            bytes_of: returns a token's bytes; b"" for a token to skip.
            leading_spaces: number of spaces to remove at the start of the text.
            prompt: the tokens that the stream continues. Only the last few are looked at.
        """
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._length = 0
        self.span, self.removed, self.joined = (0, 0), 0, False
        tail = _last_bytes(bytes_of, prompt, more_than=max(3, leading_spaces))
        self._leading_spaces = leading_spaces - min(leading_spaces, len(tail)) if not tail.strip(b" ") else 0
        self._utf8.decode(tail)
        self._of_prompt = self._utf8.getstate()[0]  # bytes of a character that the prompt leaves incomplete
        self._incomplete = bool(self._of_prompt)

    def push(self, token_id: int) -> str:
        """Add a token; return the characters that it completes."""
        data = self._bytes_of(token_id)
        self.removed = 0
        if self._leading_spaces and data:
            self.removed = min(self._leading_spaces, len(data) - len(data.lstrip(b" ")))
            self._leading_spaces = self._leading_spaces - self.removed if self.removed == len(data) else 0
            data = data[self.removed :]
        if self._of_prompt and data:
            self._leave_prompt(data[:1])
        return self._decode(data)

    def close(self) -> str:
        """End the stream; return U+FFFD if the last character is incomplete, otherwise nothing."""
        if self._of_prompt:
            self._leave_prompt(b"")
        return self._decode(b"", final=True)

    def _leave_prompt(self, following: bytes) -> None:
        """Forget the prompt's incomplete character unless the output's first byte continues it."""
        begun, self._of_prompt = self._of_prompt, b""
        self.joined = bool(following) and _begins_character(begun + following)
        if not self.joined:
            self._utf8.reset()
            self._incomplete = False

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        if data.isascii() and not self._incomplete:  # nearly all tokens: whole characters, a byte each
            self.span = (self._length, self._length + len(data))
            self._length += len(data)
            return data.decode()
        # If this token does not continue the incomplete character, its text starts after that character's U+FFFD.
        interrupts = self._incomplete and bool(data) and not 0x80 <= data[0] < 0xC0
        first = self._length + interrupts
        text = self._utf8.decode(data, final)
        self._length += len(text)
        self._incomplete = bool(self._utf8.getstate()[0])
        self.span = (first, self._length + self._incomplete if data else first)
        return text


def _last_bytes(bytes_of: Callable[[int], bytes], ids: Sequence[int], *, more_than: int) -> bytes:
    """The bytes of the last tokens: more than `more_than` of them, or all."""
    tail = b""
    for token in reversed(ids):
        tail = bytes_of(token) + tail
        if len(tail) > more_than:
            break
    return tail


def _begins_character(data: bytes) -> bool:
    """Whether the bytes are a character in UTF-8, or the beginning of one."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return True
