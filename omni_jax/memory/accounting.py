"""Block pool usage by modality, and the check for leaks."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from omni_jax.memory.block_pool import BlockPool
from omni_jax.memory.prefix import count_modalities
from omni_jax.requests import Sequence
from omni_jax.requests.segment import MODALITIES, Modality


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolUsage:
    """The use of the pool at one moment. free + cached + active = total.

    Attributes:
        block_size: Slots per block.
        total: Number of blocks that can be allocated.
        free: Number of blocks without content to reuse.
        cached: Number of idle blocks: registered in the prefix cache, and held by no sequence.
        active: Number of blocks in use.
        peak_active: Maximum number of blocks in use at a time since the start.
        shared: Number of blocks that several sequences hold.
        active_slots: Number of filled slots by modality of the token; shared blocks count once. Compression drops
            different rows in each layer and head, so a compressed sequence is assumed to keep its mixture.
        unfilled_slots: Number of slots in held blocks that are not filled.
        evictions: Number of cached blocks evicted since the start, by modality.
    """

    block_size: int
    total: int
    free: int
    cached: int
    active: int
    peak_active: int
    shared: int
    active_slots: Mapping[Modality, int]
    unfilled_slots: int
    evictions: Mapping[Modality, int]


def pool_usage(pool: BlockPool, slots: Mapping[Modality, int]) -> PoolUsage:
    """The usage of a pool with `slots` filled slots in held blocks, by modality."""
    return PoolUsage(
        block_size=pool.block_size,
        total=pool.num_usable,
        free=pool.num_free - pool.num_idle,
        cached=pool.num_idle,
        active=pool.num_used,
        peak_active=pool.peak_used,
        shared=pool.num_shared,
        active_slots={modality: slots.get(modality, 0) for modality in MODALITIES},
        unfilled_slots=pool.num_used * pool.block_size - sum(slots.values()),
        evictions={modality: pool.evictions_by_modality[modality] for modality in MODALITIES},
    )


def check_leaks(pool: BlockPool, sequences: Iterable[Sequence]) -> None:
    """Check that each block has one reference per sequence that holds it, and that the rest can be allocated.

    Args:
        sequences: All live sequences, including those that wait.

    Raises:
        AssertionError: It does not; the message gives the block.
    """
    holders: dict[int, list[str]] = collections.defaultdict(list)
    for sequence in sequences:
        for block in sequence.blocks:
            holders[block].append(sequence.name)
    for block in range(pool.num_blocks):
        held, references = holders.get(block, []), pool.references(block)
        if references != len(held):
            raise AssertionError(f"block {block} has {references} references, but is held by {held or 'no sequence'}")
        if len(set(held)) < len(held):
            raise AssertionError(f"block {block} occurs twice in a sequence's blocks: {held}")
    if pool.num_used != len(holders):
        raise AssertionError(
            f"{pool.num_used} blocks are in use, but sequences hold {len(holders)}: a sequence holds a block without "
            f"holding its parent, so the parent cannot be freed"
        )


def count_rows(sequence: Sequence, start: int, stop: int) -> dict[Modality, int]:
    """The number of rows from start to stop in the sequence's cache, by modality."""
    if start >= stop:
        return {}
    if not sequence.request.parts_stop:
        return {"text": stop - start}
    if not sequence.dropped:
        return count_modalities(sequence.request, start, stop)
    counts: dict[Modality, int] = {
        modality: count * (stop - start) // sequence.computed
        for modality, count in sequence.mixture.items()
        if modality != "text"
    }
    counts["text"] = stop - start - sum(counts.values())
    return counts
