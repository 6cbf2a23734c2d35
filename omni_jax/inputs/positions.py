"""Rotary positions of a prompt with images and video (M-RoPE): time, height and width of every token.

Text counts up on all three axes. An image or video begins at the position the next text token would have had, and
counts its temporal steps, rows and columns from there; the text behind it goes on after the largest of all these
positions (Qwen2-VL, arXiv 2409.12191, section 2.1). transformers does the same up to version 4; its `get_rope_index` of
5.24 goes on after the larger of rows and columns. A video with more temporal steps than that differs: there the text's
time would run backwards, in the middle of the video.
"""

from collections.abc import Iterable

import numpy as np

from omni_jax.inputs.image import MediaItem
from omni_jax.requests import InvalidRequest

_MOST = 2**30  # int32 holds what comes behind it, too


def mrope_positions(
    length: int, placed: Iterable[tuple[int, MediaItem]], *, merge_size: int, tokens_per_second: float | None
) -> np.ndarray:
    """Positions of all tokens of a prompt.

    Args:
        length: tokens in the prompt.
        placed: (place of its first placeholder, item), in order of places.
        merge_size: patches of a token's side.
        tokens_per_second: positions a second of video takes (Qwen2.5-VL); None: one a temporal step (Qwen2-VL).

    Returns:
        int32 [3, length].

    Raises:
        InvalidRequest: the positions of a video are beyond what int32 holds.
    """
    positions = np.empty((3, length), np.int32)
    place = position = 0
    for start, item in placed:
        text = start - place
        positions[:, place:start] = position + np.arange(text, dtype=np.int32)
        position += text
        steps, rows, columns = item.grid[0], item.grid[1] // merge_size, item.grid[2] // merge_size
        place = start + item.num_tokens
        grid = np.empty((3, steps, rows, columns), np.int32)
        grid[0] = _times(item, tokens_per_second)[:, None, None]
        grid[1] = np.arange(rows, dtype=np.int32)[:, None]
        grid[2] = np.arange(columns, dtype=np.int32)
        positions[:, start:place] = position + grid.reshape(3, -1)
        position += int(grid.max()) + 1
    positions[:, place:] = position + np.arange(length - place, dtype=np.int32)
    return positions


def _times(item: MediaItem, tokens_per_second: float | None) -> np.ndarray:
    """Temporal positions of an item's steps. They are cut to whole numbers after the multiplication, which is done in
    float32 as transformers does it: another precision would round another way at some whole seconds."""
    steps = np.arange(item.grid[0])
    if item.seconds_per_grid is None or tokens_per_second is None:
        return steps.astype(np.int32)
    interval = np.float32(tokens_per_second) * np.float32(item.seconds_per_grid)
    times = steps.astype(np.float32) * interval
    if not times[-1] < _MOST:
        raise InvalidRequest(
            f"the video's {item.grid[0]} temporal steps of {item.seconds_per_grid:g} seconds are positions up to "
            f"{times[-1]:.3g}, at most {_MOST:,} is possible",
            param="messages",
        )
    return times.astype(np.int32)
