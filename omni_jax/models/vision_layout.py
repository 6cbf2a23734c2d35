"""The order of patches in the vision tower, and the range of slots that each patch attends to; computed with numpy.

Images come one after another. The patches of an image come merge block by merge block, as the image processor produces
them; the `spatial_merge_size` squared patches of a block become one feature. Qwen2.5-VL attends within windows in most
layers: the blocks of an image are then sorted by window, so that each window is a contiguous range of slots, and each
block still is.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from omni_jax.models.config import VisionConfig


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class VisionLayout:
    """The layout of a call: int32 arrays over n slots, one for each patch of all images.

    Attributes:
        order: [n], the input patch in each slot.
        positions: [n, 2], row and column of the slot's patch in its image.
        first: [n], first slot of the patch's image.
        last: [n], the slot after the last one of its image.
        window_first: [n], first slot of its window; None if the model has no windows.
        window_last: [n], the slot after the last one of its window; None if the model has no windows.
        feature_of: [n / spatial_merge_size ** 2], for each output feature of the tower, its index in input order.
    """

    order: np.ndarray
    positions: np.ndarray
    first: np.ndarray
    last: np.ndarray
    window_first: np.ndarray | None
    window_last: np.ndarray | None
    feature_of: np.ndarray


def window_blocks(config: VisionConfig) -> int | None:
    """Side of a window in merge blocks; None if the model has no windows."""
    if config.window_size is None:
        return None
    return config.window_size // config.spatial_merge_size // config.patch_size


def longest_window(config: VisionConfig) -> int | None:
    """Number of patches in a full window; None if the model has no windows."""
    side = window_blocks(config)
    return None if side is None else (side * config.spatial_merge_size) ** 2


def layout(grids: Sequence[tuple[int, int]], config: VisionConfig) -> VisionLayout:
    """The layout of images (or temporal steps of videos), each a grid of (rows, columns) of patches.

    Windows start at the image's top left corner; those at its right and lower edge may be smaller.

    Raises:
        ValueError: there is no grid, or a side is not a multiple of spatial_merge_size.
    """
    merge, side = config.spatial_merge_size, window_blocks(config)
    if not grids:
        raise ValueError("layout needs at least one grid, got none")
    orders, positions, images, windows = [], [], [], []
    blocks = 0
    for rows, columns in grids:
        if rows < 1 or columns < 1 or rows % merge or columns % merge:
            raise ValueError(
                f"a grid of {rows} x {columns} patches cannot be divided into merge blocks of {merge} x {merge}"
            )
        row, column = (x.ravel() for x in np.indices((rows // merge, columns // merge)))
        order = np.arange(row.size)
        sizes = [row.size]
        if side is not None:
            window = row // side * -(-columns // merge // side) + column // side
            order = np.argsort(window, kind="stable")
            sizes = np.bincount(window)
        inside = np.indices((merge, merge)).reshape(2, -1)
        corner = np.stack([row[order], column[order]]) * merge
        positions.append((corner[:, :, None] + inside[:, None, :]).reshape(2, -1).T)
        orders.append(order + blocks)
        images.append(row.size)
        windows.extend(sizes)
        blocks += row.size
    feature_of = np.concatenate(orders)
    patches = feature_of[:, None] * merge**2 + np.arange(merge**2)
    first, last = _ranges(np.asarray(images) * merge**2)
    window_first, window_last = (None, None) if side is None else _ranges(np.asarray(windows) * merge**2)
    return VisionLayout(
        order=patches.ravel().astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        first=first,
        last=last,
        window_first=window_first,
        window_last=window_last,
        feature_of=feature_of.astype(np.int32),
    )


def _ranges(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each slot of consecutive ranges of `lengths`: the first slot of its range, and the slot after the range."""
    last = np.cumsum(lengths)
    return np.repeat(last - lengths, lengths).astype(np.int32), np.repeat(last, lengths).astype(np.int32)
