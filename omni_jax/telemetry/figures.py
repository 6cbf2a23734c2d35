"""Summaries of request and segment records, as statistics and as a table. Pure functions."""

import bisect
import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from omni_jax.telemetry.records import RequestRecord, SegmentRecord

Stage = Literal["queue", "encode", "prefill", "decode"]
Objective = Literal["ttft", "tpot", "e2e"]

STAGES: tuple[Stage, ...] = ("queue", "encode", "prefill", "decode")
OBJECTIVES: tuple[Objective, ...] = ("ttft", "tpot", "e2e")
MAX_PRIORITIES = 16  # priorities listed separately in a summary, because clients choose them
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


# Histograms of requests and steps, with vLLM's names and bounds.
_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
REQUEST_SECONDS = (*_REQUEST, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
BOUNDS: dict[str, tuple[float, ...]] = {
    "request_queue_time_seconds": REQUEST_SECONDS,
    "request_prefill_time_seconds": REQUEST_SECONDS,
    "request_decode_time_seconds": REQUEST_SECONDS,
    "request_inference_time_seconds": REQUEST_SECONDS,
    "request_time_per_output_token_seconds": _TOKEN,
    "iteration_tokens_total": (1, 8, *(2**power for power in range(4, 15))),
}


class Histogram:
    """Counts of values per bucket and their sum. A bucket ends at its bound; the last has no bound."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def merge(self, counts: Sequence[int], total: float) -> None:
        """Add the counts and the sum of another histogram with the same bounds."""
        self.counts = [one + more for one, more in zip(self.counts, counts, strict=True)]
        self.sum += total


def request_times(record: RequestRecord) -> dict[str, float]:
    """A continuation's times for the histograms in BOUNDS, as vLLM has them: it waits, prefills until its first token,
    decodes until its last; prefill and decode are inference, waits for blocks or images included."""
    scheduled = record.ended_at if record.scheduled_at is None else record.scheduled_at
    first = record.ended_at if record.first_token_at is None else record.first_token_at
    times = {
        "request_queue_time_seconds": max(scheduled - record.queued_at, 0.0),
        "request_prefill_time_seconds": first - scheduled,
        "request_decode_time_seconds": record.ended_at - first,
        "request_inference_time_seconds": record.ended_at - scheduled,
    }
    return times if record.tpot is None else times | {"request_time_per_output_token_seconds": record.tpot}


def request_figures(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """Statistics of requests by class and by priority, with the rarest priorities combined as "other"."""
    common = collections.Counter(record.priority for record in requests).most_common(MAX_PRIORITIES)
    shown = {priority for priority, _ in common}
    by_class = grouped(requests, lambda record: record.modality)
    by_priority = grouped(requests, lambda record: str(record.priority) if record.priority in shown else "other")
    return {
        "by_class": {name: _of_requests(group) for name, group in by_class.items()},
        "by_priority": {name: _of_requests(group) for name, group in by_priority.items()},
    }


def segment_figures(segments: Sequence[SegmentRecord]) -> dict[str, Any]:
    """Statistics of segments by class."""
    by_class = grouped(segments, lambda record: record.modality)
    return {"by_class": {name: _of_segments(group) for name, group in by_class.items()}}


def segment_table(request: RequestRecord, segments: Sequence[SegmentRecord]) -> list[str]:
    """A table of a request's segments: two header lines, then a line per segment in order of their positions."""
    name = f"{request.request_id}[{request.index}]"
    lines = [
        f"segments of {name}: {request.modality}, priority {request.priority}, {request.finish_reason}, "
        f"{request.pauses} pauses, {request.preemptions} preemptions, {request.e2e * 1000:.1f} ms",
        f"{'no':>4} {'modality':<8} {'label':<28} {'tokens':>7} {'queue ms':>9} {'encode ms':>10} {'prefill ms':>11} "
        f"{'decode ms':>10} {'steps':>6}  deadline",
    ]
    for record in sorted(segments, key=lambda record: (record.start, record.compute != "encode")):
        times = dict(stages(record))
        queue, encode, prefill, decode = (f"{times[stage] * 1000:.1f}" if stage in times else "-" for stage in STAGES)
        met = {None: "none", True: "met", False: "missed"}[record.deadline_met]
        lines.append(
            f"{record.number:>4} {record.modality:<8} {record.label[:28]!r:<28} {record.stop - record.start:>7} "
            f"{queue:>9} {encode:>10} {prefill:>11} {decode:>10} {record.steps:>6}  {met}"
        )
    return lines


def stages(record: "SegmentRecord") -> list[tuple[Stage, float]]:
    """The stages of a segment with their durations in seconds."""
    if record.compute == "prefill":
        return [("queue", record.started_at - record.queued_at), ("prefill", record.seconds)]
    return [(record.compute, record.seconds)]


def grouped(records: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Records grouped by key, keys ascending."""
    groups: dict[Any, list[Any]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return dict(sorted(groups.items()))


def attained(requests: Iterable[RequestRecord]) -> dict[Objective, dict[str, Any]]:
    """For each objective that any request had: how many requests had it, how many met it, and their share."""
    found: dict[Objective, dict[str, Any]] = {}
    for name in OBJECTIVES:
        verdicts = [met for request in requests if (met := getattr(request, f"{name}_met")) is not None]
        if verdicts:
            met = sum(verdicts)
            found[name] = {"requests": len(verdicts), "met": met, "share": met / len(verdicts)}
    return found


def _of_requests(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    completed = [request for request in requests if request.completed]
    figures: dict[str, Any] = {
        "requests": len(requests),
        "finish_reasons": dict(sorted(collections.Counter(request.finish_reason for request in requests).items())),
        "pauses": sum(request.pauses for request in requests),
        "preemptions": sum(request.preemptions for request in requests),
        "slo": attained(requests),
    }
    for stage in ("input", *STAGES):
        figures[f"{stage}_ms"] = _figures(getattr(request, f"{stage}_seconds") for request in completed)
    for name in OBJECTIVES:
        figures[f"{name}_ms"] = _figures(getattr(request, name) for request in completed)
    return figures


def _of_segments(segments: Sequence[SegmentRecord]) -> dict[str, Any]:
    seconds: dict[Stage, list[float]] = {stage: [] for stage in STAGES}
    for segment in segments:
        for stage, taken in stages(segment):
            seconds[stage].append(taken)
    verdicts = [met for segment in segments if (met := segment.deadline_met) is not None]
    figures: dict[str, Any] = {"segments": len(segments)}
    if verdicts:
        met = sum(verdicts)
        figures["deadlines"] = {"segments": len(verdicts), "met": met, "share": met / len(verdicts)}
    return figures | {f"{stage}_ms": _figures(seconds[stage]) for stage in STAGES}


def _figures(seconds: Iterable[float | None]) -> dict[str, float | int]:
    """Count, mean, population standard deviation and percentiles in milliseconds. None values are left out."""
    values = np.array([value for value in seconds if value is not None]) * 1000
    if not values.size:
        return {"count": 0}
    p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
    return {
        "count": values.size,
        "mean": float(values.mean()),
        "std": float(values.std()),
        "p50": p50,
        "p95": p95,
        "p99": p99,
    }
