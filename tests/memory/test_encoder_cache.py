"""The encoder cache, compared with a plain model, and its edge cases."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_jax.memory.encoder_cache import EncoderCache
from tests.scheduling.loop import image_span

LENGTHS = {"a": 1, "b": 3, "c": 4, "d": 9, "e": 16}


def span(name):
    return image_span(name, 0, LENGTHS[name])


@given(st.lists(st.tuples(st.sampled_from(["hold", "release", "encode"]), st.sampled_from(sorted(LENGTHS)))))
def test_referenced_rows_belong_to_one_image(events):
    cache = EncoderCache(20, rows_per_block=2)
    held, rows = collections.Counter(), {}
    for event, name in events:
        key = name.encode()
        if event == "hold" and cache.hold(span(name)):
            held[name] += 1
            found = cache.rows(key).tolist()
            assert len(set(found)) == LENGTHS[name]
            assert min(found) > 1
            assert max(found) < cache.array_rows
            assert held[name] == 1 or found == rows[name]
            rows[name] = found
        elif event == "release" and held[name]:
            cache.release(key)
            held[name] -= 1
        elif event == "encode" and held[name] and cache.is_waiting(key):
            cache.begin(key)
            cache.finish(key)
        used = [row for other, count in held.items() if count for row in rows[other]]
        assert len(set(used)) == len(used)
        assert (cache.usage == 0) == (not +held)


def test_the_least_recently_released_image_is_evicted_first():
    cache = EncoderCache(12, rows_per_block=1)
    for name in "cba":
        assert cache.hold(span(name))
        cache.begin(name.encode())
        cache.finish(name.encode())
    for name in "ba":
        cache.release(name.encode())
    assert cache.hold(image_span("new", 0, 6))  # 4 rows are free
    cache.release(b"new")
    assert cache.hold(span("a"))
    assert not cache.is_waiting(b"a")
    assert not cache.hold(span("d"))
    assert cache.is_ready(b"c")


def test_an_image_that_is_being_encoded_is_not_evicted():
    cache = EncoderCache(9, rows_per_block=1)
    cache.hold(span("d"))
    cache.begin(b"d")
    cache.release(b"d")
    assert not cache.hold(span("a"))
    cache.finish(b"d")
    assert cache.hold(span("a"))


def test_an_image_that_is_not_being_encoded_is_dropped_with_its_last_reference():
    cache = EncoderCache(9, rows_per_block=1)
    cache.hold(span("d"))
    cache.release(b"d")
    assert cache.hold(span("b"))
    assert (cache.queries, cache.hits) == (2, 0)


def test_releasing_more_often_than_holding_is_an_error():
    cache = EncoderCache(9)
    cache.hold(span("a"))
    cache.begin(b"a")
    cache.release(b"a")
    with pytest.raises(ValueError, match="more often"):
        cache.release(b"a")


def test_capacity():
    cache = EncoderCache(64)
    assert cache.capacity == 64
    assert cache.array_rows == 80
    assert cache.fits(64)
    assert not cache.fits(65)
