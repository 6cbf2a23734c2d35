"""The API of paged attention, and its implementations by name.

A page holds `page_size` consecutive tokens of one sequence for all KV heads: `[kv_heads, page_size, head_dim]`,
contiguous in memory. The pages of a sequence may be anywhere in the pool; a row of the block table lists them in order.
The queries of all rows are concatenated in one flat array, so that a step can mix whole prompts, chunks and single
tokens.
"""

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention import reference, xla
from kernels_pallas.paged_attention.pages import Pages, QuantPages, write_pages

IMPLEMENTATIONS = ("mosaic", "reference", "triton", "xla")
WRITE_IMPLEMENTATIONS = ("triton", "xla")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedBatch:
    """The places of a step's queries and keys.

    Row r has `query_start[r+1] - query_start[r]` queries: the last ones of its first `kv_len[r]` tokens. The keys and
    values of those queries are already in the pages.

    Attributes:
        query_start: first query of each row in the flat array; the last entry is the number of real queries. Rows
            without queries (padding) repeat the entry.
        kv_len: number of the row's tokens in the pages, including those of this step; at least 1, also in padding rows.
        block_tables: pages of each row, in order; entries past the end may be any valid page.
        decode: static; every row r has exactly one query, at index r, including padding rows.
    """

    query_start: Int[Array, "rows_plus_1"]
    kv_len: Int[Array, "rows"]
    block_tables: Int[Array, "rows pages_per_row"]
    decode: bool = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedKernels:
    """The names of the implementations to use. None of them falls back to another.

    Attributes:
        decode: attention of batches with one query per row.
        mixed: attention of all other batches.
        write: writing of new keys and values into their pages.
    """

    decode: str = "xla"
    mixed: str = "xla"
    write: str = "xla"


def paged_attention(
    query: Float[Array, "tokens heads head_dim"],
    key_pages: Pages,
    value_pages: Pages,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "tokens heads head_dim"]:
    """Compute causal attention of each query over its row's tokens up to and including its own.

    Unwritten slots may hold anything, NaN included (also in the scales of quantised pages); they do not affect results.
    Results of padding queries are finite and undefined.

    All keys and values are read from the pages. With quantised pages, a chunk therefore attends to its own keys and
    values after quantisation, as later queries do: a prompt computed at once, in chunks or after a cached prefix reads
    the same values.

    Args:
        query: flat queries; `heads` is a multiple of `kv_heads` (grouped-query attention).
        key_pages: keys in the dtype of `query`, or bfloat16 bit-cast to uint16 (`storage_dtype`), or quantised.
        value_pages: values, likewise.
        batch: rows, lengths and block tables.
        scale: factor on the scores, usually head_dim ** -0.5.
        window: a query at position p attends to the keys p - window + 1 to p (Hugging Face's `sliding_window`).
            Default: all keys up to p.
        implementation: `xla`, `reference`, `triton` (NVIDIA GPUs, A100 and newer) or `mosaic` (Hopper, decode batches
            only). Default: `xla`.

    Raises:
        ValueError: shapes do not match, only keys or only values are quantised, the window is empty, there is no such
            implementation, or it does not support these shapes.
    """
    tokens, heads, head_dim = query.shape
    if key_pages.shape != value_pages.shape or key_pages.shape[3] != head_dim or heads % key_pages.shape[1]:
        raise ValueError(
            f"paged_attention: query {query.shape} needs key and value pages "
            f"[num_pages, kv_heads, page_size, {head_dim}] with {heads} heads a multiple of kv_heads, "
            f"got {key_pages.shape} and {value_pages.shape}"
        )
    if isinstance(key_pages, QuantPages) != isinstance(value_pages, QuantPages):
        raise ValueError("paged_attention: key pages and value pages must both be quantised, or neither")
    for pages in (key_pages, value_pages):
        if isinstance(pages, QuantPages) and pages.scales.shape != pages.shape[:3]:
            raise ValueError(
                f"paged_attention: scales of pages {pages.shape} must be {pages.shape[:3]}, got {pages.scales.shape}"
            )
    if batch.decode and batch.kv_len.shape[0] != tokens:
        raise ValueError(
            f"paged_attention: a decode batch needs one query per row, got {batch.kv_len.shape[0]} rows and {tokens} "
            "queries"
        )
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: window must be at least 1 or None, got {window}")
    attention = _attention(implementation or "xla", decode=batch.decode)
    return attention(query, key_pages, value_pages, batch, scale=scale, window=window)


def write_kv(
    key_pages: Pages,
    value_pages: Pages,
    key: Float[Array, "tokens kv_heads head_dim"],
    value: Float[Array, "tokens kv_heads head_dim"],
    page: Int[Array, "tokens"],
    offset: Int[Array, "tokens"],
    *,
    implementation: str | None = None,
) -> tuple[Pages, Pages]:
    """Write keys and values of new tokens into the pages, quantised if the pages are; in place if they are donated.

    Args:
        key_pages: pages of keys.
        value_pages: pages of values.
        key: keys, one row per token.
        value: values, likewise.
        page: each token's page; 0 for padding, whose rows may overwrite each other in any order. Slots of other pages
            must not occur twice.
        offset: each token's offset in its page.
        implementation: `xla` or `triton` (one launch for both). Default: `xla`.

    Returns:
        Key pages and value pages.

    Raises:
        ValueError: there is no such implementation, or it does not support these shapes.
    """
    match implementation or "xla":
        case "xla":
            return write_pages(key_pages, key, page, offset), write_pages(value_pages, value, page, offset)
        case "triton":
            from kernels_pallas.paged_attention import triton_write

            return triton_write.write_kv(key_pages, value_pages, key, value, page, offset)
        case other:
            raise ValueError(f"write_kv: no implementation {other!r}; available: {list(WRITE_IMPLEMENTATIONS)}")


def _attention(implementation: str, *, decode: bool) -> Callable:
    """The attention function of an implementation.

    Pallas is imported only if it is needed: the import takes half a second, and CPUs do not use it.
    """
    match implementation:
        case "xla":
            return xla.attention
        case "reference":
            return reference.attention
        case "triton" if decode:
            from kernels_pallas.paged_attention import triton_decode

            return triton_decode.attention
        case "triton":
            from kernels_pallas.paged_attention import triton_mixed

            return triton_mixed.attention
        case "mosaic":
            from kernels_pallas.paged_attention import mosaic

            return mosaic.attention
    raise ValueError(f"paged_attention: no implementation {implementation!r}; available: {list(IMPLEMENTATIONS)}")
