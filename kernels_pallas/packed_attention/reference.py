"""The reference of packed attention: short, in float32, with all [n, n] scores. Tests compare with it."""

import jax
import jax.numpy as jnp


def attention(query, key, value, first, last, *, scale, longest):
    """See `api.packed_attention`. `longest` is ignored."""
    del longest
    at = jnp.arange(query.shape[0], dtype=jnp.int32)[None, :]
    visible = (first[:, None] <= at) & (at < last[:, None])
    live = first < last
    wide = [x.astype(jnp.float32) for x in (query, key, jnp.where(live[:, None, None], value, 0))]
    scores = jnp.einsum("qhd,khd->qhk", wide[0], wide[1], precision="highest") * scale
    weights = jax.nn.softmax(jnp.where(visible[:, None, :], scores, -1e30), axis=-1)
    out = jnp.einsum("qhk,khd->qhd", weights, wide[2], precision="highest")
    return jnp.where(live[:, None, None], out, 0).astype(query.dtype)
