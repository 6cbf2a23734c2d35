"""The engine's loop around a scheduler and the fake device, which checks all invariants at each step."""

import collections
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable

import numpy as np

from omni_jax.cost.model import CostModel
from omni_jax.memory.accounting import pool_usage
from omni_jax.memory.block_pool import BlockPool
from omni_jax.memory.encoder_cache import EncoderCache
from omni_jax.requests import MediaSpan, Request, SamplingParams, Sequence
from omni_jax.scheduling.blocks import Blocks, Compression
from omni_jax.scheduling.buckets import Buckets, default_buckets
from omni_jax.scheduling.discipline import Discipline, SLOFirst
from omni_jax.scheduling.features import Features
from omni_jax.scheduling.limits import SchedulerConfig
from omni_jax.scheduling.plan import Row, StepPlan
from omni_jax.scheduling.scheduler import Scheduler
from tests.memory.pool_walk import walk
from tests.scheduling.fake_device import Case, FakeDevice, Result, Stream, seen_prompt
from tests.scheduling.service import Service

SLICE_SECONDS = 1.0  # assumed duration of a slice of the encoder

Ending = tuple[tuple[int, ...], str, str | int | None]  # tokens, finish reason, stop reason


class WatchedPool(BlockPool):
    """A block pool that also keeps its own reference counts, and the step in which a block was shared."""

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(num_blocks, block_size)
        self.counted: collections.Counter[int] = collections.Counter()
        self.shared_in: dict[int, int] = {}
        self.step = 0

    def allocate(self, count):
        taken = super().allocate(count)
        for block in taken or ():
            assert 0 < block < self.num_blocks
            assert not self.counted[block]
            self.counted[block] = 1
            self.shared_in.pop(block, None)
        return taken

    def share(self, blocks):
        blocks = list(blocks)
        super().share(blocks)
        self.counted.update(blocks)
        for block in blocks:
            self.shared_in.setdefault(block, self.step)

    def free(self, blocks):
        blocks = list(blocks)
        super().free(blocks)
        self.counted.subtract(blocks)

    def may_write(self, block: int) -> None:
        """Check contract (c). A block may be shared in the step that fills it."""
        assert self.counted[block] <= 1 or self.shared_in[block] == self.step, "writes to a shared block"


def image_span(name: str, start: int, length: int) -> MediaSpan:
    """An image of `length` tokens and patches, at token `start` of the prompt."""
    patches = np.zeros((length, 1, 1, 1, 1), np.uint8)
    return MediaSpan(key=name.encode(), modality="image", start=start, length=length, grid=(1, length), patches=patches)


@dataclasses.dataclass(kw_only=True, eq=False)
class Parcel:
    """Blocks swapped out of the fake device, ready after `polls` calls of `is_ready`."""

    content: list
    polls: int
    lost: bool


class FakeSwap:
    """A Swap that by seed rejects blocks, is slow, and loses blocks."""

    def __init__(self, device: FakeDevice, seed: int, *, faults: bool = True):
        self._device, self._random, self._faults = device, random.Random(seed), faults
        self.parcels: set[Parcel] = set()
        self.stored = self.loaded = 0

    def store(self, sequence: Sequence, blocks: list[int], tokens: int, cached: int) -> Parcel | None:
        assert 0 <= cached <= tokens <= len(blocks) * self._device.block_size
        if self._faults and self._random.random() < 0.2:
            return None
        parcel = Parcel(
            content=self._device.read_blocks(blocks),
            polls=self._random.randrange(4),
            lost=self._faults and self._random.random() < 0.2,
        )
        self.parcels.add(parcel)
        self.stored += 1
        return parcel

    def is_ready(self, parcel: Parcel) -> bool:
        parcel.polls -= 1
        return parcel.polls < 0

    def load(self, parcel: Parcel, blocks: list[int]) -> bool:
        self.parcels.remove(parcel)
        if parcel.lost:
            return False
        self._device.write_blocks(blocks, parcel.content)
        self.loaded += 1
        return True

    def drop(self, parcel: Parcel) -> None:
        self.parcels.remove(parcel)


