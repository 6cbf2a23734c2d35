"""Who loses a slot or blocks, and to whom: a decoding sequence without a free block, a more urgent class.

Four functions change what a sequence holds: `preempt` takes a slot or blocks for another sequence, `requeue` lets a
sequence wait, `take_hits` lets it share cached blocks meanwhile, and `release` frees all that it holds.
"""

import functools
import math
import operator
from collections.abc import Callable, Collection

from omni_jax.requests import Sequence
from omni_jax.scheduling.blocks import Blocks
from omni_jax.scheduling.budget import Ahead
from omni_jax.scheduling.discipline import Discipline
from omni_jax.scheduling.events import Cause, Event
from omni_jax.scheduling.features import Features, can_start, computable
from omni_jax.scheduling.queues import MAX_CANDIDATES, Queues

_admitted_class = operator.attrgetter("admitted_class")


class Preemption:
    """Takes slots and blocks from sequences for others.

    Args:
        queues, blocks, features, discipline: Those of the scheduler.
        record: Takes the event of each preemption.

    Attributes:
        count: Number of times that a sequence lost its slot (a counter).
    """

    def __init__(
        self,
        queues: Queues,
        blocks: Blocks,
        features: Features | None,
        discipline: Discipline,
        record: Callable[[Event], None],
    ):
        self._queues, self._blocks, self._features, self._discipline = queues, blocks, features, discipline
        self._pool = blocks.pool
        self._record = record
        self.count = 0

    # -- what a sequence holds ----------------------------------------------------------------------------------------

    def preempt(self, sequence: Sequence, keep: int, cause: Cause, by: Sequence, *, wanted: int) -> bool:
        """Take the slot of a sequence, if it has one, and its blocks after the first `keep`, for another sequence that
        wants `wanted` blocks. They are swapped out if that is cheaper than recomputing.

        Returns:
            False, without a change, if a compressed sequence cannot be swapped out.
        """
        held, ran = len(sequence.blocks), sequence.slot is not None
        swapped = self._blocks.preempt(sequence, keep, max(wanted, 0))
        if swapped is None:
            return False
        lost = held - len(sequence.blocks)
        self._record(Event(kind="preempt", sequence=sequence, cause=cause, by=by.name, blocks=lost, swapped=swapped))
        self.count += ran
        self.requeue(sequence, len(sequence.blocks))
        return True

    def requeue(self, sequence: Sequence, keep: int) -> None:
        """Let a sequence wait, for the first time or again, with its first `keep` blocks and without features."""
        self._queues.remove(sequence)
        self._blocks.truncate(sequence, keep)
        if self._features is not None and sequence.request.media:
            self._features.release(sequence)
            self._features.track(sequence)
        self._queues.add(sequence)

    def take_hits(self, sequence: Sequence, hits: list[int]) -> None:
        """Let a waiting sequence hold the blocks that `Blocks.match` found."""
        self._blocks.take_hits(sequence, hits)
        if self._features is not None:
            self._features.track(sequence)
        self._queues.file(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free all that a sequence holds, and remove it from the queues."""
        self._blocks.drop_swapped(sequence)
        self._queues.remove(sequence)
        self._blocks.truncate(sequence, 0)
        if self._features is not None and sequence.request.media:
            self._features.release(sequence)

    # -- for a decoding sequence --------------------------------------------------------------------------------------

    def grow(self, sequence: Sequence, now: float) -> bool:
        """Allocate the block for one more token. If none is free, the sequence that is served last loses its slot and
        as many blocks as are missing, or all of them to the host. Returns False if that is the sequence itself, or
        nothing could be taken."""
        missing = self._pool.blocks_for(sequence.rows + 1) - len(sequence.blocks)
        if missing <= 0:
            return True
        while True:
            taken = self._pool.allocate(missing)
            if taken is not None:
                sequence.blocks += taken
                return True
            if self.reclaim_from_waiting(other_than=sequence):
                continue
            candidates = [s for s in self._queues.running if self._blocks.is_preemptible(s)]
            candidates.sort(key=lambda s: self._discipline.rank(s, now))
            preempted = None
            while candidates and preempted is None:
                victim = candidates.pop()
                whole = victim is sequence or self._blocks.swap is not None  # a sequence has one parcel at a time
                keep = 0 if whole else max(len(victim.blocks) - missing, 0)
                if self.preempt(victim, keep, "blocks", sequence, wanted=missing - self._pool.num_free):
                    preempted = victim
            if preempted is None or preempted is sequence:
                return False

    def reclaim_from_waiting(self, other_than: Sequence) -> bool:
        """Free blocks that only waiting sequences hold, those of the last to arrive first. Returns whether there were
        any."""
        # Shared blocks are prompt prefixes, at the same place in each sequence. A sequence that shares its last block
        # shares all of them, and they become free when all that hold the last one have dropped it.
        kept: dict[int, set[int]] = {}  # the blocks at a place of all sequences that keep theirs
        found: list[Sequence] = []
        for block, holders in self._queues.holders.items():
            last: Sequence = next(reversed(holders))
            if (found and last.order < found[-1].order) or other_than in holders:
                continue
            at = len(last.blocks) - 1
            if at not in kept:
                keep = (*self._queues.running, other_than)
                kept[at] = {s.blocks[at] for s in keep if len(s.blocks) > at}
            if block not in kept[at]:
                found = [s for s in holders if not s.dropped]
        for sequence in reversed(found):
            self.requeue(sequence, 0)
        return bool(found)

    # -- for a more urgent class --------------------------------------------------------------------------------------

    def least_urgent(self) -> float:
        """The least urgent class of which a sequence runs, as of its admission."""
        return max(map(_admitted_class, self._queues.running), default=-math.inf)

    def preempt_for_urgent(
        self,
        left: int,
        prefilling: list[Sequence],
        computing: Collection[bytes],
        held: frozenset[str],
        now: float,
    ) -> bool:
        """Take slots and blocks from sequences of less urgent classes for waiting ones that can then run.

        The least urgent sequence loses its slot first, then its last blocks. The taker counts by its present class, the
        victim by its class when it was admitted, aging included. So two sequences cannot take from each other in turn,
        and a sequence admitted because it had waited long keeps what it has.

        Args:
            left: Remaining token budget.
            prefilling: Running sequences with tokens to prefill. As far as these rank before a taker, they use the
                budget first.
            computing: See Admission.computing. A sequence that waits for one of these blocks takes nothing.
            held: Ids of requests that must wait.
            now: The time.

        Returns:
            Whether a running sequence lost its slot.
        """
        queues, blocks, before = self._queues, self._blocks, self.count
        rank, priority = self._discipline.rank, self._discipline.priority
        first = queues.next_in_line(1, now, held)
        owners = (*queues.running, *queues.preempted)
        least = max(map(_admitted_class, owners), default=-math.inf)
        if not first or rank(first[0], now)[0] >= least:
            return False  # without aging, no class is more urgent than the first one's with aging
        victims = [s for s in owners if blocks.is_preemptible(s)]
        least = max(map(_admitted_class, victims), default=-math.inf)
        candidates = queues.next_in_line(MAX_CANDIDATES, now, held)
        if all(priority(s) >= least for s in candidates):
            return False
        ahead = Ahead(prefilling, functools.partial(computable, self._features), self._discipline, now)
        claimed = {*computing}  # and what candidates before the present one will compute
        slots = kept = 0  # slots and blocks that candidates before the present one will take
        loading = 0  # blocks that sequences will take when their swapped ones are loaded
        for sequence in candidates:
            if sequence.pending or not can_start(self._features, sequence):
                continue
            left = ahead.leave(left, rank(sequence, now))
            full = slots >= len(queues.free_slots)
            if left < 0 or (left == 0 and (not full or prefilling)):
                break  # it could not run in this step
            hits = blocks.match(sequence)
            digest = blocks.next_digest(sequence, len(hits))
            if digest in claimed and not sequence.wants_prompt_logprobs:
                continue
            need = blocks.missing(sequence, hits)
            if blocks.compression is not None:
                need += blocks.num_reserved(sequence)
            free, less = self._unreserved() - kept, []
            if full or need > free:
                less = [
                    s
                    for s in victims
                    if s.admitted_class > priority(sequence)
                    and rank(s, now) > rank(sequence, now)  # others would start again first; nor is it its own victim
                    and (s.slot is not None or s.blocks)
                ]
                obtainable = free + sum(blocks.num_unshared(s, hits) for s in less) - loading
                if obtainable < need or (full and all(s.slot is None for s in less)):
                    break  # those after it do not start before it
                if not blocks.can_restore(sequence):
                    loading += need
                    continue
            if hits:  # or they might be taken from the victims
                before_hits = rank(sequence, now)
                need -= len(hits) - self._pool.count_held(hits)
                self.take_hits(sequence, hits)
                if rank(sequence, now) != before_hits or not can_start(self._features, sequence):
                    continue  # the tokens or the image after the hits are what counts now
            if less:
                less.sort(key=lambda s: rank(s, now))
                self._preempt_last(less, sequence, slot=full, blocks=need + kept - self._unreserved())
            slots, kept = slots + 1, kept + need + 1
            ahead.add(sequence)
            if digest is not None:
                claimed.add(digest)
        return self.count != before

    def _unreserved(self) -> int:
        """Number of free blocks beyond those reserved for running sequences to grow."""
        return self._pool.num_free - self._blocks.num_reserved_for(self._queues.running)

    def _preempt_last(self, victims: list[Sequence], taker: Sequence, *, slot: bool, blocks: int) -> None:
        """Take a slot, if `slot`, and `blocks` blocks from sequences in order of service, the last one first."""
        for victim in reversed(victims):
            if not slot and blocks <= 0:
                return
            keep, runs = len(victim.blocks) - min(len(victim.blocks), max(blocks, 0)), victim.slot is not None
            if not runs and keep == len(victim.blocks):
                continue
            before = self._pool.num_free
            if self.preempt(victim, keep, "class", taker, wanted=blocks) and runs:
                slot = False
            blocks -= self._pool.num_free - before
