"""What docs/design.md promises of the order of service and of the duration of a step, computed from the sequences as
they were before a plan. Nothing here asks the discipline, the queues' order or the budget."""

import dataclasses
import math

import numpy as np

from omni_jax.requests import Sequence
from omni_jax.scheduling.discipline import SLOFirst
from omni_jax.scheduling.features import Features
from omni_jax.scheduling.plan import StepPlan
from omni_jax.scheduling.scheduler import Scheduler

Rank = tuple[int, float, tuple[int, int]]  # class with aging, deadline, order of arrival
TICKS = 64  # waiting times are counted in 64ths of aging_seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Before:
    """A live sequence before a plan."""

    ran: bool
    computed: int
    length: int  # tokens known and pending
    blocks: int
    swapped: bool
    served_at: float
    priority: int  # the class of its next token, without aging
    rank: Rank


class Service:
    """The promises of a plan, to be made before it and checked after it."""

    def __init__(self, scheduler: Scheduler, now: float):
        self.scheduler, self.now = scheduler, now
        self.before = {s: self._snapshot(s) for s in (*scheduler.running, *scheduler.waiting)}
        self.parked = {s for s in scheduler.waiting if s in scheduler._queues.parked}
        self.num_events, self.num_free = len(scheduler.events), scheduler.pool.num_free

    def _snapshot(self, s: Sequence) -> Before:
        return Before(
            ran=s.slot is not None,
            computed=s.computed,
            length=s.num_known + s.pending,
            blocks=len(s.blocks),
            swapped=s.swapped is not None,
            served_at=s.served_at,
            priority=self._priority(s, s.computed),
            rank=self._rank(s, s.computed, s.served_at, s.num_known + s.pending),
        )

    # -- ranks --------------------------------------------------------------------------------------------------------

    def _priority(self, s: Sequence, at: int) -> int:
        """The class of token `at`, without aging."""
        if not isinstance(self.scheduler.discipline, SLOFirst):
            return 0
        for segment in s.request.segments:
            if segment.start <= at < segment.stop:
                return segment.priority
        return 0 if s.request.slo is None else s.request.slo.priority

    def _rank(self, s: Sequence, at: int, served_at: float, length: int) -> Rank:
        """The rank of token `at` of a sequence of `length` tokens."""
        if not isinstance(self.scheduler.discipline, SLOFirst):
            return 0, math.inf, s.order
        tick = TICKS / self.scheduler.discipline.aging_seconds
        risen = (math.floor(self.now * tick) - math.floor(served_at * tick)) / TICKS
        return math.ceil(self._priority(s, at) - risen), self._due(s, at, length), s.order

    def _due(self, s: Sequence, at: int, length: int) -> float:
        """When token `at` is due."""
        for segment in s.request.segments:
            if segment.start <= at < segment.stop:
                return segment.deadline
        slo = s.request.slo
        if at < s.num_prompt or slo is None or slo.tpot_ms is None or s.first_token_at is None:
            return math.inf
        return s.first_token_at + slo.tpot_ms / 1000 * (length - s.num_prompt)

    def _ranks(self, s: Sequence, start: int, stop: int) -> list[Rank]:
        """The ranks of the tokens of a row. Output that is computed again has the rank of the token before it."""
        before = self.before[s]
        edges = [segment.start for segment in s.request.segments if start < segment.start < stop]
        return [self._rank(s, at, before.served_at, before.length) for at in (start, *edges)]

    # -- a class above is served first --------------------------------------------------------------------------------

    def check(self, plan: StepPlan) -> None:
        """Check that nobody stands still for one of less urgent rank."""
        if any(s.request.params.n > 1 for s in self.before):
            return  # continuations return to the line within a plan, with the rank of other tokens
        rows = dict(zip(self.scheduler.sequences_in(plan), plan.rows, strict=True))
        idle = [s for s in self.before if s not in rows and self._could_compute(s)]
        running = [s for s in idle if s.slot is not None]
        waiting = sorted((s for s in idle if s.slot is None and self._could_start(s)), key=self._rank_before)
        prefilling = {s: row for s, row in rows.items() if not self._decodes(s)}

        for s in running:
            if self._decodes(s):
                assert not self.scheduler.pool.num_free, f"{s.name} does not decode"
        # Those that lost blocks or took cache hits in this plan have the rank of other tokens now.
        stayed = [s for s, row in rows.items() if row.start == self.before[s].computed]
        admitted = [s for s in stayed if s in prefilling and rows[s].admit and not self.before[s].ran]
        for s in waiting[:1]:
            late = [t.name for t in admitted if self._rank_before(t) > self._rank_before(s)]
            assert not late, f"{s.name} waits, and {late} of less urgent rank started"
        could = [s for s in running if not self._decodes(s)] + [s for s in waiting[:1] if self._has_room(s)]
        for s in could:
            for other, row in prefilling.items():
                last = max(self._ranks(other, row.start, row.stop))
                assert last < self._rank_before(s), f"{s.name} stands still, and {other.name} got tokens of rank {last}"
        self._check_preemption(plan, rows, waiting)

    def _rank_before(self, s: Sequence) -> Rank:
        return self.before[s].rank

    def _decodes(self, s: Sequence) -> bool:
        """Whether one token is all that a running sequence has to compute, and it is not scored."""
        before = self.before[s]
        scored = s.request.params.prompt_logprobs is not None and not s.index and before.computed < s.num_prompt - 1
        return before.ran and before.length - before.computed == 1 and not scored

    def _could_compute(self, s: Sequence) -> bool:
        """Whether a sequence has tokens to compute, and the next one needs no image that is not encoded."""
        features: Features | None = self.scheduler.features
        if s.finish_reason is not None or not s.uncomputed or (features is not None and not features.computable(s)):
            return False
        return s.computed < s.num_prompt or s.num_output + s.pending < s.max_output

    def _could_start(self, s: Sequence) -> bool:
        """Whether a waiting sequence could start if it had a slot and room."""
        before, queues, features = self.before[s], self.scheduler._queues, self.scheduler.features
        moved = before.ran or before.swapped or s.swapped is not None or len(s.blocks) != before.blocks
        if moved or s.pending or s.request.id in self.scheduler.held:
            return False
        if s.request.segments and (self.scheduler.blocks.prefix_caching or s.request.params.n > 1):
            return False  # it may have had the rank of the segment after cache hits, and lost these to another
        return s not in queues.parked and s not in queues.returning and (features is None or features.can_start(s))

    def _need(self, s: Sequence) -> int:
        """Number of blocks for all tokens of a waiting sequence."""
        return self.scheduler.pool.blocks_for(s.num_known - s.dropped) - len(s.blocks)

    def _has_room(self, s: Sequence) -> bool:
        """Whether a slot is free, and blocks for all its tokens and for each running sequence to grow."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        if not scheduler._queues.free_slots or blocks.compression is not None or blocks.prefix_caching:
            return False  # with prefix caching, making the plan may have freed blocks
        return self._need(s) + len(scheduler.running) <= self._free()

    def _free(self) -> int:
        """Number of blocks that were free before the plan and still are."""
        return min(self.num_free, self.scheduler.pool.num_free)

    # -- a slot or blocks are taken for a more urgent class -----------------------------------------------------------

    def _check_preemption(self, plan: StepPlan, rows: dict, waiting: list[Sequence]) -> None:
        """Check that what is taken for a more urgent class is used in the same step, and that it is taken where it can
        be."""
        names, blocks = {s.name for s in rows}, self.scheduler.blocks
        full = any(s.uncomputed > row.sample for s, row in rows.items())
        full |= bool(self.parked & rows.keys())  # one that waited for a victim's block returned meanwhile
        for event in self.scheduler.events[self.num_events :]:
            used = event.by in names or full or event.sequence in rows
            assert event.cause != "class" or used, f"{event.by} took from {event.sequence.name} in vain"
        if self.scheduler.cost is not None or blocks.compression is not None or blocks.prefix_caching:
            return
        for s in waiting[:1]:
            priority, pool = self.before[s].priority, self.scheduler.pool
            victims = [
                t
                for t, row in rows.items()
                if not row.admit and t.admitted_class > priority and self._rank_before(t) > self._rank_before(s)
            ]
            if not victims:
                continue
            obtainable = self._free() + sum(pool.references(block) == 1 for t in victims for block in t.blocks)
            room = self._need(s) + len(self.scheduler.running) <= obtainable
            others = {t: row for t, row in rows.items() if t not in victims}
            tokens = sum(row.count for row in others.values()) + sum(map(self._decodes, self.before))
            used = tokens >= self.scheduler.config.max_num_batched_tokens
            used |= any(t.uncomputed > row.sample for t, row in others.items())
            assert not room or used, (
                f"{s.name} of class {priority} stands still for {[(t.name, t.admitted_class) for t in victims]}"
            )

    # -- the duration of a step ---------------------------------------------------------------------------------------

    def check_pace(self, plan: StepPlan) -> None:
        """Check what a plan says of its cost, and that it keeps the pace of the sequences that decode."""
        attended = context = 0
        for row in plan.rows:
            positions = np.arange(row.start, row.stop) - row.dropped  # of each token in the cache
            keys = np.arange(row.stop - row.dropped)
            attended += int((keys[None, :] <= positions[:, None]).sum())
            context += len(keys)
        shape, config = plan.shape, self.scheduler.config
        assert (shape.attended, shape.context) == (attended, context)
        assert (shape.rows, shape.tokens, shape.size) == (len(plan.rows), len(plan.tokens), plan.size)
        if self.scheduler.cost is None or not isinstance(self.scheduler.discipline, SLOFirst):
            return
        sequences = self.scheduler.sequences_in(plan)
        decoding = [s for s in sequences if self._decodes(s)]
        allowed = min((self._allowed(s) for s in decoding), default=math.inf)
        prompts = plan.num_tokens - len(decoding)
        smallest = min((size for size in config.buckets.mixed if size > len(decoding)), default=0)
        if prompts and plan.num_tokens > smallest:
            seconds = self.scheduler.cost.seconds(shape)
            assert seconds <= allowed * (1 + 1e-9), f"a step of {seconds} s where {allowed} s are allowed"

    def _allowed(self, s: Sequence) -> float:
        """Maximum duration of a step beside a sequence that decodes: until its next token is due, or one interval."""
        slo = s.request.slo
        if slo is None or slo.tpot_ms is None:
            return math.inf
        if s.first_token_at is None and self.before[s].computed >= s.num_prompt:
            return slo.tpot_ms / 1000  # its first token is in flight
        return max(self.before[s].rank[1] - self.now, slo.tpot_ms / 1000)
