"""The choice between swapping and recomputing, compared with costs computed here."""

import math
import random

import pytest

from omni_jax.memory import swap_choice
from omni_jax.memory.swap_choice import prefer_swap, swap_seconds


def test_the_choice_costs_at_most_5_percent_more_than_the_better_one():
    draw = random.Random(5)
    swapped = 0
    for _ in range(10_000):
        blocks, tokens = draw.randint(1, 4096), draw.randint(1, 65_536)
        block_bytes = 2 ** draw.randint(10, 23)
        out, back = (10 ** draw.uniform(6, 11) if draw.random() < 0.9 else None for _ in range(2))
        again = tokens / 10 ** draw.uniform(1, 5)
        on_disk = draw.random() < 0.5
        chosen = prefer_swap(
            blocks=blocks,
            block_bytes=block_bytes,
            store_bandwidth=out,
            load_bandwidth=back,
            recompute_seconds=again,
            on_disk=on_disk,
        )
        # The defaults are 1 GB/s from memory and 300 MB/s from disk.
        swap = blocks * block_bytes * (1 / (out or 1e9) + 1 / (back or (3e8 if on_disk else 1e9)))
        assert (swap if chosen else again) <= 1.05 * min(swap, again)
        swapped += chosen
    assert 1_000 < swapped < 9_000  # both occur


def test_swap_seconds_are_bytes_over_bandwidth_in_both_directions():
    assert swap_seconds(blocks=10, block_bytes=1000, store_bandwidth=1e4, load_bandwidth=5e3) == pytest.approx(1 + 2)


def test_an_infinite_bandwidth_costs_nothing():
    assert swap_seconds(blocks=10, block_bytes=1000, store_bandwidth=math.inf, load_bandwidth=5e3) == pytest.approx(2)


def test_the_default_bandwidth_depends_on_on_disk_and_a_measured_one_does_not():
    sizes = {"blocks": 3, "block_bytes": 10**9, "store_bandwidth": math.inf}
    unknown = swap_seconds(**sizes, load_bandwidth=None, on_disk=True)
    assert unknown == pytest.approx(3e9 / swap_choice.DISK_BANDWIDTH)
    assert unknown > swap_seconds(**sizes, load_bandwidth=None)
    assert swap_seconds(**sizes, load_bandwidth=1e9, on_disk=True) == pytest.approx(3)


@pytest.mark.parametrize("bandwidth", [0, -1.0, math.nan])
@pytest.mark.parametrize("name", ["store_bandwidth", "load_bandwidth"])
def test_invalid_bandwidths_are_rejected(name, bandwidth):
    known = {"store_bandwidth": 1.0, "load_bandwidth": 1.0, name: bandwidth}
    with pytest.raises(ValueError, match=f"{name} must be a positive number"):
        swap_seconds(blocks=1, block_bytes=1, **known)


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_invalid_seconds_are_rejected(seconds):
    with pytest.raises(ValueError, match="recompute_seconds must be at least 0"):
        prefer_swap(blocks=1, block_bytes=1, store_bandwidth=1, load_bandwidth=1, recompute_seconds=seconds)
