"""Records of requests and segments, and their statistics: times by class and priority, objectives met, pauses and
preemptions. Pure Python with bounded memory; the caller passes the time.

The engine and the simulation call the same `Recorder`: after each plan, `event` for each event of the scheduler and
`planned`; after each commit, `committed`; for each sequence that ends, `finished`; around each call of the vision
tower, `encoding` and `encoded`.
"""

import bisect
import collections
import dataclasses
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from omni_jax.requests import MediaSpan, Request
from omni_jax.requests import Sequence as Continuation
from omni_jax.requests.segment import Modality, Segment
from omni_jax.requests.slo import SLO
from omni_jax.scheduling.events import Event
from omni_jax.scheduling.plan import StepPlan
from omni_jax.scheduling.scheduler import Accepted
from omni_jax.segments.deadlines import decode_deadline
from omni_jax.telemetry.figures import (
    BOUNDS,
    Histogram,
    Objective,
    Stage,
    request_figures,
    request_times,
    segment_figures,
    segment_table,
    stages,
)
from omni_jax.telemetry.records import Record, RequestRecord, SegmentRecord

logger = logging.getLogger(__name__)

_R = TypeVar("_R")

WINDOW = 2048  # latest requests, and latest segments, that statistics cover
_MAX_IMAGES = 8192  # images whose time in the vision tower is kept


def request_class(request: Request) -> Modality:
    """The class of a request: video, image or table, the first of these that it contains, else text. Only some segment
    policies detect tables."""
    if not request.media and not request.segments:
        return "text"
    found = {span.modality for span in request.media} | {segment.modality for segment in request.segments}
    rarest: tuple[Modality, ...] = ("video", "image", "table")
    for kind in rarest:
        if kind in found:
            return kind
    return "text"


def log_event(event: Event) -> None:
    """Log pauses and preemptions at INFO, resumes at DEBUG."""
    sequence = event.sequence
    name = sequence.name
    if event.kind == "preempt":
        how = "swapped out" if event.swapped else "lost"
        logger.info("preempted %s: %s (%d blocks %s)", name, event.reason, event.blocks, how)
    elif event.kind == "pause":
        logger.info("paused %s after %d of %d tokens: %s", name, sequence.computed, sequence.num_prompt, event.reason)
    else:
        logger.debug("resumed %s: %s", name, event.reason)


@dataclasses.dataclass(kw_only=True, slots=True)
class _Open:
    """A segment that is partly computed."""

    queued_at: float
    started_at: float
    steps: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecorderState:
    """The statistics of a recorder as plain data, which other processes can read. See Recorder for the fields.

    Attributes:
        requests, segments: The latest records.
        num_requests, num_segments: Number of all records.
        histograms: (class, stage, count per bucket of SECONDS, sum) of segments.
        totals: Name in BOUNDS -> (count per bucket, sum).
        verdicts: (class, objective, whether it was met, number of requests).
    """

    requests: list[RequestRecord]
    segments: list[SegmentRecord]
    num_requests: int
    num_segments: int
    histograms: list[tuple[Modality, Stage, tuple[int, ...], float]]
    totals: dict[str, tuple[tuple[int, ...], float]]
    verdicts: list[tuple[Modality, Objective, bool, int]]
    pauses: int
    resumes: int
    blocks_taken: int
    preemptions: dict[str, int]
    swapped: dict[str, int]


class _Progress:
    """The progress of a live continuation's prompt."""

    def __init__(self, request: Request):
        whole = Segment(start=0, stop=len(request.prompt_ids), modality=request_class(request), label="request")
        self.segments = request.segments or (whole,)
        self.stops = [segment.stop for segment in self.segments]
        self.queued_at = request.queued  # of the next segment
        self.open: dict[int, _Open] = {}
        self.next = 0  # number of the first segment that no step has computed tokens of
        self.records: list[SegmentRecord] = []  # of ended segments, if a table is logged


