"""Token strings of a vocabulary -> the bytes they stand for, and bytes -> text as they arrive.

Two families of vocabulary are understood, which cover Llama, Qwen, SmolLM, Mistral, Gemma and GPT: byte-level BPE (each
byte has a printable stand-in) and SentencePiece (`▁` for a space, `<0xE4>` for a byte no token covers). In both, text
is the UTF-8 reading of the tokens' bytes put one after another, which is what makes a token at a time cheap and exact.
"""

import codecs
import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers


def _byte_level_alphabet() -> dict[str, int]:
    """Stand-in character -> byte: GPT-2's table. Printable Latin-1 stands for itself, the rest for U+0100 and on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """How token strings become bytes: the `decoder` of a tokenizer.json, read as data.

    Attributes:
        byte_level: characters stand for bytes; a token with any other character (an added one) is its own UTF-8.
        byte_tokens: `<0xE4>` is the byte E4.
        replacements: (what, with what) in each token's string, in order: `▁` by a space.
        leading_spaces: so many spaces at the very start of a text are not part of it.
    """

    byte_level: bool = False
    byte_tokens: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    leading_spaces: int = 0

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> "TokenBytes":
        """Reads the decoder of a tokenizer; raises ValueError when it is of another family."""
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
                case {"type": "Replace", "pattern": {"String": what}, "content": by}:
                    rule = dataclasses.replace(rule, replacements=(*rule.replacements, (what, by)))
                case {"type": "Strip", "content": " ", "start": start, "stop": 0} if step is steps[-1]:
                    rule = dataclasses.replace(rule, leading_spaces=start)
                case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                    rule = dataclasses.replace(
                        rule, replacements=((mark, " "),), leading_spaces=0 if scheme == "never" else 1
                    )
                case _:
                    raise ValueError(
                        f"tokenizer.json has a decoder step {step['type']!r} that is not understood here; understood "
                        "are ByteLevel (GPT-2, Llama 3, Qwen) and Metaspace, or Replace, ByteFallback, Fuse and "
                        "a final Strip of leading spaces (SentencePiece)"
                    )
        return rule

    def __call__(self, token: str) -> bytes:
        """The bytes of one token's string; a leading space is still there."""
        if self.byte_level:
            try:
                return bytes([_BYTE_OF[char] for char in token])
            except KeyError:
                return token.encode()
        if self.byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        for what, by in self.replacements:
            token = token.replace(what, by)
        return token.encode()


class TextStream:
    """Text of a token stream, one token at a time; never half a character.

    Bytes that may still become a character wait for it (three at most: UTF-8 has no longer beginning). Bytes that
    cannot become one turn into U+FFFD at once, as Unicode recommends: one for each longest beginning of a character.
    An unfinished character at the end is one U+FFFD.

    Attributes:
        span: [first, last) characters that the token pushed last has a part in, counted from the start of the text;
            a character it leaves unfinished counts. Empty when the token adds nothing.
    """

    def __init__(self, bytes_of: Callable[[int], bytes], *, leading_spaces: int = 0):
        """bytes_of gives a token's bytes, b"" for a token that is not shown."""
        self._bytes_of = bytes_of
        self._leading_spaces = leading_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._length = 0
        self._unfinished = False
        self.span = (0, 0)

    def push(self, token_id: int) -> str:
        """The characters that this token completes."""
        data = self._bytes_of(token_id)
        if self._leading_spaces and data:
            cut = min(self._leading_spaces, len(data) - len(data.lstrip(b" ")))
            self._leading_spaces = self._leading_spaces - cut if cut == len(data) else 0
            data = data[cut:]
        return self._decode(data)

    def close(self) -> str:
        """U+FFFD when the last character is unfinished, else nothing; the stream is at its end."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        # A character is waiting and this token does not go on with it: it starts after the U+FFFD that is put there.
        breaks_off = self._unfinished and bool(data) and not 0x80 <= data[0] < 0xC0
        first = self._length + breaks_off
        text = self._utf8.decode(data, final)
        self._length += len(text)
        self._unfinished = bool(self._utf8.getstate()[0])
        self.span = (first, self._length + self._unfinished if data else first)
        return text
