"""The API of packed attention, and its implementations by name.

One flat array of slots holds consecutive segments (images, or windows of images). A query attends to all keys of its
own segment, given as a range of slots.
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
    """Compute softmax(scale * query key^T) value of each query i over the keys first[i] <= j < last[i].

    Segments are contiguous and in ascending order; all queries of a segment have the same first and last slot. Slots
    with first == last are padding, which may be anywhere between segments. Results of padding are exactly zero, and its
    queries, keys and values, NaN included, do not affect other results.

    Args:
        query: queries of all slots.
        key: keys, in the dtype of `query`.
        value: values, likewise.
        first: int32, first slot of each query's segment.
        last: int32, the slot after the last one of that segment.
        scale: factor on the scores, usually head_dim ** -0.5.
        longest: an upper limit on the length of a segment. Set it for many short segments (windows), which are then
            computed in batches. Not checked: results of longer segments are wrong. Default: no limit.
        implementation: `xla` or `reference`. Default: `xla`.

    Raises:
        ValueError: shapes or dtypes do not match, or there is no such implementation.
    """
    same = query.shape == key.shape == value.shape and query.dtype == key.dtype == value.dtype
    if not same or first.shape != query.shape[:1] or last.shape != query.shape[:1]:
        given = ", ".join(f"{x.dtype}{list(x.shape)}" for x in (query, key, value, first, last))
        raise ValueError(
            "packed_attention: query, key and value must be [n, heads, head_dim] of one dtype, first and last [n]; "
            f"got {given}"
        )
    if longest is not None and longest < 1:
        raise ValueError(f"packed_attention: longest must be at least 1, got {longest}")
    implementations: dict[str, Callable] = {"xla": xla.attention, "reference": reference.attention}
    chosen = implementation or "xla"
    if chosen not in implementations:
        raise ValueError(f"packed_attention: no implementation {chosen!r}; available: {sorted(implementations)}")
    return implementations[chosen](query, key, value, first, last, scale=scale, longest=longest)
