"""Statistics of runs with Student's intervals, and comparisons paired by run.

The unit is the run: one seed of an experiment, one round of a benchmark, one text of a study. What happens within a run
is no sample of what happens between runs. Neighbours wait in the same queue, and all of a run's requests share its
arrivals and the state of the machine, so an interval from resampled requests leaves out what varies most (Kalibera and
Jones, "Rigorous benchmarking in reasonable time", 2013). A run therefore counts as one number, and a single run has no
interval.

A mean of numbers that cannot be negative has its interval on the log scale by the delta method, mean * exp(+-t * se /
mean), which never reaches below zero. It also covers skewed numbers at least as well as mean +- t * se does. Ratios are
averaged and bounded as logarithms, so that halving and doubling weigh the same.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.special import stdtrit  # scipy.stats takes a second to import

CONFIDENCE = 0.95

Statistic = Callable[[np.ndarray], float]  # of the values of one run, at least one

# By name in summary.csv. Percentiles are interpolated between ranks; sd divides by n - 1, and is NaN for one value.
STATISTICS: Mapping[str, Statistic] = {
    "mean": lambda values: float(values.mean()),
    "p50": lambda values: float(np.percentile(values, 50)),
    "p95": lambda values: float(np.percentile(values, 95)),
    "p99": lambda values: float(np.percentile(values, 99)),
    "sd": lambda values: float(values.std(ddof=1)) if values.size > 1 else math.nan,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """A number with the bounds of its 95 % interval, which are NaN for a single run.

    Attributes:
        runs: number of runs that it comes from.
    """

    value: float
    low: float
    high: float
    runs: int

    def excludes(self, number: float) -> bool:
        """Return whether a number lies outside the bounds; False without bounds."""
        return number < self.low or number > self.high


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of an arm with the baseline, paired by run.

    Attributes:
        difference: mean of the arm's numbers minus the baseline's.
        ratio: geometric mean of the arm's numbers over the baseline's; NaN if one of them is zero.
    """

    difference: Interval
    ratio: Interval


def over_runs(values: Sequence[float], *, most: float = math.inf) -> Interval:
    """Return the mean of one number per run.

    Args:
        values: none is negative; NaN where a run has no such number, which leaves that run out.
        most: the largest possible value: 1 for shares.

    Raises:
        ValueError: a value is negative or above `most`.
    """
    numbers = np.asarray(values, float)
    numbers = numbers[~np.isnan(numbers)]
    if numbers.size and not (numbers.min() >= 0 and numbers.max() <= most):
        raise ValueError(f"expected values from 0 to {most:g}, got {numbers.min():g} to {numbers.max():g}")
    mean, half = _student(numbers)
    if not mean > 0:  # all are zero, or there are none
        return Interval(value=mean, low=mean + half, high=mean + half, runs=numbers.size)
    factor = math.exp(half / mean)  # NaN stays NaN: min returns its first argument then
    return Interval(value=mean, low=mean / factor, high=min(mean * factor, most), runs=numbers.size)


def compare(values: Sequence[float], baseline: Sequence[float], *, most: float = math.inf) -> Comparison:
    """Compare one number per run with those of the baseline's same runs. A run where either is NaN is left out.

    Args:
        values, baseline, most: see over_runs.

    Raises:
        ValueError: the numbers of runs differ.
    """
    mine, theirs = np.asarray(values, float), np.asarray(baseline, float)
    if mine.shape != theirs.shape:
        raise ValueError(f"a paired comparison needs the same runs, got {mine.size} and {theirs.size}")
    there = ~np.isnan(mine) & ~np.isnan(theirs)
    mine, theirs = mine[there], theirs[there]
    difference, half = _student(mine - theirs)
    if (mine > 0).all() and (theirs > 0).all():
        logarithm, spread = _student(np.log(mine) - np.log(theirs))
    else:
        logarithm = spread = math.nan
    return Comparison(
        difference=Interval(
            value=difference, low=max(difference - half, -most), high=min(difference + half, most), runs=mine.size
        ),
        ratio=Interval(
            value=math.exp(logarithm),
            low=math.exp(logarithm - spread),
            high=_exp(logarithm + spread),
            runs=mine.size,
        ),
    )


def _student(numbers: np.ndarray) -> tuple[float, float]:
    """Return the mean and half the width of its interval; NaN where there are too few numbers."""
    if not numbers.size:
        return math.nan, math.nan
    if numbers.size < 2:
        return float(numbers.mean()), math.nan
    quantile = float(stdtrit(numbers.size - 1, (1 + CONFIDENCE) / 2))
    return float(numbers.mean()), quantile * float(numbers.std(ddof=1)) / math.sqrt(numbers.size)


def _exp(value: float) -> float:
    return math.inf if value > 700 else math.exp(value)  # two runs that disagree by orders of magnitude
