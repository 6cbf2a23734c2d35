"""A prompt as a segment policy sees it. No token is decoded until a policy reads text."""

import bisect
import codecs
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from omni_jax.requests.media import MediaSpan

if TYPE_CHECKING:  # transformers is not imported for a type
    from omni_jax.inputs import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaView:
    """An image's or a video's run of visual tokens: step after step, in each row after row.

    Attributes:
        start: place of its first token in the prompt.
        stop: place behind its last token.
        modality: "image" or "video".
        grid: (rows, columns) of tokens of one temporal step.
        steps: temporal steps; 1 for an image.

    Raises ValueError when the grid is not as large as the run.
    """

    start: int
    stop: int
    modality: Literal["image", "video"]
    grid: tuple[int, int]
    steps: int = 1

    def __post_init__(self):
        rows, cols = self.grid
        if self.stop - self.start != rows * cols * self.steps or self.stop <= self.start:
            raise ValueError(
                f"{self.modality} at [{self.start}, {self.stop}) has {self.stop - self.start} tokens; "
                f"{self.steps} steps of {rows} x {cols} are {rows * cols * self.steps}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PromptView:
    """A prompt as a policy sees it: its media, and its text where somebody asks for it.

    Attributes:
        length: tokens.
        media: in order, no two overlap; what lies between them is text.
        text: (start, stop) -> text of those tokens, control tokens spelt out, bytes that are no character as U+FFFD.
        token_texts: (start, stop) -> the same, a string for each token: the characters it completes. A token that
            leaves its last character unfinished may be "". Joined they are `text`.
        controls: places of control tokens (turns of a chat, brackets around media), ascending: no sentence runs on
            across one.
    """

    length: int
    media: tuple[MediaView, ...] = ()
    text: Callable[[int, int], str]
    token_texts: Callable[[int, int], tuple[str, ...]]
    controls: tuple[int, ...] = ()

    def part(self, start: int, stop: int) -> "PromptView":
        """The tokens [start, stop) as a prompt of their own; media that lie in them whole are its media."""
        low, high = bisect.bisect_left(self.controls, start), bisect.bisect_left(self.controls, stop)
        first_item = bisect.bisect_left(self.media, start, key=lambda item: item.start)
        last_item = bisect.bisect_right(self.media, stop, key=lambda item: item.stop)
        return PromptView(
            length=stop - start,
            media=tuple(
                dataclasses.replace(item, start=item.start - start, stop=item.stop - start)
                for item in self.media[first_item:last_item]
            ),
            text=lambda first, last: self.text(start + first, start + last),
            token_texts=lambda first, last: self.token_texts(start + first, start + last),
            controls=tuple(place - start for place in self.controls[low:high]),
        )


def prompt_view(ids: Sequence[int], media: Sequence[MediaSpan], tokenizer: "Tokenizer") -> PromptView:
    """The view of a prompt. Nothing is decoded until a policy reads text, and then everything, once.

    Args:
        ids: the prompt's token ids.
        media: its spans, in order, one a temporal step; steps of a video that follow one another are one item.
        tokenizer: gives the bytes of tokens, and says which of them are control tokens.
    """

    @functools.cache
    def texts() -> tuple[str, ...]:
        return tuple(_texts(ids, tokenizer))

    return PromptView(
        length=len(ids),
        media=_items(media),
        text=lambda start, stop: "".join(texts()[start:stop]),
        token_texts=lambda start, stop: texts()[start:stop],
        controls=tuple(place for place, token in enumerate(ids) if token in tokenizer.special_ids),
    )


def _texts(ids: Sequence[int], tokenizer: "Tokenizer") -> list[str]:
    """The characters that each token completes; an unfinished one at the end is the last token's."""
    bytes_of = {token: tokenizer.token_bytes(token) for token in set(ids)}
    whole = {token: data.decode() for token, data in bytes_of.items() if _is_whole(data)}  # most tokens of most texts
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts: list[str] = []
    unfinished = False
    for token in ids:
        if unfinished or token not in whole:
            texts.append(decoder.decode(bytes_of[token]))
            unfinished = bool(decoder.getstate()[0])
        else:
            texts.append(whole[token])
    if texts:
        texts[-1] += decoder.decode(b"", True)
    return texts


def _is_whole(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _items(media: Sequence[MediaSpan]) -> tuple[MediaView, ...]:
    items: list[MediaView] = []
    for span in media:
        merge = math.isqrt(span.num_patches // span.length)  # patches a token stands for, each way
        grid = (span.grid[0] // merge, span.grid[1] // merge)
        start, steps = span.start, 1
        if items and span.modality == "video" == items[-1].modality:
            before = items[-1]
            if before.stop == span.start and before.grid == grid:
                items.pop()
                start, steps = before.start, before.steps + 1
        items.append(MediaView(start=start, stop=span.stop, modality=span.modality, grid=grid, steps=steps))
    return tuple(items)
