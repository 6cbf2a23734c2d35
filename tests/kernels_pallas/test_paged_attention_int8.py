"""int8 pages: quantisation, unwritten slots, and attention against the reference and against unquantised pages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.paged_attention import PagedBatch, QuantPages, paged_attention, write_pages
from kernels_pallas.paged_attention.pages import quantise
from tests.kernels_pallas.test_paged_attention import HEAD_DIM, HEADS, KV_HEADS, PAGES_PER_ROW, TOKENS, make_case, run

pytestmark = pytest.mark.smoke

write = jax.jit(write_pages)
TINY, HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
lengths = st.lists(st.integers(1, PAGES_PER_ROW * 8), min_size=1, max_size=8)


def quantised(pages, *, poison=np.nan):
    """The oracle of quantisation, in numpy. Slots that are not finite count as unwritten: their scales hold `poison`,
    their values are random and may be -128."""
    pages = np.asarray(pages, np.float32)
    written = np.isfinite(pages).all(-1)
    scales = np.where(written, np.abs(pages).max(-1) / np.float32(127), poison).astype(np.float32)
    rows = np.divide(pages, scales[..., None], out=np.zeros_like(pages), where=(written & (scales > 0))[..., None])
    anything = np.random.default_rng(9).integers(-128, 128, pages.shape)
    values = np.where(written[..., None], np.rint(rows), anything).astype(np.int8)
    return QuantPages(values=jnp.asarray(values), scales=jnp.asarray(scales))


def dequantised(pages):
    with np.errstate(invalid="ignore"):  # 0 * inf, in tests with infinite scales
        return np.asarray(pages.values, np.float32) * np.asarray(pages.scales)[..., None]


def empty_pages(num_pages, page_size=8, head_dim=HEAD_DIM):
    return QuantPages(
        values=jnp.full((num_pages, KV_HEADS, page_size, head_dim), -128, jnp.int8),
        scales=jnp.full((num_pages, KV_HEADS, page_size), jnp.nan, jnp.float32),
    )


def check(rows, *, page_size=16, seed=0, decode=False, dtype=jnp.float32, poison=np.nan, tolerance=2e-6):
    (query, keys, values, batch), real = make_case(rows, page_size=page_size, seed=seed, decode=decode)
    case = query.astype(dtype), quantised(keys, poison=poison), quantised(values, poison=poison), batch
    got = np.asarray(run(*case, scale=0.25, implementation="xla"), np.float32)
    want = np.asarray(run(*case, scale=0.25, implementation="reference"), np.float32)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[:real], want[:real], atol=tolerance, rtol=tolerance)
    # The reference itself, against dequantised pages.
    keys, values = (jnp.asarray(dequantised(pages)) for pages in case[1:3])
    plain = np.asarray(run(query.astype(dtype), keys, values, batch, scale=0.25, implementation="reference"))
    np.testing.assert_allclose(want[:real], plain[:real].astype(np.float32), atol=2e-6, rtol=1e-6)


# -- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 5.0, 3e4, 1e37])
def test_a_row_dequantises_to_within_half_a_step(dtype, size):
    rows = jnp.asarray(size * np.random.default_rng(0).standard_normal((50, KV_HEADS, HEAD_DIM)), dtype)
    values, scales = (np.asarray(x) for x in quantise(rows))
    exact = np.asarray(rows, np.float32)
    np.testing.assert_allclose(scales, np.abs(exact).max(-1) / 127, rtol=1e-6)
    assert (np.abs(values).max(-1) == 127).all()
    assert (np.abs(values * scales[..., None] - exact) <= 0.5001 * scales[..., None]).all()


def test_a_row_of_zeros_has_scale_0_and_zero_values():
    values, scales = quantise(jnp.zeros((3, KV_HEADS, HEAD_DIM), jnp.bfloat16))
    assert not np.asarray(values).any()
    assert not np.asarray(scales).any()


@pytest.mark.parametrize("top", [HUGE, 4.0, TINY, TINY / 2**7, TINY / 2**14, TINY / 2**23])
def test_kvq_01_rows_saturate_and_never_wrap(top):
    """The scale of a row of very small values is subnormal, and so coarse, or 0."""
    row = np.linspace(-1, 1, HEAD_DIM, dtype=np.float32) * np.float32(top)
    values, scales = quantise(jnp.asarray(row)[None])
    values = np.asarray(values[0], np.int32)
    assert np.abs(values).max() <= 127
    assert (values * np.sign(row) >= 0).all()
    assert (np.diff(values) >= 0).all()
    back = values * np.asarray(scales, np.float32)
    assert (np.abs(back - row) <= np.maximum(0.51 * top / 127, TINY)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_do_not_affect_other_tokens(bad):
    """The token's row is stored as finite values, and no other row changes, so no result becomes NaN."""
    good = np.random.default_rng(1).standard_normal((6, KV_HEADS, HEAD_DIM)).astype(np.float32)
    broken = good.copy()
    broken[2, 0, 3] = broken[4, :] = bad
    (values, scales), (want, want_scales) = (map(np.asarray, quantise(jnp.asarray(x))) for x in (broken, good))
    assert np.isfinite(scales).all()
    assert values.min() >= -127
    assert values[2, 0, 3] == (0 if np.isnan(bad) else np.sign(bad) * 127)
    others = [0, 1, 3, 5]
    np.testing.assert_array_equal(values[others], want[others])
    np.testing.assert_array_equal(scales[others], want_scales[others])
    np.testing.assert_array_equal(values[2, 1], want[2, 1])
    assert not values[4].any() or np.isinf(bad)
    assert not (values[4] * scales[4][..., None]).any()


