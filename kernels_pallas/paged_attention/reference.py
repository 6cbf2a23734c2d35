"""The reference of paged attention: short, in float32, dense and slow. Tests compare other implementations with it."""

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.pages import QuantPages


def attention(query, key_pages, value_pages, batch, *, scale, window=None):
    """See `api.paged_attention`. Materialises the row's whole context for every query."""
    tokens, heads, head_dim = query.shape
    _, kv_heads, page_size, _ = key_pages.shape
    rows, pages_per_row = batch.block_tables.shape
    context = pages_per_row * page_size

    token = jnp.arange(tokens)
    row = jnp.clip(jnp.searchsorted(batch.query_start, token, side="right") - 1, 0, rows - 1)
    queries_before_end = batch.query_start[row + 1] - token
    position = batch.kv_len[row] - queries_before_end

    def rows_of(pages):
        if isinstance(pages, QuantPages):
            by_page = pages.read(batch.block_tables)
        elif pages.dtype == jnp.uint16:
            by_page = jax.lax.bitcast_convert_type(pages, jnp.bfloat16)[batch.block_tables]
        else:
            by_page = pages[batch.block_tables]
        by_row = by_page.swapaxes(2, 3).reshape(rows, context, kv_heads, head_dim)
        return by_row.astype(jnp.float32)[row]

    visible = jnp.arange(context)[None, :] <= position[:, None]
    if window is not None:
        visible &= jnp.arange(context)[None, :] > position[:, None] - window
    keys, values = rows_of(key_pages), jnp.where(visible[:, :, None, None], rows_of(value_pages), 0)
    grouped = query.astype(jnp.float32).reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("tkgd,tskd->tkgs", grouped, keys, precision="highest") * scale
    weights = jax.nn.softmax(jnp.where(visible[:, None, None, :], scores, -1e30), axis=-1)
    out = jnp.einsum("tkgs,tskd->tkgd", weights, values, precision="highest")
    return out.reshape(tokens, heads, head_dim).astype(query.dtype)
