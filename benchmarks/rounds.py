"""Statistics of interleaved rounds."""

import dataclasses
import math
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """Rounds of a contender in a case.

    Attributes:
        name: name of the contender.
        amount: tokens, or other units of work, in a round.
        seconds: duration of each round; round i of all contenders of a case ran one right after another.
        others: number of cores that other processes kept busy during each round.
    """

    name: str
    amount: int
    seconds: tuple[float, ...]
    others: tuple[float, ...] = ()

    @property
    def per_second(self) -> float:
        """Median speed over rounds."""
        return statistics.median(self.amount / seconds for seconds in self.seconds)


def speedup(one: Series, other: Series) -> float:
    """Return the speed of `one` over that of `other`: the median over rounds of the ratio within the round, so that a
    slow phase of the machine affects both.

    Raises:
        ValueError: the numbers of rounds differ.
    """
    if len(one.seconds) != len(other.seconds) or not one.seconds:
        raise ValueError(
            f"{one.name} has {len(one.seconds)} rounds and {other.name} has {len(other.seconds)}: "
            "ratios need the same rounds"
        )
    pairs = zip(one.seconds, other.seconds, strict=True)
    return statistics.median((one.amount / mine) / (other.amount / theirs) for mine, theirs in pairs)


def faster(series: list[Series]) -> Series:
    """Return the series with the highest speed."""
    return max(series, key=lambda s: s.per_second)


def first_difference(one: list[list[int]], other: list[list[int]]) -> dict[int, int]:
    """Return by row the position of the first token that differs, up to the shorter one's end."""
    if len(one) != len(other):
        raise ValueError(f"{len(one)} rows against {len(other)}")
    found = {}
    for row, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        if place is not None:
            found[row] = place
    return found


def long_row_ratio(mixed: float, short: float, alone: float) -> float:
    """Return the step time of a long row among short ones, over that of as many short rows plus that of the long row
    alone."""
    return mixed / (short + alone)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed (nearest rank)."""
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1]


def largest_gap_allowed(*, step: float, longest_slice: float) -> float:
    """Return the maximum seconds between two tokens of a stream while images are encoded: a plain step, and 1.5 times a
    slice of the vision tower."""
    return step + 1.5 * longest_slice


def largest_slice(images: Sequence[Sequence[float]]) -> float:
    """Return the seconds of the longest slice: the median over images of each one's longest, so that a slow moment of
    the machine does not count."""
    return statistics.median(max(slices) for slices in images)
