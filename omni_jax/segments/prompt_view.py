"""A prompt as segment policies see it."""

import bisect
import codecs
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from omni_jax.requests.media import MediaSpan

if TYPE_CHECKING:  # transformers is not imported for a type
    from omni_jax.inputs.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaView:
    """The run of visual tokens of an image or a video: step by step, each step in row-major order.

    Attributes:
        start: Index of its first token in the prompt.
        stop: Index after its last token.
        modality: "image" or "video".
        grid: (rows, columns) of tokens in one temporal step.
        steps: Number of temporal steps; 1 for an image.

    Raises:
        ValueError: The grid does not match the run's length.
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
    """A prompt as segment policies see it: its media, and functions that return its text.

    Attributes:
        length: Number of tokens.
        media: Images and videos in order, without overlap; the tokens between them are text.
        text: (start, stop) -> text of those tokens. Control tokens are spelt out; invalid UTF-8 becomes U+FFFD.
        token_texts: (start, stop) -> the same text as one string per token: the characters that the token completes.
            A token that ends inside a character may be "". Joined, they equal `text`.
        controls: Indices of control tokens (chat turns, media brackets), ascending. No sentence spans one.
    """

    length: int
    media: tuple[MediaView, ...] = ()
    text: Callable[[int, int], str]
    token_texts: Callable[[int, int], tuple[str, ...]]
    controls: tuple[int, ...] = ()

    def part(self, start: int, stop: int) -> "PromptView":
        """The tokens [start, stop) as a prompt of their own, with the media that lie wholly inside."""
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
            controls=tuple(token - start for token in self.controls[low:high]),
        )


def prompt_view(ids: Sequence[int], media: Sequence[MediaSpan], tokenizer: "Tokenizer") -> PromptView:
    """Make the view of a prompt. Text is decoded when a policy first reads some: all of it, once.

    Args:
        ids: The prompt's token ids.
        media: Its spans in order, one per temporal step. Adjacent steps of a video become one item.
        tokenizer: Gives the bytes of tokens and the ids of control tokens.
    """

    @functools.cache
    def texts() -> tuple[str, ...]:
        return tuple(_texts(ids, tokenizer))

    return PromptView(
        length=len(ids),
        media=_items(media),
        text=lambda start, stop: "".join(texts()[start:stop]),
        token_texts=lambda start, stop: texts()[start:stop],
        controls=tuple(index for index, token in enumerate(ids) if token in tokenizer.special_ids),
    )


def _texts(ids: Sequence[int], tokenizer: "Tokenizer") -> list[str]:
    """The characters that each token completes. An incomplete character at the end counts to the last token."""
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
        merge = math.isqrt(span.num_patches // span.length)  # patches per token along each side
        grid = (span.grid[0] // merge, span.grid[1] // merge)
        start, steps = span.start, 1
        if items and span.modality == "video" == items[-1].modality:
            before = items[-1]
            if before.stop == span.start and before.grid == grid:
                items.pop()
                start, steps = before.start, before.steps + 1
        items.append(MediaView(start=start, stop=span.stop, modality=span.modality, grid=grid, steps=steps))
    return tuple(items)
