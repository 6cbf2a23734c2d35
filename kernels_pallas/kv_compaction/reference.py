"""The reference of KV compaction: short, in float32, with sorting. Tests compare other implementations with it."""

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention import QuantPages


def compact(key_pages, value_pages, source, rows, keep, target, *, sinks, window):
    """See `api.compact`."""
    layers = zip(key_pages, value_pages, strict=True)
    return tuple(zip(*(_layer(*pair, source, rows, keep, target, sinks, window) for pair in layers), strict=True))


def _layer(key_pages, value_pages, source, rows, keep, target, sinks, window):
    _, kv_heads, page_size, _ = key_pages.shape
    slots = source.shape[0] * page_size
    slot = jnp.arange(slots)

    if isinstance(key_pages, QuantPages):
        keys = key_pages.values.astype(jnp.float32) * key_pages.scales[..., None]
    elif key_pages.dtype == jnp.uint16:
        keys = jax.lax.bitcast_convert_type(key_pages, jnp.bfloat16).astype(jnp.float32)
    else:
        keys = key_pages.astype(jnp.float32)
    fraction, exponent = jnp.frexp(jnp.square(keys[source]).sum(-1))  # the fraction is from 0.5 to 1
    norm = jnp.ldexp(jnp.floor(fraction * 1024 + 0.5), exponent).swapaxes(0, 1).reshape(kv_heads, slots)

    # Sorted by kind, then by norm. Kinds: 0 protected, 1 finite norm, 2 NaN, 3 not a row of the sequence.
    protected = (slot < sinks) | (slot >= rows - window)
    kind = jnp.where(slot >= rows, 3, jnp.where(protected, 0, jnp.where(jnp.isnan(norm), 2, 1)))
    norm = jnp.where(kind == 1, norm, 0.0)
    order = jnp.lexsort((norm, kind), axis=-1)  # stable
    kept = jnp.sort(jnp.where(slot < keep, order, slots), axis=-1) % slots

    def move(pages):
        by_row = pages[source].swapaxes(1, 2).reshape(slots, kv_heads, *pages.shape[3:])
        moved = jnp.stack([by_row[kept[head], head] for head in range(kv_heads)])
        moved = moved.reshape(kv_heads, -1, page_size, *pages.shape[3:]).swapaxes(0, 1)
        return pages.at[target].set(moved)

    return jax.tree.map(move, (key_pages, value_pages))
