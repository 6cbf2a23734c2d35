"""The block pool against plain sets."""

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_jax.memory import BlockPool

# (operation, number): allocate so many, or share or free the holder of that number.
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "allocate", "share", "free"]), st.integers(0, 9)), max_size=60
)


@settings(max_examples=200)
@given(st.integers(2, 20), st.integers(1, 5), OPERATIONS)
def test_agrees_with_a_plain_model(num_blocks, block_size, operations):
    pool = BlockPool(num_blocks, block_size)
    unused = set(range(1, num_blocks))
    holders: list[list[int]] = []
    for operation, number in operations:
        if operation == "allocate":
            taken = pool.allocate(number)
            assert (taken is None) == (number > len(unused))
            if taken is not None:
                assert len(set(taken)) == len(taken) == number
                assert set(taken) <= unused
                unused -= set(taken)
                holders.append(taken)
        elif holders:
            holder = number % len(holders)
            if operation == "share":
                pool.share(holders[holder])
                holders.append(list(holders[holder]))
            else:
                freed = holders.pop(holder)
                pool.free(freed)
                unused |= set(freed) - {block for kept in holders for block in kept}
        assert pool.num_free == len(unused)
        assert pool.num_used == num_blocks - 1 - len(unused)
        assert pool.usage == pytest.approx(pool.num_used / (num_blocks - 1))
    for holder in holders:
        pool.free(holder)
    assert (pool.num_used, pool.num_free, pool.usage) == (0, num_blocks - 1, 0.0)
    assert collections.Counter(pool.allocate(num_blocks - 1)) == collections.Counter(range(1, num_blocks))


def test_block_0_is_never_handed_out():
    pool = BlockPool(5, 16)
    assert pool.num_usable == 4
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_too_many_is_none_and_changes_nothing():
    pool = BlockPool(5, 16)
    assert pool.allocate(5) is None
    assert pool.num_free == 4


def test_a_block_freed_twice_is_an_error():
    pool = BlockPool(5, 16)
    block, other = pool.allocate(2)
    pool.free([block])
    with pytest.raises(ValueError, match=f"block {block} was freed more often than it was taken"):
        pool.free([block])
    with pytest.raises(ValueError, match="block 0 was freed"):
        pool.free([0])
    assert pool.num_used == 1
    pool.free([other])


def test_a_shared_block_is_freed_by_its_last_holder():
    pool = BlockPool(5, 16)
    blocks = pool.allocate(2)
    pool.share(blocks)
    pool.free(blocks)
    assert pool.num_used == 2
    pool.free(blocks)
    assert pool.num_used == 0
    with pytest.raises(ValueError, match="freed more often"):
        pool.free(blocks)


def test_a_free_block_cannot_be_shared():
    pool = BlockPool(5, 16)
    with pytest.raises(ValueError, match="block 3 is free and cannot be shared"):
        pool.share([3])
    with pytest.raises(ValueError, match="block 0 is free"):
        pool.share([0])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for_rounds_up(tokens, blocks):
    assert BlockPool(2, 16).blocks_for(tokens) == blocks


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 16), (0, 16), (-1, 16), (2, 0)])
def test_a_pool_that_holds_nothing_is_refused(num_blocks, block_size):
    with pytest.raises(ValueError, match=f"got {num_blocks} of {block_size}"):
        BlockPool(num_blocks, block_size)
