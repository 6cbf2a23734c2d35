"""The usage of a block pool counted anew, token by token, to compare running counts with."""

from collections.abc import Iterable

from omni_jax.memory.accounting import PoolUsage, count_rows
from omni_jax.memory.block_pool import BlockPool
from omni_jax.requests import Request, Sequence
from omni_jax.requests.segment import MODALITIES, Modality


def walk(pool: BlockPool, sequences: Iterable[Sequence]) -> PoolUsage:
    """The usage of a pool whose blocks the sequences hold."""
    filled: dict[tuple[int, int], Modality] = {}
    holders: dict[int, int] = {}
    slots: dict[Modality, int] = dict.fromkeys(MODALITIES, 0)
    for sequence in sequences:
        for block in sequence.blocks:
            holders[block] = holders.get(block, 0) + 1
        if sequence.dropped:  # it shares no block
            for modality, count in count_rows(sequence, 0, sequence.rows).items():
                slots[modality] += count
        else:
            for token in range(sequence.computed):
                place = sequence.blocks[token // pool.block_size], token % pool.block_size
                filled[place] = _modality(sequence.request, token)
    for modality in filled.values():
        slots[modality] += 1
    return PoolUsage(
        block_size=pool.block_size,
        total=pool.num_usable,
        free=pool.num_free - pool.num_idle,
        cached=pool.num_idle,
        active=len(holders),
        peak_active=pool.peak_used,
        shared=sum(count > 1 for count in holders.values()),
        active_slots=slots,
        unfilled_slots=len(holders) * pool.block_size - sum(slots.values()),
        evictions={modality: pool.evictions_by_modality[modality] for modality in MODALITIES},
    )


def _modality(request: Request, token: int) -> Modality:
    """The modality of a token: media first, then tables."""
    for part in (*request.media, *(segment for segment in request.segments if segment.modality == "table")):
        if part.start <= token < part.stop:
            return part.modality
    return "text"
