"""Packed attention in XLA operations, for any platform.

- Segments of any length: each tile of queries loops over tiles of keys with online softmax, from the first to the last
  slot that its queries attend to. Tiles of other images are not read.
- Many short segments (`longest`): a loop over groups of segments, each sliced at its start and padded to `longest`.

The loops' trip counts depend on the data, so padding after the last segment costs nothing. Loops write float32, because
XLA for CPU converts a whole bfloat16 array to float32 and back around each update.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

# Measured with 16 heads of 80 in float32 on two cores without AVX-512: XLA for CPU computes a product of [512, 80] x
# [80, 256] on all cores, smaller ones on one. With a few heads at a time, the scores stay in the CPU's cache.
QUERY_TILE = 512
KEY_TILE = 256
HEADS = 4
SEGMENTS = 8  # short segments per loop trip
MASKED = -1e30  # finite: a row without visible keys so far gives exp(0) and not NaN


@functools.partial(jax.jit, static_argnames=("scale", "longest"))  # traced once for all layers of a tower
def attention(query, key, value, first, last, *, scale, longest):
    """See `api.packed_attention`."""
    live = first < last
    scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
    # Masked scores exclude the keys of padding. Its values are multiplied by 0, and 0 * NaN would be NaN.
    value = jnp.where(live[:, None, None], value, 0)
    if longest is None:
        out = _long(scaled, key, value, first, last, live)
    else:
        out = _short(scaled, key, value, first, last, live, longest)
    return jnp.where(live[:, None, None], out, 0).astype(query.dtype)


def _long(query, key, value, first, last, live):
    """Tiles of queries over tiles of keys. Results of padding are undefined."""
    n, heads, head_dim = query.shape
    query_tile, key_tile = min(QUERY_TILE, n), min(KEY_TILE, n)
    query_tiles = -(-n // query_tile)
    together = next(size for size in range(min(HEADS, heads), 0, -1) if heads % size == 0)
    queries = _by_heads(query, query_tiles * query_tile, together)
    keys, values = (_by_heads(x, -(-n // key_tile) * key_tile, together) for x in (key, value))

    rows = ((0, query_tiles * query_tile - n),)
    first, last, live = jnp.pad(first, rows), jnp.pad(last, rows), jnp.pad(live, rows)
    by_tile = live.reshape(query_tiles, query_tile)
    low = jnp.where(by_tile, first.reshape(by_tile.shape), n).min(axis=1)
    high = jnp.where(by_tile, last.reshape(by_tile.shape), 0).max(axis=1)
    used_tiles = jnp.max(jnp.where(by_tile.any(axis=1), jnp.arange(1, query_tiles + 1, dtype=jnp.int32), 0))

    def query_trip(i, out):
        group, tile = i // used_tiles, i % used_tiles
        start = tile * query_tile
        some_queries = _slots(queries, group, start, query_tile)
        some_first = lax.dynamic_slice_in_dim(first, start, query_tile)
        some_last = lax.dynamic_slice_in_dim(last, start, query_tile)

        def key_trip(j, state):
            total, top, mass = state
            at = j * key_tile + jnp.arange(key_tile, dtype=jnp.int32)
            visible = (some_first[:, None] <= at[None, :]) & (at[None, :] < some_last[:, None])
            some_keys, some_values = (_slots(x, group, j * key_tile, key_tile) for x in (keys, values))
            scores = jnp.einsum("hqd,hkd->hqk", some_queries, some_keys, preferred_element_type=jnp.float32)
            scores = jnp.where(visible[None], scores, MASKED)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            # The barrier keeps XLA from computing the exponentials twice, once per use.
            weights = lax.optimization_barrier(jnp.exp(scores - new_top[..., None]))
            shrink = jnp.exp(top - new_top)
            part = jnp.einsum(
                "hqk,hkd->hqd", weights.astype(query.dtype), some_values, preferred_element_type=jnp.float32
            )
            return total * shrink[..., None] + part, new_top, mass * shrink + weights.sum(axis=-1)

        zeros = jnp.zeros((together, query_tile), jnp.float32)
        state = (jnp.zeros((together, query_tile, head_dim), jnp.float32), jnp.full_like(zeros, MASKED), zeros)
        total, _, mass = lax.fori_loop(low[tile] // key_tile, -(-high[tile] // key_tile), key_trip, state)
        done = total / jnp.maximum(mass, 1e-30)[..., None]
        return lax.dynamic_update_slice(out, done[None], (group, 0, start, 0))

    out = jnp.zeros(queries.shape, jnp.float32)
    out = lax.fori_loop(0, heads // together * used_tiles, query_trip, out)
    return out.transpose(2, 0, 1, 3).reshape(-1, heads, head_dim)[:n]


def _short(query, key, value, first, last, live, longest):
    """Groups of whole segments of at most `longest` slots. Results of padding are undefined."""
    n, heads = query.shape[:2]
    longest = min(longest, n)
    slot = jnp.arange(n, dtype=jnp.int32)
    opens = live & (slot == first)
    used = opens.sum(dtype=jnp.int32)
    # Starts in ascending order, then n for segments that do not exist; the padded arrays have room for one there.
    start = jnp.pad(jnp.sort(jnp.where(opens, slot, n)), (0, -n % SEGMENTS), constant_values=n)
    length = jnp.where(start < n, last[jnp.minimum(start, n - 1)] - start, 0)
    queries, keys, values = (_by_heads(x, n + longest, heads) for x in (query, key, value))
    at = jnp.arange(longest, dtype=jnp.int32)

    def trip(i, out):
        starts = [start[i * SEGMENTS + s] for s in range(SEGMENTS)]
        lengths = lax.dynamic_slice_in_dim(length, i * SEGMENTS, SEGMENTS)
        some_queries, some_keys, some_values = (
            jnp.stack([_slots(x, 0, s, longest) for s in starts]) for x in (queries, keys, values)
        )
        scores = jnp.einsum("shqd,shkd->shqk", some_queries, some_keys, preferred_element_type=jnp.float32)
        scores = jnp.where((at[None, :] < lengths[:, None])[:, None, None, :], scores, MASKED)
        weights = lax.optimization_barrier(jnp.exp(scores - scores.max(axis=-1, keepdims=True)))
        total = jnp.einsum(
            "shqk,shkd->shqd", weights.astype(query.dtype), some_values, preferred_element_type=jnp.float32
        )
        done = total / weights.sum(axis=-1, keepdims=True)
        # A segment shorter than `longest` also writes the slots after it; the next segment overwrites them.
        for s in range(SEGMENTS):
            out = lax.dynamic_update_slice(out, done[s][None], (0, 0, starts[s], 0))
        return out

    out = lax.fori_loop(0, -(-used // SEGMENTS), trip, jnp.zeros(queries.shape, jnp.float32))
    return out[0, :, :n].swapaxes(0, 1)


def _by_heads(x, slots, together):
    """[n, heads, head_dim] -> [heads / together, together, slots, head_dim], padded with zeros."""
    n, heads, head_dim = x.shape
    x = jnp.pad(x, ((0, slots - n), (0, 0), (0, 0)))
    return x.reshape(slots, heads // together, together, head_dim).transpose(1, 2, 0, 3)


def _slots(x, group, start, size):
    """Slice `size` slots of one group of heads: [together, size, head_dim]."""
    return lax.dynamic_slice(x, (group, 0, start, 0), (1, x.shape[1], size, x.shape[3]))[0]
