"""Paged attention for mixed batches on NVIDIA GPUs (Pallas, Triton backend; A100 and newer).

One launch computes a whole batch of prompts, chunks and single tokens. A program computes one KV head for a tile of
consecutive queries of one row: the (query, head of the group) pairs are the rows of one tile for the tensor cores, so
the group need not divide the tile. The tiles are computed before the launch, once for all layers of a model. The number
of programs is for the worst distribution of queries over rows; programs past the end do nothing.

On Hopper, the products of tiles of 64 and more rows are wgmma with the weights in registers, which ptxas before 13.3
may miscompile (triton-lang/triton#9433). Only a device shows that, so kernels are tested at start-up.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.paged_attention.settings import MixedSettings, mixed_settings
from kernels_pallas.paged_attention.triton_common import (
    LOG2_E,
    attend,
    device_kind,
    empty_state,
    index_tile,
    unsupported,
)
from kernels_pallas.pallas import pl, triton


@functools.partial(jax.jit, static_argnames=("scale", "window", "settings", "interpret"))
def attention(
    query,
    key_pages,
    value_pages,
    batch,
    *,
    scale: float,
    window: int | None = None,
    settings: MixedSettings | None = None,
    interpret: bool = False,
):
    """See `api.paged_attention`.

    Args:
        settings: tiles. Default: the device's table entry.
        interpret: run the kernel on any device, slowly, for tests.

    Raises:
        ValueError: the kernel does not support the shapes or dtypes.
    """
    if (reason := unsupported(query, key_pages, value_pages)) is not None:
        raise ValueError(f"paged_attention: {reason}")
    tokens, heads, head_dim = query.shape
    _, kv_heads, page_size, _ = key_pages.shape
    rows, pages_per_row = batch.block_tables.shape
    group = heads // kv_heads
    if settings is None:
        settings = mixed_settings(
            device_kind(),
            tokens=tokens,
            rows=rows,
            kv_heads=kv_heads,
            group=group,
            head_dim=head_dim,
            page_size=page_size,
            max_context=pages_per_row * page_size,
            itemsize=jax.tree.leaves(key_pages)[0].dtype.itemsize,
        )
    tiles = query_tiles(batch, tokens, settings.query_tile // group)
    return pl.pallas_call(
        functools.partial(_kernel, scale=scale * LOG2_E, window=window, settings=settings),
        grid=(tiles.shape[1], kv_heads),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        compiler_params=triton.CompilerParams(num_warps=settings.num_warps, num_stages=settings.num_stages),
        interpret=interpret,
        name="paged_mixed",
    )(query, key_pages, value_pages, batch.block_tables, tiles)


def query_tiles(batch, tokens: int, size: int):
    """Divide the queries into tiles of at most `size`, each of one row: int32 [4, tiles].

    The four fields of a tile are its row, its first query in the flat array, its number of queries (0 past the last
    tile), and the position of its first query in the row. Later tiles of a row, which attend to more keys, come first,
    so that the last programs of a launch are short. Padding queries form one more row, at negative positions, without
    keys.
    """
    rows = batch.kv_len.shape[0]
    most_tiles = tokens // size + min(rows + 1, tokens)
    end = jnp.append(batch.query_start[1:], jnp.int32(tokens))
    kv_len = jnp.append(batch.kv_len, jnp.int32(0))
    count = end - jnp.append(batch.query_start[:-1], batch.query_start[-1])

    tiles_of_row = -(-count // size)
    last_tile = jnp.cumsum(tiles_of_row)
    tile = jnp.arange(most_tiles, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(last_tile, tile, side="right", method="compare_all").astype(jnp.int32), rows)
    first_in_row = (last_tile[row] - 1 - tile) * size
    queries = jnp.where(tile < last_tile[-1], jnp.minimum(count[row] - first_in_row, size), 0)
    first_query = end[row] - count[row] + first_in_row
    position = kv_len[row] - count[row] + first_in_row
    return jnp.stack([jnp.minimum(row, rows - 1), first_query, queries, position])


def _kernel(query, key_pages, value_pages, block_tables, tiles, out, *, scale, window, settings):
    """A program of the grid (tile, KV head)."""
    tile, head = pl.program_id(0), pl.program_id(1)
    row, first_query, queries, position = (tiles[field, tile] for field in range(4))
    page_size, head_dim = key_pages.shape[2:]
    group = query.shape[1] // key_pages.shape[1]
    key_tile = settings.key_tile

    @pl.when(queries > 0)
    def compute():
        pair = jnp.arange(settings.query_tile)
        in_tile = lax.div(pair, group)
        wide_query, column = index_tile(first_query + in_tile, jnp.arange(head_dim))
        wide_head, _ = index_tile(head * group + lax.rem(pair, group), jnp.arange(head_dim))
        real, _ = index_tile(in_tile < queries, jnp.arange(head_dim))
        rows = triton.load(query.at[wide_query, wide_head, column], mask=real, other=0)
        position_of_pair = position + in_tile
        end = position + queries  # of the keys that the last query sees
        first_seen = 0 if window is None else jnp.maximum(position - window + 1, 0)  # by the first query

        def trip(i, state):
            token = i * key_tile + jnp.arange(key_tile)
            seen = (token >= first_seen) & (token < end)
            visible = token[None, :] <= position_of_pair[:, None]
            if window is not None:
                visible &= token[None, :] > position_of_pair[:, None] - window
            page = triton.load(block_tables.at[row, lax.div(token, page_size)], mask=seen, other=0)
            offset = lax.rem(token, page_size)
            return attend(
                state, rows, key_pages, value_pages, head, page, offset, scale=scale, seen=seen, visible=visible
            )

        # Most tiles need no mask, but with a separate loop for them ptxas overlaps the products of neither loop.
        state = empty_state(settings.query_tile, head_dim)
        total, _, mass = lax.fori_loop(lax.div(first_seen, key_tile), pl.cdiv(end, key_tile), trip, state)
        average = total / jnp.where(mass == 0, 1, mass)[:, None]
        triton.store(out.at[wide_query, wide_head, column], average.astype(out.dtype), mask=real)
