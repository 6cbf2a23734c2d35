"""In which order patches lie in the vision tower, and who attends to whom: plain numpy, made on the host.

Patches of several images lie one after another. In an image they come merge block after merge block, as the image
processor makes them; the `spatial_merge_size` squared patches of a block become one feature. Qwen2.5-VL attends within
windows in most layers: the blocks of an image are then put in the order of its windows, so that a window is a run of
slots, and a block remains one.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from omni_jax.models.config import VisionConfig


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class VisionLayout:
    """All arrays are int32; n is the number of patches of all images, slots are places in the tower.

    Attributes:
        order: [n], the patch (in the order given) that lies in each slot.
        positions: [n, 2], row and column of the patch in its image.
        first: [n], first slot of the patch's image.
        last: [n], the slot behind the last one of its image.
        window_first: [n], first slot of its window; None where the model has no windows.
        window_last: [n], the slot behind the last one of its window.
        feature_of: [n / spatial_merge_size ** 2], for each feature the tower makes, in the order of slots, its place
            among the features of the images in the order given.
    """

    order: np.ndarray
    positions: np.ndarray
    first: np.ndarray
    last: np.ndarray
    window_first: np.ndarray | None
    window_last: np.ndarray | None
    feature_of: np.ndarray


def window_blocks(config: VisionConfig) -> int | None:
    """Side of a window in merge blocks; None where the model has no windows."""
    if config.window_size is None:
        return None
    return config.window_size // config.spatial_merge_size // config.patch_size


def longest_window(config: VisionConfig) -> int | None:
    """Most patches of a window; None where the model has no windows."""
    side = window_blocks(config)
    return None if side is None else (side * config.spatial_merge_size) ** 2


def layout(grids: Sequence[tuple[int, int]], config: VisionConfig) -> VisionLayout:
    """The layout of images (or temporal steps of videos) of `grids`, each (rows, columns) of patches.

    Windows are counted from the image's top left corner; those at its right and lower edge are what is left.

    Raises:
        ValueError: no grid, or one that merge blocks do not fill.
    """
    merge, side = config.spatial_merge_size, window_blocks(config)
    if not grids:
        raise ValueError("layout needs the grid of one image at least, got none")
    orders, positions, images, windows = [], [], [], []
    blocks = 0
    for rows, columns in grids:
        if rows < 1 or columns < 1 or rows % merge or columns % merge:
            raise ValueError(
                f"a grid of {rows} x {columns} patches does not consist of blocks of {merge} x {merge}: "
                "both sides have to be multiples"
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
    """For each slot of segments of `lengths`, one after another: first slot of the segment, and the one behind it."""
    last = np.cumsum(lengths)
    return np.repeat(last - lengths, lengths).astype(np.int32), np.repeat(last, lengths).astype(np.int32)
