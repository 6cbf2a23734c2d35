"""Paged attention of decode batches in Pallas for Mosaic GPU: Hopper, by TMA and wgmma.

One program of 128 threads computes one split of one row's context for one KV head. Pages come straight from the pool
into shared memory, a TMA box each, `num_stages` tiles ahead of the products. The queries of a KV head's group are the
first of the 64 rows that a wgmma has; the other rows hold whatever shared memory held: rows of a product do not mix,
and only the group's are written out.

Weights go to the second product through shared memory and not through registers, where ptxas before 13.3 is known to
miscompile it (triton-lang/triton#9433).

Splits: each row divides its own tokens, so that a batch of short and long rows is balanced; partial results are
float32, normalised, with the logarithm (base 2) of their mass, and are merged in float32.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import pallas
from kernels_pallas.paged_attention.pages import QuantPages
from kernels_pallas.paged_attention.settings import DecodeSettings
from kernels_pallas.pallas import mosaic_gpu as plgpu
from kernels_pallas.pallas import pl

QUERY_ROWS = 64  # of one wgmma
COLUMNS = 64  # of the head that one product, and one copy of the result, covers
MASKED = -1e30  # finite, so that a split without work merges as exp2(MASKED - top) = 0


@functools.partial(jax.jit, static_argnames=("scale", "window", "settings", "interpret"))
def attention(query, key_pages, value_pages, batch, *, scale, window=None, settings=None, interpret=False):
    """See `api.paged_attention`; decode batches only.

    Args:
        settings: tiles, splits and stages; None asks `settings.py`. Its `num_warps` does not apply: a wgmma takes four.
        interpret: run on a CPU inside `pallas.mosaic_interpreter`, with race detection.

    Raises:
        ValueError: the batch is mixed, or `supported` says no.
    """
    if not batch.decode:
        raise ValueError("paged_attention: 'mosaic' computes decode batches only, and this one is mixed; use 'triton'")
    rows, heads, head_dim = query.shape
    kv_heads, page_size = key_pages.shape[1:3]
    group = heads // kv_heads
    dtype = key_pages.values.dtype if isinstance(key_pages, QuantPages) else key_pages.dtype
    if refusal := supported(head_dim=head_dim, page_size=page_size, group=group, dtype=dtype):
        raise ValueError(f"paged_attention: {refusal}")
    settings = settings or DecodeSettings(key_tile=64, splits=4, num_warps=4, num_stages=2)
    # TMA writes whole 8-row pieces of the swizzled tile.
    group_rows = -(-group // 8) * 8
    grouped = jnp.pad(query.reshape(rows, kv_heads, group, head_dim), ((0, 0), (0, 0), (0, group_rows - group), (0, 0)))

    tile, stages = settings.key_tile, settings.num_stages
    in_tile = functools.partial(_shared, query.dtype)
    kernel = plgpu.kernel(
        functools.partial(_kernel, settings=settings, page_size=page_size, scale=scale, window=window),
        out_type=(
            jax.ShapeDtypeStruct((settings.splits, rows, kv_heads, group_rows, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((settings.splits, rows, kv_heads, QUERY_ROWS), jnp.float32),
        ),
        grid=(rows, kv_heads, settings.splits),
        grid_names=("row", "head", "split"),
        scratch_types=(
            in_tile(QUERY_ROWS, head_dim),
            in_tile(stages, tile, head_dim),
            in_tile(stages, tile, head_dim),
            in_tile(QUERY_ROWS, tile),
            _shared(jnp.float32, QUERY_ROWS, COLUMNS),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=-(-tile // page_size), num_barriers=stages),
            plgpu.Barrier(num_arrivals=-(-tile // page_size), num_barriers=stages),
        ),
        interpret=pallas.mosaic_interpret() if interpret else None,
        kernel_name="paged_decode_mosaic",
    )
    parts, masses = kernel(grouped, key_pages, value_pages, batch.block_tables, batch.kv_len)
    parts, masses = parts[:, :, :, :group], masses[:, :, :, :group]
    weights = jnp.exp2(masses - masses.max(0, keepdims=True))
    weights = weights / weights.sum(0, keepdims=True)
    return (parts * weights[..., None]).sum(0).reshape(rows, heads, head_dim).astype(query.dtype)


def supported(*, head_dim: int, page_size: int, group: int, dtype: Any) -> str | None:
    """None, or a sentence that says what this kernel cannot compute; `dtype` is that of the pages."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"'mosaic' reads bfloat16 and float16 pages, not {jnp.dtype(dtype).name}"
    if head_dim not in (64, 128):
        return f"'mosaic' has head sizes 64 and 128, not {head_dim}"
    if page_size not in (16, 32, 64, 128):
        return f"'mosaic' has page sizes 16, 32, 64 and 128, not {page_size}"
    if not 1 <= group <= 16:
        return f"'mosaic' has groups of 1 to 16 query heads a KV head, not {group}"
    return None


