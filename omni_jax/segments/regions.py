"""Regions of an image, and the runs of visual tokens that lie in each."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from omni_jax.segments.prompt_view import MediaView

REST = "rest"  # label of the tokens outside all named regions
_MAX_REGIONS = 64  # rows, columns or named regions; most images have fewer tokens along a side
_SLACK = 1e-9  # rounding of fractions: a region that ends at 0.1 + 0.2 adjoins one that begins at 0.3

VALID = (
    'expected a grid {"rows": 2, "cols": 2} of integers from 1 to 64, or named regions '
    '{"left": [x0, y0, x1, y1], ...}: at most 64, in fractions of width and height with 0 <= x0 < x1 <= 1 and '
    f'0 <= y0 < y1 <= 1, without overlap, and none named "{REST}" (the label of the tokens outside all regions)'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """A grid of regions, as equal as whole tokens allow."""

    rows: int = 1
    cols: int = 1

    @property
    def labels(self) -> list[str]:
        return [f"region {row},{col}" for row in range(1, self.rows + 1) for col in range(1, self.cols + 1)]

    def ids(self, rows: int, cols: int) -> np.ndarray:
        """int [rows, cols]: the index into labels of each token of an image."""
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
        """int [rows, cols]: the index into labels of each token of an image, by the rectangle that its centre is in."""
        x, y = (np.arange(cols) + 0.5) / cols, (np.arange(rows) + 0.5) / rows
        ids = np.full((rows, cols), len(self.boxes))
        for index, (x0, y0, x1, y1) in enumerate(self.boxes.values()):
            ids[np.ix_((y0 <= y) & (y < y1), (x0 <= x) & (x < x1))] = index
        return ids


def parse_regions(regions: Any) -> Grid | Boxes:
    """Parse the `regions` argument of a policy. Raises ValueError with what is valid."""
    if not isinstance(regions, Mapping) or not regions:
        raise ValueError(f"regions must be a mapping, got {regions!r}; {VALID}")
    if set(regions) <= {"rows", "cols"} and not any(isinstance(value, (list, tuple)) for value in regions.values()):
        for side, count in regions.items():
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MAX_REGIONS:
                raise ValueError(f"regions: {side} is {count!r}; {VALID}")
        return Grid(**regions)
    if len(regions) > _MAX_REGIONS:
        raise ValueError(f"regions: got {len(regions)}; {VALID}")
    boxes = {_name(name): _box(name, box) for name, box in regions.items()}
    for (one, a), (other, b) in itertools.combinations(boxes.items(), 2):
        if min(a[2], b[2]) - max(a[0], b[0]) > _SLACK and min(a[3], b[3]) - max(a[1], b[1]) > _SLACK:
            raise ValueError(f"regions {one!r} {list(a)} and {other!r} {list(b)} overlap; {VALID}")
    return Boxes(boxes=boxes)


def region_runs(media: MediaView, regions: Grid | Boxes) -> list[tuple[int, int, str]]:
    """(start, stop, label) of each run of tokens in one region, in order, as indices into the prompt.

    Tokens are in row-major order, so a region as wide as the image is one run, and any other has one run per row of
    tokens that it covers, all with the same label. Each step of a video starts anew. A region too small to contain the
    centre of a token has no run.
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
