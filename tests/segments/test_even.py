"""Even pieces, against every way there is to make them."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from omni_jax.segments.even import even_cuts


def lengths(ends):
    return [b - a for a, b in itertools.pairwise([0, *ends])]


def every_partition(ends, most, count):
    for chosen in itertools.combinations(ends[:-1], count - 1):
        parts = lengths([*chosen, ends[-1]])
        if max(parts) <= most:
            yield parts


@given(st.lists(st.integers(1, 20), min_size=1, max_size=10), st.integers(20, 60))
@settings(deadline=None)
def test_as_few_as_possible_and_nearly_as_equal(units, most):
    ends = list(itertools.accumulate(units))
    cuts = even_cuts(ends, most)
    parts = lengths(cuts)
    assert set(cuts) <= set(ends)
    assert cuts[-1] == ends[-1]
    assert max(parts) <= most
    assert not any(any(every_partition(ends, most, count)) for count in range(1, len(parts)))
    best = min(max(other) - min(other) for other in every_partition(ends, most, len(parts)))
    assert max(parts) - min(parts) <= best + max(units)


@given(st.integers(1, 400), st.integers(1, 50))
def test_units_of_one_differ_by_one(count, most):
    parts = lengths(even_cuts(range(1, count + 1), most))
    assert len(parts) == -(-count // most)
    assert max(parts) - min(parts) <= 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 25))
def test_a_long_unit_is_alone(units, most):
    ends = list(itertools.accumulate(units))
    cuts = even_cuts(ends, most)
    assert cuts == sorted(set(cuts))
    assert cuts[-1] == ends[-1]
    for part, start, stop in zip(lengths(cuts), [0, *cuts], cuts, strict=False):
        assert part <= most or (stop in ends and ends.index(stop) == (ends.index(start) + 1 if start else 0))


def test_a_long_unit_does_not_tilt_its_neighbours():
    assert even_cuts([60, 120, 180, 240, 300, 360, 3360, 3420], 256) == [180, 360, 3360, 3420]
