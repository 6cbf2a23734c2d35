"""What the Triton kernels of paged attention share: what they support, and what they do with a tile of keys."""

import math

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.pages import QuantPages
from kernels_pallas.pallas import triton

LOG2_E = math.log2(math.e)  # exp2 is one instruction, so scores are kept times this
MASKED = -1e30  # finite, so that a row with nothing visible yet gives exp2(0) of garbage and not NaN
LEAST_ROWS = 16  # of a tile that the tensor cores multiply


def unsupported(query, key_pages, value_pages) -> str | None:
    """Why these kernels cannot compute such arrays, and what they can; None if they can.

    Args:
        query: [tokens, heads, head_dim], an array or a `jax.ShapeDtypeStruct`.
        key_pages: [num_pages, kv_heads, page_size, head_dim], likewise, quantised or not.
        value_pages: likewise.
    """
    heads, head_dim = query.shape[1:]
    _, kv_heads, page_size, _ = key_pages.shape
    if head_dim & (head_dim - 1) or not 16 <= head_dim <= 256:
        return f"head_dim {head_dim}: the Triton kernels support powers of two from 16 to 256"
    if page_size & (page_size - 1) or not 8 <= page_size <= 256:
        return f"page_size {page_size}: the Triton kernels support powers of two from 8 to 256"
    if heads // kv_heads > 16:
        return f"{heads} heads over {kv_heads} KV heads: the Triton kernels support at most 16 heads a KV head"
    if query.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"queries of {query.dtype}: the Triton kernels support bfloat16, float16 and float32"
    for pages in (key_pages, value_pages):
        if isinstance(pages, QuantPages):
            # Pallas reckons offsets into an array of up to 4 GiB in signed 32-bit numbers.
            if 2**31 < math.prod(pages.shape) <= 2**32:
                return (
                    f"int8 pages {pages.shape}: the Triton kernels support arrays of at most {2**31} numbers, or of "
                    f"more than {2**32}: change the number of pages"
                )
        elif pages.dtype != query.dtype:
            return (
                f"pages of {pages.dtype}: the Triton kernels support the dtype of the queries, {query.dtype}, or int8"
            )
    return None


def device_kind() -> str:
    """Of the device that is compiled for: that of the mesh in whose context this is traced, or else the default one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind


def padded_group(group: int) -> int:
    """Rows of the query tile that holds the heads of one KV head: a power of two."""
    return max(LEAST_ROWS, 1 << (group - 1).bit_length())


def index_tile(rows, columns):
    """`rows` [n] and `columns` [m] as two [n, m] index arrays. The interpreter of masked loads does not take a mixture
    of arrays and slices; the compiler makes whole-row accesses of them all the same."""
    shape = rows.shape[0], columns.shape[0]
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape)


def attend(state, query, key_pages, value_pages, head, page, offset, *, scale, seen=None, visible=None):
    """One step of the online softmax, over a tile of keys.

    Args:
        state: sum of values [rows, head_dim], largest score [rows] and sum of weights [rows], all float32.
        query: [rows, head_dim].
        key_pages: reference to the pool, or `QuantPages` of two references.
        value_pages: likewise.
        head: KV head.
        page: of each token of the tile, [tile].
        offset: of each token within its page, [tile].
        scale: of the scores, times `LOG2_E`.
        seen: [tile]; the other tokens are not read: what lies there may be NaN. None: all are.
        visible: [rows, tile] or [1, tile]; scores of the other pairs do not count. None: all do.
    """
    total, top, mass = state
    keys, key_scales = _load(key_pages, head, page, offset, seen, query.dtype)
    scores = _dot(query, keys, trans_b=True) * scale
    if key_scales is not None:
        scores = scores * key_scales[None, :]
    if visible is not None:
        scores = jnp.where(visible, scores, MASKED)
    new_top = jnp.maximum(top, scores.max(axis=1))
    shrink = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores - new_top[:, None])
    mass = mass * shrink + weights.sum(axis=1)
    # Weights times scales may be too small for float16, and int8 is exact in bfloat16.
    values_dtype = jnp.bfloat16 if isinstance(value_pages, QuantPages) and query.dtype == jnp.float16 else query.dtype
    values, value_scales = _load(value_pages, head, page, offset, seen, values_dtype)
    if value_scales is not None:
        weights = weights * value_scales[None, :]
    total = total * shrink[:, None] + _dot(weights.astype(values.dtype), values)
    return total, new_top, mass


def empty_state(rows: int, head_dim: int):
    """What `attend` starts from."""
    return (
        jnp.zeros((rows, head_dim), jnp.float32),
        jnp.full((rows,), MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )


def _load(pages, head, page, offset, seen, dtype):
    """Rows [tile, head_dim] of one head, zeros where not seen, and their scales [tile] or None."""
    numbers, scales = (pages.values, pages.scales) if isinstance(pages, QuantPages) else (pages, None)
    wide_page, column = index_tile(page, jnp.arange(numbers.shape[3]))
    wide_offset = jnp.broadcast_to(offset[:, None], column.shape)
    rows = numbers.at[wide_page, head, wide_offset, column]
    if seen is None:
        loaded = triton.load(rows)
    else:
        loaded = triton.load(rows, mask=jnp.broadcast_to(seen[:, None], column.shape), other=0)
    if scales is None:
        return loaded, None
    per_token = scales.at[page, head, offset]
    loaded_scales = triton.load(per_token) if seen is None else triton.load(per_token, mask=seen, other=0)
    return loaded.astype(dtype), loaded_scales


def _dot(a, b, *, trans_b=False):
    """float32 operands are for tests: tensor cores would round them."""
    return triton.dot(a, b, trans_b=trans_b, precision="highest" if a.dtype == jnp.float32 else None)
