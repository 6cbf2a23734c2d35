"""The API of KV compaction, and its implementations by name.

A sequence's pages hold `page_size` cache rows each. Compaction keeps some of the rows and moves them to the first
pages, so that the other pages become free. Attention over the kept rows equals attention with the dropped rows masked:
keys are stored rotated, so a row does not depend on its place in the pages.
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
    """Keep `keep` of the first `rows` rows in the pages `source`; write them to the beginning of the pages `target`.

    This is done in every layer, in place if the caller donates the pages. Each KV head of each layer keeps, in order:
    the first `sinks` rows, the last `window` rows, and of the others those whose keys have the smallest L2 norm. Its
    square is rounded to 9 bits of its fraction, and of equal ones the earlier row is kept: so the last bits of a sum,
    which depend on the batch, do not choose between equal tokens. Keys of small norm receive much attention (Devoto et
    al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", 2024); the first and the latest rows
    are indispensable (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023).

    Rows are copied bit by bit, quantised ones with their scales. All reads come before all writes, so `target` may list
    pages of `source`. Rows of `source` after the first `rows` are never kept and may hold NaN. Rows with NaN keys are
    dropped first. The contents of `target` after the `keep` rows are undefined.

    Args:
        key_pages: for each layer, [num_pages, kv_heads, page_size, head_dim] in float32, bfloat16, bfloat16 bit-cast to
            uint16, or QuantPages. One call for several layers compiles faster than one call per layer.
        value_pages: values, likewise.
        source: the sequence's pages in order, padded with any page.
        rows: number of rows of the sequence, at most page_size for each page of `source`.
        keep: number of rows to keep, from max(1, sinks + window) to `rows`. Not checked: only the device has it.
        target: as many pages as `source`, all of which are written. Those after the first ceil(keep / page_size) are
            padding and must be a page that is never read.
        sinks: number of rows to keep at the beginning.
        window: number of rows to keep at the end.
        implementation: `xla` or `reference`. Default: `xla`.

    Raises:
        ValueError: shapes do not match, or there is no such implementation.
    """
    keys, values = ([pages.shape for pages in layers] for layers in (key_pages, value_pages))
    if keys != values or len(set(keys)) != 1 or source.shape != target.shape or source.ndim != 1:
        raise ValueError(
            "kv_compaction: keys and values of all layers need one shape, source and target need equal lengths; "
            f"got {keys}, {values}, {source.shape} and {target.shape}"
        )
    implementations: dict[str, Callable] = {"xla": xla.compact, "reference": reference.compact}
    chosen = implementation or "xla"
    if chosen not in implementations:
        raise ValueError(f"kv_compaction: no implementation {chosen!r}; available: {sorted(implementations)}")
    return implementations[chosen](key_pages, value_pages, source, rows, keep, target, sinks=sinks, window=window)
