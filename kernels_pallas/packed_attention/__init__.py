"""Attention within segments packed one after another, in both directions: images in a vision tower, and windows in
them."""

from kernels_pallas.packed_attention.api import packed_attention

__all__ = ["packed_attention"]
