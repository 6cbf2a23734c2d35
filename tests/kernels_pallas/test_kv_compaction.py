"""KV compaction against the reference and against masked attention, over pools whose unwritten slots hold NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.kv_compaction import compact
from kernels_pallas.paged_attention import PagedBatch, QuantPages, paged_attention, write_pages

pytestmark = pytest.mark.smoke

KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 2, 16, 8, 8  # PAGES: maximum per sequence
NUM_PAGES = 2 * PAGES + 1
KINDS = ("float32", "uint16", "int8", "bfloat16")
run = jax.jit(compact, static_argnames="implementation")


def bits(pages) -> list[np.ndarray]:
    """The arrays of `pages` as bytes, [num_pages, kv_heads, page_size, bytes]."""
    return [np.asarray(x).view(np.uint8).reshape(*x.shape[:3], -1) for x in jax.tree.leaves(pages)]


def as_float64(pages) -> np.ndarray:
    """The values of the pages, dequantised, as float64."""
    if isinstance(pages, QuantPages):
        return np.asarray(pages.values, np.float64) * np.asarray(pages.scales, np.float64)[..., None]
    return np.asarray(pages.view(jnp.bfloat16) if pages.dtype == jnp.uint16 else pages, np.float64)


def make_pages(kind, rows, source, *, seed=0, integers=False):
    """Keys and values of a sequence of `rows` in pages `source`; all other slots hold NaN (int8: in their scales)."""
    rng = np.random.default_rng(seed)
    # Whatever `rows` is, the same programs run: the other rows go to a page that is cut off.
    shape = (NUM_PAGES + 1, KV_HEADS, PAGE_SIZE, HEAD_DIM)
    at = np.arange(PAGES * PAGE_SIZE)
    page = jnp.asarray(np.where(at < rows, np.asarray(source)[at // PAGE_SIZE], NUM_PAGES), jnp.int32)
    offset = jnp.asarray(at % PAGE_SIZE, jnp.int32)
    pools = []
    for _ in range(2):
        given = rng.standard_normal((rows, KV_HEADS, HEAD_DIM)) * rng.uniform(0.5, 2, (rows, KV_HEADS, 1))
        given = np.round(given) if integers else given  # many norms are equal
        given = np.concatenate([given, np.zeros((len(at) - rows, KV_HEADS, HEAD_DIM))])
        if kind == "int8":
            empty = QuantPages(values=jnp.full(shape, -77, jnp.int8), scales=jnp.full(shape[:3], jnp.nan))
        elif kind == "uint16":
            empty = jnp.full(shape, 0x7FC1, jnp.uint16)
        else:
            empty = jnp.full(shape, jnp.nan, kind)
        dtype = jnp.bfloat16 if kind in ("uint16", "bfloat16") else jnp.float32
        written = write_pages(empty, jnp.asarray(given, dtype), page, offset)
        pools.append(jax.tree.map(lambda pages: pages[:NUM_PAGES], written))
    return tuple(pools)


def page_lists(seed):
    """The pages of a sequence, and other pages as targets."""
    pages = np.random.default_rng(seed).permutation(NUM_PAGES - 1)[: 2 * PAGES].astype(np.int32) + 1
    return pages[:PAGES], pages[PAGES:]


def rows_of(pages, listed, count):
    """The first `count` rows in the pages `listed`, as bytes: [array][kv_heads, count, bytes]."""
    by_row = [array[listed].swapaxes(0, 1).reshape(KV_HEADS, -1, array.shape[3]) for array in bits(pages)]
    return [array[:, :count] for array in by_row]


def kept_rows(before, after, source, target, rows, keep):
    """The original row of each kept row: [kv_heads, keep]. All rows of `before` must differ."""
    keys, moved = (rows_of(x[0], listed, n) for x, listed, n in ((before, source, rows), (after, target, keep)))
    same = np.ones((KV_HEADS, keep, rows), bool)
    for mine, theirs in zip(moved, keys, strict=True):
        same &= (mine[:, :, None] == theirs[:, None, :]).all(-1)
    assert (same.sum(-1) == 1).all()
    return same.argmax(-1)


def scalars(*numbers):
    return [jnp.asarray(number, jnp.int32) for number in numbers]


def call(pools, source, rows, keep, target, sinks, window, implementation=None):
    rows, keep, sinks, window = scalars(rows, keep, sinks, window)
    keys, values = run(
        *((x,) for x in pools), source, rows, keep, target, sinks=sinks, window=window, implementation=implementation
    )
    return keys[0], values[0]


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(), kind=st.sampled_from(KINDS), seed=st.integers(0, 99), integers=st.booleans(), in_place=st.booleans()
)
def test_xla_equals_reference(data, kind, seed, integers, in_place):
    rows = data.draw(st.integers(1, PAGES * PAGE_SIZE))
    keep = data.draw(st.integers(1, rows))
    sinks = data.draw(st.integers(0, keep))
    window = data.draw(st.integers(0, keep - sinks))
    source, elsewhere = page_lists(seed)
    target = source if in_place else elsewhere
    # Not for int8: rounding of products with a scale decides the order of equal norms.
    before = make_pages(kind, rows, source, seed=seed, integers=integers and kind != "int8")
    found, expected = (call(before, source, rows, keep, target, sinks, window, name) for name in ("xla", "reference"))
    untouched = np.setdiff1d(np.arange(NUM_PAGES), target)
    for mine, theirs, old in zip(found, expected, before, strict=True):
        for x, y in zip(rows_of(mine, target, keep), rows_of(theirs, target, keep), strict=True):
            np.testing.assert_array_equal(x, y)
        for x, y in zip(bits(mine), bits(old), strict=True):
            np.testing.assert_array_equal(x[untouched], y[untouched])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_sinks_window_and_smallest_norms_are_kept(kind, implementation):
    """By hand for each head: the kept rows, their order, and their bits."""
    rows, keep, sinks, window = 53, 30, 4, 8
    source, target = page_lists(3)
    before = make_pages(kind, rows, source, seed=3)
    after = call(before, source, rows, keep, target, sinks, window, implementation)
    kept = kept_rows(before, after, source, target, rows, keep)
    assert (np.diff(kept, axis=1) > 0).all()
    assert (kept[0] != kept[1]).any()
    keys = as_float64(before[0])
    squares = np.square(keys[source].swapaxes(0, 1).reshape(KV_HEADS, -1, HEAD_DIM)[:, :rows]).sum(-1)
    fractions, exponents = np.frexp(squares)
    norms = np.ldexp(np.round(fractions * 1024), exponents)
    for head in range(KV_HEADS):
        assert {*range(sinks), *range(rows - window, rows)} <= set(kept[head].tolist())
        between = np.arange(sinks, rows - window)
        smallest = between[np.argsort(norms[head, between], kind="stable")[: keep - sinks - window]]
        np.testing.assert_array_equal(kept[head, sinks : keep - window], np.sort(smallest))
    for mine, theirs in zip(after, before, strict=True):  # values move with their keys, scales with both
        for x, y in zip(rows_of(mine, target, keep), rows_of(theirs, source, rows), strict=True):
            np.testing.assert_array_equal(x, np.take_along_axis(y, kept[:, :, None], axis=1))


def test_each_layer_keeps_its_own_rows():
    rows, keep, (source, target) = 50, 21, page_lists(9)
    first, second = (make_pages("float32", rows, source, seed=seed) for seed in (1, 2))
    numbers = dict(zip(("rows", "keep", "sinks", "window"), scalars(rows, keep, 2, 3), strict=True))
    for name in ("xla", "reference"):
        keys, values = run(
            *zip(first, second, strict=True), source=source, target=target, **numbers, implementation=name
        )
        for layer, alone in enumerate((first, second)):
            expected = call(alone, source, rows, keep, target, 2, 3, name)
            for mine, theirs in zip((keys[layer], values[layer]), expected, strict=True):
                np.testing.assert_array_equal(rows_of(mine, target, keep), rows_of(theirs, target, keep))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 8, 13, 64])
def test_keeping_all_rows_copies_them(kind, rows):
    source, target = page_lists(5)
    before = make_pages(kind, rows, source)
    after = call(before, source, rows, rows, target, 0, 0)
    for mine, theirs in zip(after, before, strict=True):
        for x, y in zip(rows_of(mine, target, rows), rows_of(theirs, source, rows), strict=True):
            np.testing.assert_array_equal(x, y)


def test_of_equal_norms_the_earlier_rows_are_kept():
    rows, source = 40, page_lists(0)[0]
    keys = jnp.ones((NUM_PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM))
    values = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.float32)[:, None, None], (rows, KV_HEADS, HEAD_DIM))
    at = jnp.arange(rows)
    values = write_pages(keys, values, jnp.asarray(source)[at // PAGE_SIZE], at % PAGE_SIZE)
    for name in ("xla", "reference"):
        _, after = call((keys, values), source, rows, 10, source, 0, 3, name)
        kept = np.asarray(after)[source[:2]].swapaxes(0, 1).reshape(KV_HEADS, -1, HEAD_DIM)[:, :10, 0]
        np.testing.assert_array_equal(kept, [[0, 1, 2, 3, 4, 5, 6, 37, 38, 39]] * 2)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_rounding_does_not_choose_between_equal_tokens(implementation):
    """The same tokens in another batch: their keys differ in the last bits only, and the same rows are kept."""
    rows, keep, source = 60, 31, page_lists(2)[0]
    rng = np.random.default_rng(4)
    tokens = rng.standard_normal((6, KV_HEADS, HEAD_DIM))[rng.integers(0, 6, PAGES * PAGE_SIZE)]
    at = np.arange(PAGES * PAGE_SIZE)
    place = jnp.asarray(source[at // PAGE_SIZE]), jnp.asarray(at % PAGE_SIZE)
    empty = jnp.zeros((NUM_PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM))
    number = write_pages(empty, jnp.broadcast_to(jnp.asarray(at, jnp.float32)[:, None, None], tokens.shape), *place)
    kept = []
    for _ in range(3):
        noise = 1 + 3e-7 * rng.uniform(-1, 1, tokens.shape)
        keys = write_pages(empty, jnp.asarray(tokens * noise, jnp.float32), *place)
        _, after = call((keys, number), source, rows, keep, source, 2, 4, implementation)
        kept.append(np.asarray(after)[source].swapaxes(0, 1).reshape(KV_HEADS, -1, HEAD_DIM)[:, :keep, 0])
    np.testing.assert_array_equal(kept[1], kept[0])
    np.testing.assert_array_equal(kept[2], kept[0])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_nan_keys_are_dropped_first_and_infinite_norms_are_large(implementation):
    rows, keep, source = 24, 20, page_lists(1)[0]
    keys, values = make_pages("float32", rows, source)
    broken = {5: np.nan, 9: -np.nan, 12: np.inf, 17: 1e30}
    for row, value in broken.items():
        keys = keys.at[source[row // PAGE_SIZE], :, row % PAGE_SIZE, 3].set(value)
        values = values.at[source[row // PAGE_SIZE], :, row % PAGE_SIZE, 3].set(np.nan)
    after = call((keys, values), source, rows, keep, source, 1, 1, implementation)
    for pages in after:
        assert np.isfinite(np.asarray(pages)[source].swapaxes(0, 1).reshape(KV_HEADS, -1, HEAD_DIM)[:, :keep]).all()


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_kvc_01_attention_over_kept_rows_equals_masked_attention(kind):
    rows, keep, sinks, window, heads = 59, 33, 4, 8, 6
    source, target = page_lists(7)
    before = make_pages(kind, rows, source, seed=7)
    after = call(before, source, rows, keep, target, sinks, window)
    kept = kept_rows(before, after, source, target, rows, keep)
    query = np.random.default_rng(8).standard_normal((1, heads, HEAD_DIM)).astype(np.float32)
    batch = PagedBatch(
        query_start=jnp.asarray([0, 1], jnp.int32),
        kv_len=jnp.asarray([keep], jnp.int32),
        block_tables=jnp.asarray(target)[None],
        decode=True,
    )
    found = np.asarray(paged_attention(jnp.asarray(query), *after, batch, scale=0.25))[0]
    keys, values = (as_float64(x)[source].swapaxes(0, 1).reshape(KV_HEADS, -1, HEAD_DIM)[:, :rows] for x in before)
    for head in range(heads):
        group = head // (heads // KV_HEADS)
        scores = keys[group] @ query[0, head] * 0.25
        visible = np.isin(np.arange(rows), kept[group])
        weights = np.where(visible, np.exp(scores - scores.max()), 0.0)
        np.testing.assert_allclose(found[head], weights @ values[group] / weights.sum(), atol=1e-5)


def test_errors_for_mismatched_shapes_have_the_shapes():
    source, target = page_lists(0)
    keys, values = make_pages("int8", 9, source)
    rows, keep, none = scalars(9, 5, 0)
    fewer = jax.tree.map(lambda x: x[:-1], values)
    with pytest.raises(ValueError, match=r"need one shape.* got \[\(17, 2, 8, 16\)\], \[\(16, 2, 8, 16\)\]"):
        compact((keys,), (fewer,), jnp.asarray(source), rows, keep, jnp.asarray(target), sinks=none, window=none)
    with pytest.raises(ValueError, match=r"no implementation 'cuda'"):
        call((keys, values), source, 9, 5, target, 0, 0, "cuda")
