"""Who has the blocks of the pool, and whether it adds up."""

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
    """The pool at a moment. free + cached + active = total.

    Attributes:
        block_size: slots a block.
        total: blocks that can be handed out.
        free: blocks that hold nothing anybody could want.
        cached: blocks that nobody holds and that can be found.
        active: blocks in use.
        peak_active: most blocks that were in use at a time, since the start.
        shared: blocks that more than one hold.
        active_slots: slots of the sequences' blocks that are filled, by the modality of the token; blocks held by
            several count once. Compression drops rows of its own choice in every layer and head: what is left of a
            sequence is taken to be of the same mixture as before.
        unfilled_slots: slots of the sequences' blocks that are not filled.
        evictions: cached blocks given up since the start, by modality.
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
    """What a pool is used for, by the sequences that hold its blocks."""
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
    """Checks that every block has as many references as sequences that hold it, and that what nobody holds could be
    allocated. `sequences` are all that live, those that wait included.

    Raises AssertionError that names the block.
    """
    holders: dict[int, list[str]] = collections.defaultdict(list)
    for sequence in sequences:
        for block in sequence.blocks:
            holders[block].append(f"{sequence.request.id}[{sequence.index}]")
    for block in range(pool.num_blocks):
        held, references = holders.get(block, []), pool.references(block)
        if references != len(held):
            raise AssertionError(f"block {block} has {references} references, but is held by {held or 'nobody'}")
        if len(set(held)) < len(held):
            raise AssertionError(f"block {block} stands twice in a sequence's blocks: {held}")
    if pool.num_used != len(holders):
        raise AssertionError(
            f"{pool.num_used} blocks are in use, but sequences hold {len(holders)}: the others are kept because "
            f"somebody holds a block that continues them, and not them"
        )


def _runs(indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(first, behind the last) of each run of ascending numbers without a gap."""
    for _, run in itertools.groupby(enumerate(indices), key=lambda pair: pair[1] - pair[0]):
        first, *rest = (index for _, index in run)
        yield first, (rest[-1] if rest else first) + 1


def _modalities(sequence: Sequence, start: int, stop: int) -> dict[Modality, int]:
    """How many of the cache's rows from start to stop are of which modality."""
    if not sequence.dropped:
        return count_modalities(sequence.request, start, stop)
    computed = sequence.computed  # read once: another thread may be changing it
    counts = count_modalities(sequence.request, 0, computed)
    for modality, count in counts.items():
        counts[modality] = count * (stop - start) // max(computed, 1)
    counts["text"] += stop - start - sum(counts.values())
    return counts
