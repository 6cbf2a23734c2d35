"""Spends one token budget a step, first come first served or by class and deadline; recomputes what it preempts.

There are no phases: every sequence has tokens that are known or pending and a number of them that are computed, and a
step lets computed catch up. The engine runs one step ahead, so a step is planned before the tokens of the one before
it are known. What makes that safe:

(a) Nothing is planned past a foreseeable end (max_tokens, the context).
(b) An end found at commit(k) while k+1 is out drops that row of k+1 and frees its blocks at once: device calls are
    ordered through the donated pool, so whoever gets the blocks writes to them later.
(c) A block is only shared when it is full of known tokens.
(d) A preempted sequence with a pending token is not planned again before that token was committed.
(e) A step that raised has lost the pool: `reset` sends everything that ran back to the queue, uncommitted steps are
    dropped.

Images are encoded beside the steps. A sequence that needs one which is not there yet is passed over, in the queue as
in the batch: nobody waits for another's image.

The order of service is a discipline's (discipline.py). By deadline, the budget goes to segments: the most urgent one
first, to its end, then whichever is the most urgent then; decoding rows always run, and the budget is what keeps them
within their objective. Who gets nothing is paused: only its turn is lost. For somebody of a more urgent class a slot is
taken from the least urgent, which keeps its blocks; and blocks, when there are none, from the end of what it has.
"""

import bisect
import math
from collections.abc import Iterable

from omni_jax.cost import CostModel
from omni_jax.memory import BlockPool
from omni_jax.requests import InvalidRequest, MediaSpan, Request, Sequence
from omni_jax.requests.outputs import FinishReason
from omni_jax.scheduling import budget
from omni_jax.scheduling.blocks import Blocks
from omni_jax.scheduling.discipline import Discipline, FirstCome
from omni_jax.scheduling.events import Cause, Event, name
from omni_jax.scheduling.features import Features
from omni_jax.scheduling.limits import SchedulerConfig, ending, output_room
from omni_jax.scheduling.plan import Accepted, Row, StepPlan


