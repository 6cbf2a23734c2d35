"""Host-side bookkeeping of device memory: KV cache blocks, their contents and holders, and encoder features."""

from omni_jax.memory.accounting import PoolUsage, check_leaks, pool_usage
from omni_jax.memory.block_pool import BlockPool
from omni_jax.memory.encoder_cache import EncoderCache
from omni_jax.memory.recycling import BlockUse, RecyclingPolicy, make_recycling

__all__ = [
    "BlockPool",
    "BlockUse",
    "EncoderCache",
    "PoolUsage",
    "RecyclingPolicy",
    "check_leaks",
    "make_recycling",
    "pool_usage",
]
