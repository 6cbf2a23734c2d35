"""The KV cache as the host sees it: blocks, reference counts, tables."""

from omni_jax.memory.block_pool import BlockPool

__all__ = ["BlockPool"]
