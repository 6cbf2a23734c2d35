"""KV compaction: keep the most important rows of a sequence's pages, in fewer pages."""

from kernels_pallas.kv_compaction.api import compact

__all__ = ["compact"]
