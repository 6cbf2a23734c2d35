"""What cached blocks are worth, by the definitions of the policies."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_jax.memory import BlockPool, BlockUse, make_recycling
from omni_jax.memory.recycling import (
    HALF_LIFE_SECONDS,
    PIN_SECONDS,
    PINNED_BLOCKS,
    by_modality,
    count_use,
    lfu,
    lru,
)
from tests.memory.test_block_pool import cached_chain, paths

OWN = "tests.memory.own_recycling"


def use(modality="text", *, depth=PINNED_BLOCKS, times=(0.0,)):
    uses, last = 0.0, times[0]
    for time in times:
        uses, last = count_use(uses, last, time), time
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
def test_values_of_blocks_that_nobody_touches_keep_their_order(first, second, now):
    """The order of values is that of the counts, decayed to whatever time one looks at them."""

    def count(times):
        return sum(2.0 ** ((t - now) / HALF_LIFE_SECONDS) for t in times)

    difference = lfu(use(times=first)) - lfu(use(times=second))
    assert abs(difference) < 1e-6 or (difference > 0) == (count(first) > count(second))


def test_counts_stay_finite_for_a_century_of_uses_and_pauses():
    uses, now = 0.0, 0.0
    for step in (1e-9, 0.0, 1.0, 1e-3) * 1000 + (3e9, 1.0):
        uses = count_use(uses, now, now + step)
        now += step
    assert 1 < uses < 3
    assert math.isfinite(lfu(BlockUse(modality="text", depth=0, last_used=now, uses=uses)))


def test_what_was_used_once_is_worth_the_time_of_that_in_any_modality():
    for modality in ("text", "image", "video"):
        assert by_modality(use(modality, depth=0, times=(7.0,))) == 7.0


def test_images_and_video_go_by_their_last_use_alone():
    for modality in ("image", "video"):
        assert by_modality(use(modality, times=(1.0, 2.0, 3.0))) == lru(use(modality, times=(3.0,))) == 3.0


def test_text_that_is_used_often_outlives_text_that_was_used_lately():
    often, lately = use(times=(0.0, 1.0, 2.0, 3.0)), use(times=(HALF_LIFE_SECONDS,))
    assert lru(often) < lru(lately)
    assert by_modality(often) > by_modality(lately)
    assert by_modality(often) < by_modality(use(times=(3 * HALF_LIFE_SECONDS,)))  # not for ever


def test_system_prompts_and_tables_go_last():
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


def test_a_policy_knows_what_there_is_to_know():
    seen = []
    pool = BlockPool(3, 16, recycling=lambda use: seen.append(use) or 0.0)
    cached_chain(pool, b"ab", modality="video", now=5.0)
    blocks = cached_chain(pool, b"ab", modality="video", now=5.0 + HALF_LIFE_SECONDS)
    assert not seen  # nothing had to be given up
    pool.allocate(2)
    last = 5.0 + HALF_LIFE_SECONDS
    assert seen == [BlockUse(modality="video", depth=depth, last_used=last, uses=1.5) for depth in (1, 0)]
    assert len(blocks) == 2


@pytest.mark.parametrize(
    ("name", "value"), [("lru", 9.0), ("by_modality", 9.0), (f"{OWN}:deepest", -2.0), (f"{OWN}:Namespace.oldest", 9.0)]
)
def test_policies_by_name_and_by_path(name, value):
    assert make_recycling(name)(BlockUse(modality="text", depth=2, last_used=9.0, uses=1.0)) == value


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("tests.memory.nowhere:f", "cannot import tests.memory.nowhere: ModuleNotFoundError"),
        (f"{OWN}:nowhere", f"{OWN} has no nowhere"),
        (f"{OWN}:not_a_function", "not_a_function is a int, which cannot be called"),
        ("lfu", "expected lru, by_modality or 'package.module:function'"),
        ("", "expected"),
        (f"{OWN}:", "expected"),
        (f"{OWN}:deepest()", "expected"),
        (f"{OWN}:raises", "failed for BlockUse.*KeyError: 'text'"),
        (f"{OWN}:knows_no_video", "failed for BlockUse.*KeyError: 'video'"),
        (f"{OWN}:nothing", "must return seconds, a number; got None"),
        (f"{OWN}:words", "must return seconds, a number; got 'soon'"),
        (f"{OWN}:no_number", "must return seconds, a number; got nan"),
    ],
)
def test_bad_policies_are_refused_at_start(path, fault):
    with pytest.raises(ValueError, match=fault) as caught:
        make_recycling(path)
    assert path in str(caught.value)


def test_a_policy_that_fails_later_is_named():
    pool = BlockPool(2, 16, recycling=make_recycling(f"{OWN}:fails_when_used_twice"))
    cached_chain(pool, b"a")
    cached_chain(pool, b"a")
    with pytest.raises(ValueError, match=f"{OWN}:fails_when_used_twice must return seconds, a number; got 'often'"):
        pool.allocate(1)
