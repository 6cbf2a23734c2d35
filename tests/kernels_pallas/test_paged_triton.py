"""The Triton kernels of paged attention, interpreted, against the float32 reference.

Pools are tiny, because the interpreter's time grows with their size. Unwritten slots and unwritten results are NaN.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.paged_attention import (
    PagedBatch,
    QuantPages,
    paged_attention,
    triton_decode,
    triton_mixed,
    triton_write,
    write_kv,
)
from kernels_pallas.paged_attention.settings import DecodeSettings, MixedSettings
from kernels_pallas.paged_attention.triton_common import unsupported
from tests.kernels_pallas.test_paged_attention_int8 import dequantised, quantised

pytestmark = pytest.mark.smoke

SCALE = 0.25
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2**-6, jnp.float16: 2**-9}
NUM_PAGES = 48


def make_case(
    rows,
    *,
    num_rows,
    tokens=None,
    kv_heads=2,
    group=3,
    head_dim=16,
    page_size=16,
    dtype=jnp.float32,
    int8=False,
    poison=(np.nan, np.nan),
    num_pages=NUM_PAGES,
    seed=0,
):
    """Arguments for `rows` of (kv_len, queries): a mixed batch with a flat array of `tokens`, or a decode batch.

    Unwritten slots hold `poison` (keys, values).
    """
    rng = np.random.default_rng(seed)
    pages_per_row = -(-max(length for length, _ in rows) // page_size) + 1
    pools = [np.full((num_pages, kv_heads, page_size, head_dim), x, np.float32) for x in poison]
    for pool in pools:
        pool[0, :, 0] = 0.5  # written by padding rows
    free = list(rng.permutation(num_pages - 1) + 1)
    tables = rng.integers(0, num_pages, (num_rows, pages_per_row)).astype(np.int32)
    tables[len(rows) :] = 0
    kv_len, count = np.ones(num_rows, np.int32), np.full(num_rows, int(tokens is None), np.int32)
    for row, (length, queries) in enumerate(rows):
        kv_len[row], count[row] = length, queries
        for place in range(-(-length // page_size)):
            page = tables[row, place] = free.pop()
            used = min(page_size, length - place * page_size)
            for pool in pools:
                pool[page, :, :used] = rng.standard_normal((kv_heads, used, head_dim))
    # Scores have a deviation of 3: attention focuses on few tokens, and a missing token changes the result.
    query = 3 / (SCALE * head_dim**0.5) * rng.standard_normal((tokens or num_rows, kv_heads * group, head_dim))
    batch = PagedBatch(
        query_start=jnp.asarray(np.append(0, np.cumsum(count)), jnp.int32),
        kv_len=jnp.asarray(kv_len),
        block_tables=jnp.asarray(tables),
        decode=tokens is None,
    )
    pools = [quantised(pool) if int8 else jnp.asarray(pool, dtype) for pool in pools]
    return jnp.asarray(query, dtype), *pools, batch


# The tests' time is mostly compilation, and most of that is optimisation.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
OPTIONS = ("window", "settings")
run_decode = jit(functools.partial(triton_decode.attention, scale=SCALE, interpret=True), static_argnames=OPTIONS)
run_mixed = jit(functools.partial(triton_mixed.attention, scale=SCALE, interpret=True), static_argnames=OPTIONS)
run_reference = jit(
    functools.partial(paged_attention, scale=SCALE, implementation="reference"), static_argnames="window"
)


def decode(case, *, key_tile=32, splits=3, window=None):
    tiles = DecodeSettings(key_tile=key_tile, splits=splits, num_warps=4, num_stages=2)
    return np.asarray(run_decode(*case, window=window, settings=tiles))


def mixed(case, *, query_tile=32, key_tile=32, window=None):
    tiles = MixedSettings(query_tile=query_tile, key_tile=key_tile, num_warps=4, num_stages=2)
    return np.asarray(run_mixed(*case, window=window, settings=tiles))


def reference(case, *, window=None):
    query, keys, values, batch = case
    if not isinstance(keys, QuantPages):
        keys, values = keys.astype(jnp.float32), values.astype(jnp.float32)
    return np.asarray(run_reference(query.astype(jnp.float32), keys, values, batch, window=window))


def check(got, case, *, window=None):
    """Compare real queries with the reference; others must be finite."""
    query, batch = case[0], case[3]
    assert np.isfinite(got.astype(np.float32)).all()
    real = int(batch.query_start[-1])
    tolerance = TOLERANCE[query.dtype.type]
    want = reference(case, window=window)
    np.testing.assert_allclose(got[:real].astype(np.float32), want[:real], atol=tolerance, rtol=tolerance)


# -- decode ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "run"),
    [
        ({}, {"splits": 1}),
        ({"page_size": 32, "group": 1}, {"splits": 2, "key_tile": 16}),
        ({"head_dim": 64, "group": 7}, {"window": 200}),
        ({"head_dim": 128, "group": 16, "page_size": 64, "dtype": jnp.bfloat16}, {"splits": 2, "key_tile": 64}),
        ({"head_dim": 64, "group": 4, "kv_heads": 3, "page_size": 64, "dtype": jnp.float16}, {}),
        ({"head_dim": 256, "group": 2, "kv_heads": 1, "page_size": 128}, {"key_tile": 64, "window": 20}),
        ({"int8": True, "group": 7}, {}),
        ({"int8": True, "dtype": jnp.bfloat16}, {"splits": 1, "window": 33}),
        ({"int8": True, "dtype": jnp.float16, "head_dim": 64}, {"key_tile": 64}),
    ],
    ids=str,
)
def test_decode_equals_reference(model, run):
    """Rows of one token, of about a page, and long enough that every split has tiles; and padding rows."""
    page_size = model.get("page_size", 16)
    rows = [(1, 1), (page_size - 1, 1), (page_size, 1), (page_size + 1, 1), (437, 1)]
    case = make_case(rows, num_rows=6, **model)
    check(decode(case, **run), case, window=run.get("window"))


def test_splits_without_tokens_do_not_affect_results():
    """With more splits than tiles, most have no tokens. Their unwritten partial results are NaN in the interpreter."""
    case = make_case([(1, 1), (40, 1), (128, 1), (129, 1), (300, 1)], num_rows=5)
    check(decode(case, splits=12), case)


@pytest.mark.parametrize("split", [1, 4])
def test_kv_06_length_that_is_not_a_multiple_of_the_tile(split):
    case = make_case([(1000, 1)], num_rows=1, kv_heads=1, num_pages=64)
    check(decode(case, key_tile=128, splits=split), case)


@settings(max_examples=8, deadline=None)
@given(lengths=st.lists(st.integers(1, 250), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_kv_03_batched_rows_equal_each_alone(lengths, seed):
    """Equal to the bit: rows share nothing."""
    query, keys, values, batch = make_case([(n, 1) for n in lengths], num_rows=4, num_pages=64, seed=seed)
    pages = ((0, 0), (0, 17 - batch.block_tables.shape[1]))
    batch = PagedBatch(
        query_start=batch.query_start,
        kv_len=batch.kv_len,
        block_tables=jnp.pad(batch.block_tables, pages),
        decode=True,
    )
    together = decode((query, keys, values, batch), splits=2)
    check(together, (query, keys, values, batch))
    for row in range(len(lengths)):
        at = jnp.asarray([row] * 4)
        alone = PagedBatch(
            query_start=batch.query_start, kv_len=batch.kv_len[at], block_tables=batch.block_tables[at], decode=True
        )
        np.testing.assert_array_equal(decode((query[at], keys, values, alone), splits=2), together[at])


# -- mixed ----------------------------------------------------------------------------------------------------------

ROWS = ((40, 40), (1, 1), (33, 20), (150, 1), (197, 45), (16, 2))  # 109 queries


@pytest.mark.parametrize(
    ("model", "run"),
    [
        ({}, {}),
        ({"page_size": 32, "group": 1}, {"query_tile": 16, "key_tile": 16}),
        ({"head_dim": 64, "group": 7}, {"query_tile": 64}),
        ({"group": 7}, {"window": 20, "key_tile": 16}),
        ({"head_dim": 128, "group": 16, "page_size": 64, "dtype": jnp.bfloat16}, {"query_tile": 128, "key_tile": 64}),
        ({"head_dim": 64, "group": 4, "kv_heads": 3, "page_size": 64, "dtype": jnp.float16}, {"query_tile": 64}),
        ({"head_dim": 256, "group": 2, "kv_heads": 1, "page_size": 128}, {"key_tile": 64, "window": 70}),
        ({"int8": True, "group": 5}, {}),
        ({"int8": True, "dtype": jnp.bfloat16}, {"window": 33}),
        ({"int8": True, "dtype": jnp.float16}, {"query_tile": 128}),
    ],
    ids=str,
)
def test_mixed_equals_reference(model, run):
    case = make_case(ROWS, num_rows=8, tokens=120, **model)
    check(mixed(case, **run), case, window=run.get("window"))


def test_a_batch_without_padding_equals_reference():
    case = make_case([(n, q) for n, q in ROWS], num_rows=len(ROWS), tokens=109)
    check(mixed(case), case)


@pytest.mark.parametrize("window", [1, 1000])
def test_windows_of_one_token_and_of_all_equal_reference(window):
    case = make_case(ROWS, num_rows=8, tokens=120)
    check(mixed(case, window=window), case, window=window)
    case = make_case([(length, 1) for length, _ in ROWS], num_rows=6)
    check(decode(case, window=window), case, window=window)


def test_kv_06_chunk_of_a_row_whose_length_is_not_a_multiple_of_the_tile():
    case = make_case([(1000, 13)], num_rows=1, tokens=16, kv_heads=1, num_pages=64)
    check(mixed(case, key_tile=128), case)


@settings(max_examples=8, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99))
def test_kv_03_mixed_rows_equal_each_alone(data, seed):
    lengths = data.draw(st.lists(st.integers(1, 100), min_size=2, max_size=4))
    rows = [(length, data.draw(st.integers(1, min(length, 60)))) for length in lengths]
    rows.append((100, 1))  # so that all tables have one width
    query, keys, values, batch = case = make_case(rows, num_rows=5, tokens=241, seed=seed)
    together = mixed(case)
    check(together, case)
    for row, (_, queries) in enumerate(rows):
        first = int(batch.query_start[row])
        alone = PagedBatch(
            query_start=jnp.asarray([0] + [queries] * 5, jnp.int32),
            kv_len=jnp.ones_like(batch.kv_len).at[0].set(batch.kv_len[row]),
            block_tables=batch.block_tables.at[0].set(batch.block_tables[row]),
            decode=False,
        )
        got = mixed((jnp.roll(query, -first, axis=0), keys, values, alone))
        np.testing.assert_array_equal(got[:queries], together[first : first + queries])


run_query_tiles = jit(triton_mixed.query_tiles, static_argnames=("tokens", "size"))


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(0, 10), min_size=4, max_size=4), size=st.sampled_from([1, 4, 9]))
def test_tiles_cover_every_query_once(counts, size):
    kv_len = np.asarray(counts) + np.arange(1, 5)
    batch = PagedBatch(
        query_start=jnp.asarray(np.append(0, np.cumsum(counts)), jnp.int32),
        kv_len=jnp.asarray(kv_len, jnp.int32),
        block_tables=jnp.zeros((4, 1), jnp.int32),
        decode=False,
    )
    tokens = 40
    tiles = np.asarray(run_query_tiles(batch, tokens, size))
    found = [
        (first + i, row, position + i) for row, first, queries, position in tiles.T.tolist() for i in range(queries)
    ]
    want = [(row, kv_len[row] - count + i) for row, count in enumerate(counts) for i in range(count)]
    padding = tokens - len(want)
    want += [(3, i - padding) for i in range(padding)]
    assert sorted(found) == [(token, row, position) for token, (row, position) in enumerate(want)]
    assert tiles[2].max() <= size


# -- both -----------------------------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("attention", [decode, mixed])


def case_for(attention, **options):
    if attention is mixed:
        return make_case([(17, 17), (90, 10), (150, 1)], num_rows=4, tokens=32, **options)
    return make_case([(17, 1), (90, 1), (150, 1)], num_rows=4, **options)


@BOTH
@pytest.mark.parametrize("poison", [(np.nan, 0.0), (0.0, np.nan), (np.inf, -np.inf)], ids=str)
def test_kv_01_poison_in_keys_or_values_alone_changes_nothing(attention, poison):
    clean = attention(case_for(attention, poison=(0.0, 0.0)))
    np.testing.assert_array_equal(attention(case_for(attention, poison=poison)), clean)


@BOTH
def test_a_nan_query_affects_its_own_result_only(attention):
    query, *rest = case_for(attention)
    want = attention((query, *rest))
    got = attention((query.at[0, 0].set(jnp.nan), *rest))
    assert np.isnan(got[0, 0]).all()
    np.testing.assert_array_equal(got[0, 1:], want[0, 1:])
    np.testing.assert_array_equal(got[1:], want[1:])


@BOTH
def test_kv_07_attention_over_ones_is_exactly_one(attention):
    """A weighted mean of ones is one for any scores."""
    query, keys, values, batch = case_for(attention, dtype=jnp.bfloat16, head_dim=128)
    ones = [jnp.ones_like(x) for x in (query, keys, values)]
    real = int(batch.query_start[-1])
    np.testing.assert_array_equal(attention((*ones, batch))[:real], np.ones(query.shape, np.float32)[:real])


# -- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_write_equals_xla_and_changes_no_other_slot(dtype, int8):
    rng = np.random.default_rng(0)
    keys, values = (jnp.full((4, 3, 8, 16), x, dtype) for x in (7.0, 9.0))
    if int8:
        keys, values = (quantised(x) for x in (keys, values))
    new = [jnp.asarray(rng.standard_normal((6, 3, 16)), dtype) for _ in range(2)]
    new[1] = new[1].at[1].set(0)
    page, offset = jnp.asarray([1, 1, 0, 3, 0, 2]), jnp.asarray([0, 7, 0, 2, 0, 3])  # two tokens are padding
    write = jit(functools.partial(triton_write.write_kv, interpret=True), donate_argnums=(0, 1))
    want = write_kv(keys, values, *new, page, offset)
    got = write(jax.tree.map(jnp.copy, keys), jax.tree.map(jnp.copy, values), *new, page, offset)
    for one, other, before in zip(*(jax.tree.leaves(x) for x in (got, want, (keys, values))), strict=True):
        np.testing.assert_array_equal(np.asarray(one)[1:], np.asarray(other)[1:])
        np.testing.assert_array_equal(np.asarray(one)[0, :, 1:], np.asarray(before)[0, :, 1:])
    for pages, rows in zip(got, new, strict=True):
        back = dequantised(pages) if int8 else np.asarray(pages, np.float32)
        step = np.abs(rows[3]).max() / 127 if int8 else 0
        np.testing.assert_allclose(back[3, :, 2], np.asarray(rows[3], np.float32), atol=float(step))


# -- bad input ------------------------------------------------------------------------------------------------------


def abstract(*, heads=4, kv_heads=2, head_dim=64, page_size=16, dtype=jnp.bfloat16, pages_dtype=None, num_pages=8):
    shape = (num_pages, kv_heads, page_size, head_dim)
    pages = jax.ShapeDtypeStruct(shape, pages_dtype or dtype)
    if pages.dtype == jnp.int8:
        pages = QuantPages(values=pages, scales=jax.ShapeDtypeStruct(shape[:3], jnp.float32))
    return jax.ShapeDtypeStruct((1, heads, head_dim), dtype), pages, pages


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"head_dim": 80}, "head_dim 80: .* powers of two from 16 to 256"),
        ({"head_dim": 512}, "head_dim 512"),
        ({"page_size": 24}, "page_size 24: .* powers of two from 8 to 256"),
        ({"heads": 34}, "34 heads over 2 KV heads: .* at most 16"),
        ({"dtype": jnp.float8_e4m3fn}, "queries of float8_e4m3fn: .* bfloat16, float16 and float32"),
        ({"pages_dtype": jnp.uint16}, "pages of uint16: .* the dtype of the queries, bfloat16, or int8"),
        ({"pages_dtype": jnp.int8, "num_pages": 2**20 + 32}, "at most 2147483648 values"),
    ],
    ids=str,
)
def test_errors_for_unsupported_arrays_have_what_is_supported(model, message):
    query, keys, values = abstract(**model)
    assert unsupported(query, keys, values) is not None
    batch = make_case([(5, 1)], num_rows=1, num_pages=4)[3]
    attention = functools.partial(paged_attention, batch=batch, scale=SCALE, implementation="triton")
    with pytest.raises(ValueError, match=f"paged_attention: .*{message}"):
        jax.eval_shape(attention, query, keys, values)


@pytest.mark.parametrize(
    "model",
    [{}, {"head_dim": 256, "page_size": 128}, {"heads": 14}, {"pages_dtype": jnp.int8}, {"heads": 2, "page_size": 64}],
    ids=str,
)
def test_supported_arrays_are_accepted(model):
    assert unsupported(*abstract(**model)) is None


def test_triton_decode_refuses_a_mixed_batch():
    case = make_case([(5, 5)], num_rows=1, tokens=5)
    with pytest.raises(ValueError, match="triton_decode supports decode batches only"):
        decode(case)
