"""Compression schedules: the default's shape, the cap, and invalid controllers."""

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_jax.memory import compression
from omni_jax.memory.compression import STEP, BadController, Schedule, default_ratio, share_at

HERE = __name__


def constant(step: int, total: int) -> float:
    return 0.7


def nonsense(step: int, total: int) -> float:
    return -1.0 if step == 100 else 0.1


def too_much(step: int, total: int) -> float:
    return 1.0


def words(step: int, total: int) -> str:
    return "half"


def raises(step: int, total: int) -> float:
    return 0.1 / abs(step - 17) / 2


def long_ones_only(step: int, total: int) -> float:
    return float("nan") if total > 300 else 0.2


def test_the_default_is_zero_then_rises_stays_and_falls():
    ratio = functools.partial(default_ratio, total=256, cap=0.4)
    assert [ratio(step) for step in (0, 9)] == [0, 0]
    assert ratio(20) == pytest.approx(0.2)
    assert [ratio(step) for step in (30, 49)] == [0.4, 0.4]
    assert 0.1 < ratio(200) < ratio(100) < 0.4
    assert ratio(255) == pytest.approx(0.1, abs=0.01)


@given(st.integers(0, 5000), st.integers(1, 5000), st.floats(0, 0.99))
def test_the_default_never_exceeds_the_cap(step, total, cap):
    assert 0 <= default_ratio(step, total, cap=cap) <= cap


def test_a_controller_is_capped():
    assert share_at(Schedule(f"{HERE}:constant", 0.4).table(10), 3) == 0.4
    assert share_at(Schedule(f"{HERE}:constant", 0.9).table(10), 3) == 0.7


VALUES: dict[int, list[float]] = {}  # of `listed`, by the number of steps


def listed(step: int, total: int) -> float:
    return VALUES[total][step] if total in VALUES else 0.0


@given(
    st.lists(st.floats(0, 0.99) | st.floats(0.3, 0.302), min_size=1, max_size=60),
    st.floats(0.1, 0.99),
    st.integers(1, 20),
)
def test_a_table_gives_each_step_the_share_of_the_controller_or_slightly_less(values, cap, repeats):
    values = [value for value in values for _ in range(repeats)]
    VALUES.clear()
    VALUES[len(values)] = values
    table = Schedule(f"{HERE}:listed", cap).table(len(values))
    for step, value in enumerate(values):
        assert 0 <= min(value, cap) - share_at(table, step) < STEP
    assert share_at(table, len(values) + 5) == share_at(table, len(values) - 1)
    assert table.shape[1] <= 1 + sum(a != b for a, b in itertools.pairwise(values))


def ramp(step: int, total: int) -> float:
    return 0.9 * step / max(total, 1)


def test_the_table_of_a_long_request_is_small():
    schedule = Schedule(f"{HERE}:ramp", 0.8)
    assert schedule.table(131_072).nbytes <= 2 * 8 * 0.8 / STEP * 1.01
    assert schedule.table(131_072) is schedule.table(131_072)


def test_a_slow_controller_is_rejected(monkeypatch):
    schedule = Schedule(f"{HERE}:constant", 0.4)
    monkeypatch.setattr(compression, "MAX_SECONDS", -1.0)
    with pytest.raises(BadController, match=r"took more than -1 s for the first 2 of 300 steps"):
        schedule.table(300)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", r"returned -1.0 at step 100 of 256"),
        ("too_much", r"returned 1.0 at step 0"),
        ("words", r"returned 'half'"),
        ("raises", r"raised at step 17 of 256: ZeroDivisionError"),
        ("missing", r"has no missing"),
        ("HERE", r"is a str, which cannot be called"),
    ],
)
def test_an_invalid_controller_is_rejected(name, message):
    with pytest.raises(ValueError, match=message):
        Schedule(f"{HERE}:{name}", 0.4)


def test_lengths_for_which_the_controller_is_invalid_are_rejected_for_which_the_controller_is_invalid():
    schedule = Schedule(f"{HERE}:long_ones_only", 0.4)
    schedule.table(300)
    with pytest.raises(BadController, match=r"returned nan at step 0 of 301"):
        schedule.table(301)
