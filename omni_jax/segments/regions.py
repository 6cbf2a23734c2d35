"""Regions of an image: which of its visual tokens lie in which, and what runs of tokens that makes."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from omni_jax.segments.prompt_view import MediaView

REST = "rest"  # label of the tokens that lie in no named region
_MOST = 64  # rows, columns or named regions; more than tokens are along a side of most images
_SLACK = 1e-9  # fractions are rounded: 0.1 + 0.2 and 0.3 shall adjoin

VALID = (
    'valid are a grid {"rows": 2, "cols": 2} of whole numbers from 1 to 64, or named regions '
    '{"left": [x0, y0, x1, y1], ...}: fractions of width and height with 0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1, '
    f'no two overlapping, at most 64 of them, none named "{REST}" (the label of what they leave)'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """So many rows and columns of regions, as equal as whole tokens allow."""

    rows: int = 1
    cols: int = 1

    @property
    def labels(self) -> list[str]:
        return [f"region {row},{col}" for row in range(1, self.rows + 1) for col in range(1, self.cols + 1)]

    def ids(self, rows: int, cols: int) -> np.ndarray:
        """int [rows, cols]: index into labels for each token of an image."""
        down = np.arange(rows) * self.rows // rows
        across = np.arange(cols) * self.cols // cols
        return down[:, None] * self.cols + across


@dataclasses.dataclass(frozen=True, kw_only=True)
class Boxes:
    """Named rectangles (x0, y0, x1, y1), in fractions of width and height."""

    boxes: Mapping[str, tuple[float, float, float, float]]

    @property
    def labels(self) -> list[str]:
        return [*self.boxes, REST]

    def ids(self, rows: int, cols: int) -> np.ndarray:
        """int [rows, cols]: index into labels for each token of an image: the rectangle its middle lies in."""
        x, y = (np.arange(cols) + 0.5) / cols, (np.arange(rows) + 0.5) / rows
        ids = np.full((rows, cols), len(self.boxes))
        for index, (x0, y0, x1, y1) in enumerate(self.boxes.values()):
            ids[np.ix_((y0 <= y) & (y < y1), (x0 <= x) & (x < x1))] = index
        return ids


def parse_regions(regions: Any) -> Grid | Boxes:
    """A grid or named rectangles from what a person writes. Raises ValueError that lists what is valid."""
    if not isinstance(regions, Mapping) or not regions:
        raise ValueError(f"regions must be a mapping, got {regions!r}; {VALID}")
    if set(regions) <= {"rows", "cols"} and not any(isinstance(value, (list, tuple)) for value in regions.values()):
        for side, count in regions.items():
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MOST:
                raise ValueError(f"regions: {side} is {count!r}; {VALID}")
        return Grid(**regions)
    if len(regions) > _MOST:
        raise ValueError(f"regions: {len(regions)} of them; {VALID}")
    boxes = {_name(name): _box(name, box) for name, box in regions.items()}
    for (one, a), (other, b) in itertools.combinations(boxes.items(), 2):
        if min(a[2], b[2]) - max(a[0], b[0]) > _SLACK and min(a[3], b[3]) - max(a[1], b[1]) > _SLACK:
            raise ValueError(f"regions {one!r} {list(a)} and {other!r} {list(b)} overlap; {VALID}")
    return Boxes(boxes=boxes)


def region_runs(media: MediaView, regions: Grid | Boxes) -> list[tuple[int, int, str]]:
    """(start, stop, label) of the runs of tokens that lie in one region, in order, as places in the prompt.

    Tokens are in row-major order: a region as wide as the image is one run, any other has a run in each row of
    tokens it touches, all of one label. In each step of a video the regions begin anew. A region that is too small to
    hold the middle of a token gets none.
    """
    rows, cols = media.grid
    ids = regions.ids(rows, cols).reshape(-1)
    edges = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), rows * cols]
    labels = regions.labels
    runs = [(first, last, labels[ids[first]]) for first, last in itertools.pairwise(edges)]
    return [
        (base + first, base + last, label if media.modality == "image" else f"step {step} {label}")
        for step, base in enumerate(range(media.start, media.stop, rows * cols), start=1)
        for first, last, label in runs
    ]


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name or name == REST:
        raise ValueError(f"regions: {name!r} cannot be a region's name; {VALID}")
    return name


def _box(name: str, box: Any) -> tuple[float, float, float, float]:
    if (
        not isinstance(box, (list, tuple))
        or len(box) != 4
        or any(isinstance(side, bool) or not isinstance(side, (int, float)) for side in box)
    ):
        raise ValueError(f"region {name!r} is {box!r}; {VALID}")
    x0, y0, x1, y1 = box
    if not (0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1):
        raise ValueError(f"region {name!r} is {list(box)}; {VALID}")
    return x0, y0, x1, y1
