"""A request's prompt -> what policies see of it."""

import codecs
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from omni_jax.requests import MediaSpan
from omni_jax.segments.segment import MediaView, PromptView

if TYPE_CHECKING:  # transformers is not imported for a type
    from omni_jax.inputs import Tokenizer


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
