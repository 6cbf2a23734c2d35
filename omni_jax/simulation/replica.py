"""One engine on a virtual clock: its scheduler and memory, with a cost model in place of the device."""

import bisect
import collections
import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from omni_jax.cost.model import CostModel, Kind, StepShape
from omni_jax.memory.block_pool import BlockPool
from omni_jax.memory.encoder_cache import EncoderCache
from omni_jax.memory.recycling import make_recycling
from omni_jax.requests import InvalidRequest, MediaSpan, Request, Sequence
from omni_jax.scheduling.blocks import Blocks
from omni_jax.scheduling.buckets import Buckets, default_buckets, patch_buckets
from omni_jax.scheduling.discipline import Discipline, FirstCome
from omni_jax.scheduling.features import Features
from omni_jax.scheduling.limits import SchedulerConfig
from omni_jax.scheduling.plan import StepPlan
from omni_jax.scheduling.scheduler import Scheduler
from omni_jax.telemetry.recorder import Recorder


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """The settings of a simulated engine. Names are those of EngineConfig where it has them.

    Attributes:
        max_num_seqs, max_num_batched_tokens, max_model_len, block_size: See SchedulerConfig and BlockPool.
        num_blocks: Number of usable KV cache blocks. Default: enough for max_num_seqs sequences of max_model_len.
        buckets: Compiled sizes. Default: the engine's for these limits.
        chunked_prefill: See SchedulerConfig.
        discipline: Order of service.
        segment_policy: How prompts are cut; see segments.make_policy.
        encoder_cache_tokens: Number of features that fit on the device; 0 for a model that reads text only.
        max_patches: Maximum number of patches of an image.
        pack_patches: Maximum number of patches of a call of the vision tower with several images.
        encoder_slices: Number of equal slices of a call of the vision tower. At most one runs between two steps.
        host_seconds: Seconds from the start of planning a step to its dispatch.
        prefix_caching: Whether requests share the blocks of common prefixes.
        recycling: Which cached block is evicted first; see memory.make_recycling.
        noise: Standard deviation of the logarithm of a step's seconds, around the cost model's prediction.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int = 4096
    block_size: int = 32
    num_blocks: int | None = None
    buckets: Buckets | None = None
    chunked_prefill: bool = True
    discipline: Discipline = dataclasses.field(default_factory=FirstCome)
    segment_policy: str | Mapping[str, Any] = "request"
    encoder_cache_tokens: int = 8192
    max_patches: int = 5120
    pack_patches: int = 1024
    encoder_slices: int = 33
    host_seconds: float = 0.5e-3
    prefix_caching: bool = True
    recycling: str = "by_modality"
    noise: float = 0.0

    def __post_init__(self):
        if self.encoder_slices < 1 or self.host_seconds < 0 or self.noise < 0:
            raise ValueError(
                f"encoder_slices must be at least 1, host_seconds and noise at least 0, got {self.encoder_slices}, "
                f"{self.host_seconds} and {self.noise}"
            )

    @property
    def scheduler(self) -> SchedulerConfig:
        """The scheduler's limits. There are no EOS ids, because tokens are made up."""
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            buckets=self.buckets
            or default_buckets(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens),
            chunked_prefill=self.chunked_prefill,
        )

    @property
    def usable_blocks(self) -> int:
        """Number of usable KV cache blocks."""
        if self.num_blocks is not None:
            return self.num_blocks
        return self.max_num_seqs * -(-self.max_model_len // self.block_size)


class Piece(NamedTuple):
    """Tokens of one segment in one step.

    Attributes:
        request_id, index: The continuation.
        segment: Number of the segment in the prompt; output has the number after the last.
        start: Index of the first token in the sequence.
        count: Number of tokens, or of patches in a slice of the vision tower.
    """

    request_id: str
    index: int
    segment: int
    start: int
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step or a slice that a device ran.

    Attributes:
        replica: Index of the replica.
        start: Start in virtual seconds.
        seconds: Duration.
        kind: decode, mixed, or encode for a slice of the vision tower.
        size: The bucket.
        pieces: The tokens or patches that it computed.
    """

    replica: int
    start: float
    seconds: float
    kind: Kind
    size: int
    pieces: tuple[Piece, ...]


@dataclasses.dataclass(kw_only=True, slots=True)
class _Call:
    """A call of the vision tower in progress."""

    spans: tuple[MediaSpan, ...]
    shape: StepShape
    pieces: tuple[Piece, ...]
    slice_seconds: float
    left: int
    ready: float  # when the device ends the latest slice


class Replica:
    """The loop of Engine._advance without threads. The caller calls `wake` at the time that it last returned.

    The loop runs one step ahead: it plans and dispatches step k + 1, and then a slice of the vision tower, before it
    waits for the result of step k. The device runs everything in order.

    Args:
        index: Index in the fleet.
        config: Settings.
        cost: Predicts durations, for the device and for the scheduler.
        recorder: Records requests and segments.
        seed: Seed of the noise.
        on_step: Called with each step of the device.

    Attributes:
        load: Number of prompt tokens of the requests that have not ended.
        busy_seconds: Seconds in which the device was busy.
        idle: Whether it has nothing to do; after `add`, it must be woken at once.
    """

    def __init__(
        self,
        index: int,
        config: ReplicaConfig,
        cost: CostModel,
        recorder: Recorder,
        *,
        seed: int = 0,
        on_step: Callable[[Step], None] | None = None,
    ):
        self.index, self.load, self.busy_seconds, self.idle = index, 0, 0.0, True
        self._config, self._cost, self._recorder, self._on_step = config, cost, recorder, on_step
        self._features = None
        if config.encoder_cache_tokens:
            self._features = Features(
                EncoderCache(config.encoder_cache_tokens),
                max_patches=config.max_patches,
                pack_patches=config.pack_patches,
            )
            self._patch_buckets = patch_buckets(config.max_patches)
        pool = BlockPool(config.usable_blocks + 1, config.block_size, recycling=make_recycling(config.recycling))
        self.scheduler = Scheduler(
            config.scheduler,
            pool,
            self._features,
            discipline=config.discipline,
            cost=cost,
            blocks=Blocks(pool, prefix_caching=config.prefix_caching),
        )
        self._random = random.Random(f"{seed} {index}")
        self._in_flight: collections.deque[tuple[StepPlan, float]] = collections.deque()  # (plan, end)
        self._device_free = 0.0
        self._call: _Call | None = None
        self._waits_for: Callable[[float], object] | None = None

    def add(self, request: Request) -> None:
        """Queue a request. An idle replica must then be woken at once.

        Raises:
            InvalidRequest: The request can never run here.
        """
        for span in request.media:
            if self._features is None or not self._features.cache.fits(span.length):
                raise InvalidRequest(
                    f"request {request.id}: an image of {span.length} tokens is larger than the encoder cache "
                    f"({self._config.encoder_cache_tokens})"
                )
            if span.num_patches > self._config.max_patches:
                raise InvalidRequest(
                    f"request {request.id}: an image of {span.num_patches} patches is larger than max_patches "
                    f"({self._config.max_patches})"
                )
        self.scheduler.add(request)
        self.load += len(request.prompt_ids)

    def wake(self, now: float) -> float | None:
        """Do what is due at `now`. Returns when to wake it next, or None if it is idle."""
        if self._waits_for is not None:
            proceed, self._waits_for = self._waits_for, None
            proceed(now)
        again = self._advance(now)
        self.idle = again is None
        return again

    def _advance(self, now: float) -> float | None:
        plan = self.scheduler.plan(now)
        for event in self.scheduler.events:
            self._recorder.event(event, now)
        self.scheduler.events.clear()
        issued = now
        if plan is not None:
            sequences = self.scheduler.sequences_in(plan)
            self._recorder.planned(plan, sequences, now)
            issued += self._config.host_seconds
            shape = plan.shape
            pieces = () if self._on_step is None else tuple(pieces_of(plan, sequences))
            self._in_flight.append((plan, self._run(issued, self._cost.seconds(shape), shape, pieces)))

        encoded = False
        if self._call is not None:
            if self._call.ready <= issued and self.scheduler.may_encode(self._call.slice_seconds):
                encoded = self._slice(issued)
            elif not self._in_flight:
                self._waits_for = self._slice
                return self._call.ready
        elif spans := self.scheduler.next_batch():
            self._begin(spans, issued)
        if not self._in_flight:
            if self._call is None and not encoded:
                if self.scheduler.num_live:
                    raise RuntimeError(f"replica {self.index} has requests at {now} s, but nothing to do for them")
                return None
            return issued
        if plan is not None and len(self._in_flight) == 1:
            return issued
        self._waits_for = self._read
        return max(issued, self._in_flight[0][1])

    def _run(self, issued: float, seconds: float, shape: StepShape, pieces: tuple[Piece, ...]) -> float:
        """Run something on the device as soon as it is free. Returns when it ends."""
        if self._config.noise:
            seconds *= math.exp(self._config.noise * self._random.gauss(0.0, 1.0))
        start = max(issued, self._device_free)
        self._device_free = start + seconds
        self.busy_seconds += seconds
        if self._on_step is not None:
            self._on_step(
                Step(replica=self.index, start=start, seconds=seconds, kind=shape.kind, size=shape.size, pieces=pieces)
            )
        return self._device_free

    def _read(self, now: float) -> None:
        plan, _ = self._in_flight.popleft()
        accepted = self.scheduler.commit(plan, [0 if sample else None for sample in plan.samples], now)
        self._recorder.committed(plan, accepted, now)
        for one in accepted:
            sequence = one.sequence
            if sequence.finish_reason is not None:
                self._recorder.finished(sequence, now)
                if not self.scheduler.has(sequence.request.id):
                    self.load -= sequence.num_prompt

    # -- images -------------------------------------------------------------------------------------------------------

    def _begin(self, spans: tuple[MediaSpan, ...], now: float) -> None:
        """Start a call, as Engine._encode does. Embedding the patches is assumed to cost nothing."""
        self._recorder.encoding(spans, now)
        shape = self._shape_of(spans)
        self._call = _Call(
            spans=spans,
            shape=shape,
            pieces=() if self._on_step is None else tuple(self._pieces_of(spans)),
            slice_seconds=self._cost.seconds(shape) / self._config.encoder_slices,
            left=self._config.encoder_slices,
            ready=max(now, self._device_free),
        )

    def _slice(self, now: float) -> bool:
        """Run the next slice, and return whether it was the last. Steps planned from then on find the features, because
        the device runs everything in order."""
        call = self._call
        assert call is not None
        call.ready = self._run(now, call.slice_seconds, call.shape, call.pieces)
        call.left -= 1
        if call.left:
            return False
        self.scheduler.encoded(call.spans)
        self._recorder.encoded(call.spans, now)
        self._call = None
        return True

    def _shape_of(self, spans: tuple[MediaSpan, ...]) -> StepShape:
        """The shape of a call, as in Encoder.shape_of."""
        patches = [span.num_patches for span in spans]
        total = sum(patches)
        return StepShape(
            kind="encode",
            size=next(size for size in self._patch_buckets if size >= total),
            rows=len(patches),
            tokens=total,
            context=0,
            attended=sum(count * count for count in patches),
        )

    def _pieces_of(self, spans: tuple[MediaSpan, ...]) -> Iterator[Piece]:
        """The piece of each image, attributed to the first sequence that waits for it."""
        wanted = {span.key for span in spans}
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            for span in sequence.request.media[sequence.media_passed : sequence.media_held]:
                if span.key in wanted:
                    wanted.remove(span.key)
                    segment = bisect.bisect_right(sequence.request.segment_stops, span.start)
                    yield Piece(sequence.request.id, sequence.index, segment, span.start, span.num_patches)


def pieces_of(plan: StepPlan, sequences: Iterable[Sequence]) -> Iterator[Piece]:
    """The pieces of a plan's rows, by segment; output tokens get the number after the last segment."""
    for sequence, start, stop in zip(sequences, plan.starts.tolist(), plan.stops.tolist(), strict=True):
        stops = sequence.request.segment_stops or (sequence.num_prompt,)
        while start < stop:
            segment = bisect.bisect_right(stops, start)
            end = min(stops[segment], stop) if segment < len(stops) else stop
            yield Piece(sequence.request.id, sequence.index, segment, start, end - start)
            start = end
