"""The engine core: plans steps, runs them one ahead of their results, and returns tokens. It knows nothing of text."""

import collections
import contextlib
import dataclasses
import functools
import logging
import math
import time
from typing import Any

import numpy as np

from omni_jax import compat
from omni_jax.cost.model import Kind, StepShape
from omni_jax.cost.table import TableCost
from omni_jax.engine.blame import Blame
from omni_jax.engine.config import EngineConfig
from omni_jax.engine.loading import load
from omni_jax.engine.messages import SequenceOutput
from omni_jax.engine.stats import EngineStats
from omni_jax.engine.swapping import EngineSwap, open_tier
from omni_jax.memory.accounting import pool_usage
from omni_jax.memory.block_pool import BlockPool
from omni_jax.memory.compression import SINKS, WINDOW, default_ratio
from omni_jax.memory.encoder_cache import EncoderCache
from omni_jax.memory.recycling import make_recycling
from omni_jax.progress import StageReport
from omni_jax.requests import EngineError, MediaSpan, Request, Sequence
from omni_jax.requests.slo import SLO
from omni_jax.runtime.processes import Front
from omni_jax.runtime.runner import StepResult
from omni_jax.scheduling.blocks import Blocks, Compression
from omni_jax.scheduling.discipline import FirstCome, SLOFirst
from omni_jax.scheduling.features import Features
from omni_jax.scheduling.limits import SchedulerConfig
from omni_jax.scheduling.plan import StepPlan
from omni_jax.scheduling.scheduler import Accepted, Scheduler
from omni_jax.segments.deadlines import with_deadlines
from omni_jax.telemetry.debug import describe
from omni_jax.telemetry.recorder import Recorder, log_event

logger = logging.getLogger(__name__)

SWAP_POLL_SECONDS = 1e-3  # between checks of the host tier when there is nothing else to do
HANG_SECONDS = 30.0  # after which a step may count as hanging, unless steps of its kind and size take long:
HANG_FACTOR = 20.0  # times the longest of them
FIRST_STEP_SECONDS = 300.0  # for the first of them, and for images
PACK_PATCHES = 1024  # maximum patches of several images that share a call of the vision tower


@dataclasses.dataclass(kw_only=True)
class _EncoderCall:
    """Time of a call of the vision tower, summed over its slices.

    Attributes:
        batch: images of the call.
        shape: shape of the call.
        seconds: time of the slices so far. A slice with a step after it counts the time by which that step exceeded its
            prediction. NaN if unknown.
        unread: number of steps in flight that were dispatched after a slice of the call.
        done: whether the last slice was dispatched.
    """

    batch: tuple[MediaSpan, ...]
    shape: StepShape
    seconds: float = 0.0
    unread: int = 0
    done: bool = False


