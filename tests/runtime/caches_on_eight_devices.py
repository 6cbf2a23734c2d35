"""int8 and compressed KV caches, and bfloat16, on a mesh of virtual devices. Run by test_sharding.py."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests import tiny
from tests.engines import compile_tiny, greedy, make_engine, request, run
from tests.runtime.text_on_eight_devices import BLOCKS, GREEDY, collectives


@functools.cache
def int8(size: int):
    return compile_tiny(GREEDY, tensor_parallel_size=size, kv_cache_dtype="int8", **BLOCKS)


@functools.cache
def compressing(size: int):
    return compile_tiny(GREEDY, tensor_parallel_size=size, enable_adaptive_compression=True)


@functools.cache
def bfloat16(size: int):
    return compile_tiny(dataclasses.replace(GREEDY, dtype="bfloat16"), tensor_parallel_size=size)


@pytest.mark.parametrize("size", [4])
def test_int8_caches_equal_one_devices(size):
    """Sums in another order: a key half-way between two int8 numbers may be rounded to either, which depends on the
    CPU. So the logprobs of given prompts stay near, as for bfloat16."""
    items = [request(f"p{n}", tiny.prompt(n), greedy(max_tokens=0, prompt_logprobs=0)) for n in (17, 33, 60, 150)]
    found, expected = (run(make_engine(int8(n)), *items) for n in (size, 1))
    for key, answer in expected.items():
        ours = [entry.logprob for entry in answer.prompt_logprobs[1:]]
        theirs = [entry.logprob for entry in found[key].prompt_logprobs[1:]]
        np.testing.assert_allclose(theirs, ours, atol=0.05)
        assert np.median(np.abs(np.subtract(theirs, ours))) < 0.005


def test_bfloat16_stays_near_one_device():
    """Sums in another order: tokens may part where two nearly tie. The logprobs of a given prompt stay near."""
    items = [request("p", tiny.prompt(60), greedy(max_tokens=0, prompt_logprobs=0))]
    found, expected = (
        [entry.logprob for entry in run(make_engine(bfloat16(n)), *items)["p", 0].prompt_logprobs[1:]] for n in (4, 1)
    )
    np.testing.assert_allclose(found, expected, atol=0.35)
    assert np.abs(np.subtract(found, expected)).mean() < 0.05


@pytest.mark.parametrize("size", [2])
def test_compressed_caches_equal_one_devices(size):
    """Bit by bit, from the same rows. (From a whole run they need not be: keys of equal tokens have equal norms, and
    which of them goes is then a matter of rounding.)"""
    found, expected = (compacted(compressing(n).runner) for n in (size, 1))
    for many, one in zip(found, expected, strict=True):
        np.testing.assert_array_equal(many, np.repeat(one, many.shape[1] // one.shape[1], axis=1))


def compacted(runner) -> list[np.ndarray]:
    """The pool's arrays after one compaction of random rows, but for page 0, which takes the padding."""
    runner.reset()
    rng = np.random.default_rng(5)

    def filled(array):
        pages = np.zeros(array.shape, array.dtype)
        some = rng.standard_normal((64, 2, *array.shape[2:]))
        pages[:64] = np.repeat(some, array.shape[1] // 2, axis=1)
        return jax.device_put(pages, array.sharding)

    runner._pool = jax.tree.map(filled, runner._pool)
    runner.compact([3, 1, 7, 9, 4], 70, 40, [3, 1, 8], sinks=4, window=16)
    return [np.asarray(array)[1:64] for array in jax.tree.leaves(runner._pool)]


def test_a_compressing_engine_runs_on_a_mesh():
    items = [request(f"r{n}", tiny.prompt(90 + n), greedy(max_tokens=120)) for n in range(3)]
    options = {"enable_adaptive_compression": True, "kv_compress_ratio": 0.6}
    engine, one = (make_engine(compressing(n), options=options) for n in (2, 1))
    run(engine, *items)
    run(one, *items)
    assert engine.stats().tokens_dropped == one.stats().tokens_dropped > 0


@pytest.mark.parametrize("size", [2])
def test_blocks_are_compacted_without_any_exchange(size):
    for key, executable in compressing(size).runner._executables.items():
        if key[0] == "compact":
            assert not collectives(executable), key
