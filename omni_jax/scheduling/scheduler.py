"""The scheduler: which tokens of which sequences run in the next step, within one token budget.

There are no phases. The first `computed` of a sequence's known and pending tokens are in the cache, and steps advance
`computed`. The engine runs one step ahead: it plans a step before it has read the tokens of the step before. These
rules make that safe:

(a) No token is planned past a foreseeable end (max_tokens, the context length).
(b) If commit(k) ends a sequence while step k+1 is in flight, its row of k+1 is dropped and its blocks are freed at
    once. Device calls are ordered through the donated pool, so the next holder of the blocks writes to them later.
(c) A block is shared only when it is full of known tokens.
(d) A preempted sequence with a pending token is not planned before that token is committed.
(e) A step that raised has lost the pool: `reset` requeues all running sequences, and uncommitted steps are dropped.

Images are encoded between steps. A sequence whose next image is not encoded yet is skipped, both when it waits and when
it runs, so no sequence waits for another's image.

The discipline (discipline.py) decides the order of service. By deadline, the budget goes to the most urgent segment up
to its end, then to the next. Decoding sequences always run, and the budget is small enough to keep them within their
objective. A sequence that gets no tokens is paused: it keeps its slot and blocks. For a sequence of a more urgent
class, a slot is taken from the least urgent sequence, which keeps its blocks; if blocks run out, its last ones are
taken too.
"""

import math
from collections.abc import Iterable

from omni_jax.cost import CostModel
from omni_jax.memory import BlockPool
from omni_jax.requests import InvalidRequest, MediaSpan, Request, Sequence
from omni_jax.requests.outputs import FinishReason
from omni_jax.scheduling import budget
from omni_jax.scheduling.blocks import Blocks
from omni_jax.scheduling.discipline import Discipline, FirstCome
from omni_jax.scheduling.events import Cause, Event
from omni_jax.scheduling.features import Features
from omni_jax.scheduling.limits import SchedulerConfig, ending, output_room
from omni_jax.scheduling.plan import Accepted, Row, StepPlan
from omni_jax.scheduling.queues import Queues