class EngineCore:
    """Runs requests: tokens in, tokens out. Not thread-safe, except where a method says otherwise.

    Requests must have passed InputProcessor.check, and have a seed and an arrival.

    Attributes:
        loaded: What was loaded: the model's limits, the tokenizer and the vision settings.
        info: The served model and the engine's limits.
        cost: Step times of this machine, learnt from the steps it runs.
        recorder: Records of requests and segments.
        scheduler, pool, features: The scheduler, its block pool, and its encoder cache if the model reads images.
        runner: Runs the steps.
    """

    def __init__(
        self, config: EngineConfig, progress: StageReport | None = None, *, replica: int = 0, isolated: bool = False
    ):
        """Load the model on the devices of replica number `replica`, see `load`.

        Raises:
            ValueError: This process is a follower.
            whatever `load` raises.
        """
        if config.process_id:
            raise ValueError(
                f"process {config.process_id} is a follower, and only process 0 can have an engine: call "
                "omni_jax.engine.follower.follow in this process, or start `omni-jax serve` with the same flags"
            )
        loaded = load(config, progress, replica, **({"isolated": True} if isolated else {}))
        self.config, self.loaded, self.info = config, loaded, loaded.info
        self._range = "; float16 ends at 65504: try --dtype bfloat16" if self.info.dtype == "float16" else ""
        self.runner, self._encoder, self._channel = loaded.runner, loaded.runner.encoder, loaded.channel
        self.features = None
        if self._encoder is not None:
            self.features = Features(
                EncoderCache(self.info.encoder_cache_tokens),
                max_patches=self._encoder.config.buckets[-1],
                pack_patches=PACK_PATCHES,
            )
        self.pool = BlockPool(
            self.info.num_blocks, self.info.block_size, recycling=make_recycling(config.recycling_policy)
        )
        buckets = loaded.runner_config.buckets
        sizes: dict[Kind, tuple[int, ...]] = {"mixed": buckets.mixed, "decode": buckets.decode}
        if self._encoder is not None:
            sizes["encode"] = self._encoder.config.buckets
        self.cost = TableCost(sizes, overhead=buckets.overhead)
        self.recorder = Recorder(segments=True, log_segments=config.segment_aware)
        self._tier = open_tier(config, self.info, self.runner.block_bytes, replica)
        self._blocks = Blocks(
            self.pool,
            prefix_caching=config.enable_prefix_caching,
            swap=None
            if self._tier is None
            else EngineSwap(self.runner, self._tier, self.cost, mode=config.preemption_mode),
            compression=self._compression() if config.enable_adaptive_compression else None,
        )
        self._slo = SLO(ttft_ms=config.ttft_ms, tpot_ms=config.tpot_ms, e2e_ms=config.e2e_ms)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=self.info.max_num_seqs,
                max_num_batched_tokens=self.info.max_num_batched_tokens,
                max_model_len=self.info.max_model_len,
                buckets=buckets,
                eos_token_ids=loaded.eos_token_ids,
                chunked_prefill=config.enable_chunked_prefill,
            ),
            self.pool,
            self.features,
            discipline=SLOFirst(aging_seconds=config.aging_seconds)
            if config.scheduling_policy == "slo"
            else FirstCome(),
            cost=self.cost,
            blocks=self._blocks,
        )
        self._prompt_logprobs: dict[str, list[np.ndarray]] = {}  # rows of each step, by id of a request
        self._in_flight: collections.deque[StepResult] = collections.deque()
        # For each step in flight, the encoder call of which a slice was dispatched just before it:
        self._slices_before: collections.deque[_EncoderCall | None] = collections.deque()
        self._new_slice: _EncoderCall | None = None  # the call of a slice dispatched since the last step
        self._encoder_call: _EncoderCall | None = None  # the call in progress
        self._blame = Blame(self.info.max_num_seqs)
        self._at_work: StepPlan | tuple[MediaSpan, ...] = ()  # what a failure is about
        self._stats = EngineStats()
        self._gaps: collections.deque[float] = collections.deque(maxlen=1024)
        self._seconds: collections.deque[float] = collections.deque(maxlen=1024)
        self._longest: dict[tuple[bool, int], float] = {}  # seconds of a step, by kind (whether it decodes) and size
        self._kind_and_size = (False, 0)  # of the step that is read or dispatched
        self._last_ready = time.monotonic()

    # -- requests -----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: The id is in use, or the prompt does not fit the context.
        """
        self.scheduler.add(self._with_deadlines(request))
        if request.params.prompt_logprobs is not None:
            self._prompt_logprobs[request.id] = []
        before = -1
        for span in request.media:
            self._stats.mm_items[span.modality] += span.start != before  # the steps of a video follow each other
            before = span.stop

    def _with_deadlines(self, request: Request) -> Request:
        """The request with the engine's objectives where it has none, and with the deadlines of its segments."""
        default = self._slo
        slo = request.slo or default
        slo = SLO(
            ttft_ms=slo.ttft_ms if slo.ttft_ms is not None else default.ttft_ms,
            tpot_ms=slo.tpot_ms if slo.tpot_ms is not None else default.tpot_ms,
            e2e_ms=slo.e2e_ms if slo.e2e_ms is not None else default.e2e_ms,
            priority=slo.priority,
        )
        segments = with_deadlines(request.segments, slo, request.arrival, self.cost, media=request.media)
        return dataclasses.replace(request, slo=slo, segments=segments)

    def _compression(self) -> Compression:
        """The scheduler's settings for compression."""

        def compact(source: list[int], rows: int, keep: int, target: list[int]) -> None:
            self.runner.compact(source, rows, keep, target, sinks=SINKS, window=WINDOW)

        ratio = functools.partial(default_ratio, cap=self.config.kv_compress_ratio)
        return Compression(ratio=ratio, compact=compact, min_rows=SINKS + WINDOW)

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache. Running requests continue."""
        self.scheduler.clear_prefix_cache()

    def close(self) -> None:
        """End the host tier's threads, remove its files, and stop followers. The engine cannot be used afterwards."""
        if isinstance(self._channel, Front):
            self._channel.close()
        if self._tier is not None:
            self._tier.close()

    def abort(self, request_id: str) -> list[SequenceOutput]:
        """Abort a request before the next step, and return its last outputs. Ignores unknown ids."""
        return [self._ended(sequence) for sequence in self.scheduler.abort(request_id)]

    def end(self, request_id: str, index: int, stop: str, kept: int) -> None:
        """End a continuation whose text has come to a stop string after `kept` tokens. Does nothing if it has ended."""
        for sequence in self.scheduler.sequences(request_id):
            if sequence.index == index and sequence.finish_reason is None:
                del sequence.output[kept:]  # computed while the text was read
                self.scheduler.finish(sequence, "stop", stop)
                self._ended(sequence)

    @property
    def has_work(self) -> bool:
        return self.scheduler.num_live > 0 or bool(self._in_flight)

    @property
    def num_live(self) -> int:
        """Number of requests that have not ended."""
        return self.scheduler.num_live

    def has(self, request_id: str) -> bool:
        """Whether a request is live."""
        return self.scheduler.has(request_id)

    @property
    def patience(self) -> float:
        """Seconds after which the step in progress counts as hanging: `hang_seconds`, or by default many times the
        longest step of this kind and size. Thread-safe."""
        if self.config.hang_seconds is not None:
            return self.config.hang_seconds
        if self._kind_and_size not in self._longest or (self._encoder is not None and self._encoder.busy):
            return FIRST_STEP_SECONDS
        return max(HANG_SECONDS, HANG_FACTOR * self._longest[self._kind_and_size])

    @property
    def num_waiting(self) -> int:
        """Number of requests whose sequences all wait."""
        return self.scheduler.num_live - self.scheduler.num_running

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self) -> list[SequenceOutput]:
        """Dispatch the next step, then read the previous one and return its outputs.

        After a step that raised, the others' requests are computed again, and the request that caused it ends with an
        error (blame.py).

        Raises:
            EngineError: steps fail whatever they compute. The engine cannot continue; end its requests with `fail`.
        """
        compiled = compat.compilations_here()  # by other engines and by the user's own code before
        with compat.no_tracing() if self.config.forbid_tracing else contextlib.nullcontext():
            try:
                deltas = self._advance()
            except Exception as error:  # the engine's outermost loop: requests must survive a failed step
                logger.exception("step failed")
                found = self._blame.failed(self._reached(self._at_work))
                if self._blame.hopeless:
                    raise EngineError(f"steps keep failing, the last with {type(error).__name__}") from error
                self._recover()
                return [] if found is None else self._fail_request(found, error)
            finally:
                self._stats.compiles_after_warmup += compat.compilations_here() - compiled
        return deltas

    def _reached(self, work: StepPlan | tuple[MediaSpan, ...]) -> dict[str, int]:
        """The requests of a step, or those that wait for images, the oldest first, with the number of tokens of each
        that are computed when the step or the images no longer matter."""
        if isinstance(work, StepPlan):
            rows = sorted(zip(work.orders, work.request_ids, work.stops.tolist(), strict=True))
            return {request_id: stop for _, request_id, stop in rows}
        keys = {span.key for span in work}
        live = (*self.scheduler.running, *self.scheduler.waiting)
        return {
            sequence.request.id: span.stop
            for sequence in sorted(live, key=lambda sequence: sequence.order)
            for span in sequence.request.media
            if span.key in keys
        }

    def _fail_request(self, request_id: str, error: Exception) -> list[SequenceOutput]:
        """End a request that makes steps raise, and return its last outputs."""
        logger.error("request %s made steps fail again and again; it ends with an error, others go on", request_id)
        message = f"computing this request failed: {type(error).__name__}"
        ended = [sequence for sequence in self.scheduler.sequences(request_id) if sequence.finish_reason is None]
        for sequence in ended:
            self.scheduler.finish(sequence, "error")
        return [self._ended(sequence, error=message) for sequence in ended]

    def _advance(self) -> list[SequenceOutput]:
        now = time.monotonic()
        self._at_work = ()
        self.scheduler.held = self._blame.held
        plan = self.scheduler.plan(now)
        self._record_events(now)
        if plan is not None:
            sequences = self.scheduler.sequences_in(plan)
            self.recorder.planned(plan, sequences, now)
            if self.config.debug_print_batch:
                logger.info("%s", describe(plan, sequences))
            late = bool(self._in_flight) and self._in_flight[-1].is_ready()
            self._at_work = plan
            self._kind_and_size = plan.decode, plan.size
            result = self.runner.dispatch(plan)
            if self._in_flight:
                # If the previous step has finished, the device was idle, at most since the last result was read.
                self._gaps.append(result.dispatched - self._last_ready if late else 0.0)
            self._in_flight.append(result)
            self._slices_before.append(self._new_slice)
            if self._new_slice is not None:
                self._new_slice.unread += 1
                self._new_slice = None
            self._stats.steps += 1
            self._stats.real_tokens += plan.num_tokens
            self._stats.padded_tokens += plan.size - plan.num_tokens
        self._encode(wait=not self._in_flight)
        if plan is None and not self._in_flight and self._new_slice is None:
            self._blame.release()  # what may run waits for what is held back
        if plan is None and not self._in_flight and self._blocks.swapped:
            time.sleep(SWAP_POLL_SECONDS)  # all remaining work waits for the host tier
        if not self._in_flight or (plan is not None and len(self._in_flight) == 1):
            return []
        return self._read(self._in_flight.popleft())

    def _record_events(self, now: float) -> None:
        """Record and log the pauses, resumptions and preemptions of the plan just made."""
        events, self.scheduler.events = self.scheduler.events, []
        for event in events:
            self.recorder.event(event, now)
            log_event(event)

    def _encode(self, *, wait: bool) -> None:
        """Dispatch the next slice of the vision tower if the last one has finished and decoding sequences keep their
        objectives. With `wait`, for when no step is in flight, wait for the last slice and dispatch regardless."""
        encoder = self._encoder
        if encoder is None or self.features is None:
            return
        if encoder.busy:
            call = self._encoder_call
            assert call is not None
            self._at_work = call.batch
            seconds = self.cost.seconds(call.shape) / encoder.num_slices
            if not (wait or (encoder.is_ready and self.scheduler.may_encode(seconds))):
                return
            done = encoder.advance()
            if self._new_slice is not None:  # no step was dispatched after the last slice
                call.seconds += encoder.slice_seconds[-1] if wait else math.nan
            if done:
                self.scheduler.encoded(done)
                self.recorder.encoded(done, time.monotonic())
                call.done = True
                self._learn_from(call)
        elif batch := self.scheduler.next_batch():
            self._at_work = batch
            self.recorder.encoding(batch, time.monotonic())
            encoder.begin(batch, [self.features.cache.rows(span.key) for span in batch])
            self._encoder_call = _EncoderCall(batch=batch, shape=encoder.shape_of(batch))
        else:
            return
        self._new_slice = self._encoder_call

    def _learn_from(self, call: _EncoderCall) -> None:
        """Learn the time of an encoder call, once the times of all its slices are known."""
        if call.done and not call.unread and math.isfinite(call.seconds):
            self.cost.observe(call.shape, call.seconds)
            call.seconds = math.nan  # do not learn it again

    def _read(self, result: StepResult) -> list[SequenceOutput]:
        self._at_work = result.plan
        sampled, scored = result.read()
        ready = time.monotonic()
        seconds = ready - max(self._last_ready, result.dispatched)
        self._seconds.append(seconds)
        self._kind_and_size = key = result.plan.decode, result.plan.size
        self._longest[key] = max(self._longest.get(key, 0.0), seconds)
        if call := self._slices_before.popleft():  # the time includes a slice of the vision tower
            call.seconds += max(seconds - self.cost.seconds(result.plan.shape), 0.0)
            call.unread -= 1
            self._learn_from(call)
        else:
            self.cost.observe(result.plan.shape, seconds)
        self._last_ready = ready
        self._blame.succeeded(self._reached(result.plan) if self._blame.suspects else {})

        plan, samples = result.plan, result.plan.samples.tolist()
        found, ids = iter(()), iter(())
        if sampled is not None:
            found, ids = iter(sampled), iter(sampled[:, 0].tolist())
        by_row = [next(found) if sample else None for sample in samples]
        committed = self.scheduler.commit(plan, [next(ids) if sample else None for sample in samples], ready)
        self.recorder.committed(plan, committed, ready)
        ends, scores = np.cumsum(plan.counts), {score.row for score in plan.scores}
        outputs = []
        for accepted in committed:
            row = accepted.row
            if row in scores and scored is not None:
                part = scored[ends[row] - plan.counts[row] : ends[row]]
                self._collect_prompt_logprobs(accepted.sequence, int(plan.starts[row]), part)
            output = self._output(accepted, by_row[row])
            if output is not None:
                outputs.append(output)
        return outputs

    def _recover(self) -> None:
        """After a step that raised, which loses the donated pool: make new arrays and recompute running sequences."""
        self._in_flight.clear()
        self._slices_before.clear()
        self._new_slice = None
        self.scheduler.reset()
        self.runner.reset()

    def fail(self, message: str) -> list[SequenceOutput]:
        """End every live request with an error, and return the last outputs."""
        self._in_flight.clear()
        self._slices_before.clear()
        outputs = []
        for sequence in self.scheduler.live():
            self.scheduler.finish(sequence, "error")
            outputs.append(self._ended(sequence, error=message))
        return outputs

    # -- outputs ------------------------------------------------------------------------------------------------------

    def _output(self, accepted: Accepted, found: np.ndarray | None) -> SequenceOutput | None:
        sequence, token = accepted.sequence, accepted.token
        if sequence.finish_reason == "error":
            self._stats.corrupted_requests += 1
            return self._ended(sequence, error=f"the model produced NaN logits{self._range}")
        if token is None:
            if sequence.finish_reason is None:
                return None
            return self._ended(sequence, prompt_logprobs=self._prompt_done(sequence))  # it had only to be scored
        self._stats.generation_tokens += 1
        logprob = None if sequence.request.params.logprobs is None or found is None else found.tobytes()
        prompt_logprobs = self._prompt_done(sequence) if sequence.num_output == 1 else None
        if sequence.finish_reason is not None:
            return self._ended(sequence, token=token, logprob=logprob, prompt_logprobs=prompt_logprobs)
        return SequenceOutput(sequence.request.id, sequence.index, token, sequence.cached, logprob, prompt_logprobs)

    def _prompt_done(self, sequence: Sequence) -> bytes | None:
        """Note that a prompt is computed, and return its logprobs, if they are wanted."""
        if sequence.index:
            return None
        self._stats.prompt_tokens += sequence.num_prompt
        found = self._prompt_logprobs.pop(sequence.request.id, None)
        return None if found is None else b"".join(rows.tobytes() for rows in found)

    def _ended(
        self,
        sequence: Sequence,
        *,
        token: int | None = None,
        logprob: bytes | None = None,
        prompt_logprobs: bytes | None = None,
        error: str | None = None,
    ) -> SequenceOutput:
        """The last output of a sequence."""
        self.recorder.finished(sequence, time.monotonic())
        assert sequence.finish_reason is not None
        self._stats.requests_finished[sequence.finish_reason] += 1
        stop = sequence.stop_reason
        output = SequenceOutput(
            sequence.request.id,
            sequence.index,
            token,
            sequence.cached,
            logprob,
            prompt_logprobs,
            sequence.finish_reason,
            stop if isinstance(stop, int) else None,
            error,
        )
        if not self.scheduler.has(sequence.request.id):
            self._prompt_logprobs.pop(sequence.request.id, None)
            self._blame.forget(sequence.request.id)
        return output

    def _collect_prompt_logprobs(self, sequence: Sequence, first: int, scored: np.ndarray) -> None:
        """Collect the logprobs of prompt tokens first + 1 and on, except those collected before a preemption."""
        request = sequence.request
        taken = self._prompt_logprobs[request.id]
        top = request.params.prompt_logprobs
        assert top is not None
        if (scored[:, 0] < 0).any():
            self.scheduler.finish(sequence, "error")
            self.scheduler.clear_prefix_cache()  # its cached blocks may hold NaN, even if it had already ended
            sequence.finish_reason = "error"
            return
        start, stop = sum(map(len, taken)), min(first + len(scored), sequence.num_prompt - 1)
        if start < stop:
            ids = 2 + (scored.shape[1] - 2) // 2
            columns = [0, 1, *range(2, 2 + top), *range(ids, ids + top)]
            taken.append(scored[start - first : stop - first, columns])

    def stats(self) -> EngineStats:
        """A snapshot of the statistics. Its cost does not grow with requests or blocks."""
        encoder: dict[str, Any] = {}
        if self._encoder is not None and self.features is not None:
            encoder = {
                "encoder_calls": self._encoder.calls,
                "encoder_patches": self._encoder.real_patches,
                "encoder_padded_patches": self._encoder.padded_patches,
                "encoder_slice_seconds": tuple(self._encoder.slice_seconds),
                "encoder_cache_queries": self.features.cache.queries,
                "encoder_cache_hits": self.features.cache.hits,
                "encoder_cache_usage": self.features.cache.usage,
                "mm_items": dict(self._stats.mm_items),
            }
        return dataclasses.replace(
            self._stats,
            **encoder,
            num_requests_running=self.scheduler.num_running,
            num_requests_waiting=self.num_waiting,
            kv_cache_usage=self.pool.usage,
            num_preemptions=self.scheduler.num_preemptions,
            prefix_queries=dict(self._blocks.queries),
            prefix_hits=dict(self._blocks.hits),
            pool=pool_usage(self.pool, self._blocks.slots),
            swap=None if self._tier is None else self._tier.stats(),
            blocks_swapped=self._blocks.swapped,
            blocks_swapped_out=self._blocks.swapped_out,
            blocks_swapped_in=self._blocks.swapped_in,
            tokens_dropped=self._blocks.dropped,
            requests_finished=dict(self._stats.requests_finished),
            host_gap_seconds=tuple(self._gaps),
            step_seconds=tuple(self._seconds),
        )
