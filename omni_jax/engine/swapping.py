"""The scheduler's swap operations: copies of blocks between the runner's pool and the host tier."""

import hashlib
import itertools
import logging
from pathlib import Path

from omni_jax.cost.model import CostModel
from omni_jax.engine.config import EngineConfig, EngineInfo
from omni_jax.memory.host_tier import HostTier, Parcel, ParcelLost
from omni_jax.memory.swap_choice import prefer_swap
from omni_jax.requests import Sequence
from omni_jax.runtime.runner import Runner

GIB = 1 << 30

logger = logging.getLogger(__name__)


def open_tier(config: EngineConfig, info: EngineInfo, block_bytes: int, replica: int = 0) -> HostTier | None:
    """Open the host tier of a replica, or return None if swap is off."""
    if not config.swap_space or config.preemption_mode == "recompute":
        return None
    directory = None if config.swap_dir is None else Path(config.swap_dir)
    if directory is not None and config.data_parallel_size > 1:
        directory /= f"replica-{replica}"
    depends_on = (
        *(info.model_dir, info.architecture, info.dtype, config.kv_cache_dtype, info.block_size, block_bytes),
        config.tensor_parallel_size,  # a payload is stored device by device
    )
    return HostTier(
        block_bytes=block_bytes,
        capacity_bytes=int(config.swap_space * GIB),
        directory=directory,
        disk_bytes=int(config.swap_dir_space * GIB),
        num_threads=config.num_swap_threads,
        layout=hashlib.blake2b(repr(depends_on).encode(), digest_size=16).digest(),
        max_swap_ops=config.max_swap_ops,
    )


class EngineSwap:
    """See scheduling.blocks.Swap.

    Args:
        mode: "swap" to swap always, "auto" to swap if the cost model predicts that recomputing takes longer.
    """

    def __init__(self, runner: Runner, tier: HostTier, cost: CostModel, mode: str):
        self._runner, self._tier, self._cost, self._mode = runner, tier, cost, mode
        self._numbers = itertools.count()

    def store(self, sequence: Sequence, blocks: list[int], tokens: int, cached: int) -> Parcel | None:
        """Dispatch the copy after all steps in flight, and pass it to the tier's threads.

        Returns None if the tier is full or, except for compressed sequences, if recomputing is faster. (A compressed
        sequence cannot be recomputed exactly.)
        """
        if (
            self._mode == "auto"
            and not sequence.dropped
            and not self._is_cheaper(sequence, len(blocks), tokens - cached)
        ):
            return None
        if not self._tier.has_room(len(blocks)):
            return None
        key = f"{next(self._numbers)} {sequence.request.id} {sequence.index}".encode()
        parcel = self._tier.store(key, self._runner.read_blocks(blocks), len(blocks))
        if parcel is not None:
            logger.info(
                "[SWAP] evicting %s of %s[%d]: %d tokens to the host",
                _named(blocks),
                sequence.request.id,
                sequence.index,
                tokens,
            )
        return parcel

    def _is_cheaper(self, sequence: Sequence, blocks: int, tokens: int) -> bool:
        """Whether swapping the blocks is cheaper than recomputing the sequence's last `tokens` tokens."""
        if not tokens:
            return False
        stats = self._tier.stats()
        full = stats.host_bytes + blocks * self._runner.block_bytes > stats.host_capacity
        return prefer_swap(
            blocks=blocks,
            block_bytes=self._runner.block_bytes,
            store_bandwidth=stats.store_bandwidth,
            load_bandwidth=stats.disk_read_bandwidth if full else stats.load_bandwidth,
            on_disk=full,
            recompute_seconds=self._cost.prefill_seconds(tokens, sequence.rows - tokens),
        )

    def is_ready(self, parcel: Parcel) -> bool:
        """Whether the parcel is in host memory. If not, start to read it from disk."""
        if self._tier.is_ready(parcel):
            return True
        self._tier.prefetch(parcel)
        return False

    def load(self, parcel: Parcel, blocks: list[int]) -> bool:
        """Dispatch the copy to the device before the next step. Returns False if the parcel is lost."""
        try:
            data = self._tier.take(parcel)
        except ParcelLost:
            return False
        self._runner.write_blocks(blocks, data)
        logger.info("[SWAP] bringing back %s", _named(blocks))
        return True

    def drop(self, parcel: Parcel) -> None:
        """Free a parcel."""
        self._tier.drop(parcel)


def _named(blocks: list[int]) -> str:
    """A list of blocks for the log."""
    if len(blocks) == 1:
        return f"block {blocks[0]}"
    shown = " ".join(map(str, blocks[:8]))
    return f"blocks {shown}{' …' if len(blocks) > 8 else ''} ({len(blocks)})"
