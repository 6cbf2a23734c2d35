"""Paged attention in XLA operations, for any platform.

Single-token rows and longer rows are computed separately, each in a loop with online softmax over key tiles aligned at
position 0:

- Decode: the (row, key tile) pairs of all rows form one work list, processed `DECODE_ITEMS` at a time, so the work is
  proportional to the tokens that are read. One row of 4,096 tokens among fifteen of 128 costs only its own tiles.
- Prefill: a query tile is up to `QUERY_TILE` consecutive queries of one row. Tiles are processed `PREFILL_TILES` at a
  time in order, each group up to its longest context; neighbours mostly belong to one row, so little work is wasted.

The loops' trip counts depend on the data, not on the shapes: padding costs nothing, nor do key tiles that lie before a
sliding window.

Quantised pages are dequantised tile by tile as they are gathered; the computation is then float32 for any query dtype,
and only the result is rounded. On the CPU where this was measured, applying scales to scores and weights instead is not
faster, and products of int8 values converted to bfloat16 are much slower.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.paged_attention.pages import QuantPages

KEY_TILE = 64  # tokens; small enough that a short row wastes little, large enough to amortise a loop trip
DECODE_ITEMS = 8  # (row, key tile) pairs per loop trip
QUERY_TILE = 32
PREFILL_TILES = 2
MASKED = -1e30  # finite: a row without visible keys so far gives exp(0) and not NaN


@functools.partial(jax.jit, static_argnames=("scale", "window"))  # traced once for all layers of a model
def attention(query, key_pages, value_pages, batch, *, scale, window=None):
    """See `api.paged_attention`."""
    dtype = jnp.dtype(jnp.float32) if isinstance(key_pages, QuantPages) else query.dtype
    scaled = (query.astype(jnp.float32) * scale).astype(dtype)
    if batch.decode:
        return _decode(scaled, key_pages, value_pages, batch.block_tables, batch.kv_len, window).astype(query.dtype)

    tokens = query.shape[0]
    rows = batch.kv_len.shape[0]
    count = batch.query_start[1:] - batch.query_start[:-1]
    token = jnp.arange(tokens, dtype=jnp.int32)
    row = jnp.minimum(
        jnp.searchsorted(batch.query_start[1:], token, side="right", method="compare_all").astype(jnp.int32), rows - 1
    )

    single = count == 1
    first_query = jnp.minimum(batch.query_start[:-1], tokens - 1)
    decoded = _decode(
        scaled[first_query], key_pages, value_pages, batch.block_tables, jnp.where(single, batch.kv_len, 0), window
    )
    prefilled = _prefill(scaled, key_pages, value_pages, batch, jnp.where(single, 0, count), token, row, window)
    return jnp.where(single[row][:, None, None], decoded[row], prefilled).astype(query.dtype)


def _decode(query, key_pages, value_pages, block_tables, kv_len, window):
    """Attention of one query per row: `query` [rows, heads, head_dim], `kv_len` [rows] (0 to skip a row).

    The result has the shape of `query`.
    """
    rows, heads, head_dim = query.shape
    kv_heads, page_size = key_pages.shape[1:3]
    group = heads // kv_heads
    tile_pages = max(1, KEY_TILE // page_size)
    tile = tile_pages * page_size
    items = min(DECODE_ITEMS, 2 * rows)
    tables = _pad_pages(block_tables, tile_pages)

    window_start = jnp.zeros_like(kv_len) if window is None else jnp.maximum(kv_len - window, 0)
    first_tile_of_row = window_start // tile
    tiles_of_row = -(-kv_len // tile) - first_tile_of_row
    last_item = jnp.cumsum(tiles_of_row)
    most_items = -(-rows * tables.shape[1] // items) * items
    item = jnp.arange(most_items, dtype=jnp.int32)
    live = item < last_item[-1]
    row_of_item = jnp.minimum(
        jnp.searchsorted(last_item, item, side="right", method="compare_all").astype(jnp.int32), rows - 1
    )
    tile_of_item = jnp.where(live, item - (last_item - tiles_of_row - first_tile_of_row)[row_of_item], 0)
    pages_of_item = jnp.where(live[:, None], tables[row_of_item, tile_of_item], 0)
    length_of_item = jnp.where(live, jnp.clip(kv_len[row_of_item] - tile_of_item * tile, 0, tile), 0)
    start_of_item = window_start[row_of_item] - tile_of_item * tile

    grouped = query.reshape(rows, kv_heads, group, head_dim)

    def trip(i, state):
        total, top, mass = state
        part = functools.partial(lax.dynamic_slice_in_dim, start_index=i * items, slice_size=items)
        row, length = part(row_of_item), part(length_of_item)
        seen = jnp.arange(tile)[None, :] < length[:, None]
        if window is not None:
            seen &= jnp.arange(tile)[None, :] >= part(start_of_item)[:, None]
        keys, values = _tiles(key_pages, value_pages, part(pages_of_item), seen, query.dtype)
        scores = jnp.einsum("wkgd,wktd->wkgt", _rows(grouped, row), keys, preferred_element_type=jnp.float32)
        scores = jnp.where(seen[:, None, None, :], scores, MASKED)
        # Several items of one trip may belong to one row: a one-hot [rows, items] sums them.
        owns = (jnp.arange(rows)[:, None] == row[None, :]) & (length > 0)[None, :]
        new_top = jnp.maximum(top, jnp.where(owns[:, :, None, None], scores.max(-1)[None], MASKED).max(1))
        weights = jnp.exp(scores - _rows(new_top, row)[..., None])
        part_total = jnp.einsum(
            "wkgt,wktd->wkgd", weights.astype(query.dtype), values, preferred_element_type=jnp.float32
        )
        shrink, owned = jnp.exp(top - new_top), owns.astype(jnp.float32)
        # 0 * NaN is NaN: parts with NaN are left out of the sums, and the mass of their own row becomes NaN instead.
        sound = jnp.isfinite(part_total).all(-1)
        part_total = jnp.where(sound[..., None], part_total, 0)
        part_mass = jnp.where(sound, weights.sum(-1), 0)
        total = total * shrink[..., None] + jnp.einsum("rw,wkgd->rkgd", owned, part_total)
        mass = mass * shrink + jnp.einsum("rw,wkg->rkg", owned, part_mass)
        return total, new_top, jnp.where((owns[:, :, None, None] & ~sound[None]).any(1), jnp.nan, mass)

    state = _empty_state((rows, kv_heads, group), head_dim)
    total, _, mass = lax.fori_loop(0, -(-last_item[-1] // items), trip, state)
    return _normalised(total, mass).reshape(rows, heads, head_dim).astype(query.dtype)


def _prefill(query, key_pages, value_pages, batch, count, token, row, window):
    """Attention of rows with several queries. `count` [rows] is each row's number of queries, 0 to skip a row.

    The result is [tokens, heads, head_dim], undefined for tokens of skipped rows.
    """
    tokens, heads, head_dim = query.shape
    rows = count.shape[0]
    kv_heads, page_size = key_pages.shape[1:3]
    group = heads // kv_heads
    tile_pages = max(1, KEY_TILE // page_size)
    tile = tile_pages * page_size
    tables = _pad_pages(batch.block_tables, tile_pages)

    tiles_of_row = -(-count // QUERY_TILE)
    last_tile = jnp.cumsum(tiles_of_row)
    most_tiles = -(-(tokens // QUERY_TILE + min(rows, tokens // 2)) // PREFILL_TILES) * PREFILL_TILES
    query_tile = jnp.arange(most_tiles, dtype=jnp.int32)
    live = query_tile < last_tile[-1]
    row_of_tile = jnp.minimum(
        jnp.searchsorted(last_tile, query_tile, side="right", method="compare_all").astype(jnp.int32), rows - 1
    )
    first_in_row = (query_tile - (last_tile - tiles_of_row)[row_of_tile]) * QUERY_TILE
    first_token = batch.query_start[row_of_tile] + first_in_row
    first_position = batch.kv_len[row_of_tile] - count[row_of_tile] + first_in_row
    # Number of tokens visible to the tile's last query; 0 for unused tiles.
    context = jnp.where(live, jnp.minimum(first_position + QUERY_TILE, batch.kv_len[row_of_tile]), 0)
    # The key tile with the first token visible to the tile's first query.
    first_seen = jnp.zeros_like(context) if window is None else jnp.maximum(first_position - window + 1, 0)
    first_key_tile = jnp.where(live, first_seen // tile, tables.shape[1])

    def group_of_tiles(i, out):
        part = functools.partial(lax.dynamic_slice_in_dim, start_index=i * PREFILL_TILES, slice_size=PREFILL_TILES)
        row, length = part(row_of_tile), part(context)
        position = part(first_position)[:, None] + jnp.arange(QUERY_TILE)[None, :]
        source = jnp.minimum(part(first_token)[:, None] + jnp.arange(QUERY_TILE)[None, :], tokens - 1)
        queries = _rows(query, source).reshape(PREFILL_TILES, QUERY_TILE, kv_heads, group, head_dim)
        queries = queries.transpose(0, 2, 1, 3, 4).reshape(PREFILL_TILES, kv_heads, QUERY_TILE * group, head_dim)
        tables_of_tile = _rows(tables, row)
        position_of_query = jnp.repeat(position, group, axis=1)

        def trip(j, state):
            total, top, mass = state
            pages = lax.dynamic_index_in_dim(tables_of_tile, j, axis=1, keepdims=False)
            at = j * tile + jnp.arange(tile)
            seen = at[None, :] < length[:, None]
            keys, values = _tiles(key_pages, value_pages, pages, seen, query.dtype)
            scores = jnp.einsum("wkqd,wktd->wkqt", queries, keys, preferred_element_type=jnp.float32)
            visible = seen[:, None, :] & (at[None, None, :] <= position_of_query[:, :, None])
            if window is not None:
                visible &= at[None, None, :] > position_of_query[:, :, None] - window
            scores = jnp.where(visible[:, None], scores, MASKED)
            new_top = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            part_total = jnp.einsum(
                "wkqt,wktd->wkqd", weights.astype(query.dtype), values, preferred_element_type=jnp.float32
            )
            return total * shrink[..., None] + part_total, new_top, mass * shrink + weights.sum(-1)

        state = _empty_state((PREFILL_TILES, kv_heads, QUERY_TILE * group), head_dim)
        first_trip = part(first_key_tile).min()
        total, _, mass = lax.fori_loop(first_trip, -(-length.max() // tile), trip, state)
        done = _normalised(total, mass).reshape(PREFILL_TILES, kv_heads, QUERY_TILE, group, head_dim)
        done = done.transpose(0, 2, 1, 3, 4).reshape(PREFILL_TILES * QUERY_TILE, heads, head_dim).astype(query.dtype)
        return lax.dynamic_update_slice_in_dim(out, done, i * PREFILL_TILES * QUERY_TILE, axis=0)

    out = jnp.zeros((most_tiles * QUERY_TILE, heads, head_dim), query.dtype)
    out = lax.fori_loop(0, -(-last_tile[-1] // PREFILL_TILES), group_of_tiles, out)
    in_row = token - batch.query_start[row]
    place = (last_tile - tiles_of_row)[row] * QUERY_TILE + in_row
    return _rows(out, jnp.clip(place, 0, most_tiles * QUERY_TILE - 1))


def _rows(array, index):
    return array.at[index].get(mode="promise_in_bounds")


def _pad_pages(block_tables, tile_pages):
    """Reshape [rows, pages] to [rows, tiles, tile_pages], padded with page 0, whose tokens are masked."""
    rows, pages = block_tables.shape
    padded = jnp.pad(block_tables, ((0, 0), (0, -pages % tile_pages)))
    return padded.reshape(rows, -1, tile_pages)


def _tiles(key_pages, value_pages, pages, seen, dtype):
    """Gather keys and values of `pages` [n, tile_pages] as [n, kv_heads, tile, head_dim], with unseen values zeroed.

    Unwritten slots may hold NaN (if quantised, in the scales), and 0 * NaN is NaN. Scores of unseen keys are masked.
    """
    n, tile_pages = pages.shape
    _, kv_heads, page_size, head_dim = key_pages.shape

    def gather(source):
        by_page = source.read(pages) if isinstance(source, QuantPages) else _rows(source, pages)
        tile = by_page.swapaxes(1, 2).reshape(n, kv_heads, tile_pages * page_size, head_dim)
        return tile if tile.dtype == dtype else jax.lax.bitcast_convert_type(tile, dtype)

    return gather(key_pages), jnp.where(seen[:, None, :, None], gather(value_pages), jnp.zeros((), dtype))


def _empty_state(shape, head_dim):
    zeros = jnp.zeros(shape, jnp.float32)
    return jnp.zeros((*shape, head_dim), jnp.float32), jnp.full_like(zeros, MASKED), zeros


def _normalised(total, mass):
    return total / jnp.maximum(mass, 1e-30)[..., None]
