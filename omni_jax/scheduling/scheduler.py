"""First come, first served, under one token budget a step; recomputes what it has to preempt.

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

Pictures are encoded beside the steps. A sequence that needs one which is not there yet is passed over, in the queue as
in the batch: nobody waits for another's picture.
"""

import bisect
import dataclasses
from collections.abc import Iterable

from omni_jax.memory import BlockPool
from omni_jax.requests import InvalidRequest, MediaSpan, Request, Sequence
from omni_jax.requests.outputs import FinishReason
from omni_jax.scheduling.buckets import Buckets
from omni_jax.scheduling.features import Features
from omni_jax.scheduling.plan import Row, StepPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of a batch.

    Attributes:
        max_num_seqs: sequences that run at once; as many slots exist on the device.
        max_num_batched_tokens: tokens a step computes at most; at least max_num_seqs, so that everyone can decode.
        max_model_len: tokens of prompt and output together; the block pool holds at least one such sequence.
        buckets: compiled sizes.
        eos_token_ids: ids that end a sequence unless it ignores them.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    buckets: Buckets
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self):
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence decodes one token a step"
            )
        if self.buckets.rows < self.max_num_seqs or self.buckets.mixed[-1] < self.max_num_batched_tokens:
            raise ValueError(
                f"the largest buckets ({self.buckets.rows} rows, {self.buckets.mixed[-1]} tokens) must hold a full "
                f"step: max_num_seqs is {self.max_num_seqs}, max_num_batched_tokens {self.max_num_batched_tokens}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accepted:
    """What commit made of one row.

    Attributes:
        row: the row.
        token: the token its sequence has gained, if it sampled one.
        index: the row's place in the plan.
    """

    row: Row
    token: int | None
    index: int


class Scheduler:
    """Holds every live request, from admission to its last token.

    Args:
        features: the encoder cache, for a model that reads pictures; without it no request has any.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool, features: Features | None = None):
        if pool.num_usable * pool.block_size < config.max_model_len:
            raise ValueError(
                f"the KV cache holds {pool.num_usable} blocks of {pool.block_size} tokens, "
                f"less than one sequence of max_model_len {config.max_model_len}"
            )
        self.config = config
        self.pool = pool
        self.features = features
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
        self._enqueue(sequences[0])
        return sequences

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Ends a sequence and frees all it holds; steps in flight drop its rows. Does nothing when it has ended."""
        if sequence.finish_reason is not None:
            return
        self._fork(sequence)
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
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
        for sequence in [s for family in self._live.values() for s in family if s.finish_reason is None]:
            sequence.pending = 0
            if sequence.slot is not None:
                self._preempt(sequence)
            else:
                self._release(sequence)
                self._ask_again(sequence)
        if self.features is not None:
            self.features.cache.clear()

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to compute. Everything planned counts as computed from here
        on."""
        if self.features is not None:
            self.features.ask(self.waiting)
        decoding, prefilling = self._catching_up()
        budget = self.config.max_num_batched_tokens - len(decoding)
        wanted = sum(self._computable(s) for s in prefilling)
        admissible = self._admissible(budget - wanted)
        wanted = min(budget, wanted + sum(self._computable(s) for s in admissible))
        if not decoding and not wanted:
            return None

        rows = [self._row(sequence, 1) for sequence in decoding]
        left = self.config.buckets.fill(len(decoding) + wanted, len(decoding)) - len(decoding) if wanted else 0
        for sequence in prefilling + admissible:
            if left <= 0:
                break
            if sequence.slot is None and not self._admit(sequence, now):
                break
            count = min(self._computable(sequence), left)
            rows.append(self._row(sequence, count))
            left -= count
        if not rows:
            return None
        decode = all(row.count == 1 and not row.score for row in rows)
        buckets = self.config.buckets
        size = buckets.cover_decode(len(rows)) if decode else buckets.cover_mixed(sum(row.count for row in rows))
        return StepPlan(rows=tuple(rows), decode=decode, size=size)

    def _catching_up(self) -> tuple[list[Sequence], list[Sequence]]:
        """Running sequences with one token to compute, each with the block it needs; and those with more or to score.

        Preempts for the blocks, latest first: whoever is preempted comes later in `running` and is in no list yet.
        """
        decoding, prefilling = [], []
        for sequence in list(self.running):
            if sequence.slot is None:
                continue
            uncomputed = sequence.uncomputed
            if not self._computable(sequence):
                continue  # all is computed, or the next picture is not there yet
            if uncomputed > 1 or sequence.wants_prompt_logprobs:
                prefilling.append(sequence)
            elif sequence.computed >= sequence.num_prompt and sequence.remaining <= 0:
                continue  # (a): its end is in flight
            elif self._grow(sequence):
                decoding.append(sequence)
        return decoding, prefilling

    def _grow(self, sequence: Sequence) -> bool:
        """Blocks for one more token; whoever came last is preempted for it, at worst the sequence itself."""
        missing = self.pool.blocks_for(sequence.computed + 1) - len(sequence.blocks)
        while missing > 0:
            taken = self.pool.allocate(missing)
            if taken is not None:
                sequence.blocks += taken
                break
            if self._release_shared(besides=sequence):
                continue
            victim = self.running[-1]
            self._preempt(victim)
            self.num_preemptions += 1
            if victim is sequence:
                return False
        return True

    def _admissible(self, budget: int) -> list[Sequence]:
        """Waiting sequences that could start now, in order, until the budget is used. Nothing is taken yet."""
        found, free, slots = [], self.pool.num_free, len(self._free_slots)
        # Room for each running sequence to grow by a block, or what is admitted would soon be preempted again.
        reserve = len(self.running)
        for sequence in self.waiting:
            if budget <= 0 or slots <= len(found) or sequence.pending:
                break  # (d): nothing overtakes a sequence whose token is in flight
            if self.features is not None and not self.features.starts(sequence):
                continue
            need = self.pool.blocks_for(len(sequence.known)) - len(sequence.blocks)
            if need + reserve > free:
                if self.running or found or not self._release_shared(besides=sequence):
                    break
                free = self.pool.num_free
                if need > free:
                    break
            found.append(sequence)
            free -= need
            reserve += 1
            budget -= self._computable(sequence)
        return found

    def _computable(self, sequence: Sequence) -> int:
        """How many of a sequence's uncomputed tokens could be computed now."""
        return sequence.uncomputed if self.features is None else self.features.computable(sequence)

    def _admit(self, sequence: Sequence, now: float) -> bool:
        need = self.pool.blocks_for(len(sequence.known)) - len(sequence.blocks)
        taken = self.pool.allocate(need) if need > 0 else []
        if taken is None:
            return False
        sequence.blocks += taken
        sequence.slot = self._free_slots.pop()
        _remove(self.waiting, sequence)
        bisect.insort(self.running, sequence, key=lambda s: s.order)
        if sequence.scheduled_at is None:
            sequence.scheduled_at = now
        return True

    def _row(self, sequence: Sequence, count: int) -> Row:
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
            admit=sequence.on_device_blocks == 0,
            first_new_block=sequence.on_device_blocks,
            new_blocks=tuple(sequence.blocks[sequence.on_device_blocks :]),
            features=() if self.features is None else self.features.in_row(sequence, start, end),
        )
        sequence.on_device_blocks = len(sequence.blocks)
        sequence.computed = end
        if self.features is not None:
            self.features.leave_behind(sequence)
        sequence.pending += row.sample
        if sequence.children and end >= sequence.num_prompt:
            self._fork(sequence)
        return row

    def next_batch(self) -> tuple[MediaSpan, ...]:
        """What the encoder computes next; none when nothing waits for it. `encoded` must follow."""
        return () if self.features is None else self.features.next_batch((*self.running, *self.waiting))

    def encoded(self, batch: Iterable[MediaSpan]) -> None:
        """Steps that are planned from now on find the features of `batch` on the device."""
        assert self.features is not None
        for span in batch:
            self.features.cache.finish(span.key)

    # -- results ------------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, tokens: Iterable[int | None]) -> list[Accepted]:
        """Takes the sampled token of each row (None where none was; -1 where the logits were not numbers) and ends the
        sequences it ends. Rows of sequences that ended meanwhile are dropped."""
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
                    sequence.known.append(token)
                    self._end_if_due(sequence, token)
            elif not sequence.max_output and row.start + row.count >= sequence.num_prompt:
                self.finish(sequence, "length")
            accepted.append(
                Accepted(row=row, token=token if row.sample and token is not None and token >= 0 else None, index=index)
            )
        return accepted

    def _end_if_due(self, sequence: Sequence, token: int) -> None:
        params = sequence.request.params
        if sequence.num_output > params.min_tokens:
            if token in self.config.eos_token_ids and not params.ignore_eos:
                return self.finish(sequence, "stop")
            if token in params.stop_token_ids:
                return self.finish(sequence, "stop", token)
        if sequence.num_output >= sequence.max_output:
            self.finish(sequence, "length")
        return None

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
                self._enqueue(child)

    def _release(self, sequence: Sequence) -> None:
        self.pool.free(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.computed = 0
        sequence.on_device_blocks = 0
        if self.features is not None:
            self.features.release(sequence)
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
            sequence.slot = None

    def _release_shared(self, besides: Sequence) -> bool:
        """Takes back blocks that only waiting siblings hold; they will compute them again. Whether there were any."""
        # Siblings share the beginning of a prompt, so that their first block tells whose blocks are the same.
        kept = {s.blocks[0] for s in (*self.running, besides) if s.blocks}
        holders = [s for s in self.waiting if s.blocks and s.blocks[0] not in kept]
        for sequence in holders:
            self._release(sequence)
            self._ask_again(sequence)
        return bool(holders)

    def _preempt(self, sequence: Sequence) -> None:
        _remove(self.running, sequence)
        self._release(sequence)
        self._enqueue(sequence)


def _remove(queue: list[Sequence], sequence: Sequence) -> None:
    """Takes a sequence out of an ordered queue, if it is there."""
    at = bisect.bisect_left(queue, sequence.order, key=lambda s: s.order)
    if at < len(queue) and queue[at] is sequence:
        del queue[at]


def output_room(request: Request, max_model_len: int) -> int:
    """Tokens the request may generate: its max_tokens, cut to what the context leaves.

    Raises:
        InvalidRequest: an empty prompt, or one that leaves no room for what is asked.
    """
    prompt, asked = len(request.prompt_ids), request.params.max_tokens
    if not prompt:
        raise InvalidRequest("the prompt is empty: it must have at least one token", param="prompt")
    room = max_model_len - prompt
    if room < 0 or (room == 0 and asked != 0):
        wish = "" if asked is None else f" and asks for {asked} more"
        raise InvalidRequest(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt has {prompt} tokens{wish}. "
            "Shorten the prompt.",
            param="prompt",
        )
    return room if asked is None else min(asked, room)
