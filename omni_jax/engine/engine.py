"""The engine loop: it dispatches each step before it reads the results of the previous one."""

import collections
import contextlib
import dataclasses
import logging
import math
import random
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from omni_jax import compat
from omni_jax.cost.model import Kind, StepShape
from omni_jax.cost.table import TableCost
from omni_jax.engine.blame import Blame
from omni_jax.engine.config import EngineConfig
from omni_jax.engine.detokenizer import Detokenizer
from omni_jax.engine.loading import load
from omni_jax.engine.stats import EngineStats
from omni_jax.engine.swapping import EngineSwap, open_tier
from omni_jax.inputs.prompt import VisionInputs
from omni_jax.memory.accounting import pool_usage
from omni_jax.memory.block_pool import BlockPool
from omni_jax.memory.compression import SINKS, WINDOW, BadController, Schedule
from omni_jax.memory.encoder_cache import EncoderCache
from omni_jax.memory.recycling import make_recycling
from omni_jax.progress import StageReport
from omni_jax.requests import Delta, EngineError, InvalidRequest, MediaSpan, Request, Sequence, TokenLogprob
from omni_jax.requests.outputs import FinishReason
from omni_jax.requests.segment import Segment
from omni_jax.requests.slo import SLO
from omni_jax.runtime.debug import describe
from omni_jax.runtime.processes import Front
from omni_jax.runtime.runner import StepResult
from omni_jax.scheduling.blocks import Blocks, Compression
from omni_jax.scheduling.discipline import FirstCome, SLOFirst
from omni_jax.scheduling.features import Features
from omni_jax.scheduling.limits import SchedulerConfig, output_room
from omni_jax.scheduling.plan import Accepted, StepPlan
from omni_jax.scheduling.scheduler import Scheduler
from omni_jax.segments.deadlines import with_deadlines
from omni_jax.segments.policies import make_policy
from omni_jax.segments.prompt_view import prompt_view
from omni_jax.telemetry.recorder import Recorder, log_event

logger = logging.getLogger(__name__)

SWAP_POLL_SECONDS = 1e-3  # between checks of the host tier when there is nothing else to do
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


