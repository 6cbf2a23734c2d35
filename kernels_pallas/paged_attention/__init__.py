"""Attention over a paged KV cache, for rows that read whole prompts, chunks of them, or one token each."""

from kernels_pallas.paged_attention.api import PagedBatch, PagedKernels, paged_attention, write_kv
from kernels_pallas.paged_attention.pages import Pages, QuantPages, storage_dtype, write_pages

__all__ = [
    "PagedBatch",
    "PagedKernels",
    "Pages",
    "QuantPages",
    "paged_attention",
    "storage_dtype",
    "write_kv",
    "write_pages",
]
