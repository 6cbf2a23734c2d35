"""Which waiting sequences can start in the next step."""

import functools

from omni_jax.requests import Sequence
from omni_jax.scheduling.blocks import Blocks
from omni_jax.scheduling.budget import Ahead
from omni_jax.scheduling.discipline import Discipline
from omni_jax.scheduling.features import Features, can_start, computable
from omni_jax.scheduling.preemption import Preemption
from omni_jax.scheduling.queues import MAX_CANDIDATES, Queues


class Admission:
    """Finds the waiting sequences that start in a step, and gives them slots and blocks."""

    def __init__(
        self,
        queues: Queues,
        blocks: Blocks,
        features: Features | None,
        discipline: Discipline,
        preemption: Preemption,
    ):
        self._queues, self._blocks, self._features, self._discipline = queues, blocks, features, discipline
        self._preemption = preemption
        self._computable = functools.partial(computable, features)

    def enter(self, sequence: Sequence) -> None:
        """Queue a sequence that arrives, or that has been parked."""
        self._preemption.requeue(sequence, len(sequence.blocks))
        self._catch_up(sequence)

    def _catch_up(self, sequence: Sequence) -> None:
        """Let a waiting sequence with images take its cache hits, so that no image is encoded whose keys and values are
        cached."""
        if sequence.request.media and (hits := self._blocks.match(sequence)):
            self._preemption.take_hits(sequence, hits)

    def acquire_features(self) -> None:
        """Take references to the features that sequences need."""
        if self._features is not None:
            for sequence in self._features.acquire(self._catch_up):
                self._queues.file(sequence)

    def computing(self, prefilling: list[Sequence], before: float) -> dict[bytes, Sequence]:
        """The running sequences by the digest of the block that each computes next, unless it got no tokens since
        `before`, the time of the last plan. Sequences that can wait for none of them return to the line."""
        computing = {}
        for sequence in prefilling:
            digest = self._blocks.next_digest(sequence) if sequence.served_at >= before else None
            if digest is not None and not self._blocks.is_cached(digest):
                computing[digest] = sequence
        queues = self._queues
        if queues.free_slots or (queues.parked and queues.parked.most_urgent < self._preemption.least_urgent()):
            for sequence in queues.parked.wake(set(computing.values()), MAX_CANDIDATES + len(queues.free_slots)):
                if sequence.request.media:
                    self.enter(sequence)
                else:
                    queues.file(sequence)
        return computing

    def admissible(
        self,
        left: int,
        prefilling: list[Sequence],
        computing: dict[bytes, Sequence],
        held: frozenset[str],
        now: float,
    ) -> list[Sequence]:
        """Waiting sequences that can start now, in order, until the budget is used. They hold their cache hits from now
        on, and nothing else yet.

        A step looks at a limited number of sequences. Those that must wait for a block or an image leave the line
        meanwhile, so the next step looks at others.

        Args:
            left: Remaining token budget.
            prefilling: Running sequences with tokens to prefill. As far as these rank before a candidate, they use the
                budget first.
            computing: See `computing`. A sequence waits if another one, or one found earlier, computes its next block.
            held: Ids of requests that must wait.
            now: The time.
        """
        queues, blocks, pool = self._queues, self._blocks, self._blocks.pool
        slots, rank = len(queues.free_slots), self._discipline.rank
        if left <= 0 or not slots:
            return []
        ahead = Ahead(prefilling, self._computable, self._discipline, now)
        found: list[Sequence] = []
        loading = 0  # sequences whose swapped blocks are being loaded; they keep their room, so no more are loaded
        # Blocks for each running sequence to grow, or a new one would soon be preempted, and blocks that those found
        # here will take when they are admitted.
        kept = blocks.num_reserved_for(queues.running)
        for sequence in queues.next_in_line(slots + MAX_CANDIDATES, now, held):
            left = ahead.leave(left, rank(sequence, now))
            if left <= 0 or slots <= len(found):
                break
            if sequence.pending:  # (d): in this step it waits, and keeps its room
                slots -= 1
                kept += blocks.missing(sequence) + blocks.num_reserved(sequence)
                continue
            if not can_start(self._features, sequence):
                queues.file(sequence)
                continue
            if not self._computable(sequence):
                continue  # all tokens are computed, and its last one is in flight
            hits = blocks.match(sequence)
            digest = blocks.next_digest(sequence, len(hits))
            if digest in computing and not sequence.wants_prompt_logprobs:
                self._park(sequence, computing[digest], len(sequence.blocks) + len(hits))
                continue
            own, alone = blocks.num_reserved(sequence), not (queues.running or found or loading or kept)
            extra = own + kept if blocks.compression is not None else 0 if alone else kept
            need = blocks.missing(sequence, hits)
            while alone and need + extra > pool.num_free and self._preemption.reclaim_from_waiting(other_than=sequence):
                need = blocks.missing(sequence, hits)
            if need + extra > pool.num_free:
                break
            if sequence.swapped is not None and slots <= len(found) + loading:
                continue
            if not blocks.can_restore(sequence):
                loading += 1
                kept += need + own
                continue
            if hits:
                need -= len(hits) - pool.count_held(hits)
                self._preemption.take_hits(sequence, hits)
                if not can_start(self._features, sequence):  # its next image is after the hits
                    self.acquire_features()
                    continue
            found.append(sequence)
            if digest is not None:
                computing[digest] = sequence
            kept += need + own
            ahead.add(sequence)
        return found

    def _park(self, sequence: Sequence, owner: Sequence, at: int) -> None:
        """Let a sequence wait for the blocks that it shares with a running one, from block `at` on. It needs no
        features meanwhile."""
        self._queues.park(sequence, owner, self._blocks.last_shared(sequence, owner, at))
        if self._features is not None and sequence.request.media:
            self._features.release(sequence)

    def admit(self, sequence: Sequence, now: float) -> bool:
        """Give a waiting sequence a slot, and blocks for all its tokens. Returns False if there are too few."""
        blocks = self._blocks
        need = blocks.missing(sequence)
        taken = blocks.pool.allocate(need) if need > 0 else []
        if taken is None:
            return False
        sequence.blocks += taken
        if sequence.swapped is not None:
            kept = sequence.swapped.first
            if not blocks.restore(sequence):
                self._preemption.requeue(sequence, kept)  # recomputing may take more blocks than it has now
                return False
        self._queues.admit(sequence)
        if self._features is not None:
            self._features.track(sequence)
        sequence.admitted_class = self._discipline.rank(sequence, now)[0]
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
            if not sequence.index:
                blocks.count_hits(sequence)
        return True
