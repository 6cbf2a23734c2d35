"""Prompt views made of strings and grids, with simple or random tokenization."""

import dataclasses
import random
import re
from collections.abc import Iterable

from hypothesis import strategies as st

from omni_jax.segments.prompt_view import MediaView, PromptView


@dataclasses.dataclass(frozen=True)
class Image:
    rows: int
    cols: int
    steps: int = 1
    modality: str = "image"


@dataclasses.dataclass(frozen=True)
class Control:
    """A control token, such as the end of a turn."""

    text: str = "<|im_end|>"


def view_of(
    parts: Iterable[str | Image | Control], *, seed: int | None = None, longest: int = 6, words: bool = False
) -> PromptView:
    """Make a prompt of the parts; no token spans two of them.

    A token is one character; with `words`, one word with the space before it; with a seed, a random number of
    characters up to `longest`, and now and then empty (the first bytes of a character).
    """
    rng = random.Random(seed)
    texts: list[str] = []
    media: list[MediaView] = []
    controls: list[int] = []
    for part in parts:
        if isinstance(part, Image):
            count = part.rows * part.cols * part.steps
            media.append(
                MediaView(
                    start=len(texts),
                    stop=len(texts) + count,
                    modality=part.modality,
                    grid=(part.rows, part.cols),
                    steps=part.steps,
                )
            )
            texts += ["<pad>"] * count
        elif isinstance(part, Control):
            controls.append(len(texts))
            texts.append(part.text)
        elif words:
            texts += re.findall(r" ?\w+|\W", part)
        elif seed is None:
            texts += part
        else:
            at = 0
            while at < len(part):
                if rng.random() < 0.05:
                    texts.append("")
                length = rng.randint(1, longest)
                texts.append(part[at : at + length])
                at += length
    return PromptView(
        length=len(texts),
        media=tuple(media),
        text=lambda start, stop: "".join(texts[start:stop]),
        token_texts=lambda start, stop: tuple(texts[start:stop]),
        controls=tuple(controls),
    )


def pieces(view: PromptView, segments) -> list[str]:
    """The text of each segment."""
    return [view.text(segment.start, segment.stop) for segment in segments]


TABLE = "| name | n |\n|---|---|\n| a | 1 |\n| b | 2 |\n"
_SHORT = (
    ". ",
    "! ",
    "。",
    "？",
    "।",
    "e.g. ",
    "3.14",
    "\n",
    "\n\n",
    "\t",
    "|",
    "a,b\n",
    '"',
    "”",
    "“",
    "ไทย ",
    "ມື້",
    "\ufffd",
)
_LONG = ("<table>", "</table>", "\f", "- ", "1. ", TABLE, "x" * 700, "ไทย" * 300, "log\n" * 600)
ODD = st.sampled_from((*_SHORT, *_LONG))
WORDS = st.lists(
    st.one_of(ODD, st.text(max_size=5), st.sampled_from(["The ", "cat", "Dr", " Élan", "好"])), max_size=25
)
TEXTS = WORDS.map("".join)
IMAGES = st.builds(
    lambda rows, cols, steps: Image(rows, cols, steps or 1, "video" if steps else "image"),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(0, 4),
)
PARTS = st.lists(st.one_of(TEXTS, IMAGES, st.builds(Control)), min_size=1, max_size=8)


@st.composite
def prompts(draw) -> PromptView:
    """Text, media and control tokens in any order, at least one token."""
    parts = draw(PARTS)
    view = view_of(parts, seed=draw(st.integers(0, 2**16)), longest=draw(st.sampled_from([1, 3, 20])))
    return view if view.length else view_of(["x"])
