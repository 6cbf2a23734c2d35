"""KV compaction in XLA operations, for any platform.

It does not sort: a bitwise search finds the threshold of the norm, and a running count gives the new place of each kept
row. Only rows of the sequence are read, and only kept rows are moved.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.paged_attention import QuantPages

DROPPED_BITS = 14  # of the 23 bits of a float32's fraction: 9 stay
RANK_BITS = 32 - DROPPED_BITS
NO_ROW = 2**RANK_BITS - 1  # the rank of a slot that holds no row


def compact(key_pages, value_pages, source, rows, keep, target, *, sinks, window):
    """See `api.compact`. The rows of all layers are selected in one batch, so the program does not grow with layers."""
    layers, (_, kv_heads, page_size, _) = len(key_pages), key_pages[0].shape
    slots = source.shape[0] * page_size
    slot = jnp.arange(slots, dtype=jnp.int32)[None, :]
    squares = jnp.stack([_squares(pages, source) for pages in key_pages])
    squares = squares.swapaxes(1, 2).reshape(layers * kv_heads, slots)

    rank = _rounded(squares) + 1
    rank = jnp.where((slot < sinks) | (slot >= rows - window), 0, rank)
    kept = _smallest(jnp.where(slot < rows, rank, NO_ROW), keep)

    # chosen: the source slot for each place. row: its index in the pages flattened to rows.
    place = jnp.where(kept, _running_count(kept) - 1, slots)
    chooser = jnp.arange(layers * kv_heads, dtype=jnp.int32)[:, None]
    chosen = jnp.zeros_like(place).at[chooser, place].set(slot, mode="drop")
    chosen = chosen.reshape(layers, kv_heads, -1, page_size).swapaxes(1, 2)
    head = jnp.arange(kv_heads, dtype=jnp.int32)[None, None, :, None]
    row = (source[chosen // page_size] * kv_heads + head) * page_size + chosen % page_size
    row = row.reshape(layers, -1)

    def move(layer, pages):  # indexing flat rows and flat pages halves the compile time
        moved = pages.reshape(-1, *pages.shape[3:]).at[row[layer]].get(mode="promise_in_bounds")
        flat = pages.reshape(pages.shape[0], -1)
        flat = flat.at[target].set(moved.reshape(-1, flat.shape[1]), mode="promise_in_bounds")
        return flat.reshape(pages.shape)

    def moved(of_layers):
        return tuple(jax.tree.map(functools.partial(move, i), pages) for i, pages in enumerate(of_layers))

    return moved(key_pages), moved(value_pages)


def _squares(pages, source):
    """Squared norms of the rows of pages `source`, float32 [pages, kv_heads, page_size]."""

    def sums(array):
        taken = array.at[source].get(mode="promise_in_bounds")
        if taken.dtype == jnp.uint16:
            taken = lax.bitcast_convert_type(taken, jnp.bfloat16)
        return jnp.square(taken.astype(jnp.float32)).sum(-1)

    if isinstance(pages, QuantPages):
        return sums(pages.values) * jnp.square(pages.scales.at[source].get(mode="promise_in_bounds"))
    return sums(pages)


def _rounded(squares):
    """Squared norms as int32 that sort like them: rounded to 9 bits of the fraction, NaN last.

    A token's key has the same norm wherever the token stands, but for the rounding of its rotation and of sums that
    depend on the batch. Without this, a few parts in ten million would choose between equal tokens.
    """
    # The bits of non-negative floats sort like the floats.
    bits = lax.bitcast_convert_type(jnp.where(jnp.isnan(squares), 0.0, squares), jnp.int32)
    return jnp.where(jnp.isnan(squares), NO_ROW - 2, (bits + (1 << (DROPPED_BITS - 1))) >> DROPPED_BITS)


def _smallest(rank, keep):
    """Mark the `keep` smallest entries in each row of `rank` [rows, n], from 0 to NO_ROW; the first ones if equal."""

    def bit(i, threshold):  # finds the largest threshold with fewer than `keep` below it: the keep-th smallest
        higher = threshold + (1 << (RANK_BITS - 1 - i))
        return jnp.where(_count(rank < higher) < keep, higher, threshold)

    threshold = lax.fori_loop(0, RANK_BITS, bit, jnp.zeros((rank.shape[0], 1), jnp.int32))
    below, equal = rank < threshold, rank == threshold
    return below | (equal & (_running_count(equal) <= keep - _count(below)))


def _count(flags):
    return flags.sum(axis=-1, keepdims=True, dtype=jnp.int32)


def _running_count(flags):
    return jnp.cumsum(flags, axis=-1, dtype=jnp.int32)
