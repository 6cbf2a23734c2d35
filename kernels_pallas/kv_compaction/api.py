"""KV compaction: what it computes, and which implementation computes it.

A sequence's cache rows lie in its pages, `page_size` a page. Compaction keeps some of them and moves those together, so
that the pages behind them become free. Attention over what is left equals attention with the dropped columns masked:
keys carry their rotation, so a row means the same wherever it lies.
"""

from collections.abc import Callable

from jaxtyping import Array, Int

from kernels_pallas.kv_compaction import reference, xla
from kernels_pallas.paged_attention import Pages


def compact(
    key_pages: tuple[Pages, ...],
    value_pages: tuple[Pages, ...],
    source: Int[Array, "pages"],
    rows: Int[Array, ""],
    keep: Int[Array, ""],
    target: Int[Array, "pages"],
    *,
    sinks: Int[Array, ""],
    window: Int[Array, ""],
    implementation: str | None = None,
) -> tuple[tuple[Pages, ...], tuple[Pages, ...]]:
    """Of the first `rows` rows in pages `source`, writes `keep` to the beginning of pages `target`, in every layer. In
    place, when the caller donates the pages.

    Kept are the first `sinks` rows, the last `window`, and of the others those whose keys have the smallest L2 norm
    (the earlier of two that are equal). Each KV head of each layer chooses for itself, and what it keeps stays in
    order. That a small norm of the key goes with much attention was found by Devoto et al., "A Simple and Effective L2
    Norm-Based Strategy for KV Cache Compression", 2024; that the first rows and the latest are indispensable by Xiao et
    al., "Efficient Streaming Language Models with Attention Sinks", 2023.

    Rows are moved as they are stored, bit by bit: quantised ones with their scales. Everything is read before anything
    is written, so `target` may list pages of `source`. Rows of `source` behind the first `rows` are never kept,
    whatever they hold, NaN included; a key that is not a number goes before all others. What stands in `target` behind
    the `keep` rows means nothing.

    Args:
        key_pages: of each layer, [num_pages, kv_heads, page_size, head_dim] in float32, bfloat16, bfloat16 bit-cast to
            uint16, or QuantPages. Several layers in one call are compiled faster than each by itself.
        value_pages: likewise.
        source: the sequence's pages in order, padded with any page.
        rows: how many rows the sequence has, at most page_size for each page of `source`.
        keep: at least sinks + window and 1, at most `rows`. Not checked, as it is known on the device only.
        target: as many pages as `source`, all of which are written; those behind the first ceil(keep / page_size) are
            padding, and must be a page that nobody reads.
        sinks: rows.
        window: rows.
        implementation: `xla` or `reference`; a named one never falls back. None takes the best for the platform.

    Raises:
        ValueError: shapes do not fit each other, or no such implementation.
    """
    keys, values = ([pages.shape for pages in layers] for layers in (key_pages, value_pages))
    if keys != values or len(set(keys)) != 1 or source.shape != target.shape or source.ndim != 1:
        raise ValueError(
            "kv_compaction: keys and values of all layers are pages of one shape, source and target are lists of equal "
            f"length; got {keys}, {values}, {source.shape} and {target.shape}"
        )
    implementations: dict[str, Callable] = {"xla": xla.compact, "reference": reference.compact}
    chosen = implementation or "xla"
    if chosen not in implementations:
        raise ValueError(f"kv_compaction: no implementation {chosen!r}, there are {sorted(implementations)}")
    return implementations[chosen](key_pages, value_pages, source, rows, keep, target, sinks=sinks, window=window)
