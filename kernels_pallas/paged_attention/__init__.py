"""Attention over a paged KV cache, for batches of prompts, chunks of prompts and single tokens."""

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
