"""Digests of blocks are equal exactly where keys and values are equal."""

import hashlib
import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omni_jax.inputs.positions import mrope_positions
from omni_jax.memory.prefix import count_modalities, extend, modality, root_digest
from omni_jax.requests import MediaSpan, Request, SamplingParams
from omni_jax.requests.segment import Segment

PAD = 9  # placeholder token
SIZE = 4


def request(ids, *, media=(), segments=(), positions=None, salt=""):
    return Request(
        id="r",
        prompt_ids=tuple(ids),
        params=SamplingParams(),
        media=tuple(media),
        segments=tuple(segments),
        positions=positions,
        cache_salt=salt,
    )


def span(name, start, length, kind="image"):
    patches = np.zeros((length, 1, 1, 1, 1), np.uint8)
    key = hashlib.sha256(name.encode()).digest()
    return MediaSpan(key=key, modality=kind, start=start, length=length, grid=(1, length), patches=patches)


def digests(asked, known=None, *, size=SIZE):
    found = []
    extend(found, asked, () if known is None else known[len(asked.prompt_ids) :], size)
    return found


def shared(first, second):
    """Number of leading blocks that two lists have in common; they must share no other blocks."""
    assert not set(first) & set(second) or first[0] == second[0]
    common = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    assert len(set(first) & set(second)) == len(common)
    return len(common)


def test_only_full_blocks_have_digests():
    assert [len(digests(request(range(1, n + 1)))) for n in (1, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert all(len(digest) == 32 for digest in digests(request(range(8))))


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40), st.lists(st.integers(1, 9), max_size=9))
def test_extending_in_steps_or_at_once_is_the_same(ids, steps):
    asked = request(ids[:3])
    piecemeal = []
    for length in itertools.accumulate(steps):
        extend(piecemeal, asked, ids[3:length], SIZE)
    extend(piecemeal, asked, ids[3:], SIZE)
    assert piecemeal == digests(asked, ids)


@given(st.data())
def test_blocks_are_equal_as_far_as_tokens_are_equal(data):
    token = st.integers(0, 1)
    first, second = data.draw(st.lists(token, min_size=4, max_size=24)), data.draw(st.lists(token, max_size=24))
    common = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))
    assert shared(digests(request(first)), digests(request(second[:2]), second)) == common // SIZE


def test_blocks_of_different_sizes_share_no_digest():
    asked = request([0] * 16)
    assert not set(digests(asked, size=4)) & set(digests(asked, size=8))


def test_tokens_of_prompt_and_output_have_the_same_digests():
    """So the next turn of a conversation finds the output of the last one."""
    ids = list(range(1, 17))
    assert digests(request(ids[:5]), ids) == digests(request(ids))


# -- PC-01: different images have the same placeholders ---------------------------------------------------------------


def chat(*names, length=6, text=5):
    """Some text, then images with one token between them."""
    ids, media = list(range(1, text + 1)), []
    for name in names:
        media.append(span(name, len(ids), length))
        ids += [PAD] * length + [5]
    return request([*ids, 1, 2, 3, 4], media=media)


def test_pc_01_different_images_of_the_same_length_share_only_the_text_before_them():
    first, second = chat("a"), chat("b")
    assert first.prompt_ids == second.prompt_ids
    assert shared(digests(first), digests(second)) == 1
    assert digests(first) == digests(chat("a"))
    assert shared(digests(first), digests(request(first.prompt_ids))) == 1


def test_pc_01_the_order_of_images_matters():
    ab, ba, aa = digests(chat("a", "b")), digests(chat("b", "a")), digests(chat("a", "a"))
    assert shared(ab, ba) == 1
    assert shared(ab, aa) == 3  # text and first image: 12 tokens


def test_pc_01_a_second_image_does_not_change_the_blocks_of_the_first():
    assert shared(digests(chat("a")), digests(chat("a", "b"))) == 3


def test_pc_01_an_image_that_begins_inside_a_block_changes_that_block():
    first, second = chat("a", text=6), chat("b", text=6)
    assert shared(digests(first), digests(second)) == 1


def test_pc_01_the_same_image_at_other_placeholders_is_another_block():
    """The prompts are equal, but their features differ at each placeholder."""
    ids = [PAD] * 8
    laid = [span("a", 0, 8)], [span("a", 0, 7)], [span("a", 1, 7)], [span("a", 0, 4), span("a", 4, 4)]
    found = [digests(request(ids, media=media)) for media in laid]
    assert all(shared(*two) == 0 for two in itertools.combinations(found, 2))


def test_pc_02_the_media_key_is_part_of_the_digest():
    """MediaSpan.key covers shape, dtype, modality and settings (tests/inputs)."""
    keys = [b"", b"k", b"kk", hashlib.sha256(b"4x6").digest(), hashlib.sha256(b"6x4").digest()]
    found = set()
    for key in keys:
        media = [MediaSpan(key=key, modality="image", start=0, length=4, grid=(1, 4), patches=np.zeros(1, np.uint8))]
        found.update(digests(request([PAD] * 4, media=media)))
    assert len(found) == len(keys)


