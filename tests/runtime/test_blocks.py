"""Copies of blocks to the host and back are exact, in the order of steps, in place, and compile nothing."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from omni_jax import compat
from omni_jax.runtime import blocks
from omni_jax.runtime.executables import compile_all
from omni_jax.runtime.runner import Runner
from omni_jax.runtime.state import block_bytes
from tests.engines import load_tiny
from tests.runtime.with_blocks import block_runner, make_row, make_sequence, mixed, prefill, prompt

COUNTS = (1, 2, 4, 5, 16, 17, 35)


def fill(pool, *, seed: int = 0):
    """A pool of random bytes with the same shapes, NaNs with any payload included."""
    rng = np.random.default_rng(seed)

    def random(array):
        raw = rng.integers(0, 256, (*array.shape, array.dtype.itemsize), np.uint8)
        if array.dtype == jnp.bfloat16:
            raw[..., 1] &= 0xBF  # no NaN: XLA for CPU loses its payload (and CPU engines have no bfloat16 pool)
        return jax.device_put(raw.view(array.dtype).reshape(array.shape))

    return jax.tree.map(random, pool)


def as_bytes(pool) -> list[np.ndarray]:
    """Each array as [pages, bytes]."""
    return [np.asarray(x).view(np.uint8).reshape(len(x), -1) for x in jax.tree.leaves(pool)]


def runners():
    return block_runner("main"), block_runner("bfloat16"), block_runner("main", kv_cache_dtype="int8")


@pytest.fixture(params=[0, 1, 2], ids=["float32", "uint16", "int8"])
def runner(request):
    found = runners()[request.param]
    found.reset()
    return found


@pytest.mark.parametrize("count", COUNTS)
def test_a_read_returns_the_page_of_every_array(runner, count):
    runner._pool = fill(runner._pool)
    chosen = np.random.default_rng(1).permutation(runner.config.num_pages)[:count].tolist()
    data = runner.read_blocks(chosen).read()
    expected = np.concatenate([array[chosen] for array in as_bytes(runner._pool)], axis=1)
    assert (data.shape, data.dtype) == ((count, runner.block_bytes), np.uint8)
    assert data.flags.c_contiguous
    assert data.flags.owndata
    np.testing.assert_array_equal(data, expected)


@pytest.mark.parametrize("count", COUNTS)
def test_a_write_changes_only_its_blocks(runner, count):
    runner._pool = fill(runner._pool, seed=2)
    before = as_bytes(runner._pool)
    order = np.random.default_rng(3).permutation(runner.config.num_pages - 1) + 1
    source, target = order[:count].tolist(), order[count : 2 * count].tolist()
    data = runner.read_blocks(source).read()
    runner.write_blocks(target, data)
    np.testing.assert_array_equal(runner.read_blocks(target).read(), data)
    np.testing.assert_array_equal(runner.read_blocks(source).read(), data)
    untouched = np.setdiff1d(np.arange(1, runner.config.num_pages), target)  # page 0 takes padding
    for now, then in zip(as_bytes(runner._pool), before, strict=True):
        np.testing.assert_array_equal(now[untouched], then[untouched])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.uint16, jnp.int8])
def test_pages_of_any_dtype_survive_a_round_trip(dtype):
    """GPUs store bfloat16 as itself. Arrays of several widths in one pool are copied in words of the narrowest."""
    shapes = [jax.ShapeDtypeStruct((9, 2, 4, 8), dtype), jax.ShapeDtypeStruct((9, 2, 4), jnp.float32)]
    pool, empty = fill(tuple(shapes), seed=4), fill(tuple(shapes), seed=5)
    pages, targets = np.asarray([3, 1, 8], np.int32), np.asarray([2, 8, 5], np.int32)
    words = jax.jit(blocks.read)(pool, pages)
    assert words.nbytes == 3 * blocks.payload_bytes(pool)
    written = jax.jit(blocks.write)(empty, targets, words)
    for now, then in zip(as_bytes(written), as_bytes(pool), strict=True):
        np.testing.assert_array_equal(now[targets], then[pages])


def test_a_read_sees_the_steps_before_it_and_not_those_after_it(runner):
    """Three steps write different texts to the same page without waits; each read returns the text of the step before
    it."""
    texts = [[7, *range(n, n + 40)] for n in (10, 100, 200)]
    block = [5, 6, 7]

    def step(text):
        return runner.dispatch(mixed(make_row(make_sequence(text, block), 0, len(text), admit=True)))

    expected = []
    for text in texts:
        step(text).read()
        jax.block_until_ready(runner._pool)
        expected.append(runner.read_blocks(block[:2]).read())
    assert not np.array_equal(expected[0], expected[1])
    for _ in range(10):
        copies, results = [], []
        for text in texts:
            results.append(step(text))
            copies.append(runner.read_blocks(block[:2]))
        for copy, result, wanted in zip(copies, results, expected, strict=True):
            found = []
            reader = threading.Thread(target=lambda copy=copy, found=found: found.append(copy.read()))
            reader.start()
            reader.join()
            assert copy.is_ready()
            np.testing.assert_array_equal(found[0], wanted)
            result.read()


def test_a_sequence_continues_from_swapped_blocks(runner):
    """Swap out, overwrite the pool, swap into other blocks: the next token's result is bit-identical."""
    text = prompt(50)
    sequence = make_sequence(text, [1, 2, 3, 4])
    prefill(runner, sequence, 49)
    last = make_row(sequence, 49, 1, sample=True, admit=True)
    wanted = np.array(runner.dispatch(mixed(last, size=16)).read()[0])
    data = runner.read_blocks(sequence.blocks).read()
    runner._pool = fill(runner._pool, seed=6)
    sequence.blocks = [30, 9, 17, 20]
    runner.write_blocks(sequence.blocks, data)
    np.testing.assert_array_equal(np.array(runner.dispatch(mixed(last, size=16)).read()[0])[0], wanted[0])