class Scheduler:
    """Holds every live request, from admission to its last token.

    Args:
        features: the encoder cache, for a model that reads images; without it no request has any.
        discipline: the order of service.
        cost: predicts how long a step takes; without it, steps are as large as the budget.
        blocks: what is cached, swapped and compressed; without it nothing is.

    Attributes:
        events: what has happened since somebody emptied the list.
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
        self._decoding: list[Sequence] = []  # in the plan made last
        self._step_seconds = 0.0  # that it is predicted to take
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.num_preemptions = 0
        self._live: dict[str, list[Sequence]] = {}
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._arrivals = 0

    # -- requests in and out ------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        return len(self._live)

    def has(self, request_id: str) -> bool:
        return request_id in self._live

    def sequences(self, request_id: str) -> list[Sequence]:
        """All continuations of a live request, by index; none when it is not live."""
        return self._live.get(request_id, [])

    def add(self, request: Request) -> list[Sequence]:
        """Queues a request; its continuations, by index.

        Raises:
            InvalidRequest: the id is in use, or the prompt does not fit the context.
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
            self.blocks.take(sequences[0], hits)  # so that no image is encoded whose keys and values are there
        self._enqueue(sequences[0])
        return sequences

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Ends a sequence and frees all it holds; steps in flight drop its rows. Does nothing when it has ended."""
        if sequence.finish_reason is not None:
            return
        self._fork(sequence)
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if reason == "error":
            self.forget_prefixes()  # logits that are no numbers may come from what is cached
        self.blocks.register(sequence)
        self.blocks.forget(sequence)
        _remove(self.running if sequence.slot is not None else self.waiting, sequence)
        self._release(sequence)
        siblings = self._live[sequence.request.id]
        if all(sibling.finish_reason is not None for sibling in siblings):
            del self._live[sequence.request.id]

    def abort(self, request_id: str) -> list[Sequence]:
        """Ends all continuations of a request; those that had not ended. An unknown id is no error."""
        ended = [sequence for sequence in self.sequences(request_id) if sequence.finish_reason is None]
        for sequence in ended:
            self.finish(sequence, "abort")
        return ended

    def reset(self) -> None:
        """After a step that raised: what ran and what was sampled is computed again (contract e)."""
        live = [s for family in self._live.values() for s in family if s.finish_reason is None]
        hidden = {child for sequence in live for child in sequence.children}  # in no queue yet: they ask for nothing
        for sequence in live:
            self.blocks.forget(sequence)  # its last rows may be those that were never written
            sequence.pending = 0
            if sequence.slot is not None:
                self._cut(sequence, 0)
                self._queue_again(sequence)
            elif sequence not in hidden:
                self._release(sequence)
                self._ask_again(sequence)
        self.forget_prefixes()
        if self.features is not None:
            self.features.cache.clear()

    def forget_prefixes(self) -> None:
        """Empties the prefix cache; what runs goes on."""
        for family in self._live.values():
            for sequence in family:
                sequence.registered = 0
        self.pool.clear_cache()

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute. Everything planned counts as computed from here
        on."""
        by_deadline = self.discipline.by_deadline
        before, self._planned_at = self._planned_at, now
        self.pool.now = now
        self._ask()
        if by_deadline:
            self._make_way(now)
        decoding, prefilling = self._catching_up(now)
        self._decoding, self._step_seconds = decoding, 0.0
        most = budget.most_tokens(
            decoding,
            most=self.config.max_num_batched_tokens,
            seconds=self.discipline.step_seconds(decoding, now),
            buckets=self.config.buckets,
            cost=self.cost,
        ) - len(decoding)
        wanted = sum(self._computable(s) for s in prefilling)
        # By deadline, who waits may come before who runs; first come, first served, who runs came before.
        admissible = self._admissible(most if by_deadline else most - wanted, prefilling, before)
        wanted = min(most, wanted + sum(self._computable(s) for s in admissible))
        if not decoding and not wanted:
            return None

        rows = [self._row(sequence, 1, now) for sequence in decoding]
        left = wanted
        if wanted and self.config.chunked_prefill:
            left = self.config.buckets.fill(len(decoding) + wanted, len(decoding)) - len(decoding)
        for sequence, count in self._shares(prefilling + admissible, left, now):
            rows.append(self._row(sequence, count, now))
        if by_deadline:
            self._note_pauses(prefilling, now)
        if not rows:
            return None
        decode = all(row.count == 1 and not row.score for row in rows)
        buckets = self.config.buckets
        size = buckets.cover_decode(len(rows)) if decode else buckets.cover_mixed(sum(row.count for row in rows))
        plan = StepPlan(rows=tuple(rows), decode=decode, size=size)
        if by_deadline and self.cost is not None and self.features is not None:
            self._step_seconds = self.cost.seconds(plan.shape)
        return plan

    def _ask(self) -> None:
        """Takes references to the features that sequences need, in an order that time alone does not change."""
        if self.features is not None:
            self.features.ask(self.waiting, lambda sequence: (self.discipline.standing(sequence), sequence.order))

    def _in_order(self, queue: list[Sequence], now: float) -> list[Sequence]:
        """A copy of a queue in the order of service. Both queues are kept in order of arrival."""
        if not self.discipline.by_deadline:
            return list(queue)
        return sorted(queue, key=lambda s: self.discipline.rank(s, now))

    def _catching_up(self, now: float) -> tuple[list[Sequence], list[Sequence]]:
        """Running sequences with one token to compute, each with the block it needs; and those with more or to score.
        Both in order of arrival. Preempts for the blocks, whoever is served last first."""
        decoding, prefilling = [], []
        before, size = self.num_preemptions, self.pool.block_size
        for sequence in list(self.running):
            if sequence.slot is None:
                continue
            uncomputed = sequence.uncomputed
            if not uncomputed or (sequence.request.media and not self._computable(sequence)):
                continue  # all is computed, or the next image is not there yet
            if uncomputed > 1 or sequence.wants_prompt_logprobs:
                prefilling.append(sequence)
            elif sequence.computed >= sequence.num_prompt and sequence.remaining <= 0:
                continue  # (a): its end is in flight
            elif self._shrink(sequence) or sequence.rows < len(sequence.blocks) * size or self._grow(sequence, now):
                decoding.append(sequence)
        if self.num_preemptions != before:
            decoding, prefilling = ([s for s in some if s.slot is not None] for some in (decoding, prefilling))
        return decoding, prefilling

    def _shrink(self, sequence: Sequence) -> bool:
        """Compresses a decoding sequence where that frees a block: then it also has room for its next token."""
        if self.blocks.compression is None or sequence.computed < sequence.num_prompt:
            return False
        return self.blocks.compress(sequence, self._unreserved())

    def _unreserved(self) -> int:
        """Free blocks that are not kept for running sequences to grow by."""
        return self.pool.num_free - sum(self.blocks.reserve(s) for s in self.running)

    def _grow(self, sequence: Sequence, now: float) -> bool:
        """Blocks for one more token; whoever is served last is preempted for it, at worst the sequence itself."""
        missing = self.pool.blocks_for(sequence.rows + 1) - len(sequence.blocks)
        if missing <= 0:
            return True
        while True:
            taken = self.pool.allocate(missing)
            if taken is not None:
                sequence.blocks += taken
                return True
            if self._release_shared(besides=sequence):
                continue
            losers = self._in_order([s for s in self.running if self.blocks.may_lose(s)], now)
            gone = None
            while losers and gone is None:
                victim, keep = losers.pop(), 0
                if self.discipline.by_deadline and victim is not sequence:
                    keep = max(len(victim.blocks) - missing, 0)
                if self._preempt(victim, keep, "blocks", sequence):
                    gone = victim
            if gone is None or gone is sequence:
                return False

    def _make_way(self, now: float) -> None:
        """Takes slots and blocks from sequences of less urgent classes for waiting ones that would have to wait for
        them: from the least urgent first, its slot before its blocks, and of these the last ones.

        Who takes is judged by its class, who gives by the class it had risen to when it was admitted: so two do not
        take from each other in turn, and who was admitted because it had waited for long keeps what it has.
        """
        first = min((s.most_urgent for s in self.waiting), default=math.inf)
        holders = [
            s for s in (*self.running, *self.waiting) if first < s.admitted_class < math.inf and self.blocks.may_lose(s)
        ]
        if not holders:
            return
        least = max(s.admitted_class for s in holders)
        slots, free = len(self._free_slots), self._unreserved()
        for sequence in self._in_order(self.waiting, now):
            if sequence.priority >= least:
                continue
            if sequence.pending or (self.features is not None and not self.features.starts(sequence)):
                continue
            if not self.blocks.is_back(sequence):
                continue
            need = self.blocks.missing(sequence, self.blocks.match(sequence))
            if self.blocks.compression is not None:
                need += self.blocks.reserve(sequence)
            if slots < 1 or need > free:
                less = [s for s in holders if s.admitted_class > sequence.priority and (s.slot is not None or s.blocks)]
                obtainable = free + sum(len(s.blocks) for s in less)
                if obtainable < need or (slots < 1 and all(s.slot is None for s in less)):
                    continue
                less.sort(key=lambda s: self.discipline.rank(s, now))
                self._give_up(sequence, less, slots < 1, need - free)
                slots, free = len(self._free_slots), self._unreserved()
            slots, free = slots - 1, free - need - 1

    def _give_up(self, taker: Sequence, less: list[Sequence], slot: bool, blocks: int) -> None:
        """Takes a slot and `blocks` from the last of `less`, which are in order."""
        while (slot or blocks > 0) and less:
            victim = less.pop()
            keep = len(victim.blocks) - min(len(victim.blocks), max(blocks, 0))
            before = self.pool.num_free
            if victim.slot is not None:
                slot = not self._preempt(victim, keep, "class", taker) and slot
            elif keep < len(victim.blocks):
                self._take_from(victim, keep, "class", taker)
                self._ask_again(victim)
            blocks -= self.pool.num_free - before

    def _admissible(self, left: int, prefilling: list[Sequence], before: float) -> list[Sequence]:
        """Waiting sequences that could start now, in order, until the budget is used. What the cache has of them they
        hold from here on; nothing else is taken yet.

        Args:
            prefilling: those that run. Who would compute the same next block as one of them, or as one found here, lets
                it, as long as that one had its turn in the plan made `before`.
        """
        if left <= 0 or not self._free_slots:
            return []
        blocks, found, slots = self.blocks, [], len(self._free_slots)
        # Room for each running sequence to grow, or what is admitted would soon be preempted again; and what is found
        # will take, once it is admitted.
        kept = sum(blocks.reserve(s) for s in self.running)
        coming = {blocks.next_digest(s) for s in prefilling if s.served_at >= before} - {None}
        for sequence in self._in_order(self.waiting, self._planned_at):
            if left <= 0 or slots <= len(found):
                break
            if sequence.pending:  # (d)
                if self.discipline.by_deadline:
                    continue
                break  # nothing overtakes it
            if self.features is not None and not self.features.starts(sequence):
                continue
            if not self._computable(sequence):
                continue  # all is computed, and its end in flight
            hits = blocks.match(sequence)
            ahead = blocks.next_digest(sequence, len(hits))
            if ahead in coming:
                continue
            own, alone = blocks.reserve(sequence), not self.running and not found
            besides = own + kept if blocks.compression is not None else 0 if alone else kept
            need = blocks.missing(sequence, hits)
            while alone and need + besides > self.pool.num_free and self._release_shared(besides=sequence):
                need = blocks.missing(sequence, hits)
            if need + besides > self.pool.num_free:
                break
            if not self.blocks.is_back(sequence):
                continue  # it is being loaded, now that there is room for it
            if hits:
                need -= sum(self.pool.references(block) == 0 for block in hits)
                blocks.take(sequence, hits)
                if self.features is not None:
                    self.features.leave_behind(sequence)
                    if not self.features.starts(sequence):  # its next image is behind the hits
                        self._ask()
                        continue
            found.append(sequence)
            if ahead is not None:
                coming.add(ahead)
            kept += need + own
            left -= self._computable(sequence)
        return found

    def _shares(self, candidates: list[Sequence], left: int, now: float) -> budget.Shares:
        """How many tokens each candidate gets of those that are left; who gets some is admitted."""

        def admit(sequence: Sequence) -> bool:
            return self._admit(sequence, now)

        if self.discipline.by_deadline:
            return budget.by_deadline(
                candidates,
                left,
                computable=self._computable,
                admit=admit,
                rank=lambda sequence: self.discipline.rank(sequence, now),
            )
        in_chunks = self.config.chunked_prefill
        return budget.by_arrival(candidates, left, computable=self._computable, admit=admit, in_chunks=in_chunks)

    def _note_pauses(self, prefilling: list[Sequence], now: float) -> None:
        """Who has begun its prompt and got nothing of this step is paused until it gets something again."""
        for sequence in prefilling:
            if sequence.slot is not None and sequence.computed and sequence.served_at != now and not sequence.paused:
                sequence.paused = True
                self.events.append(Event(kind="pause", sequence=sequence, cause="budget"))

    def _computable(self, sequence: Sequence) -> int:
        """How many of a sequence's uncomputed tokens could be computed now, what is swapped out being back."""
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
                self._cut(sequence, kept)  # the rest is computed again, for which it may need more blocks than these
                self._ask_again(sequence)
                return False
        sequence.slot = self._free_slots.pop()
        _remove(self.waiting, sequence)
        bisect.insort(self.running, sequence, key=lambda s: s.order)
        sequence.admitted_class = self.discipline.rank(sequence, now)[0]
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
            if not sequence.index:
                self.blocks.count(sequence)
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
            features=self.features.in_row(sequence, start, end) if self.features and sequence.request.media else (),
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
            self.features.leave_behind(sequence)
        sequence.pending += row.sample
        if sequence.children and end >= sequence.num_prompt:
            self._fork(sequence)
        return row

    def next_batch(self) -> tuple[MediaSpan, ...]:
        """What the encoder computes next; none when nothing waits for it. `encoded` must follow."""
        if self.features is None:
            return ()
        return self.features.next_batch(self._in_order([*self.running, *self.waiting], self._planned_at))

    def may_encode(self, seconds: float) -> bool:
        """Whether a slice of the encoder that takes so long may run beside the step planned last. First come, first
        served: always. By deadline, who decodes may be in the way; see budget.slice_fits."""
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
        """Steps that are planned from now on find the features of `batch` on the device."""
        assert self.features is not None
        for span in batch:
            self.features.cache.finish(span.key)

    # -- results ------------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, tokens: Iterable[int | None], now: float = 0.0) -> list[Accepted]:
        """Takes the sampled token of each row (None where none was; -1 where the logits were not numbers) and ends the
        sequences it ends. Rows of sequences that ended meanwhile are dropped.

        Args:
            now: when the tokens came, in the engine's seconds.
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

    # -- blocks and slots ---------------------------------------------------------------------------------------------

    def _enqueue(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=lambda s: s.order)
        self._ask_again(sequence)

    def _ask_again(self, sequence: Sequence) -> None:
        if self.features is not None:
            self.features.add(sequence)

    def _fork(self, parent: Sequence) -> None:
        """Lets the siblings start, with the parent's full prompt blocks if its prompt is computed. At least one
        prompt token is left to each, to have something to sample from."""
        children, parent.children = parent.children, []
        shared = (parent.num_prompt - 1) // self.pool.block_size if parent.computed >= parent.num_prompt else 0
        for child in children:
            if child.finish_reason is None:
                child.blocks = parent.blocks[:shared]
                self.pool.share(child.blocks)
                child.computed = shared * self.pool.block_size
                child.digests, child.registered = list(parent.digests), min(parent.registered, shared)
                self._enqueue(child)

    def _release(self, sequence: Sequence) -> None:
        self._cut(sequence, 0)
        if sequence.slot is not None:
            self._release_slot(sequence)

    def _cut(self, sequence: Sequence, keep: int) -> None:
        """Takes the blocks behind the first `keep` from a sequence, to be computed again. It holds no features
        afterwards."""
        self.blocks.cut(sequence, keep)
        if self.features is not None:
            self.features.release(sequence)

    def _take_from(self, sequence: Sequence, keep: int, cause: Cause, by: Sequence) -> bool:
        """The same for the sake of another; what is cheaper to bring back than to compute is swapped out. Whether
        anything was taken."""
        held = len(sequence.blocks)
        swapped = self.blocks.take_from(sequence, keep)
        if swapped is None:
            return False
        if self.features is not None:
            self.features.release(sequence)
        lost = held - len(sequence.blocks)
        self.events.append(
            Event(kind="preempt", sequence=sequence, cause=cause, by=name(by), blocks=lost, swapped=swapped)
        )
        return True

    def _release_shared(self, besides: Sequence) -> bool:
        """Takes back blocks that only a waiting sequence holds, the last to arrive; it will compute them again. Whether
        there was one."""
        holders = [s for s in self.waiting if s.blocks and not s.dropped and s is not besides]
        if not holders:
            return False
        kept = {block for s in (*self.running, besides) for block in s.blocks}
        # What is shared is the beginning of a prompt: who shares its last block shares all.
        holder = next((s for s in reversed(holders) if s.blocks[-1] not in kept), None)
        if holder is None:
            return False
        self._release(holder)
        self._ask_again(holder)
        return True

    def _preempt(self, sequence: Sequence, keep: int, cause: Cause, by: Sequence) -> bool:
        """Sends a running sequence back to the queue, with its first `keep` blocks, for the sake of another. Whether it
        went: a compressed one that cannot be swapped stays."""
        if not self._take_from(sequence, keep, cause, by):
            return False
        self.num_preemptions += 1
        self._queue_again(sequence)
        return True

    def _queue_again(self, sequence: Sequence) -> None:
        _remove(self.running, sequence)
        self._release_slot(sequence)
        self._enqueue(sequence)

    def _release_slot(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._free_slots.append(sequence.slot)
        sequence.slot = None
        sequence.on_device = False


def _remove(queue: list[Sequence], sequence: Sequence) -> None:
    """Takes a sequence out of an ordered queue, if it is there."""
    at = bisect.bisect_left(queue, sequence.order, key=lambda s: s.order)
    if at < len(queue) and queue[at] is sequence:
        del queue[at]