class Engine:
    """Runs requests. Not thread-safe, except where a method says otherwise.

    Attributes:
        info: the served model and the engine's limits.
        tokenizer: the model's tokenizer.
        vision: settings that turn images into patches; None for a text-only model.
        cost: step times of this machine, learnt from the steps it runs.
        recorder: records of requests and segments.
    """

    def __init__(self, config: EngineConfig, progress: StageReport | None = None, *, replica: int = 0):
        """Load the model on the devices of replica number `replica`.

        Raises:
            ValueError: this process is a follower.
            whatever `load` raises.
        """
        if config.process_id:
            raise ValueError(
                f"process {config.process_id} is a follower, and only process 0 can have an engine: call "
                "omni_jax.engine.follower.follow in this process, or start `omni-jax serve` with the same flags"
            )
        loaded = load(config, progress, replica)
        self.config, self.info, self.tokenizer = config, loaded.info, loaded.tokenizer
        self.vision = loaded.vision
        self._range = "; float16 ends at 65504: try --dtype bfloat16" if self.info.dtype == "float16" else ""
        self._runner, self._encoder, self._channel = loaded.runner, loaded.runner.encoder, loaded.channel
        self._features = None
        if self._encoder is not None:
            self._features = Features(
                EncoderCache(self.info.encoder_cache_tokens),
                max_patches=self._encoder.config.buckets[-1],
                pack_patches=PACK_PATCHES,
            )
        self._pool = BlockPool(
            self.info.num_blocks, self.info.block_size, recycling=make_recycling(config.recycling_policy)
        )
        buckets = loaded.runner_config.buckets
        sizes: dict[Kind, tuple[int, ...]] = {"mixed": buckets.mixed, "decode": buckets.decode}
        if self._encoder is not None:
            sizes["encode"] = self._encoder.config.buckets
        self.cost = TableCost(sizes, overhead=buckets.overhead)
        self.recorder = Recorder(segments=True, log_segments=config.segment_aware)
        self._schedule = (
            Schedule(config.kv_compress_controller, config.kv_compress_ratio)
            if config.enable_adaptive_compression
            else None
        )
        self._tier = open_tier(config, self.info, self._runner.block_bytes, replica)
        self._blocks = Blocks(
            self._pool,
            prefix_caching=config.enable_prefix_caching,
            swap=None
            if self._tier is None
            else EngineSwap(self._runner, self._tier, self.cost, mode=config.preemption_mode),
            compression=None if self._schedule is None else self._compression(),
        )
        self._policy = make_policy(config.segment_policy, allow_custom=True)
        self._slo = SLO(ttft_ms=config.ttft_ms, tpot_ms=config.tpot_ms, e2e_ms=config.e2e_ms)
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=self.info.max_num_seqs,
                max_num_batched_tokens=self.info.max_num_batched_tokens,
                max_model_len=self.info.max_model_len,
                buckets=buckets,
                eos_token_ids=loaded.eos_token_ids,
                chunked_prefill=config.enable_chunked_prefill,
            ),
            self._pool,
            self._features,
            discipline=SLOFirst(aging_seconds=config.aging_seconds)
            if config.scheduling_policy == "slo"
            else FirstCome(),
            cost=self.cost,
            blocks=self._blocks,
        )
        self._random = random.Random(config.seed)
        self._detokenizers: dict[Sequence, Detokenizer] = {}
        self._prompt_logprobs: dict[str, list[TokenLogprob | None]] = {}
        self._prefilled: set[str] = set()
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
        self._last_ready = time.monotonic()

    # -- requests -----------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise InvalidRequest if the request can never run. Changes nothing. Thread-safe."""
        request.params.check_vocabulary(self.info.vocab_size)
        room = output_room(request, self.info.max_model_len)
        if self._schedule is not None:
            try:
                self._schedule.check(room)
            except BadController as error:
                raise InvalidRequest(str(error)) from error
        if max(request.prompt_ids) >= self.info.vocab_size or min(request.prompt_ids) < 0:
            raise InvalidRequest(
                f"the prompt has token ids outside the vocabulary (0 to {self.info.vocab_size - 1})", param="prompt"
            )
        if self._features is not None and self.vision is not None:
            check_media(request, self.vision, self._features)
        elif request.media:
            raise InvalidRequest("this model reads text only, but the request has images", param="messages")

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: the request can never run, or its id is in use.
        """
        self.check(request)
        if request.params.seed is None:
            # Each request without a seed gets one, so that requests differ and preemption does not change samples.
            params = dataclasses.replace(request.params, seed=self._random.getrandbits(63))
            request = dataclasses.replace(request, params=params)
        if not request.arrival:
            request = dataclasses.replace(request, arrival=time.monotonic())
        request = self._with_deadlines(request)
        # They are made first: a sequence that is queued without one could never end.
        made = [Detokenizer(self.tokenizer, request.params, request.prompt_ids) for _ in range(request.params.n)]
        self._detokenizers.update(zip(self._scheduler.add(request), made, strict=True))
        if request.params.prompt_logprobs is not None:
            self._prompt_logprobs[request.id] = [None]
        before = -1
        for span in request.media:
            self._stats.mm_items[span.modality] += span.start != before  # the steps of a video follow each other
            before = span.stop

    def cut(
        self, ids: tuple[int, ...], media: tuple[MediaSpan, ...] = (), policy: str | Mapping[str, Any] | None = None
    ) -> tuple[Segment, ...]:
        """Cut a prompt into segments by the engine's policy, or by `policy`; see segments.make_policy. Thread-safe.

        Raises:
            ValueError: the policy is unknown.
            InvalidRequest: a custom policy does not cover the prompt.
        """
        chosen = self._policy if policy is None else make_policy(policy)
        return chosen(prompt_view(ids, media, self.tokenizer))

    def _with_deadlines(self, request: Request) -> Request:
        """The request with the engine's objectives where it has none, and with segments and their deadlines."""
        default = self._slo
        slo = request.slo or default
        slo = SLO(
            ttft_ms=slo.ttft_ms if slo.ttft_ms is not None else default.ttft_ms,
            tpot_ms=slo.tpot_ms if slo.tpot_ms is not None else default.tpot_ms,
            e2e_ms=slo.e2e_ms if slo.e2e_ms is not None else default.e2e_ms,
            priority=slo.priority,
        )
        segments = request.segments or self.cut(request.prompt_ids, request.media)
        segments = with_deadlines(segments, slo, request.arrival, self.cost, media=request.media)
        return dataclasses.replace(request, slo=slo, segments=segments)

    def _compression(self) -> Compression:
        """The scheduler's settings for compression."""
        schedule = self._schedule
        assert schedule is not None

        def compact(source: list[int], rows: int, keep: int, target: list[int]) -> None:
            self._runner.compact(source, rows, keep, target, sinks=SINKS, window=WINDOW)

        return Compression(ratio=schedule.ratio, compact=compact, min_rows=SINKS + WINDOW)

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache. Running requests continue."""
        self._scheduler.clear_prefix_cache()

    def close(self) -> None:
        """End the host tier's threads, remove its files, and stop followers. The engine cannot be used afterwards."""
        if isinstance(self._channel, Front):
            self._channel.close()
        if self._tier is not None:
            self._tier.close()

    def abort(self, request_id: str) -> list[Delta]:
        """Abort a request before the next step, and return its last deltas. Ignores unknown ids."""
        return [self._ended(sequence) for sequence in self._scheduler.abort(request_id)]

    @property
    def has_work(self) -> bool:
        return self._scheduler.num_live > 0 or bool(self._in_flight)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """Dispatch the next step, then read the previous one and return its deltas.

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
            rows = sorted(work.rows, key=lambda row: row.sequence.order)
            return {row.sequence.request.id: row.start + row.count for row in rows}
        keys = {span.key for span in work}
        live = (*self._scheduler.running, *self._scheduler.waiting)
        return {
            sequence.request.id: span.stop
            for sequence in sorted(live, key=lambda sequence: sequence.order)
            for span in sequence.request.media
            if span.key in keys
        }

    def _fail_request(self, request_id: str, error: Exception) -> list[Delta]:
        """End a request that makes steps raise, and return its last deltas."""
        logger.error("request %s made steps fail again and again; it ends with an error, others go on", request_id)
        message = f"computing this request failed: {type(error).__name__}"
        ended = [sequence for sequence in self._scheduler.sequences(request_id) if sequence.finish_reason is None]
        for sequence in ended:
            self._scheduler.finish(sequence, "error")
        return [self._ended(sequence, error=message) for sequence in ended]

    def _advance(self) -> list[Delta]:
        now = time.monotonic()
        self._at_work = ()
        self._scheduler.held = self._blame.held
        plan = self._scheduler.plan(now)
        self._record_events(now)
        if plan is not None:
            self.recorder.planned(plan, now)
            if self.config.debug_print_batch:
                logger.info("%s", describe(plan))
            late = bool(self._in_flight) and self._in_flight[-1].is_ready()
            self._at_work = plan
            result = self._runner.dispatch(plan)
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
        events, self._scheduler.events = self._scheduler.events, []
        for event in events:
            self.recorder.event(event, now)
            log_event(event)

    def _encode(self, *, wait: bool) -> None:
        """Dispatch the next slice of the vision tower if the last one has finished and decoding sequences keep their
        objectives. With `wait`, for when no step is in flight, wait for the last slice and dispatch regardless."""
        encoder = self._encoder
        if encoder is None or self._features is None:
            return
        if encoder.busy:
            call = self._encoder_call
            assert call is not None
            self._at_work = call.batch
            seconds = self.cost.seconds(call.shape) / encoder.num_slices
            if not (wait or (encoder.is_ready and self._scheduler.may_encode(seconds))):
                return
            done = encoder.advance()
            if self._new_slice is not None:  # no step was dispatched after the last slice
                call.seconds += encoder.slice_seconds[-1] if wait else math.nan
            if done:
                self._scheduler.encoded(done)
                self.recorder.encoded(done, time.monotonic())
                call.done = True
                self._learn_from(call)
        elif batch := self._scheduler.next_batch():
            self._at_work = batch
            self.recorder.encoding(batch, time.monotonic())
            encoder.begin(batch, [self._features.cache.rows(span.key) for span in batch])
            self._encoder_call = _EncoderCall(batch=batch, shape=encoder.shape_of(batch))
        else:
            return
        self._new_slice = self._encoder_call

    def _learn_from(self, call: _EncoderCall) -> None:
        """Learn the time of an encoder call, once the times of all its slices are known."""
        if call.done and not call.unread and math.isfinite(call.seconds):
            self.cost.observe(call.shape, call.seconds)
            call.seconds = math.nan  # do not learn it again

    def _read(self, result: StepResult) -> list[Delta]:
        self._at_work = result.plan
        sampled, scored = result.read()
        ready = time.monotonic()
        seconds = ready - max(self._last_ready, result.dispatched)
        self._seconds.append(seconds)
        if call := self._slices_before.popleft():  # the time includes a slice of the vision tower
            call.seconds += max(seconds - self.cost.seconds(result.plan.shape), 0.0)
            call.unread -= 1
            self._learn_from(call)
        else:
            self.cost.observe(result.plan.shape, seconds)
        self._last_ready = ready
        self._blame.succeeded(self._reached(result.plan) if self._blame.suspects else {})

        rows = iter(sampled if sampled is not None else ())
        by_row = [next(rows) if row.sample else None for row in result.plan.rows]
        tokens = [None if found is None else int(found[0]) for found in by_row]
        offsets = np.cumsum([0] + [row.count for row in result.plan.rows])
        deltas = []
        committed = self._scheduler.commit(result.plan, tokens, ready)
        self.recorder.committed(result.plan, ready)
        for accepted in committed:
            row = accepted.row
            if row.score and scored is not None:
                at = int(offsets[accepted.index])
                self._collect_prompt_logprobs(accepted, scored[at : at + row.count])
            delta = self._delta(accepted, by_row[accepted.index])
            if delta is not None:
                deltas.append(delta)
        return deltas

    def _recover(self) -> None:
        """After a step that raised, which loses the donated pool: make new arrays and recompute running sequences."""
        self._in_flight.clear()
        self._slices_before.clear()
        self._new_slice = None
        self._scheduler.reset()
        self._runner.reset()

    def fail(self, message: str) -> list[Delta]:
        """End every live request with an error, and return the last deltas."""
        deltas = []
        self._in_flight.clear()
        self._slices_before.clear()
        for sequence in list(self._detokenizers):
            self._scheduler.finish(sequence, "error")
            deltas.append(self._ended(sequence, error=message))
        return deltas

    # -- deltas -------------------------------------------------------------------------------------------------------

    def _delta(self, accepted: Accepted, found: np.ndarray | None) -> Delta | None:
        sequence, token = accepted.row.sequence, accepted.token
        params = sequence.request.params
        if sequence.finish_reason == "error":
            self._stats.corrupted_requests += 1
            return self._ended(sequence, error=f"the model produced NaN logits{self._range}")
        if token is None:
            return self._ended(sequence) if sequence.finish_reason is not None else None
        self._stats.generation_tokens += 1
        logprob = None
        if params.logprobs is not None and found is not None:
            logprob = token_logprob(found, params.logprobs)
        if sequence.finish_reason == "stop":  # by the token, which is not part of the text
            return self._ended(sequence, token_ids=(token,), last_logprob=logprob)
        piece = self._detokenizers[sequence].push(token, logprob)
        if piece.stopped is not None:
            self._end(sequence, "stop", piece.stopped)
        if sequence.finish_reason is not None:
            return self._ended(sequence, text=piece.text, token_ids=(token,), logprobs=piece.logprobs)
        return Delta(
            request_id=sequence.request.id,
            index=sequence.index,
            text=piece.text,
            token_ids=(token,),
            logprobs=piece.logprobs,
            prompt_logprobs=self._take_prompt_logprobs(sequence),
            cached_tokens=sequence.cached,
        )

    def _end(self, sequence: Sequence, reason: FinishReason, stop_reason: str | None = None) -> None:
        """End a sequence for a reason that only the engine detects. Overrides an end by length in the same step."""
        self._scheduler.finish(sequence, reason, stop_reason)
        if reason == "error":
            self._scheduler.clear_prefix_cache()  # its cached blocks may hold NaN, even if it had already ended
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason

    def _ended(self, sequence: Sequence, *, text="", token_ids=(), logprobs=(), last_logprob=None, error=None) -> Delta:
        """The last delta of a sequence, with the text that its detokenizer held back.

        `last_logprob` is that of a token that ended the sequence and is not part of the text.
        """
        self.recorder.finished(sequence, time.monotonic())
        rest = self._detokenizers.pop(sequence).finish(last_logprob)
        assert sequence.finish_reason is not None
        self._stats.requests_finished[sequence.finish_reason] += 1
        delta = Delta(
            request_id=sequence.request.id,
            index=sequence.index,
            text=text + rest.text,
            token_ids=token_ids,
            logprobs=logprobs + rest.logprobs,
            prompt_logprobs=self._take_prompt_logprobs(sequence),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            cached_tokens=sequence.cached,
            error=error,
        )
        if not self._scheduler.has(sequence.request.id):
            self._prompt_logprobs.pop(sequence.request.id, None)
            self._prefilled.discard(sequence.request.id)
            self._blame.forget(sequence.request.id)
        return delta

    def _collect_prompt_logprobs(self, accepted: Accepted, scored: np.ndarray) -> None:
        """Collect the logprobs of prompt tokens start+1 and on, except those collected before a preemption."""
        row = accepted.row
        request = row.sequence.request
        taken = self._prompt_logprobs[request.id]
        wanted = request.params.prompt_logprobs
        assert wanted is not None
        if (scored[:, 0] < 0).any():
            self._end(row.sequence, "error")
            return
        for position in range(len(taken) - 1, min(row.start + row.count, row.sequence.num_prompt - 1)):
            taken.append(token_logprob(scored[position - row.start], wanted))

    def _take_prompt_logprobs(self, sequence: Sequence) -> tuple[TokenLogprob | None, ...] | None:
        """Return prompt logprobs with the first delta of the first continuation, unless it ended before its prefill was
        done; otherwise None. Also counts the request's prompt tokens."""
        request = sequence.request
        if sequence.index or request.id in self._prefilled or sequence.finish_reason in ("abort", "error"):
            return None
        self._prefilled.add(request.id)
        self._stats.prompt_tokens += sequence.num_prompt
        found = self._prompt_logprobs.pop(request.id, None)
        return None if found is None else tuple(found)

    def stats(self) -> EngineStats:
        """A snapshot of the statistics. Thread-safe."""
        running = {sequence.request.id for sequence in list(self._scheduler.running)}
        encoder: dict[str, Any] = {}
        if self._encoder is not None and self._features is not None:
            encoder = {
                "encoder_calls": self._encoder.calls,
                "encoder_patches": self._encoder.real_patches,
                "encoder_padded_patches": self._encoder.padded_patches,
                "encoder_slice_seconds": tuple(self._encoder.slice_seconds),
                "encoder_cache_queries": self._features.cache.queries,
                "encoder_cache_hits": self._features.cache.hits,
                "encoder_cache_usage": self._features.cache.usage,
                "mm_items": dict(self._stats.mm_items),
            }
        return dataclasses.replace(
            self._stats,
            **encoder,
            num_requests_running=len(running),
            num_requests_waiting=len({sequence.request.id for sequence in list(self._scheduler.waiting)} - running),
            kv_cache_usage=self._pool.usage,
            num_preemptions=self._scheduler.num_preemptions,
            prefix_queries=dict(self._blocks.queries),
            prefix_hits=dict(self._blocks.hits),
            pool=pool_usage(self._pool, [*self._scheduler.running, *self._scheduler.waiting]),
            swap=None if self._tier is None else self._tier.stats(),
            blocks_swapped=self._blocks.swapped,
            blocks_swapped_out=self._blocks.swapped_out,
            blocks_swapped_in=self._blocks.swapped_in,
            tokens_dropped=self._blocks.dropped,
            requests_finished=dict(self._stats.requests_finished),
            host_gap_seconds=tuple(self._gaps),
            step_seconds=tuple(self._seconds),
        )


