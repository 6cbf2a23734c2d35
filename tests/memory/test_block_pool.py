"""The block pool, compared with plain sets."""

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_jax.memory.block_pool import BlockPool

# (operation, number): allocate that many blocks, or share or free the blocks of holder `number`.
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "allocate", "share", "free"]), st.integers(0, 9)), max_size=60
)


@settings(max_examples=200)
@given(st.integers(2, 20), st.integers(1, 5), OPERATIONS)
def test_matches_a_plain_model(num_blocks, block_size, operations):
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


def test_block_0_is_never_allocated():
    pool = BlockPool(5, 16)
    assert pool.num_usable == 4
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_allocating_too_many_returns_none_and_changes_nothing():
    pool = BlockPool(5, 16)
    assert pool.allocate(5) is None
    assert pool.num_free == 4


def test_freeing_a_block_twice_is_an_error():
    pool = BlockPool(5, 16)
    block, other = pool.allocate(2)
    pool.free([block])
    with pytest.raises(ValueError, match=f"block {block} was freed more often than it was allocated or shared"):
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
def test_a_pool_without_usable_blocks_is_rejected(num_blocks, block_size):
    with pytest.raises(ValueError, match=f"got {num_blocks} of {block_size}"):
        BlockPool(num_blocks, block_size)


# -- registered blocks ------------------------------------------------------------------------------------------------


def cached_chain(pool, path, *, now=0.0, modality="text"):
    """Allocate, register and free the blocks of a chain; `path` has one letter per block."""
    found = pool.find([path[: i + 1] for i in range(len(path))])
    pool.share(found)
    blocks = found + pool.allocate(len(path) - len(found))
    for i, block in enumerate(blocks):
        assert pool.register(block, path[: i + 1], path[:i] or None, modality=modality, depth=i)
    pool.now = now
    pool.free(reversed(blocks))
    return blocks


def paths(path):
    return [path[: i + 1] for i in range(len(path))]


def test_freed_blocks_are_found_until_they_are_evicted():
    pool = BlockPool(5, 16)
    blocks = cached_chain(pool, b"abc")
    assert (pool.num_free, pool.num_idle, pool.num_used, pool.usage) == (4, 3, 0, 0.0)
    assert pool.find(paths(b"abx")) == blocks[:2]
    assert pool.find([]) == pool.find(paths(b"xab")) == []
    pool.share(blocks[:2])
    assert (pool.num_free, pool.num_idle, pool.num_used) == (2, 1, 2)
    assert [pool.references(block) for block in blocks] == [1, 1, 0]
    assert pool.allocate(3) is None
    assert pool.find(paths(b"abc")) == blocks
    other = pool.allocate(2)
    assert blocks[2] in other
    assert pool.find(paths(b"abc")) == blocks[:2]
    assert pool.evictions == pool.evictions_by_modality["text"] == 1


def test_free_blocks_are_allocated_before_idle_ones():
    pool = BlockPool(6, 16)
    blocks = cached_chain(pool, b"abc")
    assert not set(pool.allocate(2)) & set(blocks)
    assert pool.find(paths(b"abc")) == blocks


def test_chains_are_evicted_from_their_end():
    pool = BlockPool(5, 16, recycling=lambda use: -use.depth)
    blocks = cached_chain(pool, b"abcd")
    pool = BlockPool(5, 16, recycling=lambda use: use.depth)
    assert cached_chain(pool, b"abcd") == blocks
    for length in (3, 2, 1, 0):
        (block,) = pool.allocate(1)
        assert block == blocks[length]
        assert pool.find(paths(b"abcd")) == blocks[:length]


def test_a_block_is_evicted_after_all_its_children():
    pool = BlockPool(4, 16, recycling=lambda use: use.last_used)
    first = cached_chain(pool, b"ab", now=2.0)
    second = cached_chain(pool, b"ac", now=3.0)
    assert second[0] == first[0]
    assert [pool.allocate(1) for _ in range(3)] == [[first[1]], [second[1]], [first[0]]]


def test_the_value_of_a_leaf_follows_its_last_use():
    pool = BlockPool(3, 16, recycling=lambda use: use.last_used)
    old, new = cached_chain(pool, b"a", now=1.0), cached_chain(pool, b"b", now=2.0)
    pool.free(pool.allocate(0))
    pool.share(old)
    pool.now = 3.0
    pool.free(old)
    assert pool.allocate(1) == new


