"""The Mosaic GPU kernel, interpreted: shared memory, barriers and copies simulated on a CPU, races raised."""

import faulthandler
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import pallas
from kernels_pallas.paged_attention import PagedBatch, QuantPages, mosaic, reference
from kernels_pallas.paged_attention.settings import DecodeSettings

interpreted = pytest.mark.skipif(pallas.NO_MOSAIC_INTERPRETER is not None, reason=str(pallas.NO_MOSAIC_INTERPRETER))


@pytest.fixture(autouse=True)
def never_hangs():
    """A barrier that is waited for in vain blocks the interpreter's threads for ever: the process is ended instead,
    with all stacks."""
    faulthandler.dump_traceback_later(120, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


def make_case(lengths, *, group=7, kv_heads=1, head_dim=64, page_size=16, dtype=jnp.bfloat16, poison=(np.nan, np.nan)):
    """Rows of these lengths in pages that stand in random order. Slots that no row wrote hold `poison` (keys,
    values), pages that no row owns too; tables end in random pages."""
    rng = np.random.default_rng(0)
    rows, pages_per_row = len(lengths), -(-max(lengths) // page_size) + 1
    pools = np.empty((2, 1 + rows * pages_per_row, kv_heads, page_size, head_dim), np.float32)
    pools[0], pools[1] = poison
    free = list(rng.permutation(rows * pages_per_row) + 1)
    tables = rng.integers(0, pools.shape[1], (rows, pages_per_row)).astype(np.int32)
    for row, length in enumerate(lengths):
        for p in range(-(-length // page_size)):
            page = tables[row, p] = free.pop()
            used = min(page_size, length - p * page_size)
            pools[:, page, :, :used] = rng.standard_normal((2, kv_heads, used, head_dim))
    query = jnp.asarray(rng.standard_normal((rows, group * kv_heads, head_dim)), dtype)
    keys, values = (jnp.asarray(pool, dtype) for pool in pools)
    batch = PagedBatch(
        query_start=jnp.arange(rows + 1, dtype=jnp.int32),
        kv_len=jnp.asarray(lengths, jnp.int32),
        block_tables=jnp.asarray(tables),
        decode=True,
    )
    return query, keys, values, batch


def check(case, *, splits=1, stages=2):
    settings = DecodeSettings(key_tile=64, splits=splits, num_warps=4, num_stages=stages)
    with pallas.mosaic_interpreter():
        got = mosaic.attention(*case, scale=0.2, settings=settings, interpret=True).block_until_ready()
    want = reference.attention(*case, scale=0.2)
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    np.testing.assert_allclose(got, want, atol=1e-2, rtol=1e-2)


@interpreted
def test_decode_equals_reference():
    check(make_case([300, 37]))


def test_what_it_cannot_do_is_named():
    query, keys, values, batch = make_case([5])
    pages = QuantPages(values=keys.astype(jnp.int8), scales=jnp.ones(keys.shape[:3]))
    with pytest.raises(ValueError, match="not int8"):
        mosaic.attention(query, pages, pages, batch, scale=1.0)
    mixed = PagedBatch(
        query_start=batch.query_start, kv_len=batch.kv_len, block_tables=batch.block_tables, decode=False
    )
    with pytest.raises(ValueError, match="decode batches only"):
        mosaic.attention(query, keys, values, mixed, scale=1.0)