def test_rotary_positions_are_part_of_the_digest():
    """Two videos with the same frames and different frame rates have equal features but different positions."""
    ids = [1, 2, *[PAD] * 8, 3, 4, 5, 6, 7, 8]
    media = [span("step 0", 2, 4, "video"), span("step 1", 6, 4, "video")]
    slow, fast = (np.broadcast_to(np.arange(16, dtype=np.int32), (3, 16)).copy() for _ in range(2))
    slow[0, 6:] += 25
    fast[0, 6:] += 12
    found = [digests(request(ids, media=media, positions=positions)) for positions in (slow, fast)]
    assert shared(*found) == 1


class Item:
    """The attributes of a MediaItem that mrope_positions reads."""

    grid, num_tokens, seconds_per_grid = (1, 4, 4), 4, None


def test_output_after_an_image_has_the_digests_it_has_as_a_prompt():
    """Rotary positions of output are token index + Request.position_delta; in the next prompt they are given."""
    ids = [1, *[PAD] * 4, *range(10, 25)]
    media = [span("a", 1, 4)]
    positions = mrope_positions(len(ids), [(1, Item())], merge_size=2, tokens_per_second=None)
    assert not np.array_equal(positions[0], np.arange(len(ids)))
    whole = digests(request(ids, media=media, positions=positions))
    for turn in (5, 7, 8, 13):
        asked = request(ids[:turn], media=media, positions=positions[:, :turn])
        assert digests(asked, ids) == whole


def test_positions_equal_to_token_indices_change_nothing():
    ids = list(range(8))
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), (3, 8))
    assert digests(request(ids, positions=positions)) == digests(request(ids))


# -- PC-06: isolation -------------------------------------------------------------------------------------------------


def test_pc_06_requests_share_blocks_only_if_their_salts_are_equal():
    ids = range(12)
    first, second, third = (digests(request(ids, salt=salt)) for salt in ("s1", "s2", "s1"))
    assert shared(first, second) == shared(first, digests(request(ids))) == 0
    assert first == third


def test_pc_06_different_pairs_of_salt_and_adapter_have_different_roots():
    pairs = [("", ""), ("a", ""), ("", "a"), ("ab", ""), ("a", "b"), ("", "ab"), ("a\0", "b"), ("a", "\0b"), ("ü", "")]
    assert len({root_digest(salt=salt, adapter=adapter) for salt, adapter in pairs}) == len(pairs)
    assert len(root_digest(salt="\ud800")) == 32  # JSON can contain it


def test_digests_are_chained_by_sha_256():
    """Computed by hand, so that a change of the format is noticed."""
    root = hashlib.sha256(b"omni_jax.memory.prefix 1" + (2).to_bytes(8, "little") + b"s1").digest()
    assert root_digest(salt="s1") == root
    ids = np.arange(1, 9, dtype="<i4")
    first = hashlib.sha256(root + ids[:4].tobytes() + bytes([4, 0, 0, 0, 0, 0, 0, 0])).digest()
    second = hashlib.sha256(first + ids[4:].tobytes() + bytes([4, 0, 0, 0, 0, 0, 0, 0])).digest()
    assert digests(request(range(1, 9), salt="s1")) == [first, second]


# -- modalities -------------------------------------------------------------------------------------------------------


def naive_counts(asked, start, stop):
    counts = dict.fromkeys(("text", "image", "video", "table"), 0)
    for token in range(start, stop):
        over = [item.modality for item in asked.media if item.start <= token < item.stop]
        over += [s.modality for s in asked.segments if s.start <= token < s.stop and s.modality == "table"]
        counts[over[0] if over else "text"] += 1
    return counts


@given(st.data())
def test_tokens_are_counted_by_modality(data):
    cuts = sorted(data.draw(st.sets(st.integers(1, 39), max_size=8)))
    kinds = st.sampled_from(["text", "table", "image"])
    segments = [
        Segment(start=start, stop=stop, modality=data.draw(kinds)) for start, stop in itertools.pairwise([0, *cuts, 40])
    ]
    edges = sorted(data.draw(st.sets(st.integers(0, 40), max_size=8)))
    media = [
        span(str(start), start, stop - start, data.draw(st.sampled_from(["image", "video"])))
        for start, stop in zip(edges[::2], edges[1::2], strict=False)
    ]
    asked = request([1] * 40, media=media, segments=data.draw(st.sampled_from([segments, []])))
    start = data.draw(st.integers(0, 48))
    stop = data.draw(st.integers(start, 50))
    counts = count_modalities(asked, start, stop)
    assert counts == naive_counts(asked, start, stop)
    assert counts[modality(asked, start, stop)] == max(counts.values())


def test_a_block_has_the_modality_of_most_of_its_tokens():
    segments = [
        Segment(start=0, stop=8, modality="text"),
        Segment(start=8, stop=16, modality="table"),
        Segment(start=16, stop=24, modality="text"),
    ]
    asked = request([1] * 24, media=[span("a", 17, 3), span("b", 20, 1, "video")], segments=segments)
    assert [modality(asked, at, at + 4) for at in range(0, 32, 4)] == [
        *("text", "text", "table", "table", "image", "text", "text", "text")
    ]
    assert modality(asked, 6, 10) == "text"  # half of each
    assert modality(asked, 6, 11) == "table"