class Recorder:
    """Records requests, segments and events.

    Call it from one thread; the statistics may be read from any. Only `summary` takes longer after more requests, up to
    WINDOW of them.

    Args:
        segments: Whether segments are recorded; otherwise a step costs nothing.
        sink: Called with each record, in the caller's thread.
        log_segments: Whether a table of its segments is logged when a request ends; implies `segments`.

    Attributes:
        pauses, resumes: Number of pauses and of resumes (counters).
        preemptions: Number of preemptions by cause (counters).
        swapped: Number of those whose blocks were swapped out; those of the others are recomputed.
        blocks_taken: Number of blocks lost to preemptions (a counter).
    """

    def __init__(
        self, *, segments: bool = False, sink: Callable[[Record], None] | None = None, log_segments: bool = False
    ):
        self.pauses = self.resumes = self.blocks_taken = 0
        self.preemptions: dict[str, int] = {"blocks": 0, "class": 0}
        self.swapped: dict[str, int] = {"blocks": 0, "class": 0}
        self._segments, self._sink, self._log_segments = segments or log_segments, sink, log_segments
        self._live: dict[Continuation, _Progress] = {}
        self._disturbed: dict[Continuation, list[int]] = {}  # pauses and preemptions of live continuations
        self._in_tower: dict[bytes, float] = {}
        self._images: collections.OrderedDict[bytes, tuple[float, float]] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._requests: collections.deque[RequestRecord] = collections.deque(maxlen=WINDOW)
        self._ended: collections.deque[SegmentRecord] = collections.deque(maxlen=WINDOW)
        self._num_requests = self._num_segments = 0
        self._histograms: dict[tuple[Modality, Stage], Histogram] = {}
        self._totals = {name: Histogram(bounds) for name, bounds in BOUNDS.items()}
        # Requests in the window that had an objective: (class, objective, whether it was met) -> their number.
        self._verdicts: collections.Counter[tuple[Modality, Objective, bool]] = collections.Counter()

    # -- recording ----------------------------------------------------------------------------------------------------

    def planned(self, plan: StepPlan, sequences: tuple[Continuation, ...], now: float) -> None:
        """Record that a step was planned, with the sequence of each of its rows."""
        with self._lock:
            self._totals["iteration_tokens_total"].add(plan.num_tokens)
        if not self._segments:
            return
        for sequence, start, stop in zip(sequences, plan.starts.tolist(), plan.stops.tolist(), strict=True):
            if start < sequence.num_prompt:
                self._begin(sequence, start, min(stop, sequence.num_prompt), now)

    def committed(self, plan: StepPlan, accepted: Iterable[Accepted], now: float) -> None:
        """Record that the result of a step was read, and the rows that the scheduler accepted."""
        if not self._segments:
            return
        starts, stops = plan.starts.tolist(), plan.stops.tolist()
        for row, sequence, _ in accepted:
            if starts[row] < sequence.num_prompt and (progress := self._live.get(sequence)) is not None:
                self._end(sequence, progress, stops[row], now)

    def encoding(self, spans: Iterable[MediaSpan], now: float) -> None:
        """Record that the vision tower started on a batch. It processes one at a time."""
        self._in_tower = {span.key: now for span in spans}

    def encoded(self, spans: Iterable[MediaSpan], now: float) -> None:
        """Record that the features of a batch are ready."""
        for span in spans:
            began = self._in_tower.pop(span.key, None)
            if began is not None:
                self._images[span.key] = (began, now)
                self._images.move_to_end(span.key)
        while len(self._images) > _MAX_IMAGES:
            self._images.popitem(last=False)

    def event(self, event: Event, now: float) -> None:
        """Record a pause, resume or preemption."""
        disturbed = [0, 0]
        if event.sequence.finish_reason is None:
            disturbed = self._disturbed.setdefault(event.sequence, disturbed)
        if event.kind == "pause":
            self.pauses += 1
            disturbed[0] += 1
        elif event.kind == "resume":
            self.resumes += 1
        else:
            self.preemptions[event.cause] += 1
            self.swapped[event.cause] += event.swapped
            self.blocks_taken += event.blocks
            disturbed[1] += 1

    def finished(self, sequence: Continuation, now: float) -> None:
        """Record that a continuation ended, and forget its state. `committed` of its last step may follow."""
        pauses, preemptions = self._disturbed.pop(sequence, (0, 0))
        record = _request_record(sequence, now, self._in_the_tower(sequence.request), pauses, preemptions)
        if self._segments:
            progress = self._live.pop(sequence, None)
            if progress is None and (record.completed or sequence.request.media or self._log_segments):
                progress = _Progress(sequence.request)
            if progress is not None:
                self._end_segments(sequence, record, progress, now)
        with self._lock:
            self._num_requests += 1
            if len(self._requests) == self._requests.maxlen:
                self._verdicts.subtract(_verdicts(self._requests[0]))
            self._requests.append(record)
            self._verdicts.update(_verdicts(record))
            for name, value in request_times(record).items() if record.completed else ():
                self._totals[name].add(value)
        if self._sink is not None:
            self._sink(record)

    def _begin(self, sequence: Continuation, start: int, stop: int, now: float) -> None:
        progress = self._live.get(sequence)
        if progress is None:
            progress = self._live[sequence] = _Progress(sequence.request)
        for number in range(bisect.bisect_right(progress.stops, start), len(progress.stops)):
            if progress.segments[number].start >= stop:
                break
            if number >= progress.next:
                progress.open[number] = _Open(queued_at=progress.queued_at, started_at=now)
                progress.next = number + 1
            if number in progress.open:
                progress.open[number].steps += 1
            if number + 1 == progress.next and progress.stops[number] <= stop:
                progress.queued_at = now

    def _end(self, sequence: Continuation, progress: _Progress, stop: int, now: float) -> None:
        for number in [number for number in progress.open if progress.stops[number] <= stop]:
            times = progress.open.pop(number)
            self._add(
                progress,
                _segment_record(
                    sequence,
                    number,
                    progress.segments[number],
                    queued_at=times.queued_at,
                    started_at=times.started_at,
                    ended_at=now,
                    steps=times.steps,
                ),
            )

    def _end_segments(self, sequence: Continuation, record: RequestRecord, progress: _Progress, now: float) -> None:
        if record.completed:  # its whole prompt was computed, although `committed` may not have been called yet
            self._end(sequence, progress, sequence.num_prompt, now)
        self._end_stages(sequence, progress, now)
        if self._log_segments:
            for line in segment_table(record, progress.records):
                logger.info("%s", line)

    def _end_stages(self, sequence: Continuation, progress: _Progress, now: float) -> None:
        """Record the images that were encoded for a request, and the output of a continuation."""
        request = sequence.request
        for span in request.media if sequence.index == 0 else ():
            began, ended = self._images.get(span.key, (-math.inf, -math.inf))
            if began < request.queued:
                continue
            number = bisect.bisect_right(progress.stops, span.start)
            part = dataclasses.replace(
                progress.segments[number], start=span.start, stop=span.stop, compute="encode", modality=span.modality
            )
            self._add(
                progress,
                _segment_record(
                    sequence, number, part, queued_at=request.queued, started_at=began, ended_at=ended, steps=1
                ),
            )
        if (first := sequence.first_token_at) is None:
            return
        slo = request.slo or SLO()
        output = Segment(
            start=sequence.num_prompt,
            stop=sequence.num_prompt + sequence.num_output,
            modality=request_class(request),
            label="output",
            compute="decode",
            priority=slo.priority,
            deadline=decode_deadline(slo, request.arrival, first, max(sequence.num_output - 1, 0)),
        )
        number, steps = len(progress.segments), sequence.num_output
        self._add(
            progress,
            _segment_record(sequence, number, output, queued_at=first, started_at=first, ended_at=now, steps=steps),
        )

    def _add(self, progress: _Progress, record: SegmentRecord) -> None:
        if self._log_segments:
            progress.records.append(record)
        with self._lock:
            self._num_segments += 1
            self._ended.append(record)
            for stage, seconds in stages(record):
                self._histograms.setdefault((record.modality, stage), Histogram()).add(seconds)
        if self._sink is not None:
            self._sink(record)

    def _in_the_tower(self, request: Request) -> list[tuple[float, float]]:
        """The intervals after a request was queued in which the tower encoded its images, in order, without overlap."""
        if not request.media:
            return []
        times = sorted(
            (max(began, request.queued), ended)
            for began, ended in (self._images.get(key, (0.0, -math.inf)) for key in {s.key for s in request.media})
            if ended > request.queued
        )
        merged: list[tuple[float, float]] = []
        for began, ended in times:
            if merged and began <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(ended, merged[-1][1]))
            else:
                merged.append((began, ended))
        return merged

    def state(self, *, after: tuple[int, int] = (0, 0)) -> "RecorderState":
        """Its statistics as plain data, with the latest records after so many requests and segments."""
        with self._lock:
            return RecorderState(
                requests=_last(self._requests, self._num_requests - after[0]),
                segments=_last(self._ended, self._num_segments - after[1]),
                num_requests=self._num_requests,
                num_segments=self._num_segments,
                histograms=[(*key, tuple(found.counts), found.sum) for key, found in self._histograms.items()],
                totals={name: (tuple(found.counts), found.sum) for name, found in self._totals.items()},
                verdicts=[(*key, count) for key, count in self._verdicts.items()],
                pauses=self.pauses,
                resumes=self.resumes,
                blocks_taken=self.blocks_taken,
                preemptions=dict(self.preemptions),
                swapped=dict(self.swapped),
            )

    @classmethod
    def of(cls, states: "Iterable[RecorderState]") -> "Recorder":
        """A recorder with the combined statistics of several, for reading."""
        whole, requests, ended = cls(), [], []
        for state in states:
            requests += state.requests
            ended += state.segments
            whole._num_requests += state.num_requests
            whole._num_segments += state.num_segments
            for kind, stage, counts, total in state.histograms:
                whole._histograms.setdefault((kind, stage), Histogram()).merge(counts, total)
            for name, (counts, total) in state.totals.items():
                whole._totals[name].merge(counts, total)
            for kind, name, met, count in state.verdicts:
                whole._verdicts[kind, name, met] += count
            whole.pauses += state.pauses
            whole.resumes += state.resumes
            whole.blocks_taken += state.blocks_taken
            for cause, count in state.preemptions.items():
                whole.preemptions[cause] += count
                whole.swapped[cause] += state.swapped[cause]
        whole._requests.extend(sorted(requests, key=lambda record: record.ended_at))
        whole._ended.extend(sorted(ended, key=lambda record: record.ended_at))
        return whole

    # -- statistics ---------------------------------------------------------------------------------------------------

    def attainment(self) -> dict[Modality, dict[Objective, float]]:
        """Share of the latest requests that met each objective, among those that had it, by class."""
        with self._lock:
            counts = dict(self._verdicts)
        shares: dict[Modality, dict[Objective, float]] = {}
        for kind, name, _ in sorted(key for key, count in counts.items() if count):
            met, missed = counts.get((kind, name, True), 0), counts.get((kind, name, False), 0)
            shares.setdefault(kind, {})[name] = met / (met + missed)
        return shares

    def histograms(self) -> dict[tuple[Modality, Stage], tuple[tuple[int, ...], float]]:
        """Durations of all segments so far: (class, stage) -> (count per bucket of SECONDS, sum)."""
        with self._lock:
            return {key: (tuple(found.counts), found.sum) for key, found in sorted(self._histograms.items())}

    def totals(self) -> dict[str, tuple[tuple[int, ...], float]]:
        """Histograms of all requests and steps so far: name in BOUNDS -> (count per bucket, sum)."""
        with self._lock:
            return {name: (tuple(found.counts), found.sum) for name, found in self._totals.items()}

    def summary(self) -> dict[str, Any]:
        """Statistics of the latest WINDOW requests and segments, and counts of all, as plain JSON. Times are in
        milliseconds, of completed requests only; `std` is the jitter."""
        with self._lock:
            requests, segments = list(self._requests), list(self._ended)
            num_requests, num_segments = self._num_requests, self._num_segments
        return {
            "requests": {"finished": num_requests, "window": len(requests), **request_figures(requests)},
            "segments": {"finished": num_segments, "window": len(segments), **segment_figures(segments)},
            "events": {
                "pauses": self.pauses,
                "resumes": self.resumes,
                "preemptions": dict(self.preemptions),
                "blocks_taken": self.blocks_taken,
            },
        }