def test_written_rows_are_read_back_and_no_other_slot_changes():
    new = np.random.default_rng(0).standard_normal((3, KV_HEADS, HEAD_DIM)).astype(np.float32)
    before = empty_pages(4)
    after = write_pages(before, jnp.asarray(new), jnp.asarray([3, 1, 1]), jnp.asarray([7, 0, 1]))
    back = dequantised(after)
    np.testing.assert_allclose(
        np.stack([back[3, :, 7], back[1, :, 0], back[1, :, 1]]), new, atol=np.abs(new).max() / 127 / 1.99
    )
    untouched = np.ones((4, 8), bool)
    untouched[[3, 1, 1], [7, 0, 1]] = False
    assert np.isnan(np.asarray(after.scales).swapaxes(1, 2)[untouched]).all()
    assert (np.asarray(after.values).swapaxes(1, 2)[untouched] == -128).all()


# -- reading --------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(lengths=lengths, page_size=st.sampled_from([8, 16, 64]), seed=st.integers(0, 99))
def test_decode_equals_reference(lengths, page_size, seed):
    check([(n, 1) for n in lengths], page_size=page_size, seed=seed, decode=True)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), page_size=st.sampled_from([8, 16]), seed=st.integers(0, 99))
def test_mixed_rows_equal_reference(data, page_size, seed):
    rows, left = [], TOKENS
    while left > 8 and len(rows) < 8:
        queries = data.draw(st.integers(1, min(left - 8, 70)))
        rows.append((queries + data.draw(st.integers(0, PAGES_PER_ROW * page_size - queries)), queries))
        left -= queries
    check(rows, page_size=page_size, seed=seed)


def test_bfloat16_queries_equal_reference_up_to_rounding():
    """Only the query and the result are bfloat16."""
    check([(40, 1), (7, 1)], decode=True, dtype=jnp.bfloat16, tolerance=2**-8)
    check([(40, 33), (7, 1)], dtype=jnp.bfloat16, tolerance=2**-8)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 190])
def test_kv_01_scales_of_unwritten_slots_may_be_nan(length, poison):
    check([(length, 1)], decode=True, poison=poison)
    check([(length, min(length, 40))], poison=poison)