class Scheduler:
    """Holds all live requests, from arrival to their last token.

    Args:
        config: Limits of a batch.
        pool: The block pool.
        features: The encoder cache, for a model that reads images.
        discipline: The order of service. Default: first come, first served.
        cost: Predicts the duration of steps; without it, steps are as large as the budget allows.
        blocks: Prefix caching, swapping and compression; without it none of them is used.

    Attributes:
        waiting, running: Sequences without and with a slot, each in order of arrival.
        events: Events since the caller last cleared the list.
        num_preemptions: Number of times that a sequence lost its slot (a counter).
        held: Ids of requests that must wait, whatever their rank. Set by the caller, after `reset`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        features: Features | None = None,
        *,
        discipline: Discipline | None = None,
        cost: CostModel | None = None,
        blocks: Blocks | None = None,
    ):
        if pool.num_usable * pool.block_size < config.max_model_len:
            raise ValueError(
                f"the KV cache holds {pool.num_usable} blocks of {pool.block_size} tokens, "
                f"less than one sequence of max_model_len {config.max_model_len}"
            )
        self.config = config
        self.pool = pool
        self.blocks = blocks or Blocks(pool)
        self.features = features
        self.discipline: Discipline = discipline or FirstCome()
        self.cost = cost
        self.events: list[Event] = []
        self._planned_at = 0.0
        self._decoding: list[Sequence] = []  # in the latest plan
        self._step_seconds = 0.0  # predicted duration of the latest plan
        self._queues = Queues(config.max_num_seqs)
        self.running, self.waiting = self._queues.running, self._queues.waiting
        self.num_preemptions = 0
        self.held: frozenset[str] = frozenset()
        self._live: dict[str, list[Sequence]] = {}
        self._arrivals = 0

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        return len(self._live)

    def has(self, request_id: str) -> bool:
        return request_id in self._live

    def sequences(self, request_id: str) -> list[Sequence]:
        """All continuations of a live request, by index; empty if it is not live."""
        return self._live.get(request_id, [])

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request and return its continuations, by index.

        Raises:
            InvalidRequest: The id is in use, or the prompt does not fit the context.
        """
        if request.id in self._live:
            raise InvalidRequest(f"request id {request.id!r} is in use by a live request", param="request_id")
        room = output_room(request, self.config.max_model_len)
        sequences = [
            Sequence(
                request=request,
                index=index,
                order=(self._arrivals, index),
                max_output=room,
                known=list(request.prompt_ids),
            )
            for index in range(request.params.n)
        ]
        self._arrivals += 1
        self._live[request.id] = sequences
        sequences[0].children = sequences[1:]
        if request.media and (hits := self.blocks.match(sequences[0])):
            self.blocks.take_hits(sequences[0], hits)  # images with cached keys and values are not encoded
        self._enqueue(sequences[0])
        return sequences

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence and free all that it holds; steps in flight drop its rows. Does nothing if it has ended."""
        if sequence.finish_reason is not None:
            return
        self._fork(sequence)
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if reason == "error":
            self.clear_prefix_cache()  # logits that are not numbers may come from cached blocks
        self.blocks.register(sequence)
        self.blocks.drop_swapped(sequence)
        self._queues.remove(sequence)
        self._truncate(sequence, 0)
        siblings = self._live[sequence.request.id]
        if all(sibling.finish_reason is not None for sibling in siblings):
            del self._live[sequence.request.id]

    def abort(self, request_id: str) -> list[Sequence]:
        """End all continuations of a request, and return those that had not ended. The id may be unknown."""
        ended = [sequence for sequence in self.sequences(request_id) if sequence.finish_reason is None]
        for sequence in ended:
            self.finish(sequence, "abort")
        return ended

    def reset(self) -> None:
        """Requeue all running sequences after a step that raised, and discard pending tokens (contract e)."""
        live = [s for family in self._live.values() for s in family if s.finish_reason is None]
        unqueued = {child for sequence in live for child in sequence.children}  # they need no features yet
        for sequence in live:
            self.blocks.drop_swapped(sequence)  # its last rows may be those that the step did not write
            sequence.pending = 0
            if sequence.slot is not None:
                self._truncate(sequence, 0)
                self._requeue(sequence)
            elif sequence not in unqueued:
                self._truncate(sequence, 0)
                self._track_features(sequence)
        self.clear_prefix_cache()
        if self.features is not None:
            self.features.cache.clear()

    def clear_prefix_cache(self) -> None:
        """Clear the prefix cache; running sequences keep their blocks."""
        for family in self._live.values():
            for sequence in family:
                sequence.registered = 0
        self.pool.clear_cache()

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can be computed. All planned tokens count as computed from now on."""
        by_deadline = self.discipline.by_deadline
        before, self._planned_at = self._planned_at, now
        self.pool.now = now
        self._acquire_features()
        if by_deadline:
            self._preempt_less_urgent(now)
        decoding, prefilling = self._split_running(now)
        self._decoding, self._step_seconds = decoding, 0.0
        pace = budget.pace(
            decoding,
            seconds=self.discipline.step_seconds(decoding, now),
            buckets=self.config.buckets,
            cost=self.cost,
        )
        limit = self.config.max_num_batched_tokens - len(decoding)
        limit = limit if pace is None else pace.limit(limit)
        wanted = sum(self._computable(s) for s in prefilling)
        # By deadline, a waiting sequence may rank before a running one; first come, first served, it never does.
        admissible = self._admissible(limit if by_deadline else limit - wanted, prefilling, before)
        wanted = min(limit, wanted + sum(self._computable(s) for s in admissible))
        if not decoding and not wanted:
            return None

        rows = [self._row(sequence, 1, now) for sequence in decoding]
        left = wanted
        if wanted and self.config.chunked_prefill:
            left = self.config.buckets.fill(len(decoding) + wanted, len(decoding)) - len(decoding)
        for sequence, count in self._shares(prefilling + admissible, left, now, pace):
            rows.append(self._row(sequence, count, now))
        if by_deadline:
            self._record_pauses(prefilling, now)
        if not rows:
            return None
        decode = all(row.count == 1 and not row.score for row in rows)
        buckets = self.config.buckets
        size = buckets.cover_decode(len(rows)) if decode else buckets.cover_mixed(sum(row.count for row in rows))
        plan = StepPlan(rows=tuple(rows), decode=decode, size=size)
        if by_deadline and self.cost is not None and self.features is not None:
            self._step_seconds = self.cost.seconds(plan.shape)
        return plan

    def _acquire_features(self) -> None:
        """Take references to the features that sequences need, in an order that does not change with time."""
        if self.features is not None:
            self.features.acquire(
                self.waiting, lambda sequence: (self.discipline.stable_rank(sequence), sequence.order)
            )

    def _in_order(self, queue: list[Sequence], now: float) -> list[Sequence]:
        """A copy of a queue, which is in order of arrival, in the order of service, without requests that are held."""
        if self.held:
            queue = [sequence for sequence in queue if sequence.request.id not in self.held]
        if not self.discipline.by_deadline:
            return list(queue)
        return sorted(queue, key=lambda s: self.discipline.rank(s, now))

    def _split_running(self, now: float) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences with one token to compute, and those with several or with tokens to score.

        Gives each of the former the block that it needs, preempting sequences in reverse order of service.
        """
        decoding, prefilling = [], []
        before, size = self.num_preemptions, self.pool.block_size
        for sequence in list(self.running):
            if sequence.slot is None:
                continue
            uncomputed = sequence.uncomputed
            if not uncomputed or (sequence.request.media and not self._computable(sequence)):
                continue  # all tokens are computed, or the next image is not encoded yet
            if uncomputed > 1 or sequence.wants_prompt_logprobs:
                prefilling.append(sequence)
            elif sequence.computed >= sequence.num_prompt and sequence.remaining <= 0:
                continue  # (a): its last token is in flight
            elif self._compress(sequence) or sequence.rows < len(sequence.blocks) * size or self._grow(sequence, now):
                decoding.append(sequence)
        if self.num_preemptions != before:
            decoding, prefilling = ([s for s in some if s.slot is not None] for some in (decoding, prefilling))
        return decoding, prefilling

    def _compress(self, sequence: Sequence) -> bool:
        """Compress a decoding sequence if that frees a block. It then also has room for its next token."""
        if self.blocks.compression is None or sequence.computed < sequence.num_prompt:
            return False
        return self.blocks.compress(sequence, self._unreserved())

    def _unreserved(self) -> int:
        """Number of free blocks beyond those reserved for running sequences to grow."""
        return self.pool.num_free - sum(self.blocks.num_reserved(s) for s in self.running)

    def _grow(self, sequence: Sequence, now: float) -> bool:
        """Allocate the block for one more token, preempting the last in the order of service if none is free. Returns
        False if the sequence was preempted itself, or nothing could be."""
        missing = self.pool.blocks_for(sequence.rows + 1) - len(sequence.blocks)
        if missing <= 0:
            return True
        while True:
            taken = self.pool.allocate(missing)
            if taken is not None:
                sequence.blocks += taken
                return True
            if self._reclaim_shared(other_than=sequence):
                continue
            candidates = self._in_order([s for s in self.running if self.blocks.is_preemptible(s)], now)
            preempted = None
            while candidates and preempted is None:
                victim, keep = candidates.pop(), 0
                if self.discipline.by_deadline and victim is not sequence:
                    keep = max(len(victim.blocks) - missing, 0)
                if self._preempt(victim, keep, "blocks", sequence, wanted=missing - self.pool.num_free):
                    preempted = victim
            if preempted is None or preempted is sequence:
                return False

    def _preempt_less_urgent(self, now: float) -> None:
        """Take slots and blocks from sequences of less urgent classes for waiting ones that need them.

        The least urgent sequence loses its slot first, then its last blocks. The taker counts by its present class, the
        victim by its class when it was admitted, aging included. So two sequences cannot take from each other in turn,
        and a sequence admitted because it had waited long keeps what it has.
        """
        first = min((s.most_urgent for s in self.waiting), default=math.inf)
        holders = [
            s
            for s in (*self.running, *self.waiting)
            if first < s.admitted_class < math.inf and self.blocks.is_preemptible(s)
        ]
        if not holders:
            return
        least = max(s.admitted_class for s in holders)
        slots, free = len(self._queues.free_slots), self._unreserved()
        for sequence in self._in_order(self.waiting, now):
            if sequence.priority >= least:
                continue
            if sequence.pending or (self.features is not None and not self.features.can_start(sequence)):
                continue
            if not self.blocks.can_restore(sequence):
                continue
            need = self.blocks.missing(sequence, self.blocks.match(sequence))
            if self.blocks.compression is not None:
                need += self.blocks.num_reserved(sequence)
            if slots < 1 or need > free:
                less = [s for s in holders if s.admitted_class > sequence.priority and (s.slot is not None or s.blocks)]
                obtainable = free + sum(len(s.blocks) for s in less)
                if obtainable < need or (slots < 1 and all(s.slot is None for s in less)):
                    continue
                less.sort(key=lambda s: self.discipline.rank(s, now))
                self._take_from(less, sequence, slot=slots < 1, blocks=need - free)
                slots, free = len(self._queues.free_slots), self._unreserved()
            slots, free = slots - 1, free - need - 1

    def _take_from(self, less: list[Sequence], taker: Sequence, *, slot: bool, blocks: int) -> None:
        """Take a slot, if `slot`, and `blocks` blocks from sequences in order of service, the last one first."""
        while (slot or blocks > 0) and less:
            victim = less.pop()
            keep = len(victim.blocks) - min(len(victim.blocks), max(blocks, 0))
            before = self.pool.num_free
            if victim.slot is not None:
                slot = not self._preempt(victim, keep, "class", taker, wanted=blocks) and slot
            elif keep < len(victim.blocks):
                self._preempt_blocks(victim, keep, "class", taker, wanted=blocks)
                self._track_features(victim)
            blocks -= self.pool.num_free - before

    def _admissible(self, left: int, prefilling: list[Sequence], before: float) -> list[Sequence]:
        """Waiting sequences that can start now, in order, until the budget is used. They hold their cache hits from now
        on, and nothing else yet.

        Args:
            left: Remaining token budget.
            prefilling: Running sequences with tokens to prefill. A sequence waits if one of them, or one found earlier,
                is about to compute its next block, unless that one got no tokens in the last plan.
            before: Time of the last plan.
        """
        if left <= 0 or not self._queues.free_slots:
            return []
        blocks, found, slots = self.blocks, [], len(self._queues.free_slots)
        # Blocks for each running sequence to grow, or a new one would soon be preempted, and blocks that those found
        # here will take when they are admitted.
        kept = sum(blocks.num_reserved(s) for s in self.running)
        coming = {blocks.next_digest(s) for s in prefilling if s.served_at >= before} - {None}
        for sequence in self._in_order(self.waiting, self._planned_at):
            if left <= 0 or slots <= len(found):
                break
            if sequence.pending:  # (d)
                if self.discipline.by_deadline:
                    continue
                break  # no later sequence may overtake it
            if self.features is not None and not self.features.can_start(sequence):
                continue
            if not self._computable(sequence):
                continue  # all tokens are computed, and its last one is in flight
            hits = blocks.match(sequence)
            ahead = blocks.next_digest(sequence, len(hits))
            if ahead in coming:
                continue
            own, alone = blocks.num_reserved(sequence), not self.running and not found
            extra = own + kept if blocks.compression is not None else 0 if alone else kept
            need = blocks.missing(sequence, hits)
            while alone and need + extra > self.pool.num_free and self._reclaim_shared(other_than=sequence):
                need = blocks.missing(sequence, hits)
            if need + extra > self.pool.num_free:
                break
            if not self.blocks.can_restore(sequence):
                continue  # its blocks are being loaded, now that there is room for them
            if hits:
                need -= sum(self.pool.references(block) == 0 for block in hits)
                blocks.take_hits(sequence, hits)
                if self.features is not None:
                    self.features.release_passed(sequence)
                    if not self.features.can_start(sequence):  # its next image is after the hits
                        self._acquire_features()
                        continue
            found.append(sequence)
            if ahead is not None:
                coming.add(ahead)
            kept += need + own
            left -= self._computable(sequence)
        return found

    def _shares(self, candidates: list[Sequence], left: int, now: float, pace: budget.Pace | None) -> budget.Shares:
        """The number of tokens that each candidate gets of those left. Candidates that get some are admitted."""

        def admit(sequence: Sequence) -> bool:
            return self._admit(sequence, now)

        if self.discipline.by_deadline:
            return budget.by_deadline(
                candidates,
                left,
                computable=self._computable,
                admit=admit,
                rank=lambda sequence: self.discipline.rank(sequence, now),
                pace=pace,
            )
        in_chunks = self.config.chunked_prefill
        return budget.by_arrival(candidates, left, computable=self._computable, admit=admit, in_chunks=in_chunks)

    def _record_pauses(self, prefilling: list[Sequence], now: float) -> None:
        """Pause sequences whose prompt is partly computed and that got no tokens of this step."""
        for sequence in prefilling:
            if sequence.slot is not None and sequence.computed and sequence.served_at != now and not sequence.paused:
                sequence.paused = True
                self.events.append(Event(kind="pause", sequence=sequence, cause="budget"))

    def _computable(self, sequence: Sequence) -> int:
        """Number of uncomputed tokens that could be computed now, once swapped blocks are back."""
        if sequence.swapped is not None:
            return len(sequence.known) - sequence.reached
        if self.features is None or not sequence.request.media:
            return sequence.uncomputed
        return self.features.computable(sequence)

    def _admit(self, sequence: Sequence, now: float) -> bool:
        need = self.blocks.missing(sequence)
        taken = self.pool.allocate(need) if need > 0 else []
        if taken is None:
            return False
        sequence.blocks += taken
        if sequence.swapped is not None:
            kept = sequence.swapped.first
            if not self.blocks.restore(sequence):
                self._truncate(sequence, kept)  # recomputing may take more blocks than it has now
                self._track_features(sequence)
                return False
        self._queues.admit(sequence)
        sequence.admitted_class = self.discipline.rank(sequence, now)[0]
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
            if not sequence.index:
                self.blocks.count_hits(sequence)
        return True

    def _row(self, sequence: Sequence, count: int, now: float) -> Row:
        assert sequence.slot is not None
        start, end = sequence.computed, sequence.computed + count
        row = Row(
            sequence=sequence,
            slot=sequence.slot,
            start=start,
            count=count,
            feedback=sequence.pending > 0,
            sample=count == sequence.uncomputed and sequence.remaining > 0,
            score=sequence.wants_prompt_logprobs,
            admit=not sequence.on_device,
            moved=sequence.on_device and sequence.on_device_blocks == 0,
            dropped=sequence.dropped,
            first_new_block=sequence.on_device_blocks,
            new_blocks=tuple(sequence.blocks[sequence.on_device_blocks :]),
            features=self.features.in_range(sequence, start, end) if self.features and sequence.request.media else (),
        )
        sequence.on_device, sequence.on_device_blocks = True, len(sequence.blocks)
        sequence.computed = end
        if len(sequence.known) >= (sequence.registered + 1) * self.pool.block_size:
            self.blocks.register(sequence)
        sequence.served_at = now
        if sequence.paused:
            sequence.paused = False
            self.events.append(Event(kind="resume", sequence=sequence, cause="turn"))
        if self.features is not None and sequence.request.media:
            self.features.release_passed(sequence)
        sequence.pending += row.sample
        if sequence.children and end >= sequence.num_prompt:
            self._fork(sequence)
        return row

    def next_batch(self) -> tuple[MediaSpan, ...]:
        """The images to encode in the next call, or none. The caller must call `encoded` after it."""
        if self.features is None:
            return ()
        return self.features.next_batch(self._in_order([*self.running, *self.waiting], self._planned_at))

    def may_encode(self, seconds: float) -> bool:
        """Whether a slice of the encoder that takes `seconds` may run beside the latest step. First come, first served,
        it always may; by deadline, decoding sequences may prevent it, see budget.slice_fits."""
        if not self.discipline.by_deadline or self.features is None:
            return True
        now = self._planned_at
        return budget.slice_fits(
            self._decoding,
            self.features.awaiting(self.running, self.waiting),
            until=now + self._step_seconds + seconds,
            rank=lambda sequence: self.discipline.rank(sequence, now),
        )

    def encoded(self, batch: Iterable[MediaSpan]) -> None:
        """Mark the features of `batch` as ready for the steps planned from now on."""
        assert self.features is not None
        for span in batch:
            self.features.cache.finish(span.key)

    # -- results ------------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, tokens: Iterable[int | None], now: float = 0.0) -> list[Accepted]:
        """Add the sampled tokens to their sequences, and end the sequences that they end.

        Args:
            plan: The plan of the step. Rows of sequences that ended in the meantime are dropped.
            tokens: The sampled token of each row: None if none was sampled, -1 if its logits were not numbers.
            now: Engine time in seconds when the tokens came.
        """
        self.pool.now = max(self.pool.now, now)
        accepted = []
        for index, (row, token) in enumerate(zip(plan.rows, tokens, strict=True)):
            sequence = row.sequence
            if row.sample:
                sequence.pending -= 1
            if sequence.finish_reason is not None:
                continue
            if row.score:
                sequence.scored = max(sequence.scored, min(row.start + row.count, sequence.num_prompt - 1))
            if row.sample and token is not None:
                if token < 0:
                    self.finish(sequence, "error")
                else:
                    if sequence.first_token_at is None:
                        sequence.first_token_at = now
                    sequence.known.append(token)
                    if end := ending(sequence, token, self.config.eos_token_ids):
                        self.finish(sequence, *end)
            elif not sequence.max_output and row.start + row.count >= sequence.num_prompt:
                self.finish(sequence, "length")
            accepted.append(
                Accepted(row=row, token=token if row.sample and token is not None and token >= 0 else None, index=index)
            )
        return accepted

    # -- queues and blocks --------------------------------------------------------------------------------------------

    def _enqueue(self, sequence: Sequence) -> None:
        self._queues.add(sequence)
        self._track_features(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        self._queues.requeue(sequence)
        self._track_features(sequence)

    def _track_features(self, sequence: Sequence) -> None:
        if self.features is not None:
            self.features.track(sequence)

    def _fork(self, parent: Sequence) -> None:
        """Queue the siblings of a sequence, with its full prompt blocks if its prompt is computed. Each computes at
        least one prompt token itself, to sample from."""
        children, parent.children = parent.children, []
        shared = (parent.num_prompt - 1) // self.pool.block_size if parent.computed >= parent.num_prompt else 0
        for child in children:
            if child.finish_reason is None:
                child.blocks = parent.blocks[:shared]
                self.pool.share(child.blocks)
                child.computed = shared * self.pool.block_size
                child.digests, child.registered = list(parent.digests), min(parent.registered, shared)
                self._enqueue(child)

    def _truncate(self, sequence: Sequence, keep: int) -> None:
        """Free a sequence's blocks after the first `keep`, and drop its features."""
        self.blocks.truncate(sequence, keep)
        if self.features is not None:
            self.features.release(sequence)

    def _preempt_blocks(self, sequence: Sequence, keep: int, cause: Cause, by: Sequence, *, wanted: int) -> bool:
        """Free or swap out a sequence's blocks after the first `keep` for another that wants `wanted` of them. Returns
        False if none were: a compressed sequence that cannot be swapped out keeps its blocks."""
        held = len(sequence.blocks)
        swapped = self.blocks.preempt(sequence, keep, max(wanted, 0))
        if swapped is None:
            return False
        if self.features is not None:
            self.features.release(sequence)
        lost = held - len(sequence.blocks)
        self.events.append(
            Event(kind="preempt", sequence=sequence, cause=cause, by=by.name, blocks=lost, swapped=swapped)
        )
        return True

    def _reclaim_shared(self, other_than: Sequence) -> bool:
        """Free blocks that only waiting sequences hold, those of the last to arrive first. Returns whether there were
        any."""
        holders = [s for s in self.waiting if s.blocks and not s.dropped and s is not other_than]
        if not holders:
            return False
        kept = {block for s in (*self.running, other_than) for block in s.blocks}
        # Shared blocks are prompt prefixes: a sequence that shares its last block shares all of them.
        holder = next((s for s in reversed(holders) if s.blocks[-1] not in kept), None)
        if holder is None:
            return False
        self._truncate(holder, 0)
        self._track_features(holder)
        return True

    def _preempt(self, sequence: Sequence, keep: int, cause: Cause, by: Sequence, *, wanted: int) -> bool:
        """Requeue a running sequence, with its first `keep` blocks, for another sequence. Returns False if it keeps its
        slot, see _preempt_blocks."""
        if not self._preempt_blocks(sequence, keep, cause, by, wanted=wanted):
            return False
        self.num_preemptions += 1
        self._requeue(sequence)
        return True
