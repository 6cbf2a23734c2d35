"""Statistics against numpy, the standard library and results worked out by hand."""

import math
import statistics

import numpy as np
import pytest

from omni_jax.stats.intervals import STATISTICS, compare, interval, over_runs, resamples


def test_statistics_of_known_numbers():
    values = np.arange(1, 101, dtype=float)
    found = {name: float(function(values)) for name, function in STATISTICS.items()}
    assert found["mean"] == 50.5
    assert found["p50"] == 50.5
    assert found["p95"] == pytest.approx(95.05)  # linear between the 95th and the 96th of ranks 0 to 99
    assert found["p99"] == pytest.approx(99.01)
    assert found["sd"] == pytest.approx(statistics.stdev(values))


def test_statistics_of_several_rows_at_once():
    rows = np.random.default_rng(0).random((7, 30))
    for function in STATISTICS.values():
        np.testing.assert_allclose(function(rows), [function(row) for row in rows])


def test_a_single_value_has_no_spread():
    assert STATISTICS["sd"](np.array([3.0])) == 0


def test_resamples_stay_within_each_run_and_are_blocks():
    drawn = resamples([100, 25], count=40, seed=3)
    assert drawn.shape == (40, 125)
    assert ((drawn[:, :100] >= 0) & (drawn[:, :100] < 100)).all()
    assert ((drawn[:, 100:] >= 100) & (drawn[:, 100:] < 125)).all()
    within = drawn[:, :100].reshape(40, 10, 10)  # blocks of the root of 100
    assert ((np.diff(within, axis=-1) % 100) == 1).all()


def test_resamples_of_a_seed_are_the_same():
    np.testing.assert_array_equal(resamples([9, 4], count=5, seed=1), resamples([9, 4], count=5, seed=1))
    assert (resamples([9, 4], count=5, seed=1) != resamples([9, 4], count=5, seed=2)).any()


def test_intervals_cover_the_mean_in_95_percent_of_samples():
    """With independent values, blocks are as good as single draws."""
    rng = np.random.default_rng(7)
    held = 0
    for seed in range(200):
        values = rng.normal(10.0, 3.0, 144)
        found = interval(values, STATISTICS["mean"], resamples([144], count=300, seed=seed))
        held += found.low <= 10.0 <= found.high
    assert 175 <= held <= 199


def test_blocks_account_for_correlated_neighbours():
    """In an autoregressive series, single draws make the interval several times too narrow."""
    rng = np.random.default_rng(1)
    values = np.zeros(400)
    for i in range(1, 400):
        values[i] = 0.9 * values[i - 1] + rng.normal()
    blocks = interval(values, STATISTICS["mean"], resamples([400], count=500, seed=0))
    singles = interval(values, STATISTICS["mean"], rng.integers(0, 400, (500, 400)))
    assert blocks.high - blocks.low > 2 * (singles.high - singles.low)


def test_a_constant_gain_has_an_interval_of_no_width():
    """Comparisons are paired, so widely varying values do not widen the interval."""
    baseline = np.random.default_rng(0).lognormal(3, 1, 200)
    drawn = resamples([100, 100], count=100, seed=0)
    found = compare(baseline - 2.0, baseline, STATISTICS["mean"], drawn)
    assert found.difference.value == pytest.approx(-2.0)
    assert (found.difference.low, found.difference.high) == pytest.approx((-2.0, -2.0))
    halved = compare(baseline / 2, baseline, STATISTICS["p95"], drawn)
    assert (halved.ratio.value, halved.ratio.low, halved.ratio.high) == pytest.approx((0.5, 0.5, 0.5))


def test_unpaired_arrays_are_refused():
    with pytest.raises(ValueError, match="same requests"):
        compare(np.ones(3), np.ones(4), STATISTICS["mean"], resamples([3], count=2, seed=0))


def test_the_ratio_to_zero_is_nan():
    found = compare(np.ones(4), np.zeros(4), STATISTICS["mean"], resamples([4], count=5, seed=0))
    assert math.isnan(found.ratio.value)
    assert math.isnan(found.ratio.low)
    assert found.difference.value == 1


def test_over_runs_equals_results_worked_out_by_hand():
    found = over_runs([10.0, 12.0, 14.0])
    half = 4.302653 * 2 / math.sqrt(3)  # Student's 97.5 % quantile of two degrees of freedom
    assert (found.value, found.low, found.high) == pytest.approx((12, 12 - half, 12 + half))
    assert over_runs([11.0, 9.0], [10.0, 10.0]).value == pytest.approx(1.0)
    assert math.isnan(over_runs([5.0]).low)


@pytest.mark.parametrize(("runs", "quantile"), [(2, 12.706), (12, 2.201), (21, 2.086), (31, 2.042)])
def test_students_quantile(runs, quantile):
    values = np.arange(runs, dtype=float)
    found = over_runs(values)
    half = quantile * values.std(ddof=1) / math.sqrt(runs)
    assert found.high - found.value == pytest.approx(half, rel=1e-3)