def _shared(dtype, *shape):
    """Shared memory for `shape`, its last two axes swizzled as TMA and wgmma want it."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = min(128, shape[-1] * itemsize)
    transforms = (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _kernel(
    # Global memory.
    query,  # [rows, kv_heads, group_rows, head_dim]
    keys,  # [num_pages, kv_heads, page_size, head_dim]
    values,
    tables,  # [rows, pages_per_row]
    lengths,  # [rows]
    out,  # [splits, rows, kv_heads, group_rows, head_dim]
    masses,  # [splits, rows, kv_heads, QUERY_ROWS]
    # Shared memory.
    query_tile,  # [QUERY_ROWS, head_dim]
    key_tiles,  # [stages, tile, head_dim]
    value_tiles,
    weight_tile,  # [QUERY_ROWS, tile]
    out_tile,  # [QUERY_ROWS, COLUMNS]
    query_ready,
    keys_ready,  # [stages]
    values_ready,
    *,
    settings,
    page_size,
    scale,
    window,
):
    row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    stages, tile, head_dim = key_tiles.shape
    group_rows = query.shape[2]
    dtype = query_tile.dtype
    box = min(page_size, tile)  # tokens of one TMA copy, which never crosses a page

    length = lengths[row]
    first = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)  # the first visible token
    context = first // box * box
    chunk = pl.cdiv(pl.cdiv(length - context, settings.splits), tile) * tile
    start = context + split * chunk
    end = jnp.minimum(start + chunk, length)
    trips = pl.cdiv(jnp.maximum(end - start, 0), tile)
    last_box = (length - 1) // box

    def fetch(trip):
        """Starts the copies of a tile. Boxes past the row's end read its last one again, to be masked: the barriers
        count the same number of arrivals every time."""
        stage = lax.rem(trip, stages)
        for i in range(tile // box):
            number = jnp.minimum((start + trip * tile) // box + i, last_box)
            page = tables[row, number * box // page_size]
            here, there = pl.ds(number * box % page_size, box), pl.ds(i * box, box)
            for pages, tiles, ready in ((keys, key_tiles, keys_ready), (values, value_tiles, values_ready)):
                plgpu.copy_gmem_to_smem(pages.at[page, head, here], tiles.at[stage, there], ready.at[stage])

    for trip in range(stages - 1):
        pl.when(trip < trips)(functools.partial(fetch, jnp.int32(trip)))
    plgpu.copy_gmem_to_smem(query.at[row, head], query_tile.at[pl.ds(0, group_rows)], query_ready)
    plgpu.barrier_wait(query_ready)

    def visible(shape, axis, at):
        """Which tokens of the tile that begins at `at` are visible to the query; `axis` runs over them."""
        token = at + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
        return (token >= first) & (token < end)

    def product(left, right):
        def of(accumulator):
            plgpu.wgmma(accumulator, left, right)
            return accumulator[...]

        return pl.run_scoped(of, plgpu.ACC((left.shape[0], right.shape[1]), jnp.float32))

    def body(trip, state):
        totals, top, mass = state
        stage, at = lax.rem(trip, stages), start + trip * tile

        plgpu.barrier_wait(keys_ready.at[stage])
        scores = product(query_tile, key_tiles.at[stage].T) * (scale * math.log2(math.e))
        scores = jnp.where(visible(scores.shape, 1, at), scores, MASKED)
        new_top = jnp.maximum(top, scores.max(axis=1))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        weight_tile[...] = weights.astype(dtype)
        plgpu.commit_smem()
        # All threads have passed the last trip's products: its stage is free.
        pl.when(trip + stages - 1 < trips)(lambda: fetch(trip + stages - 1))

        plgpu.barrier_wait(values_ready.at[stage])

        @pl.when((at < first) | (at + tile > end))
        def _():
            # What is not visible may be NaN, and 0 * NaN would reach the sum.
            for column in range(0, head_dim, COLUMNS):
                part = value_tiles.at[stage, :, pl.ds(column, COLUMNS)]
                part[...] = jnp.where(visible((tile, COLUMNS), 0, at), part[...], 0)
            plgpu.commit_smem()

        mass = mass * shrink + weights.sum(axis=1)
        totals = tuple(
            total * lax.broadcast_in_dim(shrink, total.shape, [0])
            + product(weight_tile, value_tiles.at[stage, :, pl.ds(i * COLUMNS, COLUMNS)])
            for i, total in enumerate(totals)
        )
        return totals, new_top, mass

    def full(shape, value, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    layout = plgpu.Layout.WGMMA
    empty = (
        tuple(full((QUERY_ROWS, COLUMNS), 0, layout) for _ in range(head_dim // COLUMNS)),
        full((QUERY_ROWS,), MASKED, layout.reduce(1)),
        full((QUERY_ROWS,), 0, layout.reduce(1)),
    )
    totals, top, mass = lax.fori_loop(0, trips, body, empty)

    mass = jnp.where(mass > 0, mass, 1)  # of a split without work: its total is 0 and its top is MASKED
    masses[split, row, head] = top + jnp.log2(mass)
    for i, total in enumerate(totals):
        out_tile[...] = total / lax.broadcast_in_dim(mass, total.shape, [0])
        plgpu.commit_smem()
        there = out.at[split, row, head, :, pl.ds(i * COLUMNS, COLUMNS)]
        plgpu.copy_smem_to_gmem(out_tile.at[pl.ds(0, group_rows)], there)
        plgpu.wait_smem_to_gmem(0)
