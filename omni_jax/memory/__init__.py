"""The device's memory as the host sees it: KV blocks and encoder features, reference counts, tables."""

from omni_jax.memory.block_pool import BlockPool
from omni_jax.memory.encoder_cache import EncoderCache

__all__ = ["BlockPool", "EncoderCache"]
