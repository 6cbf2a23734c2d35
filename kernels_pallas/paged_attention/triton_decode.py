"""Paged attention for decode batches on NVIDIA GPUs (Pallas, Triton backend; A100 and newer).

A program computes one KV head of one row: the query heads of the group are the rows of one tile for the tensor cores,
so each key is read once for all of them. Decoding is bound by memory reads, and few rows with long contexts would leave
most of the GPU idle, so `splits` programs share a row. Each row divides its own tokens, so the work is balanced for any
length. Partial results are float32; a second launch merges them, weighted by their log-sum-exp.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.paged_attention.settings import DecodeSettings, decode_settings
from kernels_pallas.paged_attention.triton_common import (
    LOG2_E,
    MASKED,
    attend,
    device_kind,
    empty_state,
    index_tile,
    padded_group,
    unsupported,
)
from kernels_pallas.pallas import pl, triton

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
        settings: tiles and splits. Default: the device's table entry.
        interpret: run the kernels on any device, slowly, for tests.

    Raises:
        ValueError: the batch is mixed, or the kernels do not support its shapes or dtypes.
    """
    if not batch.decode:
        raise ValueError("paged_attention: triton_decode supports decode batches only, use triton_mixed for others")
    if (reason := unsupported(query, key_pages, value_pages)) is not None:
        raise ValueError(f"paged_attention: {reason}")
    rows, heads, head_dim = query.shape
    _, kv_heads, page_size, _ = key_pages.shape
    if settings is None:
        settings = decode_settings(
            device_kind(),
            rows=rows,
            kv_heads=kv_heads,
            group=heads // kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            max_context=batch.block_tables.shape[1] * page_size,
            itemsize=jax.tree.leaves(key_pages)[0].dtype.itemsize,
        )
    splits = settings.splits
    whole = jax.ShapeDtypeStruct(query.shape, query.dtype)
    partial = (
        jax.ShapeDtypeStruct((rows, heads, splits, head_dim), jnp.float32),
        jax.ShapeDtypeStruct((rows, heads, splits), jnp.float32),
    )
    out = pl.pallas_call(
        functools.partial(
            _share_kernel, scale=scale * LOG2_E, window=window, splits=splits, key_tile=settings.key_tile
        ),
        grid=(rows, kv_heads, splits),
        out_shape=whole if splits == 1 else partial,
        compiler_params=triton.CompilerParams(num_warps=settings.num_warps, num_stages=settings.num_stages),
        interpret=interpret,
        name="paged_decode",
    )(query, key_pages, value_pages, batch.block_tables, batch.kv_len)
    if splits == 1:
        return out
    return pl.pallas_call(
        _merge_kernel,
        grid=(rows, heads),
        out_shape=whole,
        compiler_params=triton.CompilerParams(num_warps=4 if splits * head_dim > 1024 else 1, num_stages=1),
        interpret=interpret,
        name="paged_decode_merge",
    )(*out)


def _share_kernel(query, key_pages, value_pages, block_tables, kv_len, *out, scale, window, splits, key_tile):
    """A program of the grid (row, KV head, split).

    `out` is the result, or the partial results: weighted averages of values, and the log2 of the sum of weights. A
    split without tokens does not write its averages.
    """
    row, head, split = (pl.program_id(axis) for axis in range(3))
    page_size, head_dim = key_pages.shape[2:]
    group = query.shape[1] // key_pages.shape[1]

    length = kv_len[row]
    first_seen = 0 if window is None else jnp.maximum(length - window, 0)
    first_tile = lax.div(first_seen, key_tile) * key_tile
    share = pl.cdiv(pl.cdiv(length - first_tile, splits), key_tile) * key_tile
    share = jnp.maximum(share, pl.cdiv(MIN_SHARE, key_tile) * key_tile)
    start = first_tile + split * share
    end = jnp.minimum(start + share, length)

    member = jnp.arange(padded_group(group))
    is_head = member < group
    wide_head, column = index_tile(head * group + member, jnp.arange(head_dim))
    wide_is_head, _ = index_tile(is_head, jnp.arange(head_dim))

    if splits > 1:

        @pl.when(start >= end)
        def leave_empty():
            triton.store(out[1].at[row, head * group + member, split], jnp.full(member.shape, MASKED), mask=is_head)

    @pl.when(start < end)
    def compute():
        queries = triton.load(query.at[row, wide_head, column], mask=wide_is_head, other=0)

        def trip(i, state):
            token = start + i * key_tile + jnp.arange(key_tile)
            seen = token < end
            if window is not None:
                seen &= token >= first_seen
            page = triton.load(block_tables.at[row, lax.div(token, page_size)], mask=seen, other=0)
            return attend(
                state,
                queries,
                key_pages,
                value_pages,
                head,
                page,
                lax.rem(token, page_size),
                scale=scale,
                seen=seen,
                visible=seen[None, :],
            )

        state = empty_state(member.shape[0], head_dim)
        total, top, mass = lax.fori_loop(0, pl.cdiv(end - start, key_tile), trip, state)
        average = (total / mass[:, None]).astype(out[0].dtype)
        if splits == 1:
            triton.store(out[0].at[row, wide_head, column], average, mask=wide_is_head)
        else:
            triton.store(out[0].at[row, wide_head, split, column], average, mask=wide_is_head)
            triton.store(out[1].at[row, head * group + member, split], top + jnp.log2(mass), mask=is_head)


def _merge_kernel(average, log_mass, out):
    """A program of the grid (row, head): averages the splits, weighted by their sums of weights."""
    row, head = pl.program_id(0), pl.program_id(1)
    splits, head_dim = average.shape[2:]
    split = jnp.arange(1 << (splits - 1).bit_length())
    logs = triton.load(log_mass.at[row, head, split], mask=split < splits, other=MASKED)
    weights = jnp.exp2(logs - logs.max(axis=0))
    wide_split, column = index_tile(split, jnp.arange(head_dim))
    # Splits without tokens have not written their averages, which may be NaN. NaN of other splits must stay.
    live = jnp.broadcast_to((logs != MASKED)[:, None], column.shape)
    averages = triton.load(average.at[row, head, wide_split, column], mask=live, other=0)
    total = (averages * weights[:, None]).sum(axis=0)
    out[row, head, :] = (total / weights.sum(axis=0)).astype(out.dtype)
