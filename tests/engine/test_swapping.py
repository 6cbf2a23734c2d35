"""The choice between swapping and recomputing, as the engine makes it."""

import types

import pytest

from omni_jax.engine.swapping import EngineSwap


class Tier:
    """A host tier with room, that copies a gigabyte per second."""

    def stats(self):
        return types.SimpleNamespace(
            host_bytes=0, host_capacity=10**9, store_bandwidth=1e9, load_bandwidth=1e9, disk_read_bandwidth=1e9
        )

    def has_room(self, blocks):
        return True

    def store(self, key, copy, blocks):
        return "parcel"


class Runner:
    block_bytes = 10**6

    def read_blocks(self, blocks):
        return blocks


class Cost:
    """A millisecond for each token."""

    def prefill_seconds(self, tokens, context):
        assert tokens + context == 100
        return tokens / 1000


@pytest.mark.parametrize(("cached", "parcel"), [(0, "parcel"), (64, "parcel"), (96, None), (100, None)])
def test_blocks_are_recomputed_where_the_prefix_cache_makes_that_cheaper(cached, parcel):
    """Ten blocks of a megabyte, out and in: 20 ms."""
    swap = EngineSwap(Runner(), Tier(), Cost(), "auto")  # pyright: ignore[reportArgumentType]
    sequence = types.SimpleNamespace(dropped=0, rows=100, index=0, request=types.SimpleNamespace(id="a"))
    assert swap.store(sequence, list(range(10)), 100, cached) == parcel  # pyright: ignore[reportArgumentType]