class Loop:
    """The engine's part: adds requests, runs steps and the encoder, and reads results."""

    def __init__(
        self,
        *,
        blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        buckets: Buckets | None = None,
        eos: Iterable[int] = (),
        discipline: Discipline | None = None,
        cost: CostModel | None = None,
        feature_rows: int = 0,
        max_patches: int = 8,
        slices: int = 2,
        prefix_caching: bool = False,
        swap: int | None = None,
        ratio: Callable[[int, int], float] | None = None,
    ):
        """Args:
        blocks: Number of usable blocks.
        feature_rows: Rows of the encoder cache; 0 for a model that reads text only.
        max_patches: Maximum number of patches of a call of the encoder.
        slices: Number of slices of a call of the encoder.
        swap: Seed of a FakeSwap; None disables swapping.
        ratio: Compression ratio, see Compression; None disables compression.
        """
        self.pool = WatchedPool(blocks + 1, block_size)
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            buckets=buckets
            or default_buckets(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
            eos_token_ids=frozenset(eos),
        )
        self.features = None
        if feature_rows:
            cache = EncoderCache(feature_rows, rows_per_block=1)
            self.features = Features(cache, max_patches=max_patches, pack_patches=max_patches)
        self.slices = slices
        self.encoding: tuple[MediaSpan, ...] = ()
        self.slices_left = 0
        self.encoded: collections.Counter[bytes] = collections.Counter()
        self.device = FakeDevice(
            num_blocks=blocks + 1, block_size=block_size, slots=max_num_seqs, max_model_len=max_model_len
        )
        self.swap = None if swap is None else FakeSwap(self.device, swap)
        self.blocks = Blocks(
            self.pool,
            prefix_caching=prefix_caching,
            swap=self.swap,
            compression=None if ratio is None else Compression(ratio=ratio, compact=self.device.compact),
        )
        self.scheduler = Scheduler(
            self.config, self.pool, self.features, discipline=discipline, cost=cost, blocks=self.blocks
        )
        self.cases: dict[str, Case] = {}
        self.sequences: list[Sequence] = []
        self.in_flight: collections.deque[tuple[StepPlan, Result]] = collections.deque()
        self.computed: collections.Counter[Sequence] = collections.Counter()
        self.admitted: collections.Counter[Sequence] = collections.Counter()
        self.plans: list[StepPlan] = []
        self.scored: dict[str, list] = {}
        self.watched = True  # whether each plan is checked by Service, which looks at all that wait
        self._names = itertools.count()

    # -- actions of a test --------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: int | Iterable[int],
        *,
        id: str | None = None,
        stop_pair=None,
        nan_at=None,
        media=(),
        segments=(),
        slo=None,
        cache_salt="",
        drop_shares=None,
        **params,
    ):
        """Add a request and return its continuations. If `prompt` is a length, its tokens are made up."""
        number = next(self._names)
        if isinstance(prompt, int):
            prompt = [(number * 5 + i * i + i // 3) % 7 for i in range(prompt)]
        request = Request(
            id=id or f"r{number}",
            prompt_ids=tuple(prompt),
            params=SamplingParams(**params),
            arrival=float(self.pool.step),
            media=tuple(media),
            segments=tuple(segments),
            slo=slo,
            cache_salt=cache_salt if self.blocks.prefix_caching else f"{number}",  # as InputProcessor does
            drop_shares=drop_shares,
        )
        added = self.scheduler.add(request)
        self.cases[request.id] = Case(request=request, stop_pair=stop_pair, nan_at=nan_at)
        self.sequences += added
        self.scored[request.id] = []
        self.check()
        return added

    def step(self, *, between=lambda: None) -> bool:
        """Do as Engine._advance does. `between` is called between dispatch and commit. Returns whether work is left."""
        self.pool.step += 1
        before = list(self.scheduler.waiting), list(self.scheduler.running)
        had_swapped = any(s.swapped is not None for s in self.scheduler.waiting)
        promised = Service(self.scheduler, float(self.pool.step)) if self.watched else None
        plan = self.scheduler.plan(float(self.pool.step))
        if plan is not None:
            self._check_plan(plan, *before)
            if promised is not None:
                promised.check(plan)
                promised.check_pace(plan)
            self.in_flight.append((plan, self.device.dispatch(plan, self.cases, self.pool.may_write)))
            self.plans.append(plan)
        self._encode()
        self.check()
        between()
        # Swapped blocks take several steps to load; lost ones are recomputed from the next plan on.
        loading = any(s.swapped is not None for s in self.scheduler.waiting) or had_swapped
        busy = plan is not None or self.in_flight or self.encoding or loading
        assert busy or not self.scheduler.num_live or self.just_encoded, "there is work, but none is done"
        if self.in_flight and (plan is None or len(self.in_flight) > 1):
            self._commit(*self.in_flight.popleft())
        self.check()
        assert len(self.in_flight) <= 1
        return bool(self.scheduler.num_live or self.in_flight)

    def _encode(self) -> None:
        """Do as Engine._encode does: run a slice of the present call, or start a new one."""
        self.just_encoded = False
        if self.features is None:
            return
        if self.encoding:
            if self.in_flight and not self.scheduler.may_encode(SLICE_SECONDS):
                return
            self.slices_left -= 1
            if not self.slices_left:
                self.device.encode(self.encoding, [self.features.cache.rows(span.key) for span in self.encoding])
                self.scheduler.encoded(self.encoding)
                self.encoding = ()
                self.just_encoded = True
        else:
            self.encoding, self.slices_left = self.scheduler.next_batch(), self.slices
            assert len({span.key for span in self.encoding}) == len(self.encoding), "encoded twice"
            self.encoded.update(span.key for span in self.encoding)

    def run(self, steps: int = 0) -> None:
        """Run until all requests have ended, in at most `steps` steps; 0 is a bound that allows for recomputation."""
        needed = sum(s.num_prompt + s.max_output for s in self.sequences)
        images = sum(len(s.request.media) for s in self.sequences)
        for _ in range(steps or 100 + 10 * needed + 10 * images * (self.slices + 1)):
            if not self.step():
                return self.check_idle()
        raise AssertionError("the requests do not end")

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self.check()

    def fail_step(self, *, dispatched: bool) -> None:
        """Let a step raise, after its dispatch or when its predecessor is read."""
        self.pool.step += 1
        plan = self.scheduler.plan(float(self.pool.step))
        if plan is not None and dispatched:
            self.device.dispatch(plan, self.cases, self.pool.may_write)
        self.in_flight.clear()
        self.encoding = ()
        self.scheduler.reset()
        self.device.wipe()
        self.check()

    def preempt(self, sequence: Sequence, keep: int = 0) -> None:
        """Preempt a sequence as if an earlier one needed its blocks after the first `keep`."""
        self.scheduler._preemption.preempt(sequence, keep, "blocks", sequence, wanted=1)
        self.check()

    # -- results ------------------------------------------------------------------------------------------------------

    def ending(self, sequence: Sequence) -> Ending:
        assert sequence.finish_reason is not None
        return tuple(sequence.output), sequence.finish_reason, sequence.stop_reason

    def alone(self, sequence: Sequence) -> Ending:
        """The ending of a continuation that runs alone, computed without the scheduler."""
        case, params = self.cases[sequence.request.id], sequence.request.params
        prompt = seen_prompt(sequence.request)
        room = self.config.max_model_len - len(prompt)
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        stream, output = Stream(prompt, sequence.index), []
        while len(output) < limit:
            if len(output) == case.nan_at:
                return tuple(output), "error", None
            token = stream.token(len(prompt) + len(output))
            output.append(token)
            if len(output) > params.min_tokens:
                if token in self.config.eos_token_ids and not params.ignore_eos:
                    return tuple(output), "stop", None
                if token in params.stop_token_ids:
                    return tuple(output), "stop", token
            if tuple(output[-2:]) == case.stop_pair:
                return tuple(output), "stop", "pair"
        return tuple(output), "length", None

    def check_endings(self) -> None:
        for sequence in self.sequences:
            tokens, reason, stop_reason = self.ending(sequence)
            if reason == "abort":
                assert tokens == self.alone(sequence)[0][: len(tokens)]
            else:
                assert (tokens, reason, stop_reason) == self.alone(sequence)
                if sequence.request.params.prompt_logprobs is not None and sequence.index == 0:
                    assert len(self.scored[sequence.request.id]) == sequence.num_prompt - 1

    # -- invariants ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        scheduler, pool = self.scheduler, self.pool
        running, waiting = scheduler.running, scheduler.waiting
        live = [s for s in self.sequences if s.finish_reason is None]
        held = collections.Counter(block for s in self.sequences for block in s.blocks)
        assert held == +pool.counted
        assert pool.num_used == len(held)
        assert pool.num_used + pool.num_free == pool.num_usable
        assert [s.order for s in running] == sorted({s.order for s in running})
        slots = [s.slot for s in running]
        assert None not in slots
        assert sorted(slots + scheduler._queues.free_slots) == list(range(self.config.max_num_seqs))
        assert len(running) + len(waiting) == len(live), "a live sequence is in no queue or in two"
        assert {*running, *waiting} == set(live)
        sampling = self._sampling()
        for sequence in self.sequences:
            flying = sampling[sequence.order]
            assert sequence.pending == flying or sequence.finish_reason is not None
            assert (sequence.slot is not None) == (sequence in running)
            assert len(set(sequence.blocks)) == len(sequence.blocks)
            assert sequence.rows <= len(sequence.blocks) * pool.block_size
            if sequence.finish_reason is not None:
                assert not sequence.blocks
                assert sequence.swapped is None
        if self.swap is not None:
            assert self.swap.parcels == {s.swapped.parcel for s in live if s.swapped is not None}
            assert self.blocks.swapped == sum(s.swapped.count for s in live if s.swapped is not None)
        assert scheduler.num_live == len({s.request.id for s in live})
        assert scheduler.num_running == len({s.request.id for s in running})
        assert pool_usage(pool, self.blocks.slots) == walk(pool, live)
        self._check_line()
        if self.features is not None:
            self._check_features()

    def _check_line(self) -> None:
        """Compare the queues with their plain definition: all that may start, sorted by rank, now and later."""
        scheduler, queues = self.scheduler, self.scheduler._queues
        startable = [s for s in queues.waiting if self.features is None or self.features.can_start(s)]
        returning = set(queues.returning)
        line = {s for s in startable if s not in queues.parked and s not in returning}
        for later in (0, 1, 7, 1e6):
            now = float(self.pool.step + later)
            found = [s for s in queues.line.in_order(now) if s in line]
            assert found == sorted(line, key=lambda s: scheduler.discipline.rank(s, now)), "the line is out of order"
        assert {s for s in queues.waiting if s in queues.parked or s in queues.line} | returning >= set(startable)
        assert not any(s in queues.parked and s in queues.line for s in queues.waiting)
        assert queues.line._keys.keys() <= set(queues.waiting), "a sequence that does not wait is in the line"
        holders = {s for s in queues.waiting if s.blocks}
        assert {s: block for block, some in queues.holders.items() for s in some} == {s: s.blocks[-1] for s in holders}

    def _check_features(self) -> None:
        held = collections.Counter(
            span.key for s in self.sequences for span in s.request.media[s.media_passed : s.media_held]
        )
        entries = self.features.cache._entries
        assert held == collections.Counter({key: e.references for key, e in entries.items() if e.references})
        rows = [row for entry in entries.values() for row in entry.rows.tolist()]
        assert len(set(rows)) == len(rows), "two images share a row"
        for sequence in self.sequences:
            if sequence.finish_reason is not None:
                assert sequence.media_passed == sequence.media_held
        assert all(entries[span.key].state == "encoding" for span in self.encoding)
        asked = {
            (s, index)
            for s in self.sequences
            for index in range(s.media_passed, s.media_held)
            if entries[s.request.media[index].key].state != "ready"
        }
        assert asked == {one for some in self.features._askers.values() for one in some}
        waiting = set(self.scheduler.waiting)
        assert self.features._holders._keys.keys() == {s for s in waiting if s.media_passed < s.media_held}
        wanting = {s for s in waiting if s.media_held < len(s.request.media) and s not in self.scheduler._queues.parked}
        assert self.features._waiting._keys.keys() == wanting
        for line in (self.features._holders, self.features._waiting):
            assert all(line._keys[s] == line.key(s) for s in line._keys), "out of order"

    def check_idle(self) -> None:
        self.check()
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert self.scheduler.num_live == 0
        assert self.pool.num_used == 0
        assert self.pool.usage == 0.0
        assert self.swap is None or not self.swap.parcels
        assert self.features is None or self.features.cache.usage == 0.0 or self.encoding
        assert not self.in_flight

    def _check_plan(self, plan: StepPlan, waiting: list[Sequence], running: list[Sequence]) -> None:
        config, rows = self.config, plan.rows
        assert rows
        sequences = self.scheduler.sequences_in(plan)
        assert [row.order for row in rows] == [sequence.order for sequence in sequences]
        assert len({*sequences}) == len({row.slot for row in rows}) == len(rows)
        assert all(row.count >= 1 for row in rows)
        assert plan.num_tokens <= config.max_num_batched_tokens
        assert len(rows) <= config.buckets.rows
        assert plan.decode == all(row.count == 1 and row.targets is None for row in rows)
        sizes = config.buckets.decode if plan.decode else config.buckets.mixed
        assert plan.size == min(size for size in sizes if size >= plan.num_tokens)

        flying = self._sampling()
        for row, sequence in zip(rows, sequences, strict=True):
            assert sequence.finish_reason is None
            assert row.feedback == (flying[row.order] > 0)
            assert not (row.admit and flying[row.order]), "contract (d)"
            assert row.write is None or row.write.blocks == tuple(sequence.blocks)
            sampled = sequence.num_output + flying[row.order]
            assert sampled + row.sample <= sequence.max_output, "contract (a)"
            if sampled or row.start >= sequence.num_prompt:
                assert sampled < sequence.max_output, "contract (a): the row is not needed"
            reaches = row.start + row.count == sequence.num_prompt + sampled
            assert row.sample == (reaches and sampled < sequence.max_output)
            assert row.targets is None or row.start < sequence.num_prompt - 1
            assert row.start + row.count - row.dropped <= len(sequence.blocks) * self.pool.block_size
            self.computed[sequence] += row.count
            self.admitted[sequence] += row.admit

        if isinstance(self.scheduler.discipline, SLOFirst) or self.blocks.prefix_caching or self.swap is not None:
            return  # a sequence that waits for a block to be computed or loaded may be overtaken
        # First come, first served: an admitted sequence comes before all that could have been admitted and were not.
        admitted = [row.order for row in rows if row.admit]
        left = [
            s.order
            for s in self.scheduler.waiting
            if (s in waiting or s in running)
            and not s.pending
            and s not in self.scheduler._queues.parked  # it waits for blocks of another continuation
            and (self.features is None or self.features.can_start(s))
        ]
        assert not admitted or not left or max(admitted) < min(left)

    def _sampling(self) -> collections.Counter[tuple[int, int]]:
        """The number of tokens in flight of each continuation."""
        return collections.Counter(row.order for plan, _ in self.in_flight for row in plan.rows if row.sample)

    def _commit(self, plan: StepPlan, result: Result) -> None:
        rows, sequences = plan.rows, self.scheduler.sequences_in(plan)
        ended = [sequence.finish_reason is not None for sequence in sequences]
        accepted = self.scheduler.commit(plan, result.tokens, float(self.pool.step))
        assert [a.row for a in accepted] == [row for row, gone in enumerate(ended) if not gone]
        for one in accepted:
            row, sequence = rows[one.row], one.sequence
            assert sequence is sequences[one.row]
            if row.targets is not None:
                self._collect(row, sequence, result.scored[one.row])
            token = result.tokens[one.row]
            assert one.token == (token if token != -1 else None)
            if one.token is not None:
                self._read(sequence, one.token)

    def _collect(self, row: Row, sequence: Sequence, scored) -> None:
        """Collect prompt logprobs as the engine does: without gaps, and without those collected before a preemption."""
        taken, stream = self.scored[sequence.request.id], Stream(seen_prompt(sequence.request), 0)
        assert row.start <= len(taken)
        for position in range(len(taken), min(row.start + row.count, sequence.num_prompt - 1)):
            assert scored[position - row.start] == (stream.digest(position), stream.token(position + 1))
            taken.append(scored[position - row.start])
        assert sequence.scored == len(taken)

    def _read(self, sequence: Sequence, token: int) -> None:
        """Read a token as the engine does: after all prompt logprobs; a stop string overrides a length."""
        params = sequence.request.params
        if params.prompt_logprobs is not None and sequence.index == 0:
            assert len(self.scored[sequence.request.id]) == sequence.num_prompt - 1
        output = sequence.output
        assert output[-1] == token
        pair = self.cases[sequence.request.id].stop_pair
        if sequence.finish_reason != "stop" and tuple(output[-2:]) == pair:
            self.scheduler.finish(sequence, "stop", "pair")
            sequence.finish_reason, sequence.stop_reason = "stop", "pair"
