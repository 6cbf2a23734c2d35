"""Block pool usage as the random schedules count it anew, compared with counts by hand; leaks that must be detected."""

import numpy as np
import pytest

from omni_jax.memory.accounting import check_leaks, pool_usage
from omni_jax.memory.block_pool import BlockPool
from omni_jax.requests import MediaSpan, Request, SamplingParams, Sequence
from omni_jax.requests.segment import Segment
from tests.memory.pool_walk import walk
from tests.memory.test_block_pool import cached_chain


def sequence(blocks, computed, *, name="r", index=0, dropped=0, media=(), segments=(), prompt=40):
    asked = Request(
        id=name, prompt_ids=(1,) * prompt, params=SamplingParams(), media=tuple(media), segments=tuple(segments)
    )
    return Sequence(
        request=asked,
        index=index,
        order=(0, index),
        max_output=100,
        blocks=list(blocks),
        computed=computed,
        dropped=dropped,
    )


def image_span(start, length, modality="image"):
    patches = np.zeros((length, 1, 1, 1, 1), np.uint8)
    return MediaSpan(key=b"k", modality=modality, start=start, length=length, grid=(1, length), patches=patches)


def slots(text=0, image=0, video=0, table=0):
    return {"text": text, "image": image, "video": video, "table": table}


def test_an_empty_pool():
    usage = pool_usage(BlockPool(9, 4), {})
    assert (usage.block_size, usage.total, usage.free, usage.cached, usage.active) == (4, 8, 8, 0, 0)
    assert (usage.shared, usage.peak_active, usage.unfilled_slots) == (0, 0, 0)
    assert usage.active_slots == usage.evictions == slots()


def test_blocks_and_slots_are_counted():
    pool = BlockPool(20, 4)
    cached_chain(pool, b"xyz", modality="video")
    mine, more = pool.allocate(5), pool.allocate(2)
    pool.share(mine[:2])
    media, segments = [image_span(5, 4), image_span(9, 2, "video")], [Segment(start=11, stop=14, modality="table")]
    first = sequence(mine, 18, media=media, segments=segments)
    # Shares the first two blocks, and fills 5 of 8 slots of two others.
    second = sequence([*mine[:2], *more], 13, name="s", media=media, segments=segments)
    usage = walk(pool, [first, second])
    assert (usage.total, usage.free, usage.cached, usage.active) == (19, 9, 3, 7)
    assert (usage.shared, usage.peak_active) == (2, 7)
    # First: 5 of text, 4 of the image, 2 of video, 3 of the table, 4 of text after it. Second, from token 8 on: 1 of
    # the image, 2 of video, 2 of the table.
    assert usage.active_slots == slots(text=9, image=5, video=4, table=5)
    assert usage.unfilled_slots == 7 * 4 - 18 - 5
    check_leaks(pool, [first, second])


def test_dropped_rows_are_not_counted():
    pool = BlockPool(20, 4)
    held = sequence(pool.allocate(5), 32, dropped=14, media=[image_span(0, 16)])
    held.mixture = {"text": 24, "image": 16}
    usage = walk(pool, [held])
    assert usage.active_slots == slots(text=9, image=9)
    assert usage.unfilled_slots == 20 - 18


def test_blocks_without_computed_tokens_are_unfilled():
    pool = BlockPool(20, 4)
    usage = walk(pool, [sequence(pool.allocate(5), 0), sequence([], 0, name="waits")])
    assert usage.active_slots == slots()
    assert usage.unfilled_slots == 20


def test_evictions_and_peak():
    pool = BlockPool(4, 4)
    cached_chain(pool, b"ab", modality="image")
    cached_chain(pool, b"c")
    pool.share(pool.find([b"c"]))
    pool.free(pool.allocate(2))
    usage = pool_usage(pool, {})
    assert usage.evictions == slots(image=2)
    assert (usage.free, usage.cached, usage.active, usage.peak_active) == (2, 0, 1, 3)


@pytest.mark.parametrize(
    ("blocks", "fault"),
    [
        ([1], r"block 2 has 1 references, but is held by no sequence"),
        ([1, 2, 3], r"block 3 has 0 references, but is held by \['r\[0\]'\]"),
        ([1, 2, 2], r"block 2 has 1 references, but is held by \['r\[0\]', 'r\[0\]'\]"),
        ([0, 1, 2], r"block 0 has 0 references"),
    ],
)
def test_a_leak_is_reported_with_its_block(blocks, fault):
    pool = BlockPool(5, 4)
    assert pool.allocate(2) == [1, 2]
    with pytest.raises(AssertionError, match=fault):
        check_leaks(pool, [sequence(blocks, 3)])
    check_leaks(pool, [sequence([1, 2], 3)])


def test_an_extra_reference_is_a_leak():
    pool = BlockPool(5, 4)
    blocks = pool.allocate(2)
    pool.share(blocks[:1])
    with pytest.raises(AssertionError, match=r"block 1 has 2 references, but is held by \['r\[0\]'\]"):
        check_leaks(pool, [sequence(blocks, 3)])
    check_leaks(pool, [sequence(blocks, 3), sequence(blocks[:1], 3, index=1)])
    with pytest.raises(AssertionError, match="block 1 occurs twice"):
        check_leaks(pool, [sequence([1, 2, 1], 3)])


def test_a_parent_held_only_through_its_child_is_a_leak():
    pool = BlockPool(5, 4)
    cached_chain(pool, b"a")
    blocks = pool.allocate(1)
    pool.register(blocks[0], b"ab", b"a", modality="text", depth=1)
    with pytest.raises(AssertionError, match="2 blocks are in use, but sequences hold 1"):
        check_leaks(pool, [sequence(blocks, 3)])
