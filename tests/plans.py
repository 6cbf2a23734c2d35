"""Plans made by hand: rows of sequences that no scheduler knows."""

import copy
import dataclasses

import numpy as np

from omni_jax.memory.encoder_cache import EncoderCache
from omni_jax.requests import Sequence
from omni_jax.scheduling.buckets import default_buckets
from omni_jax.scheduling.features import Features
from omni_jax.scheduling.plan import Score, StepPlan
from omni_jax.scheduling.plan_builder import build_plan

BUCKETS = default_buckets(max_num_seqs=64, max_num_batched_tokens=4096)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HandRow:
    """Tokens start to start + count of a sequence. Nothing is derived from the sequence's state but its tokens, its
    blocks and its parameters.

    Attributes:
        feedback: The token is on the device.
        new_slot, moved: The slot is written: as new, or with the history that it has.
    """

    sequence: Sequence
    start: int
    count: int
    feedback: bool = False
    sample: bool = False
    score: bool = False
    new_slot: bool = False
    moved: bool = False


def plan_of(*rows: HandRow, size: int = 64, decode: bool = False, number: int = 0) -> StepPlan:
    features = None
    if any(row.sequence.request.positions is not None for row in rows):
        features = Features(EncoderCache(16), max_patches=1, pack_patches=1)
    scores, parts = [], []
    for index, row in enumerate(rows):
        sequence = row.sequence
        slot = index if sequence.slot is None else sequence.slot
        there = copy.copy(sequence)
        there.slot, there.computed, there.pending = slot, row.start, int(row.feedback)
        written = not (row.new_slot or row.moved)
        there.on_device, there.on_device_blocks = not row.new_slot, len(sequence.blocks) if written else 0
        parts.append((there, row.count))
        if row.score:
            scores.append(Score(index, sequence.request.prompt_ids[row.start + 1 : row.start + row.count + 1]))
    samples = np.array([row.sample for row in rows])
    made = build_plan(parts, number=number, buckets=BUCKETS, eos_token_ids=frozenset(), features=features)
    return dataclasses.replace(
        made, decode=decode, size=size, samples=samples, scores=tuple(scores), suppressed=(), forced=()
    )
