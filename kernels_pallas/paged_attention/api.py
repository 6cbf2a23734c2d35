"""Paged attention: what it computes, and which implementation computes it.

A page holds `page_size` consecutive tokens of one sequence, for all KV heads: `[kv_heads, page_size, head_dim]` lies
in one piece. The pages of a sequence may stand anywhere in the pool; a row of the block table lists them in order.
Queries of all rows lie one after another in one flat array, so that a step may mix whole prompts, chunks and single
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
    """Where the queries of a step stand, and where their keys lie.

    Row r has `query_start[r+1] - query_start[r]` queries: the last ones of its first `kv_len[r]` tokens. Keys and
    values of those queries are in the pages already.

    Attributes:
        query_start: first query of each row in the flat array; the last entry is the number of real queries. Rows
            without queries (padding) repeat the entry.
        kv_len: tokens of the row in the pages, those of this step included; at least 1, for padding rows too.
        block_tables: pages of each row, in order; entries past the end may be anything in range.
        decode: static; says that row r has exactly one query, number r (padding rows included).
    """

    query_start: Int[Array, "rows_plus_1"]
    kv_len: Int[Array, "rows"]
    block_tables: Int[Array, "rows pages_per_row"]
    decode: bool = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedKernels:
    """Which implementation computes what, by name. A named one never falls back.

    Attributes:
        decode: attention of batches with one query a row.
        mixed: attention of all other batches.
        write: of new keys and values into their pages.
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
    """Causal attention of each query over its row's tokens up to and including its own.

    Slots that no token was written to may hold anything, NaN included (in the scales of quantised pages too); they
    never reach the result. Results of padding queries are finite and mean nothing.

    Everything is read from the pages. With quantised pages a chunk therefore attends to its own keys and values as they
    are after quantisation, like every later reader of them: a prompt computed at once, in chunks or behind a prefix
    from the cache reads the same numbers.

    Args:
        query: flat queries; `heads` is a multiple of `kv_heads` (grouped-query attention).
        key_pages: keys in the dtype of `query`, or bfloat16 bit-cast to uint16 (`storage_dtype`), or quantised.
        value_pages: values, likewise.
        batch: rows, lengths and tables.
        scale: multiplies the scores, usually head_dim ** -0.5.
        window: a query at position p sees the keys p - window + 1 to p only (Hugging Face's `sliding_window`); None
            lets it see all.
        implementation: `xla`, `reference`, `triton` (NVIDIA GPUs, A100 and newer) or `mosaic` (Hopper, decode batches
            only); a named one never falls back. None is `xla`.

    Raises:
        ValueError: shapes do not fit each other, keys are quantised and values not, the window is empty, there is no
            such implementation, or it does not support these shapes.
    """
    tokens, heads, head_dim = query.shape
    if key_pages.shape != value_pages.shape or key_pages.shape[3] != head_dim or heads % key_pages.shape[1]:
        raise ValueError(
            f"paged_attention: query {query.shape} needs key and value pages "
            f"[num_pages, kv_heads, page_size, {head_dim}] with {heads} heads a multiple of kv_heads, "
            f"got {key_pages.shape} and {value_pages.shape}"
        )
    if isinstance(key_pages, QuantPages) != isinstance(value_pages, QuantPages):
        raise ValueError("paged_attention: quantise key pages and value pages, or neither")
    for pages in (key_pages, value_pages):
        if isinstance(pages, QuantPages) and pages.scales.shape != pages.shape[:3]:
            raise ValueError(
                f"paged_attention: scales {pages.scales.shape} do not fit pages {pages.shape}, {pages.shape[:3]} do"
            )
    if batch.decode and batch.kv_len.shape[0] != tokens:
        raise ValueError(
            f"paged_attention: a decode batch of {batch.kv_len.shape[0]} rows has {tokens} queries, not one a row"
        )
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: a window of {window} tokens sees nothing, it must be at least 1 or None")
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
    """Writes keys and values of new tokens, quantised if the pages are. In place, when the caller donates the pages.

    Args:
        key_pages: where the keys go.
        value_pages: where the values go.
        key: a row a token.
        value: likewise.
        page: of each token; 0 for padding, whose rows may overwrite each other in any order. No slot of another page
            may be named twice.
        offset: of each token within its page.
        implementation: `xla` (None too) or `triton` (one launch for both); a named one never falls back.

    Returns:
        key pages and value pages.

    Raises:
        ValueError: no such implementation, or it does not support these shapes.
    """
    match implementation or "xla":
        case "xla":
            return write_pages(key_pages, key, page, offset), write_pages(value_pages, value, page, offset)
        case "triton":
            from kernels_pallas.paged_attention import triton_write

            return triton_write.write_kv(key_pages, value_pages, key, value, page, offset)
        case other:
            raise ValueError(f"write_kv: no implementation {other!r}, there are {list(WRITE_IMPLEMENTATIONS)}")


def _attention(implementation: str, *, decode: bool) -> Callable:
    """The function of that name. Pallas is imported by who asks for it: it costs half a second, and is not needed on a
    CPU."""
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
    raise ValueError(f"paged_attention: no implementation {implementation!r}, there are {list(IMPLEMENTATIONS)}")
