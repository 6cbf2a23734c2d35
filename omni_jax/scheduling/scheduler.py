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

The discipline (discipline.py) ranks the sequences. The budget goes to the sequence that ranks first, as far as its
tokens have that rank, then to the next. Decoding sequences always run, and the budget is small enough to keep them
within their objective. A sequence that gets no tokens is paused: it keeps its slot and blocks. For a sequence of a more
urgent class, a slot is taken from the least urgent sequence, which keeps its blocks; if blocks run out, its last ones
are taken too.
"""

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from omni_jax.cost.model import CostModel
from omni_jax.memory.block_pool import BlockPool
from omni_jax.requests import InvalidRequest, MediaSpan, Request, Sequence
from omni_jax.requests.outputs import FinishReason
from omni_jax.scheduling import budget
from omni_jax.scheduling.admission import Admission
from omni_jax.scheduling.blocks import Blocks
from omni_jax.scheduling.discipline import Discipline, FirstCome
from omni_jax.scheduling.events import Event
from omni_jax.scheduling.features import Features, can_start, computable
from omni_jax.scheduling.limits import SchedulerConfig, ending, output_room
from omni_jax.scheduling.plan import StepPlan
from omni_jax.scheduling.plan_builder import Rows, build_plan
from omni_jax.scheduling.preemption import Preemption
from omni_jax.scheduling.queues import Queues
from omni_jax.scheduling.running import schedule_running


class Accepted(NamedTuple):
    """A row whose result was committed.

    Attributes:
        row: Index of the row in the plan.
        sequence: The row's sequence.
        token: The token that the sequence gained, if one was sampled.
    """

    row: int
    sequence: Sequence
    token: int | None


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
        waiting, running: Sequences without and with a slot; the latter in order of arrival.
        events: Events since the caller last cleared the list.
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
        self._planned_at = 0.0
        self._decoding: list[Sequence] = []  # in the latest plan
        self._latest: StepPlan | None = None  # the latest plan
        if features is not None:
            features.order_by(self.discipline)
        self._computable = functools.partial(computable, features)
        self._queues = Queues(config.max_num_seqs, self.discipline, functools.partial(can_start, features))
        self.running, self.waiting = self._queues.running, self._queues.waiting
        self._preemption = Preemption(
            self._queues, self.blocks, features, self.discipline, record=lambda event: self.events.append(event)
        )
        self._admission = Admission(self._queues, self.blocks, features, self.discipline, self._preemption)
        self.events: list[Event] = []
        self.held: frozenset[str] = frozenset()
        self._live: dict[str, list[Sequence]] = {}
        self._arrivals = 0
        self._num_plans = 0
        self._in_flight: dict[int, tuple[Sequence, ...]] = {}  # plan's number -> sequence of each row, until `commit`

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def num_preemptions(self) -> int:
        """Number of times that a sequence lost its slot (a counter)."""
        return self._preemption.count

    @property
    def num_live(self) -> int:
        """Number of live requests."""
        return len(self._live)

    @property
    def num_running(self) -> int:
        """Number of live requests with a sequence that has a slot."""
        return len(self._queues.running_requests)

    def has(self, request_id: str) -> bool:
        return request_id in self._live

    def sequences(self, request_id: str) -> list[Sequence]:
        """All continuations of a live request, by index; empty if it is not live."""
        return self._live.get(request_id, [])

    def live(self) -> list[Sequence]:
        """All continuations that have not ended, in order of arrival."""
        return [s for family in self._live.values() for s in family if s.finish_reason is None]

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request and return its continuations, by index. Nothing changes if that raises.

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
                digests=list(request.digests),
            )
            for index in range(request.params.n)
        ]
        self._arrivals += 1
        self._live[request.id] = sequences
        try:
            for sequence in sequences:
                self._admission.enter(sequence)
        except BaseException:  # a fault of ours must not leave a sequence that never ends
            del self._live[request.id]
            for sequence in sequences:
                self._preemption.release(sequence)
            raise
        return sequences

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence and free all that it holds; steps in flight drop its rows. Does nothing if it has ended."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if reason == "error":
            self.clear_prefix_cache()  # logits that are not numbers may come from cached blocks
        self.blocks.register(sequence, sequence.computed)
        self._preemption.release(sequence)
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
        self._in_flight.clear()
        for sequence in self.live():
            self.blocks.drop_swapped(sequence)  # its last rows may be those that the step did not write
            sequence.pending = 0
            self._preemption.requeue(sequence, 0)
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
        before, self._planned_at = self._planned_at, now
        self.pool.now = now
        self._admission.acquire_features()
        self._queues.file_returning()
        decoding, prefilling = schedule_running(self._queues, self.blocks, self._preemption, self._computable, now)
        pace, limit = self._limit(decoding, now)
        computing = self._admission.computing(prefilling, before)
        if self._preemption.preempt_for_urgent(limit, prefilling, computing, self.held, now):
            decoding, prefilling = ([s for s in some if s.slot is not None] for some in (decoding, prefilling))
            pace, limit = self._limit(decoding, now)
            computing = self._admission.computing(prefilling, before)
        self._decoding, self._latest = decoding, None
        admissible = self._admission.admissible(limit, prefilling, computing, self.held, now)
        candidates = prefilling + admissible
        wanted = min(limit, sum(map(self._computable, candidates)))
        if not decoding and not wanted:
            return None

        left = wanted
        if wanted and self.config.chunked_prefill:
            left = self.config.buckets.fill(len(decoding) + wanted, len(decoding)) - len(decoding)
        shares = budget.divide(
            candidates,
            left,
            computable=self._computable,
            admit=lambda sequence: self._admission.admit(sequence, now),
            discipline=self.discipline,
            now=now,
            pace=pace,
            in_chunks=self.config.chunked_prefill,
        )
        rows = [*((sequence, 1) for sequence in decoding), *shares]
        plan = self._plan_of(rows, now) if rows else None
        self._record_pauses(prefilling, now)
        return plan

    def _plan_of(self, rows: Rows, now: float) -> StepPlan:
        """The plan of these rows; their tokens count as computed from now on."""
        size, features = self.pool.block_size, self.features
        filled = [
            (s, n)
            for s, n in rows
            if s.num_known >= (s.registered + 1) * size and not s.dropped and self.blocks.shares(s)
        ]
        for sequence, _ in filled:  # first, so that none of these takes a block that this step writes to
            self.blocks.register(sequence, sequence.computed)
        for sequence, count in filled:
            self.blocks.register(sequence, sequence.computed + count)
        self._num_plans += 1
        self._latest = plan = build_plan(
            rows,
            number=self._num_plans,
            buckets=self.config.buckets,
            eos_token_ids=self.config.eos_token_ids,
            features=self.features,
        )
        self._in_flight[plan.number] = tuple([sequence for sequence, _ in rows])
        text = 0  # tokens of requests without other parts, and after prompts
        for (sequence, count), sample in zip(rows, plan.samples.tolist(), strict=True):
            if sequence.request.parts_stop and (sequence.computed < sequence.num_prompt or sequence.dropped):
                self.blocks.fill(sequence, count)
            else:
                text += count
                sequence.computed += count
            sequence.pending += sample
            sequence.served_at = now
            sequence.on_device, sequence.on_device_blocks = True, len(sequence.blocks)
            if sequence.paused:
                sequence.paused = False
                self.events.append(Event(kind="resume", sequence=sequence, cause="turn"))
            if features is not None and sequence.media_passed < len(sequence.request.media):
                features.release_passed(sequence)
        self.blocks.slots["text"] += text
        return plan

    def _limit(self, decoding: list[Sequence], now: float) -> tuple[budget.Pace | None, int]:
        """The pace that decoding sequences set, and the number of prompt tokens that fit beside them."""
        seconds = self.discipline.step_seconds(decoding, now)
        pace = budget.pace(decoding, seconds=seconds, buckets=self.config.buckets, cost=self.cost)
        limit = self.config.max_num_batched_tokens - len(decoding)
        return pace, limit if pace is None else pace.limit(limit)

    def _record_pauses(self, prefilling: list[Sequence], now: float) -> None:
        """Pause sequences whose prompt is partly computed and that got no tokens of this step."""
        for sequence in prefilling:
            if sequence.slot is not None and sequence.computed and sequence.served_at != now and not sequence.paused:
                sequence.paused = True
                self.events.append(Event(kind="pause", sequence=sequence, cause="budget"))

    def sequences_in(self, plan: StepPlan) -> tuple[Sequence, ...]:
        """The sequence of each row of a plan that was not committed yet."""
        return self._in_flight[plan.number]

    def next_batch(self) -> tuple[MediaSpan, ...]:
        """The images to encode in the next call, or none. The caller must call `encoded` after it."""
        if self.features is None:
            return ()
        now = self._planned_at
        return self.features.next_batch(lambda sequence: self.discipline.rank(sequence, now), self.held)

    def may_encode(self, seconds: float) -> bool:
        """Whether a slice of the encoder that takes `seconds` may run beside the latest step. Decoding sequences whose
        next token is due may prevent it, see budget.slice_fits."""
        if self.features is None or all(self.discipline.due(sequence) == math.inf for sequence in self._decoding):
            return True
        now = self._planned_at
        step_seconds = 0.0 if self.cost is None or self._latest is None else self.cost.seconds(self._latest.shape)
        return budget.slice_fits(
            self._decoding,
            self.features.awaiting(self.running, now),
            until=now + step_seconds + seconds,
            discipline=self.discipline,
            now=now,
        )

    def encoded(self, batch: Iterable[MediaSpan]) -> None:
        """Mark the features of `batch` as ready for the steps planned from now on."""
        assert self.features is not None
        waiting = [sequence for sequence in self.features.encoded(batch) if sequence.slot is None]
        self._queues.returning.update(dict.fromkeys(waiting))

    # -- results ------------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, tokens: Iterable[int | None], now: float = 0.0) -> list[Accepted]:
        """Add the sampled tokens to their sequences, and end the sequences that they end.

        Args:
            plan: The plan of the step, made since the last `reset`. Rows of sequences that ended in the meantime are
                dropped.
            tokens: The sampled token of each row: None if none was sampled, -1 if its logits were not numbers.
            now: Engine time in seconds when the tokens came.
        """
        self.pool.now = max(self.pool.now, now)
        sequences, accepted = self._in_flight.pop(plan.number), []
        for score in plan.scores:
            sequence = sequences[score.row]
            sequence.scored = max(sequence.scored, min(int(plan.stops[score.row]), sequence.num_prompt - 1))
        for row, (sequence, sample, token) in enumerate(zip(sequences, plan.samples.tolist(), tokens, strict=True)):
            if sample:
                sequence.pending -= 1
            if sequence.finish_reason is not None:
                continue
            if not sample or token is None:
                token = None
                if not sequence.max_output and plan.stops[row] >= sequence.num_prompt:
                    self.finish(sequence, "length")
            elif token < 0:
                token = None
                self.finish(sequence, "error")
            else:
                if sequence.first_token_at is None:
                    sequence.first_token_at = now
                sequence.output.append(token)
                if end := ending(sequence, token, self.config.eos_token_ids):
                    self.finish(sequence, *end)
                elif sequence.slot is None:
                    self._queues.file(sequence)  # preempted meanwhile: its next token is due now
            accepted.append(Accepted(row, sequence, token))
        return accepted
