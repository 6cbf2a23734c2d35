"""Statistics of rounds, and the prompts of benchmarks.cpu."""

import pytest

from benchmarks.cpu import cases
from benchmarks.rounds import Series, faster, first_difference, long_row_ratio, speedup


def test_a_speedup_compares_within_rounds():
    # The machine was three times slower in the second round.
    mine = Series(name="mine", amount=8, seconds=(1.0, 3.0, 1.0))
    theirs = Series(name="theirs", amount=8, seconds=(1.5, 4.5, 1.5))
    assert speedup(mine, theirs) == pytest.approx(1.5)
    assert speedup(theirs, mine) == pytest.approx(1 / 1.5)


def test_a_speedup_counts_tokens_and_ignores_one_slow_round():
    mine = Series(name="mine", amount=16, seconds=(2.0, 2.0, 40.0))
    theirs = Series(name="theirs", amount=8, seconds=(1.0, 1.0, 1.0))
    assert speedup(mine, theirs) == pytest.approx(1.0)


def test_unequal_numbers_of_rounds_are_refused():
    with pytest.raises(ValueError, match="mine has 2 rounds and theirs has 1"):
        speedup(Series(name="mine", amount=1, seconds=(1.0, 1.0)), Series(name="theirs", amount=1, seconds=(1.0,)))


def test_the_faster_one_has_the_higher_median():
    steady = Series(name="steady", amount=10, seconds=(1.0, 1.0, 1.0))
    lucky = Series(name="lucky", amount=10, seconds=(0.1, 2.0, 2.0))
    assert steady.per_second == pytest.approx(10.0)
    assert faster([lucky, steady]) is steady


def test_tokens_are_compared_up_to_the_shorter_end():
    assert first_difference([[1, 2, 3], [4, 5]], [[1, 2], [4, 6, 7]]) == {1: 1}
    assert first_difference([[1, 2, 3]], [[1, 2, 3, 4]]) == {}


def test_the_ratio_of_a_long_row_is_one_if_costs_add_up():
    assert long_row_ratio(mixed=3.0, short=1.0, alone=2.0) == pytest.approx(1.0)


def test_prompts_are_reproducible_and_inside_the_vocabulary():
    lengths = next(case.lengths for case in cases.CASES if case.name == "mixed-24")
    assert len(lengths) == 24
    assert min(lengths) >= 33
    assert max(lengths) <= 300
    first, second = cases.prompts(lengths, 1000), cases.prompts(lengths, 1000)
    assert first == second
    assert [len(p) for p in first] == list(lengths)
    assert all(300 <= token < 700 for p in first for token in p)
