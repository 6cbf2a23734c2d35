"""The Mosaic GPU kernel of paged attention against the dense float32 reference, and lowered for GPUs.

The kernel is interpreted on a CPU: shared memory, barriers and copies are simulated, and races raise.
"""

import faulthandler
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import pallas
from kernels_pallas.paged_attention import PagedBatch, QuantPages, mosaic, paged_attention, reference
from kernels_pallas.paged_attention.settings import DecodeSettings

pytestmark = pytest.mark.smoke

SCALE = 0.2
interpreted = pytest.mark.skipif(pallas.NO_MOSAIC_INTERPRETER is not None, reason=str(pallas.NO_MOSAIC_INTERPRETER))


@pytest.fixture(autouse=True)
def end_hanging_process(capfd):
    """End the process with all stacks after 300 seconds: waiting for a barrier can hang forever outside Python."""
    with capfd.disabled():
        stderr = os.dup(2)
    faulthandler.dump_traceback_later(300, exit=True, file=stderr)
    yield
    faulthandler.cancel_dump_traceback_later()
    os.close(stderr)


def make_case(
    lengths, *, window=None, group=7, kv_heads=1, head_dim=64, page_size=16, dtype=jnp.bfloat16, poison=(np.nan, np.nan)
):
    """Arguments for rows of these lengths, in randomly ordered pages; tables are as long as the longest row.

    Unwritten slots and tokens before the window hold `poison` (keys, values). The first and the last visible token have
    large values, so that results without them are wrong.
    """
    rng = np.random.default_rng(0)
    rows, pages_per_row = len(lengths), -(-max(lengths) // page_size)
    num_pages = 1 + rows * pages_per_row
    pools = np.empty((2, num_pages, kv_heads, page_size, head_dim), np.float32)
    pools[0], pools[1] = poison
    free = list(rng.permutation(num_pages - 1) + 1)
    tables = rng.integers(0, num_pages, (rows, pages_per_row)).astype(np.int32)
    for row, length in enumerate(lengths):
        first = max(0, length - (window or length))
        for p in range(first // page_size, -(-length // page_size)):
            tables[row, p] = free.pop()
        for token in range(first, length):
            slot = tables[row, token // page_size], slice(None), token % page_size
            pools[(0, *slot)] = rng.standard_normal((kv_heads, head_dim))
            pools[(1, *slot)] = rng.standard_normal((kv_heads, head_dim)) + 20 * (token in (first, length - 1))
    query = jnp.asarray(rng.standard_normal((rows, group * kv_heads, head_dim)), dtype)
    keys, values = (jnp.asarray(pool, dtype) for pool in pools)
    batch = PagedBatch(
        query_start=jnp.arange(rows + 1, dtype=jnp.int32),
        kv_len=jnp.asarray(lengths, jnp.int32),
        block_tables=jnp.asarray(tables),
        decode=True,
    )
    return query, keys, values, batch


def check(lengths, *, splits=1, stages=2, key_tile=64, window=None, **kinds):
    case = make_case(lengths, window=window, **kinds)
    settings = DecodeSettings(key_tile=key_tile, splits=splits, num_warps=4, num_stages=stages)
    with pallas.mosaic_interpreter():
        got = mosaic.attention(*case, scale=SCALE, window=window, settings=settings, interpret=True)
        got = np.asarray(got, np.float32)
    want = np.asarray(reference.attention(*case, scale=SCALE, window=window), np.float32)
    # Both round the result to 8 bits; the kernel also rounds its weights.
    np.testing.assert_allclose(got, want, atol=2e-2, rtol=1e-2)


@interpreted
@pytest.mark.parametrize(
    "kinds",
    [
        {"group": 7, "kv_heads": 2},
        {"group": 1, "head_dim": 128, "page_size": 32},
        {"group": 16, "page_size": 128, "dtype": jnp.float16},
        {"group": 9, "head_dim": 256, "page_size": 64},
    ],
    ids=str,
)
def test_decode_equals_reference(kinds):
    check([300, 37], stages=2, **kinds)


@interpreted
@pytest.mark.parametrize(("stages", "key_tile"), [(3, 64), (4, 64), (2, 128)])
def test_stages_are_reused(stages, key_tile):
    """Every stage is used at least twice."""
    check([2 * stages * key_tile + 17], stages=stages, key_tile=key_tile, page_size=64)


@interpreted
@pytest.mark.parametrize("page_size", [16, 64])
def test_kv_01_lengths_at_the_edges_of_pages_and_tiles(page_size):
    check([1, 15, 16, 17, 64, 65, 128], page_size=page_size)


@interpreted
def test_rows_divide_their_own_tokens():
    """Three splits of at least 128 tokens: rows that use one, two and three of them."""
    check([1, 129, 400], splits=3)


@interpreted
@pytest.mark.parametrize(("window", "page_size"), [(1, 16), (100, 16), (130, 128)])
def test_sliding_window_equals_reference(window, page_size):
    check([17, 129, 300], splits=2, window=window, page_size=page_size)


@interpreted
# The interpreter multiplies in numpy: scores of infinite keys, which are masked afterwards.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize("poison", [(np.nan, 0.0), (0.0, np.nan), (np.inf, -np.inf)], ids=str)
def test_kv_01_unwritten_slots_do_not_affect_results(poison):
    check([17, 150], poison=poison)


@interpreted
def test_weights_stored_untransposed_equal_reference(monkeypatch):
    """JAX 0.10 cannot store them transposed, and has no interpreter."""
    monkeypatch.setattr(pallas, "MOSAIC_STORES_TRANSPOSED", False)
    jax.clear_caches()
    check([200], head_dim=128)
    jax.clear_caches()


@pytest.mark.parametrize("head_dim", mosaic.HEAD_DIMS)
@pytest.mark.parametrize("page_size", [16, 128])
def test_kernel_lowers_for_a_gpu(head_dim, page_size):
    *arrays, batch = make_case([100], head_dim=head_dim, page_size=page_size)
    attention = functools.partial(paged_attention, batch=batch, scale=SCALE, window=40, implementation="mosaic")
    lowered = jax.jit(attention).trace(*arrays).lower(lowering_platforms=("cuda",))
    assert "paged_decode_mosaic" in lowered.as_text()


def test_mixed_batches_are_refused():
    query, keys, values, batch = make_case([5])
    mixed = PagedBatch(
        query_start=batch.query_start, kv_len=batch.kv_len, block_tables=batch.block_tables, decode=False
    )
    with pytest.raises(ValueError, match="decode batches only, got a mixed batch: use triton"):
        mosaic.attention(query, keys, values, mixed, scale=SCALE)


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        ({"head_dim": 96}, r"head_dim 96: the Mosaic kernel supports \(64, 128, 256\)"),
        ({"page_size": 8}, r"page_size 8: the Mosaic kernel supports \(16, 32, 64, 128\)"),
        ({"group": 17}, r"17 heads over 1 KV heads: the Mosaic kernel supports at most 16 per KV head"),
        ({"dtype": jnp.float32}, r"queries of float32: the Mosaic kernel supports bfloat16 and float16"),
    ],
    ids=str,
)
def test_errors_for_unsupported_sizes_have_what_is_supported(kinds, reason):
    case = make_case([5], **kinds)
    with pytest.raises(ValueError, match=reason):
        mosaic.attention(*case, scale=SCALE)
    assert mosaic.unsupported(*make_case([5])[:3]) is None


def test_pages_of_another_dtype_are_refused():
    query, keys, values, batch = make_case([5])
    pages = QuantPages(values=keys.astype(jnp.int8), scales=jnp.ones(keys.shape[:3]))
    with pytest.raises(ValueError, match="int8 pages: the Mosaic kernel reads bfloat16 and float16 only"):
        mosaic.attention(query, pages, pages, batch, scale=SCALE)
    with pytest.raises(ValueError, match=r"pages of float16 and bfloat16: .* the dtype of the queries, bfloat16"):
        mosaic.attention(query, keys.astype(jnp.float16), values, batch, scale=SCALE)
