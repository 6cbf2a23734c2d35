"""Keeps the rows of a sequence's pages that matter most, moved together into fewer pages."""

from kernels_pallas.kv_compaction.api import compact

__all__ = ["compact"]
