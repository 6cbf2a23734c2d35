"""Statistics of interleaved rounds, and what they are worth. No measuring here."""

import dataclasses
import math
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One contender in one case.

    Attributes:
        name: of the contender.
        amount: tokens computed a round, or whatever else is counted.
        seconds: of each round; round i of all contenders of a case were measured one right after another.
        others: cores that other processes kept busy during each round.
    """

    name: str
    amount: int
    seconds: tuple[float, ...]
    others: tuple[float, ...] = ()

    @property
    def per_second(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.amount / seconds for seconds in self.seconds)


def speedup(one: Series, other: Series) -> float:
    """How many times as fast `one` is as `other`: the median over rounds of the ratio within the round, so that what
    slows the machine for a while slows both.

    Raises:
        ValueError: they have different numbers of rounds.
    """
    if len(one.seconds) != len(other.seconds) or not one.seconds:
        raise ValueError(
            f"{one.name} has {len(one.seconds)} rounds and {other.name} has {len(other.seconds)}: "
            "ratios need the same rounds"
        )
    pairs = zip(one.seconds, other.seconds, strict=True)
    return statistics.median((one.amount / mine) / (other.amount / theirs) for mine, theirs in pairs)


def faster(series: list[Series]) -> Series:
    """The one with most per second."""
    return max(series, key=lambda s: s.per_second)


def first_difference(one: list[list[int]], other: list[list[int]]) -> dict[int, int]:
    """Row -> place of the first token that differs, as far as both go; empty when all rows agree."""
    if len(one) != len(other):
        raise ValueError(f"{len(one)} rows against {len(other)}")
    found = {}
    for row, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        if place is not None:
            found[row] = place
    return found


def long_row_ratio(mixed: float, short: float, alone: float) -> float:
    """Cost of a long row among short ones against the cost of as many rows, all short, plus that of the long row alone.
    All in seconds a step."""
    return mixed / (short + alone)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that so large a share of them does not exceed (nearest rank)."""
    return sorted(values)[max(1, math.ceil(share * len(values))) - 1]


def largest_gap_allowed(*, step: float, longest_slice: float) -> float:
    """Seconds a stream may wait at most for its next token while images are in work: a plain step, and one slice of
    the vision tower with half as much again for what comes with it."""
    return step + 1.5 * longest_slice


def largest_slice(images: Sequence[Sequence[float]]) -> float:
    """Seconds of the longest slice of like images: the median over them of each one's longest, so that a slow moment
    of the machine in one of them allows nothing."""
    return statistics.median(max(slices) for slices in images)
