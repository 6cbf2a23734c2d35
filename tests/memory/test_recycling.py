"""Recycling policies, compared with their definitions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_jax.memory.block_pool import BlockPool
from omni_jax.memory.recycling import (
    HALF_LIFE_SECONDS,
    PIN_SECONDS,
    PINNED_BLOCKS,
    BlockUse,
    by_modality,
    decay,
    lfu,
    lru,
    make_recycling,
)
from tests.memory.test_block_pool import cached_chain, paths

MODULE = "tests.memory.custom_recycling"


def use(modality="text", *, depth=PINNED_BLOCKS, times=(0.0,)):
    uses, last = 0.0, times[0]
    for time in times:
        uses, last = 1.0 + uses * decay(time - last), time
    return BlockUse(modality=modality, depth=depth, last_used=last, uses=uses)


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=30).map(sorted))
def test_lfu_is_the_logarithm_of_the_decayed_count(times):
    wanted = HALF_LIFE_SECONDS * math.log2(sum(2.0 ** (t / HALF_LIFE_SECONDS) for t in times))
    assert lfu(use(times=times)) == pytest.approx(wanted, abs=1e-6)


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=10).map(sorted),
    st.lists(st.integers(0, 5000), min_size=1, max_size=10).map(sorted),
    st.integers(5000, 9000),
)
def test_values_of_unused_blocks_keep_their_order(first, second, now):
    """Values order blocks as their decayed counts do, at any time."""

    def count(times):
        return sum(2.0 ** ((t - now) / HALF_LIFE_SECONDS) for t in times)

    difference = lfu(use(times=first)) - lfu(use(times=second))
    assert abs(difference) < 1e-6 or (difference > 0) == (count(first) > count(second))


def test_counts_stay_finite_over_a_century():
    uses, now = 0.0, 0.0
    for step in (1e-9, 0.0, 1.0, 1e-3) * 1000 + (3e9, 1.0):
        uses = 1.0 + uses * decay(step)
        now += step
    assert 1 < uses < 3
    assert math.isfinite(lfu(BlockUse(modality="text", depth=0, last_used=now, uses=uses)))


def test_a_block_used_once_is_worth_the_time_of_its_use_in_any_modality():
    for modality in ("text", "image", "video"):
        assert by_modality(use(modality, depth=0, times=(7.0,))) == 7.0


def test_images_and_video_are_ordered_by_last_use():
    for modality in ("image", "video"):
        assert by_modality(use(modality, times=(1.0, 2.0, 3.0))) == lru(use(modality, times=(3.0,))) == 3.0


def test_frequently_used_text_outlives_recently_used_text():
    frequent, recent = use(times=(0.0, 1.0, 2.0, 3.0)), use(times=(HALF_LIFE_SECONDS,))
    assert lru(frequent) < lru(recent)
    assert by_modality(frequent) > by_modality(recent)
    assert by_modality(frequent) < by_modality(use(times=(3 * HALF_LIFE_SECONDS,)))


def test_system_prompts_and_tables_are_evicted_last():
    once, twice = use(depth=0, times=(50.0,)), use(depth=0, times=(0.0, 50.0))
    deep = use(depth=PINNED_BLOCKS, times=(0.0, 50.0))
    table = use("table", times=(50.0,))
    assert by_modality(once) == 50.0
    assert by_modality(deep) == lfu(deep)
    assert by_modality(twice) == lfu(twice) + PIN_SECONDS
    assert by_modality(table) == 50.0 + PIN_SECONDS
    image = use("image", depth=0, times=(0.0, 50.0))
    assert by_modality(image) == 50.0


def test_the_pool_keeps_the_system_prompt_through_a_flood_of_images():
    pool = BlockPool(21, 16)
    for now in range(3):
        system = cached_chain(pool, b"sys" + bytes([now]), now=float(now))[:3]
    for number in range(100):
        cached_chain(pool, bytes([128 + number, 1, 2]), modality="image", now=10.0 + number)
    assert pool.find(paths(b"sys")) == system
    pool = BlockPool(21, 16, recycling=lru)
    for now in range(3):
        cached_chain(pool, b"sys" + bytes([now]), now=float(now))
    for number in range(100):
        cached_chain(pool, bytes([128 + number, 1, 2]), modality="image", now=10.0 + number)
    assert pool.find(paths(b"sys")) == []


def test_a_policy_is_called_only_to_evict():
    seen = []
    pool = BlockPool(3, 16, recycling=lambda use: seen.append(use) or 0.0)
    cached_chain(pool, b"ab", modality="video", now=5.0)
    blocks = cached_chain(pool, b"ab", modality="video", now=5.0 + HALF_LIFE_SECONDS)
    assert not seen  # nothing was evicted
    pool.allocate(2)
    last = 5.0 + HALF_LIFE_SECONDS
    assert seen == [BlockUse(modality="video", depth=depth, last_used=last, uses=1.5) for depth in (1, 0)]
    assert len(blocks) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("lru", 9.0), ("by_modality", 9.0), (f"{MODULE}:deepest", -2.0), (f"{MODULE}:Namespace.oldest", 9.0)],
)
def test_policies_by_name_and_by_path(name, value):
    assert make_recycling(name)(BlockUse(modality="text", depth=2, last_used=9.0, uses=1.0)) == value


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("tests.memory.nowhere:f", "cannot import tests.memory.nowhere: ModuleNotFoundError"),
        (f"{MODULE}:nowhere", f"{MODULE} has no nowhere"),
        (f"{MODULE}:not_a_function", "not_a_function is a int, which cannot be called"),
        ("lfu", "expected lru, by_modality or 'package.module:function'"),
        ("", "expected"),
        (f"{MODULE}:", "expected"),
        (f"{MODULE}:deepest()", "expected"),
        (f"{MODULE}:raises", "failed for BlockUse.*KeyError: 'text'"),
        (f"{MODULE}:lacks_video", "failed for BlockUse.*KeyError: 'video'"),
        (f"{MODULE}:nothing", "must return a number of seconds, got None"),
        (f"{MODULE}:words", "must return a number of seconds, got 'soon'"),
        (f"{MODULE}:no_number", "must return a number of seconds, got nan"),
    ],
)
def test_an_invalid_policy_is_rejected_when_it_is_made(path, fault):
    with pytest.raises(ValueError, match=fault) as caught:
        make_recycling(path)
    assert path in str(caught.value)


def test_an_error_in_a_policy_contains_its_path():
    pool = BlockPool(2, 16, recycling=make_recycling(f"{MODULE}:fails_when_used_twice"))
    cached_chain(pool, b"a")
    cached_chain(pool, b"a")
    with pytest.raises(
        ValueError, match=f"{MODULE}:fails_when_used_twice must return a number of seconds, got 'often'"
    ):
        pool.allocate(1)
