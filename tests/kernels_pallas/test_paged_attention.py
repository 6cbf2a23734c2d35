"""Paged attention against the dense float32 reference, over random rows and page sizes, with NaN in unwritten slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.paged_attention import PagedBatch, paged_attention, storage_dtype, write_kv, write_pages

pytestmark = pytest.mark.smoke

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
PAGES_PER_ROW, TOKENS = 12, 96
run = jax.jit(paged_attention, static_argnames=("scale", "window", "implementation"))


def make_case(rows, *, page_size, seed=0, decode=False, dtype=jnp.float32, poison=np.nan, num_rows=8):
    """Arguments for `rows` of (kv_len, queries). Unwritten slots hold `poison`; tables are padded with random pages."""
    rng = np.random.default_rng(seed)
    num_pages = 1 + num_rows * PAGES_PER_ROW
    pools = np.full((2, num_pages, KV_HEADS, page_size, HEAD_DIM), poison, np.float32)
    pools[:, 0, :, 0] = 0.5  # written by padding rows
    free = list(rng.permutation(num_pages - 1) + 1)
    tables = rng.integers(0, num_pages, (num_rows, PAGES_PER_ROW)).astype(np.int32)
    kv_len, count = np.ones(num_rows, np.int32), np.zeros(num_rows, np.int32)
    for r, (length, queries) in enumerate(rows):
        kv_len[r], count[r] = length, queries
        for p in range(-(-length // page_size)):
            page = tables[r, p] = free.pop()
            used = min(page_size, length - p * page_size)
            pools[:, page, :, :used] = rng.standard_normal((2, KV_HEADS, used, HEAD_DIM))
    if decode:
        tables[len(rows) :] = 0
        count[:] = 1
    tokens = num_rows if decode else TOKENS
    query_start = np.concatenate([[0], np.cumsum(count)]).astype(np.int32)
    query = jnp.asarray(rng.standard_normal((tokens, HEADS, HEAD_DIM)), dtype)
    keys, values = (jnp.asarray(pool, dtype) for pool in pools)
    if dtype == jnp.bfloat16:
        keys, values = (jax.lax.bitcast_convert_type(x, storage_dtype(dtype, "cpu")) for x in (keys, values))
    batch = PagedBatch(
        query_start=jnp.asarray(query_start),
        kv_len=jnp.asarray(kv_len),
        block_tables=jnp.asarray(tables),
        decode=decode,
    )
    real = len(rows) if decode else int(query_start[len(rows)])
    return (query, keys, values, batch), real


def check(case, real, *, tolerance=2e-6, window=None):
    got = np.asarray(run(*case, scale=0.25, window=window, implementation="xla"), np.float32)
    want = np.asarray(run(*case, scale=0.25, window=window, implementation="reference"), np.float32)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[:real], want[:real], atol=tolerance, rtol=tolerance)


lengths = st.lists(st.integers(1, PAGES_PER_ROW * 8), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None)
@given(lengths=lengths, page_size=st.sampled_from([8, 16, 64]), seed=st.integers(0, 99))
def test_decode_equals_reference(lengths, page_size, seed):
    case, real = make_case([(n, 1) for n in lengths], page_size=page_size, seed=seed, decode=True)
    check(case, real)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), page_size=st.sampled_from([8, 16]), seed=st.integers(0, 99))
def test_mixed_rows_equal_reference(data, page_size, seed):
    rows, left = [], TOKENS
    for _ in range(data.draw(st.integers(1, 8))):
        queries = data.draw(st.integers(1, max(1, min(left - 8, 70))))
        rows.append((queries + data.draw(st.integers(0, PAGES_PER_ROW * page_size - queries)), queries))
        left -= queries
        if left <= 8:
            break
    case, real = make_case(rows, page_size=page_size, seed=seed)
    check(case, real)


@pytest.mark.parametrize("window", [1, 17, 64])
def test_windows_equal_reference(window):
    """Lengths and windows end before, at and after the edge of a key tile."""
    lengths = [1, 63, 64, 65, 128, 150, 181, 190]
    check(*make_case([(n, 1) for n in lengths], page_size=16, decode=True), window=window)
    check(*make_case([(190, 40), (70, 33), (181, 1), (1, 1), (20, 20)], page_size=16), window=window)


def test_reference_with_a_window_attends_to_the_last_tokens_only():
    """The oracle is softmax over the last tokens of one row, in numpy."""
    (query, keys, values, batch), _ = make_case([(30, 3)], page_size=8)
    got = np.asarray(run(query, keys, values, batch, scale=0.25, window=5, implementation="reference"))
    table = np.asarray(batch.block_tables)[0]
    rows = [np.asarray(pages)[table].swapaxes(1, 2).reshape(-1, KV_HEADS, HEAD_DIM) for pages in (keys, values)]
    for place, position in enumerate((27, 28, 29)):
        key, value = (x[position - 4 : position + 1] for x in rows)
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            weights = np.exp(0.25 * key[:, kv_head] @ np.asarray(query)[place, head])
            want = weights @ value[:, kv_head] / weights.sum()
            np.testing.assert_allclose(got[place, head], want, atol=1e-5)


@pytest.mark.parametrize("decode", [True, False])
def test_nan_in_a_row_does_not_affect_other_rows(decode):
    """NaN is in a query, or in a written key or value; results of all other rows keep every bit."""
    rows = [(33, 1 if decode else 9), (70, 1), (190, 1), (17, 1)]
    (query, keys, values, batch), real = make_case(rows, page_size=16, decode=decode)
    clean = np.asarray(run(query, keys, values, batch, scale=0.25))
    first = int(batch.query_start[1])
    page = int(batch.block_tables[1, 2])
    broken = (
        (query.at[first, 4].set(jnp.nan), keys, values),
        (query, keys.at[page, 1, 3].set(jnp.nan), values),
        (query, keys, values.at[page, 1, 3].set(jnp.nan)),
    )
    for arrays in broken:
        got = np.asarray(run(*arrays, batch, scale=0.25))
        assert np.isnan(got[first, 4]).all()
        np.testing.assert_array_equal(np.delete(got[:real], first, 0), np.delete(clean[:real], first, 0))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 190])
def test_kv_01_unwritten_slots_may_hold_nan(length, poison):
    check(*make_case([(length, 1)], page_size=16, decode=True, poison=poison))
    check(*make_case([(length, min(length, 40))], page_size=16, poison=poison))


@pytest.mark.parametrize("poisoned", [1, 2])
def test_kv_01_nan_in_unwritten_keys_or_values_alone_changes_nothing(poisoned):
    case, real = make_case([(17, 1), (33, 20)], page_size=16)
    clean = make_case([(17, 1), (33, 20)], page_size=16, poison=0.0)[0]
    mixed = list(clean)
    mixed[poisoned] = case[poisoned]
    got, want = (np.asarray(run(*c, scale=0.25, implementation="xla")) for c in (mixed, clean))
    np.testing.assert_array_equal(got[:real], want[:real])


def test_kv_03_batched_rows_equal_each_alone():
    rows = [(5, 1), (16, 1), (33, 1)]
    case, real = make_case(rows, page_size=16, decode=True)
    together = run(*case, scale=0.25)
    query, keys, values, batch = case
    for r in range(real):
        order = jnp.asarray([r] + [7] * 7)
        alone = PagedBatch(
            query_start=batch.query_start,
            kv_len=batch.kv_len[order],
            block_tables=batch.block_tables[order],
            decode=True,
        )
        np.testing.assert_allclose(run(query[order], keys, values, alone, scale=0.25)[0], together[r], atol=1e-6)


def test_bfloat16_pool_stored_as_uint16():
    check(*make_case([(40, 1), (7, 1)], page_size=16, dtype=jnp.bfloat16, decode=True), tolerance=2e-2)
    check(*make_case([(40, 33), (7, 1)], page_size=16, dtype=jnp.bfloat16), tolerance=2e-2)


def test_written_rows_are_read_back():
    pages = jnp.zeros((4, KV_HEADS, 8, HEAD_DIM), jnp.uint16)
    new = jnp.asarray(np.random.default_rng(0).standard_normal((3, KV_HEADS, HEAD_DIM)), jnp.bfloat16)
    pages = write_pages(pages, new, jnp.asarray([3, 1, 1]), jnp.asarray([7, 0, 1]))
    back = jax.lax.bitcast_convert_type(pages, jnp.bfloat16)
    np.testing.assert_array_equal(np.stack([back[3, :, 7], back[1, :, 0], back[1, :, 1]]), np.asarray(new))
    assert int((pages != 0).any(axis=(1, 3)).sum()) == 3


def test_write_kv_writes_keys_and_values():
    rng = np.random.default_rng(0)
    pages = [jnp.asarray(rng.standard_normal((4, KV_HEADS, 8, HEAD_DIM)), jnp.float32) for _ in range(2)]
    new = [jnp.asarray(rng.standard_normal((3, KV_HEADS, HEAD_DIM)), jnp.float32) for _ in range(2)]
    page, offset = jnp.asarray([3, 1, 1]), jnp.asarray([7, 0, 1])
    for got, before, rows in zip(write_kv(*pages, *new, page, offset), pages, new, strict=True):
        np.testing.assert_array_equal(got[page, :, offset], rows)
        assert int((got != before).any(axis=(1, 3)).sum()) == 3


def test_errors_for_invalid_arguments_have_the_values():
    (query, keys, values, batch), _ = make_case([(5, 1)], page_size=8, decode=True)
    with pytest.raises(ValueError, match=r"heads a multiple of kv_heads, got \(97, 2, 8, 16\)"):
        paged_attention(query[:, :5], keys, values, batch, scale=1.0)
    with pytest.raises(ValueError, match=r"no implementation 'cuda'"):
        paged_attention(query, keys, values, batch, scale=1.0, implementation="cuda")
    with pytest.raises(ValueError, match=r"window must be at least 1 or None, got 0"):
        paged_attention(query, keys, values, batch, scale=1.0, window=0)
    new, at = jnp.zeros((2, KV_HEADS, HEAD_DIM)), jnp.asarray([1, 2])
    with pytest.raises(ValueError, match=r"write_kv: no implementation 'mosaic'"):
        write_kv(keys, values, new, new, at, at, implementation="mosaic")
