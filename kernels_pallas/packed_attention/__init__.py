"""Bidirectional attention within packed segments: images of a vision tower, or windows of images."""

from kernels_pallas.packed_attention.api import packed_attention

__all__ = ["packed_attention"]
