"""Made-up texts, tables and images, realistic enough for segment policies, and a tokenizer that needs no files."""

import random
import re
from collections.abc import Iterator

import numpy as np

_SUBJECTS = (
    "the committee", "a small team", "the river", "our engineer", "the old library", "a reader", "the night train",
    "the market", "her brother", "the report", "a neighbour", "the harbour", "the school", "his letter", "the garden",
)  # fmt: skip
_VERBS = (
    "found", "described", "left", "carried", "measured", "followed", "opened", "repaired", "counted", "remembered",
    "crossed", "painted", "asked for", "kept", "returned",
)  # fmt: skip
_OBJECTS = (
    "a new bridge", "the missing key", "three boxes of glass", "the long road", "a quiet answer", "the second draft",
    "an early harvest", "the last ferry", "a list of names", "the broken clock", "some bread and salt", "the city map",
    "a heavy coat", "the first snow", "a better plan",
)  # fmt: skip
_ENDINGS = (
    "before the rain began", "in the middle of the week", "although nobody had noticed", "with the help of friends",
    "for the first time in years", "because the lights were out", "near the northern gate", "and went home",
    "without a word", "as the paper had said", "after a short walk", "when the bell rang",
)  # fmt: skip
_COLUMNS = ("name", "place", "year", "amount", "share", "price", "weight", "count")
_ROW_NAMES = ("north", "south", "east", "west", "harbour", "station", "market", "garden", "bridge", "library")
QUESTION = "\n\nWhat does this show, and what would you do next?"


def sentences(rng: random.Random) -> Iterator[str]:
    """Endless sentences, each followed by a space or an empty line."""
    number = 0
    while True:
        words = [rng.choice(_SUBJECTS), rng.choice(_VERBS), rng.choice(_OBJECTS)]
        if rng.random() < 0.7:
            words.append(rng.choice(_ENDINGS))
        text = " ".join(words)
        number += 1
        yield text[0].upper() + text[1:] + (".\n\n" if number % 6 == 0 else ". ")


def table_rows(rng: random.Random) -> Iterator[str]:
    """Endless lines of a Markdown table. The first two are its header, after an empty line."""
    columns = rng.sample(_COLUMNS, rng.randint(3, 5))
    yield "\n\n| " + " | ".join(columns) + " |\n"
    yield "|" + "---|" * len(columns) + "\n"
    while True:
        cells = [f"{rng.choice(_ROW_NAMES)} {rng.randint(1, 99)}", *(str(rng.randint(1, 9999)) for _ in columns[1:])]
        yield "| " + " | ".join(cells) + " |\n"


def image(rows: int, cols: int, seed: int) -> np.ndarray:
    """A coloured texture, uint8 [rows, cols, 3]."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (-(-rows // 16), -(-cols // 16), 3), np.uint8)
    return coarse.repeat(16, axis=0).repeat(16, axis=1)[:rows, :cols]


class WordTokenizer:
    """A tokenizer with a token for each word of the texts above, including the space before it, and for each byte.

    It gives about as many tokens as a trained vocabulary, and has the methods that build() and segments.prompt_view()
    call.

    Attributes:
        special_ids: Empty.
        vocab_size: Number of bytes plus number of words.
    """

    special_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        texts = (*_SUBJECTS, *_VERBS, *_OBJECTS, *_ENDINGS, *_COLUMNS, *_ROW_NAMES, QUESTION)
        words = sorted({word for text in texts for word in re.findall(r"[A-Za-z]+", text)})
        spelt = sorted({form for word in words for form in (word, " " + word, word[0].upper() + word[1:])})
        self._bytes = [bytes([byte]) for byte in range(256)] + [form.encode() for form in spelt]
        self._ids = {form: 256 + i for i, form in enumerate(spelt)}
        self.vocab_size = len(self._bytes)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text. There are no special tokens."""
        ids: list[int] = []
        for piece in re.findall(r" ?[A-Za-z]+|[\s\S]", text):
            if (known := self._ids.get(piece)) is not None:
                ids.append(known)
            else:
                ids.extend(piece.encode())
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; empty for an id outside the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""
