"""Statistics of an experiment: descriptions, bootstrap intervals, paired differences. Arrays in, numbers out.

Requests of one run are not independent: whoever arrives while a queue is long waits as long as its neighbours did. So
the bootstrap draws blocks of consecutive arrivals (the circular block bootstrap of Politis and Romano, 1992), within
each run by itself. Arms have the same arrivals, and a difference between two draws the same requests from both.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.special import stdtrit  # scipy.stats takes a second to import

CONFIDENCE = 0.95

Statistic = Callable[[np.ndarray], np.ndarray]  # [..., requests] -> [...]

# By the name that summary.csv has. Percentiles are numpy's, linear between ranks; sd divides by n - 1.
STATISTICS: Mapping[str, Statistic] = {
    "mean": lambda values: values.mean(axis=-1),
    "p50": lambda values: np.percentile(values, 50, axis=-1),
    "p95": lambda values: np.percentile(values, 95, axis=-1),
    "p99": lambda values: np.percentile(values, 99, axis=-1),
    "sd": lambda values: values.std(axis=-1, ddof=1) if values.shape[-1] > 1 else np.zeros(values.shape[:-1]),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """A number, and the bounds of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Of an arm with the baseline, over the same requests.

    Attributes:
        difference: the arm's number less the baseline's.
        ratio: the arm's number over the baseline's.
    """

    difference: Interval
    ratio: Interval


def resamples(runs: Sequence[int], *, count: int, seed: int) -> np.ndarray:
    """int64 [count, sum of runs]: which requests each resample has.

    Args:
        runs: requests of each run, which follow one another in order of arrival. A block is about the square root of
            the run.
        count: resamples.
        seed: the same seed draws the same.
    """
    draw = np.random.default_rng([seed, *runs])
    columns, first = [], 0
    for size in runs:
        block = max(1, round(math.sqrt(size)))
        starts = draw.integers(0, size, (count, -(-size // block)))
        places = (starts[:, :, None] + np.arange(block)) % size
        columns.append(first + places.reshape(count, -1)[:, :size])
        first += size
    return np.concatenate(columns, axis=1)


def interval(values: np.ndarray, statistic: Statistic, drawn: np.ndarray) -> Interval:
    """A statistic of `values` [requests], and its percentile interval over the resamples `drawn` (see resamples)."""
    return _interval(float(statistic(values)), statistic(values[drawn]))


def compare(arm: np.ndarray, baseline: np.ndarray, statistic: Statistic, drawn: np.ndarray) -> Comparison:
    """An arm's `values` [requests] beside the baseline's, request by request.

    Raises:
        ValueError: they are not of the same requests.
    """
    if arm.shape != baseline.shape:
        raise ValueError(f"a paired difference needs the same requests: {arm.shape} against {baseline.shape}")
    mine, theirs = statistic(arm[drawn]), statistic(baseline[drawn])
    whole, other = float(statistic(arm)), float(statistic(baseline))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = mine / theirs
    return Comparison(
        difference=_interval(whole - other, mine - theirs),
        ratio=_interval(whole / other if other else math.nan, ratios),
    )


def _interval(value: float, drawn: np.ndarray) -> Interval:
    drawn = drawn[np.isfinite(drawn)]
    if not drawn.size:
        return Interval(value=value, low=math.nan, high=math.nan)
    low, high = np.percentile(drawn, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    return Interval(value=value, low=float(low), high=float(high))


def over_runs(values: Sequence[float], baseline: Sequence[float] | None = None) -> Interval:
    """Mean of one number a run (throughput, say), or of its ratios to the baseline's in the same run, with Student's
    interval. Bounds are NaN for a single run."""
    numbers = np.asarray(values, float)
    if baseline is not None:
        numbers = numbers / np.asarray(baseline, float)
    mean = float(numbers.mean())
    if numbers.size < 2:
        return Interval(value=mean, low=math.nan, high=math.nan)
    quantile = float(stdtrit(numbers.size - 1, (1 + CONFIDENCE) / 2))
    half = quantile * float(numbers.std(ddof=1)) / math.sqrt(numbers.size)
    return Interval(value=mean, low=mean - half, high=mean + half)