def test_the_pool_is_written_in_place_and_temporaries_do_not_grow_with_it(runner):
    kinds = ("read", "write", "compact")
    config = dataclasses.replace(runner.config, num_pages=2 * runner.config.num_pages)
    larger = Runner(runner._model, runner._weights, config, runner.mesh)
    twice = compile_all([job for job in larger.jobs() if job.key[0] in kinds])
    assert {key[0] for key in twice} == set(kinds)
    pool = sum(array.nbytes for array in jax.tree.leaves(runner._pool))
    for key, executable in twice.items():
        once, double = (x.compiled.memory_analysis() for x in (runner._executables[key], executable))
        donated = 0 if key[0] == "read" else pool
        assert (once.alias_size_in_bytes, double.alias_size_in_bytes) == (donated, 2 * donated), key
        assert once.temp_size_in_bytes == double.temp_size_in_bytes < 4 << 20, key


def test_block_operations_compile_nothing(runner):
    compat.count_compilations()
    before = compat.compilations()
    with compat.no_tracing():
        for count in COUNTS:
            data = runner.read_blocks(range(1, count + 1)).read()
            runner.write_blocks(range(1, count + 1), data)
        for rows in (20, 200, 1000):
            held = -(-rows // runner.config.block_size)
            runner.compact(range(1, held + 1), rows, rows // 2, range(1, held + 1), sinks=4, window=5)
        jax.block_until_ready(runner._pool)
    assert compat.compilations() == before


def test_block_programs_are_compiled_only_if_configured():
    keys = {job.key[0] for job in load_tiny("main").runner.jobs()}
    assert not keys & {"read", "write", "compact"}


def test_data_of_another_shape_dtype_or_order_is_refused(runner):
    width = runner.block_bytes
    for wrong in (
        np.zeros((2, width), np.uint8),
        np.zeros((3, width - 1), np.uint8),
        np.zeros((3, width), np.int8),
        np.zeros((width, 3), np.uint8).T,
    ):
        with pytest.raises(ValueError, match=rf"3 blocks of {width} bytes need uint8 \[3, {width}\] in C order"):
            runner.write_blocks([1, 2, 3], wrong)


def test_block_bytes_of_the_runner_and_of_the_sizing_are_equal():
    for runner in runners():
        config = runner.config
        assert runner.block_bytes == block_bytes(
            runner._model,
            block_size=config.block_size,
            dtype=config.dtype,
            kv_cache_dtype=config.kv_cache_dtype,
        )
