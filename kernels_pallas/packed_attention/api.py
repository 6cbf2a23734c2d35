"""Packed attention: what it computes, and which implementation computes it.

Slots of one flat array hold segments one after another (images, or windows of images); a query sees the keys of its own
segment, before and after it. Segments are told apart by the range of slots that each query sees.
"""

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from kernels_pallas.packed_attention import reference, xla


def packed_attention(
    query: Float[Array, "n heads head_dim"],
    key: Float[Array, "n heads head_dim"],
    value: Float[Array, "n heads head_dim"],
    first: Int[Array, "n"],
    last: Int[Array, "n"],
    *,
    scale: float,
    longest: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "n heads head_dim"]:
    """Attention of query i over the keys first[i] <= j < last[i], by softmax(scale * query key^T) value.

    Segments are contiguous and in ascending order, and all queries of one have its first and last slot. Slots with
    first == last are padding and may stand anywhere between segments: their results are exactly zero, and whatever
    their queries, keys and values hold, NaN included, reaches no other result.

    Args:
        query: queries of all slots.
        key: keys, in the dtype of `query`.
        value: values, likewise.
        first: int32, first slot of the segment each query belongs to.
        last: int32, the slot behind the last one of that segment.
        scale: multiplies the scores, usually head_dim ** -0.5.
        longest: no segment is longer than this; give it where segments are many and short (windows), and they are
            computed as a batch. It is not checked: results of a segment that is longer are wrong.
        implementation: `xla` or `reference`; a named one never falls back. None takes the best for the platform.

    Raises:
        ValueError: shapes or dtypes do not fit each other, or no such implementation.
    """
    same = query.shape == key.shape == value.shape and query.dtype == key.dtype == value.dtype
    if not same or first.shape != query.shape[:1] or last.shape != query.shape[:1]:
        given = ", ".join(f"{x.dtype}{list(x.shape)}" for x in (query, key, value, first, last))
        raise ValueError(
            "packed_attention: query, key and value are [n, heads, head_dim] of one dtype, first and last are [n]; "
            f"got {given}"
        )
    if longest is not None and longest < 1:
        raise ValueError(f"packed_attention: longest is a number of slots, at least 1, got {longest}")
    implementations: dict[str, Callable] = {"xla": xla.attention, "reference": reference.attention}
    chosen = implementation or "xla"
    if chosen not in implementations:
        raise ValueError(f"packed_attention: no implementation {chosen!r}, there are {sorted(implementations)}")
    return implementations[chosen](query, key, value, first, last, scale=scale, longest=longest)
