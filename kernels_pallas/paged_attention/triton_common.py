"""Common parts of the Triton kernels of paged attention: supported arrays, and attention over a tile of keys."""

import math

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.pages import QuantPages
from kernels_pallas.pallas import triton

LOG2_E = math.log2(math.e)  # scores are scaled by this for exp2, which is one instruction
MASKED = -1e30  # finite: a row without visible keys so far gives exp2(0) and not NaN
MIN_ROWS = 16  # minimum rows of a tile for the tensor cores


def unsupported(query, key_pages, value_pages) -> str | None:
    """The reason why these kernels do not support arrays, with what they support; None if they do.

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
        return f"{heads} heads over {kv_heads} KV heads: the Triton kernels support at most 16 heads per KV head"
    if query.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"queries of {query.dtype}: the Triton kernels support bfloat16, float16 and float32"
    for pages in (key_pages, value_pages):
        if isinstance(pages, QuantPages):
            # Pallas computes offsets in arrays of up to 4 GiB in signed 32-bit integers.
            if 2**31 < math.prod(pages.shape) <= 2**32:
                return (
                    f"int8 pages {pages.shape}: the Triton kernels support arrays of at most {2**31} values, or of "
                    f"more than {2**32}: change the number of pages"
                )
        elif pages.dtype != query.dtype:
            return (
                f"pages of {pages.dtype}: the Triton kernels support the dtype of the queries, {query.dtype}, or int8"
            )
    return None


def device_kind() -> str:
    """`device_kind` of the device to compile for: the current abstract mesh's, otherwise the default device's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind


def padded_group(group: int) -> int:
    """Rows of the query tile for the heads of one KV head: a power of two."""
    return max(MIN_ROWS, 1 << (group - 1).bit_length())


def index_tile(rows, columns):
    """Broadcast `rows` [n] and `columns` [m] to two [n, m] index arrays.

    The interpreter of masked loads cannot mix arrays and slices; the compiler still generates whole-row accesses.
    """
    shape = rows.shape[0], columns.shape[0]
    return jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(columns[None, :], shape)


def attend(state, query, key_pages, value_pages, head, page, offset, *, scale, seen, visible):
    """One step of the online softmax over a tile of keys.

    Args:
        state: sum of values [rows, head_dim], largest score [rows] and sum of weights [rows], all float32.
        query: [rows, head_dim].
        key_pages: reference to the pool, or `QuantPages` of two references.
        value_pages: likewise.
        head: the KV head.
        page: page of each token of the tile, [tile].
        offset: offset of each token in its page, [tile].
        scale: factor on the scores, including `LOG2_E`.
        seen: [tile]; other tokens are not read, since their slots may hold NaN.
        visible: [rows, tile] or [1, tile]; scores of other pairs are masked.
    """
    total, top, mass = state
    keys, key_scales = _load(key_pages, head, page, offset, seen)
    scores = _dot(query, keys.astype(query.dtype), trans_b=True) * scale
    if key_scales is not None:  # int8 is exact in any dtype, and there are fewer scores than key values
        scores = scores * key_scales[None, :]
    scores = jnp.where(visible, scores, MASKED)
    new_top = jnp.maximum(top, scores.max(axis=1))
    shrink = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores - new_top[:, None])
    values, value_scales = _load(value_pages, head, page, offset, seen)
    if value_scales is not None:  # weights times scales could underflow in float16
        values = values.astype(jnp.float32) * value_scales[:, None]
    total = total * shrink[:, None] + _dot(weights.astype(query.dtype), values.astype(query.dtype))
    return total, new_top, mass * shrink + weights.sum(axis=1)


def empty_state(rows: int, head_dim: int):
    """The initial state for `attend`."""
    return (
        jnp.zeros((rows, head_dim), jnp.float32),
        jnp.full((rows,), MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
    )


def _load(pages, head, page, offset, seen):
    """Load the rows [tile, head_dim] of one head, zeros if not seen, and their scales [tile], None if not quantised."""
    numbers = pages.values if isinstance(pages, QuantPages) else pages
    wide_page, column = index_tile(page, jnp.arange(numbers.shape[3]))
    wide_offset, _ = index_tile(offset, jnp.arange(numbers.shape[3]))
    wide_seen, _ = index_tile(seen, jnp.arange(numbers.shape[3]))
    rows = triton.load(numbers.at[wide_page, head, wide_offset, column], mask=wide_seen, other=0)
    if not isinstance(pages, QuantPages):
        return rows, None
    return rows, triton.load(pages.scales.at[page, head, offset], mask=seen, other=0)


def _dot(a, b, *, trans_b=False):
    """Multiply in full precision for float32 operands, which are for tests: tensor cores would round them."""
    return triton.dot(a, b, trans_b=trans_b, precision="highest" if a.dtype == jnp.float32 else None)