def _last(records: collections.deque[_R], count: int) -> list[_R]:
    """The last `count` records, or all that there are."""
    return list(itertools.islice(reversed(records), count))[::-1]


def _verdicts(record: RequestRecord) -> list[tuple[Modality, Objective, bool]]:
    """The objectives that a request had, and whether each was met."""
    if record.ttft_met is record.tpot_met is record.e2e_met is None:
        return []
    met: dict[Objective, bool | None] = {"ttft": record.ttft_met, "tpot": record.tpot_met, "e2e": record.e2e_met}
    return [(record.modality, name, verdict) for name, verdict in met.items() if verdict is not None]


def _segment_record(
    sequence: Continuation,
    number: int,
    segment: Segment,
    *,
    queued_at: float,
    started_at: float,
    ended_at: float,
    steps: int,
) -> SegmentRecord:
    return SegmentRecord(
        request_id=sequence.request.id,
        index=sequence.index,
        number=number,
        modality=segment.modality,
        label=segment.label,
        compute=segment.compute,
        priority=segment.priority,
        deadline=segment.deadline,
        start=segment.start,
        stop=segment.stop,
        queued_at=queued_at,
        started_at=started_at,
        ended_at=ended_at,
        steps=steps,
    )


def _request_record(
    sequence: Continuation, now: float, tower: list[tuple[float, float]], pauses: int, preemptions: int
) -> RequestRecord:
    request, reason = sequence.request, sequence.finish_reason
    assert reason is not None
    arrival, queued, scheduled, first = request.arrival, request.queued, sequence.scheduled_at, sequence.first_token_at
    left_queue = now if scheduled is None else scheduled
    prefilled = now if first is None else first
    in_queue = in_prefill = 0.0
    if tower:
        in_queue, in_prefill = _overlap(tower, queued, left_queue), _overlap(tower, left_queue, prefilled)
    slo = request.slo or SLO()
    aborted = reason == "abort"
    outputs = sequence.num_output
    tpot = (now - first) / (outputs - 1) if first is not None and outputs > 1 else None
    completed = reason in ("stop", "length")
    return RequestRecord(
        request_id=request.id,
        index=sequence.index,
        modality=request_class(request),
        priority=slo.priority,
        arrival=arrival,
        queued_at=queued,
        scheduled_at=scheduled,
        first_token_at=first,
        ended_at=now,
        prompt_tokens=sequence.num_prompt,
        output_tokens=outputs,
        finish_reason=reason,
        pauses=pauses,
        preemptions=preemptions,
        input_seconds=queued - arrival,
        queue_seconds=left_queue - queued - in_queue,
        encode_seconds=in_queue + in_prefill,
        prefill_seconds=None if scheduled is None else prefilled - left_queue - in_prefill,
        decode_seconds=None if first is None else now - first,
        ttft_met=_met(
            slo.ttft_ms, prefilled - arrival if completed or first is not None else None, now - arrival, aborted
        ),
        tpot_met=None if tpot is None and completed else _met(slo.tpot_ms, tpot, 0.0, aborted),
        e2e_met=_met(slo.e2e_ms, now - arrival if completed else None, now - arrival, aborted),
    )


def _met(objective_ms: float | None, seconds: float | None, so_far: float, aborted: bool) -> bool | None:
    """Whether an objective was met; None if there was none. If `seconds` is None, the result never came: the objective
    was missed, unless the client aborted while there was time."""
    if objective_ms is None:
        return None
    if seconds is not None:
        return seconds * 1000 <= objective_ms
    return None if aborted and so_far * 1000 <= objective_ms else False


def _overlap(times: list[tuple[float, float]], start: float, stop: float) -> float:
    return sum(max(min(ended, stop) - max(began, start), 0.0) for began, ended in times)