def test_a_digest_belongs_to_one_block():
    pool = BlockPool(9, 16)
    mine, yours = pool.allocate(2), pool.allocate(2)
    assert pool.register(mine[0], b"a", None, modality="text", depth=0)
    assert not pool.register(yours[0], b"a", None, modality="text", depth=0)
    assert not pool.is_registered(yours[0])
    assert pool.register(mine[0], b"a", None, modality="text", depth=0)  # registering again is no error
    assert not pool.register(mine[1], b"xb", b"x", modality="text", depth=1)
    assert not pool.is_registered(mine[1])
    assert pool.find(paths(b"ab")) == mine[:1]
    with pytest.raises(ValueError, match=f"block {mine[0]} is registered as 61 and cannot become 62"):
        pool.register(mine[0], b"b", None, modality="text", depth=0)
    pool.free(yours)
    with pytest.raises(ValueError, match=f"block {yours[0]} has no references"):
        pool.register(yours[0], b"b", None, modality="text", depth=0)
    assert pool.num_used == 2


def test_holding_a_block_without_its_parent_keeps_both_in_use():
    pool = BlockPool(5, 16)
    parent = cached_chain(pool, b"ab")
    copy = pool.allocate(2)
    assert pool.register(copy[1], b"abc", b"ab", modality="text", depth=2)
    assert (pool.num_free, pool.num_idle, pool.num_used) == (0, 0, 4)
    assert pool.allocate(1) is None
    pool.free(copy[:1])
    assert pool.allocate(1) == copy[:1]
    assert pool.allocate(1) is None
    pool.free(copy)
    assert (pool.num_free, pool.num_idle, pool.num_used) == (4, 3, 0)
    assert pool.find(paths(b"abc")) == [*parent, copy[1]]
    assert sorted(pool.allocate(2)) == sorted(copy)  # the leaf, not the former leaf
    assert pool.find(paths(b"abc")) == parent


def test_nothing_is_found_after_clear_cache():
    pool = BlockPool(7, 16)
    idle, used = cached_chain(pool, b"ab"), cached_chain(pool, b"xy")
    pool.share(used)
    pool.clear_cache()
    assert pool.find(paths(b"ab")) == pool.find(paths(b"xy")) == []
    assert (pool.num_free, pool.num_idle, pool.num_used, pool.evictions) == (4, 0, 2, 0)
    with pytest.raises(ValueError, match="is free and cannot be shared"):
        pool.share(idle)
    assert pool.register(used[0], b"x", None, modality="text", depth=0)
    pool.free(reversed(used))
    assert (pool.num_free, pool.num_idle) == (6, 1)
    assert sorted(pool.allocate(6)) == [1, 2, 3, 4, 5, 6]


def test_peak_used():
    pool = BlockPool(9, 16)
    pool.free(pool.allocate(3))
    assert pool.peak_used == 3
    blocks = cached_chain(pool, b"abcde")
    assert pool.peak_used == 5
    pool.allocate(3)
    pool.share(blocks[:3])
    assert pool.peak_used == 6
    assert pool.allocate(8) is None
    assert pool.peak_used == 6


def test_a_policy_that_raises_leaves_the_pool_unchanged():
    def policy(use):
        raise RuntimeError("no idea")

    pool = BlockPool(4, 16, recycling=policy)
    blocks = cached_chain(pool, b"ab")
    with pytest.raises(RuntimeError, match="no idea"):
        pool.allocate(3)
    assert pool.find(paths(b"ab")) == blocks
    assert (pool.num_free, pool.num_idle, pool.num_used) == (3, 2, 0)
    pool.clear_cache()
    assert len(pool.allocate(3)) == 3


def test_blocks_that_are_reused_often_leave_few_stale_entries():
    pool = BlockPool(100, 16)
    for number in range(50):
        cached_chain(pool, bytes([number]))
    for number in range(10_000):
        blocks = pool.find([bytes([number % 50])])
        pool.share(blocks)
        pool.free(blocks)
        if number % 1000 == 0:
            pool.free(pool.allocate(50))  # evicts one
            cached_chain(pool, bytes([number % 50]))
        assert len(pool._leaves._new) + len(pool._leaves._heap) < 200