@pytest.mark.parametrize("poisoned", [1, 2])
def test_kv_01_scales_of_keys_or_values_alone_are_nan(poisoned):
    (query, keys, values, batch), real = make_case([(17, 1), (33, 20)], page_size=16)
    clean = [query, quantised(keys, poison=0), quantised(values, poison=0), batch]
    mixed = list(clean)
    mixed[poisoned] = quantised((keys, values)[poisoned - 1])
    got, want = (np.asarray(run(*case, scale=0.25, implementation="xla")) for case in (mixed, clean))
    np.testing.assert_array_equal(got[:real], want[:real])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_kvq_01_attention_is_close_to_that_over_unquantised_pages(implementation):
    """Keys and values are up to 4 to 5. An error of half a step of 5/127 in each value changes a score of
    head_dim ** -0.5 * sum(q * k) by about 0.01 (root mean square), and a result by at most a step of its values. A
    wrong scale of 1.0 changes it by ten times that."""
    (query, keys, values, batch), real = make_case([(190, 1), (90, 60), (16, 16)], page_size=16)
    keys, values = 1.3 * keys, 1.3 * values
    want = np.asarray(run(query, keys, values, batch, scale=0.25, implementation="reference"))[:real]
    keys, values = quantised(keys), quantised(values)
    got = np.asarray(run(query, keys, values, batch, scale=0.25, implementation=implementation))[:real]
    error = np.sqrt(np.mean((got - want) ** 2))
    assert error < 0.01 * np.sqrt(np.mean(want**2))
    wrong_scales = [QuantPages(values=x.values, scales=jnp.ones_like(x.scales)) for x in (keys, values)]
    wrong = np.asarray(run(query, *wrong_scales, batch, scale=0.25, implementation=implementation))[:real]
    assert np.sqrt(np.mean((wrong - want) ** 2)) > 10 * error


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_kvq_02_whole_chunked_and_prefix_cached_prompts_are_equal(chunk, dtype):
    """A chunk attends to its own rows after quantisation, so a token's chunk does not matter."""
    length, page_size = 64, 16
    rng = np.random.default_rng(3)
    query, *new = (
        np.asarray(rng.standard_normal((length, heads, HEAD_DIM)), dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    table = np.array([[3, 1, 4, 2]], np.int32)

    def prefill(pages, start, stop):
        """One step: padded to a fixed size; padding rows write to page 0."""
        at = np.arange(start, start + length)
        real = at < stop
        page = np.where(real, table[0, np.minimum(at, length - 1) // page_size], 0)
        flat = [jnp.asarray(np.roll(x, -start, axis=0)) for x in (query, *new)]
        page, offset = jnp.asarray(page), jnp.asarray(at % page_size)
        pages = [write(p, x, page, offset) for p, x in zip(pages, flat[1:], strict=True)]
        batch = PagedBatch(
            query_start=jnp.asarray([0, stop - start], jnp.int32),
            kv_len=jnp.asarray([stop], jnp.int32),
            block_tables=jnp.asarray(table),
            decode=False,
        )
        return pages, np.asarray(run(flat[0], *pages, batch, scale=0.25), np.float32)[: stop - start]

    cold_pages, cold = prefill([empty_pages(5, page_size)] * 2, 0, length)
    pages, parts = [empty_pages(5, page_size)] * 2, []
    for start in range(0, length, chunk):
        pages, part = prefill(pages, start, min(start + chunk, length))
        parts.append(part)
    for got, want in zip(jax.tree.leaves(pages), jax.tree.leaves(cold_pages), strict=True):
        np.testing.assert_array_equal(got[1:], want[1:])
    tolerance = 2e-6 if dtype == jnp.float32 else 2**-8
    np.testing.assert_allclose(np.concatenate(parts), cold, atol=tolerance, rtol=tolerance)
    hit_pages, hit = prefill(cold_pages, 48, length)
    np.testing.assert_allclose(hit, cold[48:], atol=tolerance, rtol=tolerance)
    for got, want in zip(jax.tree.leaves(hit_pages), jax.tree.leaves(cold_pages), strict=True):
        np.testing.assert_array_equal(got[1:], want[1:])


# -- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_step_is_in_place_and_its_temporaries_do_not_grow_with_the_pool(dtype, decode):
    tokens, rows, page_size, head_dim = (8, 8, 32, 64) if decode else (64, 8, 32, 64)
    abstract = jax.ShapeDtypeStruct

    @functools.partial(jax.jit, donate_argnums=(0,))
    def step(pool, query, new, page, offset, query_start, kv_len, block_tables):
        batch = PagedBatch(query_start=query_start, kv_len=kv_len, block_tables=block_tables, decode=decode)
        keys, values = (write_pages(pages, new, page, offset) for pages in pool)
        return (keys, values), paged_attention(query, keys, values, batch, scale=0.125)

    def memory(num_pages):
        pages = jax.eval_shape(lambda: empty_pages(num_pages, page_size, head_dim))
        query, new = abstract((tokens, 6, head_dim), dtype), abstract((tokens, KV_HEADS, head_dim), dtype)
        ints = [abstract(shape, jnp.int32) for shape in ((tokens,), (tokens,), (rows + 1,), (rows,), (rows, 16))]
        compiled = step.lower((pages, pages), query, new, *ints).compile()
        return compiled.memory_analysis(), 2 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages))

    (once, pool), (twice, twice_pool) = memory(512), memory(1024)
    assert pool == 512 * 2 * KV_HEADS * page_size * (head_dim + 4)
    assert once.alias_size_in_bytes == pool
    assert twice.alias_size_in_bytes == twice_pool
    assert once.temp_size_in_bytes == twice.temp_size_in_bytes < pool / 2


# -- bad input ------------------------------------------------------------------------------------------------------


def test_errors_for_mismatched_pages_have_the_shapes():
    (query, keys, values, batch), _ = make_case([(5, 1)], page_size=8, decode=True)
    int8 = quantised(values)
    with pytest.raises(ValueError, match="key pages and value pages must both be quantised, or neither"):
        paged_attention(query, keys, int8, batch, scale=1.0)
    with pytest.raises(ValueError, match=r"scales of pages \(97, 2, 8, 16\) must be \(97, 2, 8\), got \(97, 2\)"):
        paged_attention(query, QuantPages(values=int8.values, scales=int8.scales[..., 0]), int8, batch, scale=1.0)
    with pytest.raises(ValueError, match=r"got \(97, 2, 8, 16\) and \(97, 1, 8, 16\)"):
        paged_attention(query, int8, jax.tree.map(lambda x: x[:, :1], int8), batch, scale=1.0)
