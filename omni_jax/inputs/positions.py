"""M-RoPE positions of a prompt with images and video: temporal, height and width position of every token.

Text tokens count up on all three axes. An image or video starts at the position of the next text token and counts
temporal steps, rows and columns from there. The text after it continues after the largest of these positions
(Qwen2-VL, arXiv 2409.12191, section 2.1). transformers up to version 4 does the same; `get_rope_index` of version 5.24
continues after the larger of rows and columns. The two differ for a video with more temporal steps than that: in
version 5.24 the temporal position of the text then lies inside the video.
"""

from collections.abc import Iterable

import numpy as np

from omni_jax.inputs.image import MediaItem
from omni_jax.requests import InvalidRequest

_MAX_POSITION = 2**30  # leaves room in int32 for the text after the video


def mrope_positions(
    length: int, placed: Iterable[tuple[int, MediaItem]], *, merge_size: int, tokens_per_second: float | None
) -> np.ndarray:
    """Compute the positions of all tokens of a prompt.

    Args:
        length: number of tokens in the prompt.
        placed: (index of its first placeholder, item), in order of indices.
        merge_size: side of a merge block in patches.
        tokens_per_second: temporal positions per second of video (Qwen2.5-VL); None: one per temporal step (Qwen2-VL).

    Returns:
        int32 [3, length].

    Raises:
        InvalidRequest: a video's positions do not fit int32.
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
    """Temporal positions of an item's steps, truncated to integers.

    The product is float32 as in transformers: at some whole seconds another precision gives another integer.
    """
    steps = np.arange(item.grid[0])
    if item.seconds_per_grid is None or tokens_per_second is None:
        return steps.astype(np.int32)
    interval = np.float32(tokens_per_second) * np.float32(item.seconds_per_grid)
    times = steps.astype(np.float32) * interval
    if not times[-1] < _MAX_POSITION:
        raise InvalidRequest(
            f"the video's {item.grid[0]} temporal steps of {item.seconds_per_grid:g} seconds have positions up to "
            f"{times[-1]:.3g}; the limit is {_MAX_POSITION:,}",
            param="messages",
        )
    return times.astype(np.int32)
