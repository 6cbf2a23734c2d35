"""Statistics with bootstrap intervals, and paired comparisons, of arrays.

Requests of one run are not independent: neighbours wait in the same queue. So the bootstrap draws blocks of consecutive
arrivals (the circular block bootstrap of Politis and Romano, 1992), separately for each run. Arms have the same
arrivals, and a comparison draws the same requests from both.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy.special import stdtrit  # scipy.stats takes a second to import

CONFIDENCE = 0.95

Statistic = Callable[[np.ndarray], np.ndarray]  # [..., requests] -> [...]

# By name in summary.csv. Percentiles are interpolated between ranks; sd divides by n - 1.
STATISTICS: Mapping[str, Statistic] = {
    "mean": lambda values: values.mean(axis=-1),
    "p50": lambda values: np.percentile(values, 50, axis=-1),
    "p95": lambda values: np.percentile(values, 95, axis=-1),
    "p99": lambda values: np.percentile(values, 99, axis=-1),
    "sd": lambda values: values.std(axis=-1, ddof=1) if values.shape[-1] > 1 else np.zeros(values.shape[:-1]),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """A number with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of an arm with the baseline, over the same requests.

    Attributes:
        difference: the arm's number minus the baseline's.
        ratio: the arm's number divided by the baseline's.
    """

    difference: Interval
    ratio: Interval


def resamples(runs: Sequence[int], *, count: int, seed: int) -> np.ndarray:
    """Draw resamples of requests, in blocks of about the square root of the run's length.

    Args:
        runs: number of requests of each run; requests are in order of arrival, run after run.
        count: number of resamples.

    Returns:
        int64 [count, sum of runs], the indices of the requests in each resample.
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
    """Return a statistic of `values` [requests] with its percentile interval over `drawn`, see resamples."""
    return _interval(float(statistic(values)), statistic(values[drawn]))


def compare(arm: np.ndarray, baseline: np.ndarray, statistic: Statistic, drawn: np.ndarray) -> Comparison:
    """Compare a statistic of an arm's values [requests] with the baseline's, paired by request.

    Raises:
        ValueError: the arrays differ in shape.
    """
    if arm.shape != baseline.shape:
        raise ValueError(f"a paired comparison needs the same requests, got {arm.shape} and {baseline.shape} values")
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
    """Return the mean of one number per run with Student's interval; the bounds are NaN for a single run.

    Args:
        values: for example the throughput of each run.
        baseline: numbers of the same runs by which the values are divided.
    """
    numbers = np.asarray(values, float)
    if baseline is not None:
        numbers = numbers / np.asarray(baseline, float)
    mean = float(numbers.mean())
    if numbers.size < 2:
        return Interval(value=mean, low=math.nan, high=math.nan)
    quantile = float(stdtrit(numbers.size - 1, (1 + CONFIDENCE) / 2))
    half = quantile * float(numbers.std(ddof=1)) / math.sqrt(numbers.size)
    return Interval(value=mean, low=mean - half, high=mean + half)
