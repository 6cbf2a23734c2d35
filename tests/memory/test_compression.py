"""Compression schedules: the default's shape, the cap, and invalid controllers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_jax.memory.compression import BadController, Schedule

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
    schedule = Schedule(None, 0.4)
    assert [schedule.ratio(step, 256) for step in (0, 9)] == [0, 0]
    assert schedule.ratio(20, 256) == pytest.approx(0.2)
    assert [schedule.ratio(step, 256) for step in (30, 49)] == [0.4, 0.4]
    assert 0.1 < schedule.ratio(200, 256) < schedule.ratio(100, 256) < 0.4
    assert schedule.ratio(255, 256) == pytest.approx(0.1, abs=0.01)


@given(st.integers(0, 5000), st.integers(1, 5000), st.floats(0, 0.99))
def test_the_default_never_exceeds_the_cap(step, total, cap):
    assert 0 <= Schedule(None, cap).ratio(step, total) <= cap


def test_a_controller_is_capped():
    assert Schedule(f"{HERE}:constant", 0.4).ratio(3, 10) == 0.4
    assert Schedule(f"{HERE}:constant", 0.9).ratio(3, 10) == 0.7


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


def test_check_rejects_lengths_for_which_the_controller_is_invalid():
    schedule = Schedule(f"{HERE}:long_ones_only", 0.4)
    schedule.check(300)
    with pytest.raises(BadController, match=r"returned nan at step 0 of 301"):
        schedule.check(301)
