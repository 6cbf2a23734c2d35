"""Even pieces, compared with all possible partitions."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from omni_jax.segments.even import even_cuts


def lengths(ends):
    return [b - a for a, b in itertools.pairwise([0, *ends])]


def every_partition(ends, max_length, count):
    for chosen in itertools.combinations(ends[:-1], count - 1):
        parts = lengths([*chosen, ends[-1]])
        if max(parts) <= max_length:
            yield parts


@given(st.lists(st.integers(1, 20), min_size=1, max_size=10), st.integers(20, 60))
@settings(deadline=None)
def test_pieces_are_fewest_and_nearly_equal(units, max_length):
    ends = list(itertools.accumulate(units))
    cuts = even_cuts(ends, max_length)
    parts = lengths(cuts)
    assert set(cuts) <= set(ends)
    assert cuts[-1] == ends[-1]
    assert max(parts) <= max_length
    assert not any(any(every_partition(ends, max_length, count)) for count in range(1, len(parts)))
    best = min(max(other) - min(other) for other in every_partition(ends, max_length, len(parts)))
    assert max(parts) - min(parts) <= best + max(units)


@given(st.integers(1, 400), st.integers(1, 50))
def test_pieces_of_units_of_length_one_differ_by_at_most_one(count, max_length):
    parts = lengths(even_cuts(range(1, count + 1), max_length))
    assert len(parts) == -(-count // max_length)
    assert max(parts) - min(parts) <= 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 25))
def test_a_unit_longer_than_the_maximum_is_a_piece_of_its_own(units, max_length):
    ends = list(itertools.accumulate(units))
    cuts = even_cuts(ends, max_length)
    assert cuts == sorted(set(cuts))
    assert cuts[-1] == ends[-1]
    for part, start, stop in zip(lengths(cuts), [0, *cuts], cuts, strict=False):
        assert part <= max_length or (stop in ends and ends.index(stop) == (ends.index(start) + 1 if start else 0))


def test_a_long_unit_leaves_the_pieces_beside_it_even():
    assert even_cuts([60, 120, 180, 240, 300, 360, 3360, 3420], 256) == [180, 360, 3360, 3420]
