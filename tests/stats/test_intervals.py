"""Statistics against numpy, the standard library, simulated experiments and results worked out by hand."""

import math
import statistics

import numpy as np
import pytest

from omni_jax.stats.intervals import STATISTICS, compare, over_runs


def test_statistics_of_known_numbers():
    values = np.arange(1, 101, dtype=float)
    found = {name: function(values) for name, function in STATISTICS.items()}
    assert found["mean"] == 50.5
    assert found["p50"] == 50.5
    assert found["p95"] == pytest.approx(95.05)  # linear between the 95th and the 96th of ranks 0 to 99
    assert found["p99"] == pytest.approx(99.01)
    assert found["sd"] == pytest.approx(statistics.stdev(values))


def test_a_single_value_has_no_deviation():
    assert math.isnan(STATISTICS["sd"](np.array([3.0])))


@pytest.mark.parametrize(("runs", "quantile"), [(2, 12.706), (3, 4.303), (12, 2.201), (21, 2.086), (31, 2.042)])
def test_a_mean_has_students_interval_on_the_log_scale(runs, quantile):
    """Delta method: the standard error of log(mean) is that of the mean over the mean."""
    values = 50 + np.arange(runs, dtype=float)
    found = over_runs(values)
    relative = quantile * values.std(ddof=1) / math.sqrt(runs) / values.mean()
    assert (found.value, found.runs) == (values.mean(), runs)
    assert math.log(found.high / found.value) == pytest.approx(relative, rel=1e-3)
    assert math.log(found.value / found.low) == pytest.approx(relative, rel=1e-3)


@pytest.mark.parametrize(("runs", "quantile"), [(2, 12.706), (3, 4.303), (12, 2.201)])
def test_differences_and_ratios_have_students_interval(runs, quantile):
    """A difference of 0, 1, 2, ... and a ratio of 1, e, e^2, ..."""
    steps = np.arange(runs, dtype=float)
    half = quantile * steps.std(ddof=1) / math.sqrt(runs)
    found = compare(7 + steps, np.full(runs, 7.0)).difference
    assert (found.value, found.low, found.high) == pytest.approx(
        (steps.mean(), steps.mean() - half, steps.mean() + half), rel=1e-3
    )
    ratio = compare(2 * np.exp(steps), np.full(runs, 2.0)).ratio
    logs = [math.log(bound) for bound in (ratio.value, ratio.low, ratio.high)]
    assert logs == pytest.approx((steps.mean(), steps.mean() - half, steps.mean() + half), rel=1e-3)


def test_the_headline_of_the_four_arms_over_its_seeds():
    """P95 slowdowns by seed of the first published comparison, whose resampled requests gave -48.7 % [-70.5, -28.5]."""
    found = compare([20.2, 25.2, 19.1], [28.0, 85.5, 24.0]).ratio
    assert 100 * (found.value - 1) == pytest.approx(-44.7, abs=0.1)
    assert 100 * (found.low - 1) == pytest.approx(-86, abs=0.5)
    assert 100 * (found.high - 1) == pytest.approx(115, abs=1)
    assert not found.excludes(1)


def test_a_single_run_has_no_interval():
    found = over_runs([5.0])
    assert found.value == 5
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert not found.excludes(0)
    against = compare([5.0], [4.0], most=10)
    assert (against.difference.value, against.ratio.value) == pytest.approx((1, 1.25))
    assert math.isnan(against.difference.low)
    assert math.isnan(against.difference.high)
    assert math.isnan(against.ratio.high)


def test_intervals_stay_within_the_possible():
    rates = over_runs([1.0, 9.0, 2.0])  # mean - t * se is -6.8
    assert 0 < rates.low < 4 < rates.high
    shares = over_runs([1.0, 0.5, 1.0], most=1.0)
    assert 0 < shares.low < shares.high == 1.0
    points = compare([1.0, 0.0], [0.0, 0.2], most=1.0).difference
    assert (points.low, points.high) == (-1, 1)
    assert compare([1e-30, 1e30], [1.0, 1.0]).ratio.high == math.inf
    with pytest.raises(ValueError, match=r"from 0 to 1, got 0\.5 to 1\.5"):
        over_runs([0.5, 1.5], most=1.0)
    with pytest.raises(ValueError, match="from 0 to inf"):
        over_runs([-1.0, 1.0])


def test_zeros_have_no_ratio():
    found = compare([1.0, 2.0], [0.0, 1.0])
    assert math.isnan(found.ratio.value)
    assert found.difference.value == 1
    none = over_runs([0.0, 0.0])
    assert (none.value, none.low, none.high) == (0, 0, 0)


def test_runs_without_a_number_are_left_out_in_pairs():
    assert over_runs([2.0, math.nan, 4.0]).runs == 2
    found = compare([2.0, math.nan, 4.0, 8.0], [1.0, 1.0, math.nan, 4.0])
    assert (found.ratio.value, found.ratio.runs) == pytest.approx((2.0, 2))
    assert math.isnan(over_runs([]).value)
    assert compare([], []).difference.runs == 0


def test_a_constant_gain_has_an_interval_of_no_width():
    """Comparisons are paired, so runs that differ widely do not widen the interval."""
    baseline = np.random.default_rng(0).lognormal(3, 1, 20)
    halved = compare(baseline / 2, baseline).ratio
    assert (halved.value, halved.low, halved.high) == pytest.approx((0.5, 0.5, 0.5))
    less = compare(baseline + 2.0, baseline).difference
    assert (less.low, less.high) == pytest.approx((2.0, 2.0))


def test_unpaired_runs_are_refused():
    with pytest.raises(ValueError, match="same runs, got 3 and 4"):
        compare(np.ones(3), np.ones(4))


@pytest.mark.parametrize("runs", [3, 10])
@pytest.mark.parametrize("spread", [0.1, 0.4])
def test_intervals_cover_the_truth_in_95_percent_of_experiments(runs, spread):
    """Runs that differ by a lognormal factor. Resampling a few runs, or a normal quantile, would cover less."""
    rng, trials = np.random.default_rng(11), 2000
    factors = rng.lognormal(-spread * spread / 2, spread, (2, trials, runs))  # of mean 1
    covered = sum(not over_runs(some).excludes(1.0) for some in factors[0])
    assert 0.92 * trials <= covered <= 0.97 * trials
    ratios = sum(not compare(2 * mine, other).ratio.excludes(2.0) for mine, other in zip(*factors, strict=True))
    assert 0.935 * trials <= ratios <= 0.965 * trials


@pytest.mark.parametrize("noise", [0.01, 0.03])
@pytest.mark.parametrize("statistic", ["mean", "p95"])
def test_identical_arms_with_noise_between_runs_differ_in_five_percent_of_trials(noise, statistic):
    """Three seeds of 400 requests, the same in both arms; a factor moves all requests of a run, and some noise each.
    Intervals from resampled requests called 49 to 62 % of such trials different."""
    rng, trials, seeds, requests = np.random.default_rng(3), 500, 3, 400
    of_run, different = STATISTICS[statistic], 0
    for _ in range(trials):
        latencies = rng.lognormal(0, 0.5, (seeds, 1, requests))
        factors = rng.lognormal(0, noise, (seeds, 2, 1)) * rng.lognormal(0, 0.01, (seeds, 2, requests))
        one, other = np.moveaxis(latencies * factors, 1, 0)
        different += compare([*map(of_run, one)], [*map(of_run, other)]).ratio.excludes(1)
    assert 0.025 * trials <= different <= 0.08 * trials
