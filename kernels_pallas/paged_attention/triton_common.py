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


def attend(state, query, key_pages, value_pages, head, page, offset, *, scale, seen, visible):
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
        seen: [tile]; the other tokens are not read: what lies there may be NaN.
        visible: [rows, tile] or [1, tile]; scores of the other pairs do not count.
    """
    total, top, mass = state
    keys, key_scales = _load(key_pages, head, page, offset, seen)
    scores = _dot(query, keys.astype(query.dtype), trans_b=True) * scale
    if key_scales is not None:  # int8 is exact in any dtype, and there are fewer scores than numbers
        scores = scores * key_scales[None, :]
    scores = jnp.where(visible, scores, MASKED)
    new_top = jnp.maximum(top, scores.max(axis=1))
    shrink = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores - new_top[:, None])
    values, value_scales = _load(value_pages, head, page, offset, seen)
    if value_scales is not None:  # weights times scales would be too small for float16
        values = values.astype(jnp.float32) * value_scales[:, None]
    total = total * shrink[:, None] + _dot(weights.astype(query.dtype), values.astype(query.dtype))
    return total, new_top, mass * shrink + weights.sum(axis=1)


def empty_state(rows: int, head_dim: int):
    """What `attend` starts from."""
    return (
        jnp.zeros((rows, head_dim), jnp.float32),
        jnp.full((rows,), MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )


def _load(pages, head, page, offset, seen):
    """Rows [tile, head_dim] of one head, zeros where not seen; and their scales [tile], None if not quantised."""
    numbers = pages.values if isinstance(pages, QuantPages) else pages
    wide_page, column = index_tile(page, jnp.arange(numbers.shape[3]))
    wide_offset, _ = index_tile(offset, jnp.arange(numbers.shape[3]))
    wide_seen, _ = index_tile(seen, jnp.arange(numbers.shape[3]))
    rows = triton.load(numbers.at[wide_page, head, wide_offset, column], mask=wide_seen, other=0)
    if not isinstance(pages, QuantPages):
        return rows, None
    return rows, triton.load(pages.scales.at[page, head, offset], mask=seen, other=0)


def _dot(a, b, *, trans_b=False):
    """float32 operands are for tests: tensor cores would round them."""
    return triton.dot(a, b, trans_b=trans_b, precision="highest" if a.dtype == jnp.float32 else None)