def check_media(request: Request, vision: VisionInputs, features: Features) -> None:
    """Raise InvalidRequest if a request's images and placeholders do not match, or an image can never be encoded."""
    placeholders = {vision.config.image_token_id: "image", vision.config.video_token_id: "video"}
    at = 0
    for span in request.media:
        expected = vision.config.image_token_id if span.modality == "image" else vision.config.video_token_id
        if not at <= span.start < span.stop <= len(request.prompt_ids) or any(
            token != expected for token in request.prompt_ids[span.start : span.stop]
        ):
            raise InvalidRequest(
                f"the {span.modality} at tokens {span.start} to {span.stop} of the prompt must replace exactly "
                f"{span.length} placeholder tokens",
                param="messages",
            )
        if unmatched := placeholders.keys() & request.prompt_ids[at : span.start]:
            raise _unmatched_placeholder(placeholders[unmatched.pop()])
        at = span.stop
        if not features.cache.fits(span.length):
            raise InvalidRequest(
                f"an image of {span.length} tokens is larger than the encoder cache, which holds "
                f"{features.cache.capacity}: send a smaller one, or raise --encoder-cache-tokens",
                param="messages",
            )
        if span.num_patches > features.max_patches:
            raise InvalidRequest(
                f"an image of {span.num_patches} patches is above the limit of {features.max_patches}: send a smaller "
                "one, or raise --max-pixels",
                param="messages",
            )
    if unmatched := placeholders.keys() & request.prompt_ids[at:]:
        raise _unmatched_placeholder(placeholders[unmatched.pop()])


def _unmatched_placeholder(modality: str) -> InvalidRequest:
    return InvalidRequest(f"the prompt has {modality} placeholder tokens without {modality} input", param="prompt")


def token_logprob(found: np.ndarray, top: int) -> TokenLogprob:
    """Convert a row of a head's result (functions.head) to a TokenLogprob with `top` alternatives."""
    alternatives = (len(found) - 2) // 2
    floats = found.view(np.float32)
    ids = found[2 : 2 + top].tolist()
    logprobs = floats[2 + alternatives : 2 + alternatives + top].tolist()
    return TokenLogprob(token_id=int(found[0]), logprob=float(floats[1]), top=tuple(zip(ids, logprobs, strict=True)))
