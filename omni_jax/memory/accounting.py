"""Block pool usage by modality, and the check for leaks."""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping

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


def pool_usage(pool: BlockPool, sequences: Iterable[Sequence]) -> PoolUsage:
    """The usage of a pool whose blocks the sequences hold."""
    seen: set[int] = set()
    slots: collections.Counter[Modality] = collections.Counter()
    for sequence in sequences:
        rows = sequence.computed - sequence.dropped
        for first, stop in _runs(index for index, block in enumerate(sequence.blocks) if block not in seen):
            start, end = first * pool.block_size, min(stop * pool.block_size, rows)
            if start < end:
                slots.update(_modalities(sequence, start, end))
        seen.update(sequence.blocks)
    return PoolUsage(
        block_size=pool.block_size,
        total=pool.num_usable,
        free=pool.num_free - pool.num_idle,
        cached=pool.num_idle,
        active=pool.num_used,
        peak_active=pool.peak_used,
        shared=sum(pool.references(block) > 1 for block in seen),
        active_slots={modality: slots[modality] for modality in MODALITIES},
        unfilled_slots=len(seen) * pool.block_size - slots.total(),
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


def _runs(indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of each run of consecutive numbers."""
    for _, run in itertools.groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        first, *rest = (index for _, index in run)
        yield first, (rest[-1] if rest else first) + 1


def _modalities(sequence: Sequence, start: int, stop: int) -> dict[Modality, int]:
    """The number of rows from start to stop in the sequence's cache, by modality."""
    if not sequence.dropped:
        return count_modalities(sequence.request, start, stop)
    computed = sequence.computed  # read once, because another thread may change it
    counts = count_modalities(sequence.request, 0, computed)
    for modality, count in counts.items():
        counts[modality] = count * (stop - start) // max(computed, 1)
    counts["text"] += stop - start - sum(counts.values())
    return counts
