"""Paged attention for decode batches on NVIDIA Hopper GPUs (Pallas, Mosaic GPU: TMA and wgmma).

A program of 128 threads computes one KV head of one row, or one split of it. TMA copies pages from the pool to shared
memory, with `num_stages` tiles in flight. A wgmma has at least 64 rows, but a group has at most 16 queries, so the
products are transposed: scores are [tile, group] and the result is [head_dim, group]. The group is wgmma's narrow side,
which may be as small as 8.

Weights are passed to the second product through shared memory, because they are its right operand. (As left operand in
registers, ptxas before 13.3 may miscompile them: triton-lang/triton#9433.)

Decoding is bound by memory reads, and few rows with long contexts would leave most of the GPU idle, so `splits`
programs share a row. Each row divides its own tokens, so the work is balanced for any length. Partial results are
float32; XLA merges them, weighted by their log-sum-exp.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import pallas
from kernels_pallas.paged_attention.pages import QuantPages
from kernels_pallas.paged_attention.settings import DecodeSettings, mosaic_settings
from kernels_pallas.paged_attention.triton_common import LOG2_E, MASKED, device_kind
from kernels_pallas.pallas import mosaic_gpu, pl

HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
MAX_GROUP = 16
COLUMNS = 64  # columns of a tile of values that are masked at a time
MIN_SHARE = 128  # tokens per split; starting a program and merging its result costs as much as reading about that many


@functools.partial(jax.jit, static_argnames=("scale", "window", "settings", "interpret"))
def attention(
    query,
    key_pages,
    value_pages,
    batch,
    *,
    scale: float,
    window: int | None = None,
    settings: DecodeSettings | None = None,
    interpret: bool = False,
):
    """See `api.paged_attention`; for decode batches only.

    Args:
        settings: tiles and splits. Default: the device's table entry. `num_warps` is ignored; wgmma needs four.
        interpret: run the kernel in `pallas.mosaic_interpreter`, for tests.

    Raises:
        ValueError: the batch is mixed, or the kernel does not support its shapes or dtypes.
    """
    if not batch.decode:
        raise ValueError("paged_attention: mosaic supports decode batches only, got a mixed batch: use triton")
    if (reason := unsupported(query, key_pages, value_pages)) is not None:
        raise ValueError(f"paged_attention: {reason}")
    rows, heads, head_dim = query.shape
    _, kv_heads, page_size, _ = key_pages.shape
    group = heads // kv_heads
    if settings is None:
        settings = mosaic_settings(
            device_kind(),
            rows=rows,
            kv_heads=kv_heads,
            group=group,
            head_dim=head_dim,
            page_size=page_size,
            max_context=batch.block_tables.shape[1] * page_size,
            itemsize=query.dtype.itemsize,
        )
    splits, tile, stages = settings.splits, settings.key_tile, settings.num_stages

    # wgmma needs both operands of a product with the same swizzle. With 32 bytes a tile of weights can be stored token
    # by token, as it is computed. TMA and wgmma are faster with 128 bytes, which needs the transposed tile.
    transposed = pallas.MOSAIC_STORES_TRANSPOSED
    group_rows = 8 if group <= 8 and transposed else 16
    weight_shape = (group_rows, tile) if transposed else (tile, group_rows)
    swizzle = 128 if transposed else 32
    boxes = tile // min(tile, page_size)
    kernel = mosaic_gpu.kernel(
        functools.partial(_share_kernel, scale=scale * LOG2_E, window=window, splits=splits, transposed=transposed),
        out_type=(
            jax.ShapeDtypeStruct((splits, rows, kv_heads, head_dim, group_rows), jnp.float32),
            jax.ShapeDtypeStruct((splits, rows, kv_heads, group_rows), jnp.float32),
        ),
        grid=(rows, kv_heads, splits),
        grid_names=("row", "head", "split"),
        scratch_types=(
            _swizzled((group_rows, head_dim), query.dtype, 128),
            _swizzled((stages, tile, head_dim), query.dtype, 128),
            _swizzled((stages, tile, head_dim), query.dtype, swizzle),
            _swizzled(weight_shape, query.dtype, swizzle),
            _swizzled((head_dim, group_rows), jnp.float32, 4 * group_rows),
            mosaic_gpu.SMEM((group_rows,), jnp.float32),
            mosaic_gpu.Barrier(),
            mosaic_gpu.Barrier(num_arrivals=boxes, num_barriers=stages),
            mosaic_gpu.Barrier(num_arrivals=boxes, num_barriers=stages),
        ),
        # Enough for reducing a tile of scores. With the default, one program fewer fits on an SM.
        compiler_params=mosaic_gpu.CompilerParams(reduction_scratch_bytes=1024),
        interpret=pallas.mosaic_interpret() if interpret else None,
        kernel_name="paged_decode_mosaic",
    )
    queries = query.reshape(rows, kv_heads, group, head_dim)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, group_rows - group), (0, 0)))
    averages, logs = kernel(queries, key_pages, value_pages, batch.block_tables, batch.kv_len)
    averages, logs = averages[..., :group], logs[..., None, :group]
    weights = jnp.exp2(logs - logs.max(axis=0, keepdims=True))
    out = (averages * weights).sum(axis=0) / weights.sum(axis=0)
    return out.swapaxes(2, 3).reshape(rows, heads, head_dim).astype(query.dtype)


def unsupported(query, key_pages, value_pages) -> str | None:
    """The reason why this kernel does not support arrays, with what it supports; None if it does.

    It also needs a Hopper GPU (compute capability 9.0), which is not checked here.

    Args:
        query: [tokens, heads, head_dim], an array or a `jax.ShapeDtypeStruct`.
        key_pages: [num_pages, kv_heads, page_size, head_dim], likewise, quantised or not.
        value_pages: likewise.
    """
    heads, head_dim = query.shape[1:]
    _, kv_heads, page_size, _ = key_pages.shape
    if isinstance(key_pages, QuantPages) or isinstance(value_pages, QuantPages):
        return "int8 pages: the Mosaic kernel reads bfloat16 and float16 only"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries of {query.dtype}: the Mosaic kernel supports bfloat16 and float16"
    if key_pages.dtype != query.dtype or value_pages.dtype != query.dtype:
        return (
            f"pages of {key_pages.dtype} and {value_pages.dtype}: the Mosaic kernel supports the dtype of the queries, "
            f"{query.dtype}"
        )
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim}: the Mosaic kernel supports {HEAD_DIMS}"
    if page_size not in PAGE_SIZES:
        return f"page_size {page_size}: the Mosaic kernel supports {PAGE_SIZES}"
    if heads // kv_heads > MAX_GROUP:
        return f"{heads} heads over {kv_heads} KV heads: the Mosaic kernel supports at most {MAX_GROUP} per KV head"
    return None


def _swizzled(shape, dtype, swizzle):
    """Shared memory with its last two axes in the layout of TMA and wgmma; `swizzle` is in bytes."""
    transforms = (
        mosaic_gpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)),
        mosaic_gpu.SwizzleTransform(swizzle),
    )
    return mosaic_gpu.SMEM(shape, dtype, transforms=transforms)


def _share_kernel(
    # Global memory.
    query,  # [rows, kv_heads, group_rows, head_dim]
    key_pages,  # [num_pages, kv_heads, page_size, head_dim]
    value_pages,
    block_tables,  # [rows, pages_per_row]
    kv_len,  # [rows]
    averages,  # [splits, rows, kv_heads, head_dim, group_rows]
    logs,  # [splits, rows, kv_heads, group_rows]
    # Shared memory.
    query_tile,  # [group_rows, head_dim]
    key_tiles,  # [stages, tile, head_dim]
    value_tiles,
    weight_tile,  # [group_rows, tile] if transposed, [tile, group_rows] if not
    average_tile,  # [head_dim, group_rows]
    log_tile,  # [group_rows]
    query_there,
    keys_there,  # [stages]
    values_there,
    *,
    scale,
    window,
    splits,
    transposed,
):
    """A program of the grid (row, KV head, split). Writes the weighted average of values and the log2 of the sum of
    weights; a split without tokens writes zeros and MASKED."""
    row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    stages, tile, head_dim = key_tiles.shape
    page_size = key_pages.shape[2]
    box = min(page_size, tile)  # tokens of one copy, which never crosses a page
    weight_view = weight_tile.T if transposed else weight_tile

    length = kv_len[row]
    first_seen = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)
    first_box = lax.div(first_seen, box)
    last_box = lax.div(length - 1, box)
    share = pl.cdiv(pl.cdiv(length - first_box * box, splits), tile) * tile
    share = jnp.maximum(share, pl.cdiv(MIN_SHARE, tile) * tile)
    start = first_box * box + split * share
    end = jnp.minimum(start + share, length)
    trips = pl.cdiv(jnp.maximum(end - start, 0), tile)

    def fetch(trip):
        """Start the copies of a tile. Boxes past the row's last one repeat it and are masked, because a barrier needs
        the same number of copies every time."""
        stage = lax.rem(trip, stages)
        for i in range(tile // box):
            number = jnp.minimum(lax.div(start, box) + trip * (tile // box) + i, last_box)
            page = block_tables[row, lax.div(number * box, page_size)]
            source, target = pl.ds(lax.rem(number * box, page_size), box), pl.ds(i * box, box)
            for pages, tiles, there in ((key_pages, key_tiles, keys_there), (value_pages, value_tiles, values_there)):
                mosaic_gpu.copy_gmem_to_smem(pages.at[page, head, source], tiles.at[stage, target], there.at[stage])

    def seen(first, shape):
        """Mask of the tokens to attend to, in the tile that begins at `first`, along the first axis of `shape`."""
        token = first + mosaic_gpu.broadcasted_iota(jnp.int32, shape, 0, layout=mosaic_gpu.Layout.WGMMA)
        return (token >= first_seen) & (token < end)

    def trip(i, state):
        total, top, mass = state
        stage, first = lax.rem(i, stages), start + i * tile

        mosaic_gpu.barrier_wait(keys_there.at[stage])
        scores = _product(key_tiles.at[stage], query_tile.T) * scale
        scores = jnp.where(seen(first, scores.shape), scores, MASKED)
        new_top = jnp.maximum(top, scores.max(axis=0))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [1]))
        mass = mass * shrink + weights.sum(axis=0)
        weight_view[...] = weights.astype(weight_tile.dtype)
        mosaic_gpu.commit_smem()
        # All threads have passed the barrier, so the last trip's products no longer read their stage.
        pl.when(i + stages - 1 < trips)(lambda: fetch(i + stages - 1))

        mosaic_gpu.barrier_wait(values_there.at[stage])

        @pl.when((first < first_seen) | (first + tile > end))
        def mask_values():
            # Unwritten slots may hold NaN, and 0 * NaN is NaN.
            for column in range(0, head_dim, COLUMNS):
                part = value_tiles.at[stage, :, pl.ds(column, COLUMNS)]
                part[...] = jnp.where(seen(first, part.shape), part[...], 0)
            mosaic_gpu.commit_smem()

        part = _product(value_tiles.at[stage].T, weight_view)
        return total * lax.broadcast_in_dim(shrink, total.shape, [1]) + part, new_top, mass

    for i in range(stages - 1):
        pl.when(i < trips)(functools.partial(fetch, jnp.int32(i)))
    mosaic_gpu.copy_gmem_to_smem(query.at[row, head], query_tile, query_there)
    mosaic_gpu.barrier_wait(query_there)

    total, top, mass = lax.fori_loop(0, trips, trip, _empty_state(average_tile.shape))
    mass = jnp.where(mass > 0, mass, 1)
    average_tile[...] = total / lax.broadcast_in_dim(mass, total.shape, [1])
    log_tile[...] = top + jnp.log2(mass)
    mosaic_gpu.commit_smem()
    mosaic_gpu.copy_smem_to_gmem(average_tile, averages.at[split, row, head])
    mosaic_gpu.copy_smem_to_gmem(log_tile, logs.at[split, row, head])
    mosaic_gpu.wait_smem_to_gmem(0)


def _product(left, right):
    """Compute left [m, k] @ right [k, n] of two references to shared memory, in float32."""

    def of(accumulator):
        mosaic_gpu.wgmma(accumulator, left, right)
        return accumulator[...]

    return pl.run_scoped(of, mosaic_gpu.WGMMAAccumulatorRef((left.shape[0], right.shape[1])))


def _empty_state(shape):
    """The initial state: sum of values [head_dim, group_rows], largest score and sum of weights [group_rows]."""
    layout = mosaic_gpu.Layout.WGMMA

    def full(shape, number, layout):
        return mosaic_gpu.layout_cast(jnp.full(shape, number, jnp.float32), layout)

    return full(shape, 0, layout), full(shape[1:], MASKED, layout.reduce(0)), full(shape[1:], 0, layout.reduce(0))
