"""Compiled sizes: few, ascending, and filled at no higher cost than padding."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_jax.scheduling.buckets import Buckets, default_buckets

DEFAULTS = [(32, 512, 1, 16), (32, 512, 2, 16), (256, 8192, 1, 256)]  # CPU float32, CPU bfloat16, GPU


@pytest.mark.parametrize(("seqs", "budget", "smallest", "overhead"), DEFAULTS)
def test_the_defaults_are_at_most_twelve_bodies_and_cover_all_row_counts(seqs, budget, smallest, overhead):
    buckets = default_buckets(
        max_num_seqs=seqs, max_num_batched_tokens=budget, smallest_decode=smallest, overhead=overhead
    )
    assert len(buckets.decode) + len(buckets.mixed) <= 12
    assert (buckets.decode[0], buckets.decode[-1], buckets.mixed[-1]) == (smallest, seqs, budget)
    for rows in range(1, seqs + 1):
        assert rows <= buckets.cover_decode(rows) <= max(2 * rows, smallest)


@given(
    st.integers(1, 1024).flatmap(lambda seqs: st.tuples(st.just(seqs), st.integers(seqs, 20_000))), st.integers(1, 2)
)
def test_default_buckets_cover_any_step(limits, smallest):
    seqs, budget = limits
    buckets = default_buckets(max_num_seqs=seqs, max_num_batched_tokens=budget, smallest_decode=smallest)
    for sizes in (buckets.decode, buckets.mixed):
        assert list(sizes) == sorted(set(sizes))
    assert len(buckets.decode) <= max(9, seqs.bit_length() + 1)
    assert buckets.rows == max(seqs, smallest)
    assert budget <= buckets.mixed[-1] < budget + 16
    assert smallest <= buckets.decode[0]


def test_a_size_larger_than_all_buckets_is_an_error():
    buckets = Buckets(decode=(1, 2), mixed=(16, 64))
    with pytest.raises(ValueError, match=r"no bucket holds 65; the sizes are \[16, 64\]"):
        buckets.cover_mixed(65)


@functools.cache
def lowest_cost(buckets: Buckets, tokens: int, certain: int) -> int:
    """The lowest cost over all ways to run `tokens` tokens, of which `certain` recur in each step."""
    ways = [buckets.cover_mixed(tokens) + buckets.overhead]
    for size in buckets.mixed:
        if certain < size < tokens:
            ways.append(size + buckets.overhead + lowest_cost(buckets, tokens - size + certain, certain))
    return min(ways)


@st.composite
def fills(draw):
    mixed = tuple(sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=4))))
    wanted = draw(st.integers(1, mixed[-1]))
    buckets = Buckets(decode=(1,), mixed=mixed, overhead=draw(st.integers(0, 40)))
    return buckets, wanted, draw(st.integers(0, wanted - 1))


@settings(max_examples=300)
@given(fills())
def test_fill_never_splits_if_that_costs_more(given_):
    buckets, wanted, certain = given_
    now = buckets.fill(wanted, certain)
    assert certain < now <= wanted
    if now < wanted:
        assert now in buckets.mixed
        rest = now + buckets.overhead + lowest_cost(buckets, wanted - now + certain, 0)
        assert rest < buckets.cover_mixed(wanted) + buckets.overhead


@pytest.mark.parametrize(
    ("wanted", "certain", "now"),
    [
        (32, 0, 32),  # exactly a bucket
        (33, 0, 32),  # cost 48 + 48, against 144
        (33, 31, 32),  # one prompt token now, 31 + 1 in the next step
        (33, 32, 33),  # the smaller bucket holds no prompt token
        (129, 128, 129),  # the same
        (40, 31, 40),  # the 31 recur, so that 39 would remain for another 128
        (120, 0, 120),  # little padding is cheapest
        (129, 0, 128),  # cost 144 + 48, against 528
        (500, 0, 500),
        (512, 31, 512),
    ],
)
def test_fill_prefers_the_smaller_bucket_for_a_short_tail(wanted, certain, now):
    buckets = default_buckets(max_num_seqs=32, max_num_batched_tokens=512)
    assert buckets.mixed == (32, 128, 512)
    assert buckets.fill(wanted, certain) == now
