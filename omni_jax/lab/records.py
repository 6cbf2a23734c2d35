"""Results of a run: rows of requests, segments and steps, and the file that holds them."""

import collections
import dataclasses
import gzip
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omni_jax.requests import MediaSpan, Request, Sequence
from omni_jax.requests.segment import Segment
from omni_jax.scheduling.plan import StepPlan
from omni_jax.scheduling.scheduler import Accepted
from omni_jax.simulation.replica import Piece, Step, pieces_of
from omni_jax.telemetry.recorder import Recorder
from omni_jax.telemetry.records import Record, RequestRecord

DIGITS = 6  # decimal places of seconds in files


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestRow:
    """A request. Times are in seconds since the run began.

    Attributes:
        kind: text, image or table.
        arrival: time of its arrival in the workload, even if the engine was busy then.
        image_tokens: number of prompt_tokens that belong to an image.
        scheduled_at, first_token_at: None if the request ended before.
        pauses: number of times it lost its turn.
        preemptions: number of times it lost its slot or blocks.
    """

    id: str
    kind: str
    priority: int
    arrival: float
    prompt_tokens: int
    image_tokens: int
    output_tokens: int
    scheduled_at: float | None
    first_token_at: float | None
    ended_at: float
    finish_reason: str
    pauses: int = 0
    preemptions: int = 0

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than by its last token."""
        return self.finish_reason not in ("stop", "length")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentRow:
    """A segment of a prompt.

    Attributes:
        number: its place in the prompt, from 0.
        started_at, ended_at: bounds of the first and the last step that computed tokens of it.
        steps: number of steps that computed tokens of it.
        seconds: its share, by tokens, of the time of those steps.
    """

    request_id: str
    number: int
    modality: str
    label: str
    start: int
    stop: int
    priority: int
    deadline: float | None
    started_at: float
    ended_at: float
    steps: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRow:
    """A part of a step: one row for each segment of a prompt, and one, without a request, for all decoded tokens.

    Attributes:
        kind: decode or mixed for an executable, encode for the vision tower.
        size: bucket of the executable; patches of a call of the tower.
    """

    step: int
    started_at: float
    ended_at: float
    kind: str
    size: int
    compute: str
    request_id: str
    segment: int
    modality: str
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Rows of a cell.

    Attributes:
        busy_seconds: time during which a step was running.
    """

    requests: tuple[RequestRow, ...]
    segments: tuple[SegmentRow, ...] = ()
    steps: tuple[StepRow, ...] = ()
    busy_seconds: float = 0.0


_TABLES: Mapping[str, type] = {"requests": RequestRow, "segments": SegmentRow, "steps": StepRow}


class RunRecorder(Recorder):
    """A Recorder that also keeps the steps of the device. Times are those of the caller's clock.

    Attributes:
        records: records of the requests that ended.
        requests: the same requests by id, as the scheduler had them, so with deadlines.
        steps: steps of the device, calls of the vision tower included.
    """

    def __init__(self):
        self.records: list[RequestRecord] = []
        self.requests: dict[str, Request] = {}
        self.steps: list[Step] = []
        super().__init__(sink=self._keep)
        self._began: dict[int, tuple[float, tuple[Piece, ...]]] = {}  # by number of a plan in flight
        self._tower_began = 0.0
        self._free_since = -math.inf  # end of the last step

    def _keep(self, record: Record) -> None:
        if isinstance(record, RequestRecord):
            self.records.append(record)

    def planned(self, plan: StepPlan, sequences: tuple[Sequence, ...], now: float) -> None:
        """Record that a step was dispatched."""
        super().planned(plan, sequences, now)
        self._began[plan.number] = now, tuple(pieces_of(plan, sequences))

    def committed(self, plan: StepPlan, accepted: Iterable[Accepted], now: float) -> None:
        """Record a step whose tokens were read. It ran from its dispatch, or from the end of the step before if that
        was later."""
        super().committed(plan, accepted, now)
        began, pieces = self._began.pop(plan.number, (now, ()))
        began = max(began, self._free_since)
        self._free_since = max(now, began)
        kind = "decode" if plan.decode else "mixed"
        self.steps.append(
            Step(replica=0, start=began, seconds=self._free_since - began, kind=kind, size=plan.size, pieces=pieces)
        )

    def finished(self, sequence: Sequence, now: float) -> None:
        """Record a request that has ended."""
        self.requests[sequence.request.id] = sequence.request
        super().finished(sequence, now)

    def encoding(self, spans: Iterable[MediaSpan], now: float) -> None:
        """Record that the vision tower has begun with the spans."""
        super().encoding(spans, now)
        self._tower_began = now

    def encoded(self, spans: Iterable[MediaSpan], now: float) -> None:
        """Record that the features of the spans are computed."""
        spans = tuple(spans)
        super().encoded(spans, now)
        pieces = tuple(Piece("", 0, 0, span.start, span.num_patches) for span in spans)
        size = sum(span.num_patches for span in spans)
        self.steps.append(
            Step(
                replica=0,
                start=self._tower_began,
                seconds=now - self._tower_began,
                kind="encode",
                size=size,
                pieces=pieces,
            )
        )


def make_run(
    records: Iterable[RequestRecord], steps: Iterable[Step], requests: Mapping[str, Request], *, start: float = 0.0
) -> Run:
    """Return the rows of a run, in seconds since `start`.

    Args:
        records: records of the requests that ended, in any order.
        steps: steps of the device, in any order; the slices of one call of the tower become one row.
        requests: requests by id, with segments. An id begins with the kind: `text-7`.
    """
    merged = _merge_slices(sorted(steps, key=lambda step: step.start))
    parts: dict[tuple[str, int], list[tuple[Step, float]]] = collections.defaultdict(list)
    rows: list[StepRow] = []
    for number, step in enumerate(merged):
        here = {"step": number, "kind": step.kind, "size": step.size}
        here |= {"started_at": step.start - start, "ended_at": step.start + step.seconds - start}
        if step.kind == "encode":
            tokens = sum(piece.count for piece in step.pieces)
            rows.append(StepRow(**here, compute="encode", request_id="", segment=-1, modality="image", tokens=tokens))
            continue
        whole = sum(piece.count for piece in step.pieces)
        decoded = 0
        for piece in step.pieces:
            segments = requests[piece.request_id].segments
            if piece.segment >= max(len(segments), 1):
                decoded += piece.count
                continue
            parts[piece.request_id, piece.segment].append((step, step.seconds * piece.count / whole))
            rows.append(
                StepRow(
                    **here,
                    compute="prefill",
                    request_id=piece.request_id,
                    segment=piece.segment,
                    modality=segments[piece.segment].modality if segments else "text",
                    tokens=piece.count,
                )
            )
        if decoded:
            rows.append(StepRow(**here, compute="decode", request_id="", segment=-1, modality="text", tokens=decoded))
    return Run(
        requests=tuple(
            _request_row(record, requests[record.request_id], start)
            for record in sorted(records, key=lambda record: (record.arrival, record.request_id))
        ),
        segments=tuple(
            _segment_row(requests[request_id], number, parts[request_id, number], start)
            for request_id, number in sorted(parts)
        ),
        steps=tuple(rows),
        busy_seconds=_covered((step.start, step.start + step.seconds) for step in merged),
    )


def _merge_slices(steps: Iterable[Step]) -> list[Step]:
    """Merge the slices of each call of the tower into one step from the first's beginning to the last's end."""
    merged: list[Step] = []
    calls: dict[int, int] = {}  # by id of the call's pieces, which its slices share
    for step in steps:
        if step.kind == "encode" and id(step.pieces) in calls:
            place = calls[id(step.pieces)]
            seconds = step.start + step.seconds - merged[place].start
            merged[place] = dataclasses.replace(merged[place], seconds=seconds)
            continue
        if step.kind == "encode":
            calls[id(step.pieces)] = len(merged)
        merged.append(step)
    return merged


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of the intervals."""
    total, reached = 0.0, -math.inf
    for began, ended in sorted(intervals):
        total += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return total


def _request_row(record: RequestRecord, request: Request, start: float) -> RequestRow:
    def since(at: float | None) -> float | None:
        return None if at is None else at - start

    return RequestRow(
        id=record.request_id,
        kind=record.request_id.partition("-")[0],
        priority=record.priority,
        arrival=record.arrival - start,
        prompt_tokens=record.prompt_tokens,
        image_tokens=sum(span.length for span in request.media),
        output_tokens=record.output_tokens,
        scheduled_at=since(record.scheduled_at),
        first_token_at=since(record.first_token_at),
        ended_at=record.ended_at - start,
        finish_reason=record.finish_reason,
        pauses=record.pauses,
        preemptions=record.preemptions,
    )


def _segment_row(request: Request, number: int, parts: list[tuple[Step, float]], start: float) -> SegmentRow:
    whole = Segment(start=0, stop=len(request.prompt_ids), modality="text", label="request")
    segment = request.segments[number] if request.segments else whole
    return SegmentRow(
        request_id=request.id,
        number=number,
        modality=segment.modality,
        label=segment.label,
        start=segment.start,
        stop=segment.stop,
        priority=segment.priority,
        deadline=None if math.isinf(segment.deadline) else segment.deadline - start,
        started_at=parts[0][0].start - start,
        ended_at=max(step.start + step.seconds for step, _ in parts) - start,
        steps=len(parts),
        seconds=sum(seconds for _, seconds in parts),
    )


# -- files ------------------------------------------------------------------------------------------------------------


def write_run(path: Path, run: Run, settings: Mapping[str, Any]) -> None:
    """Write a cell's file atomically."""
    tables = {
        name: {
            "columns": [field.name for field in dataclasses.fields(kind)],
            "rows": [[_rounded(value) for value in vars(row).values()] for row in getattr(run, name)],
        }
        for name, kind in _TABLES.items()
    }
    write_json(path, {"settings": settings, "busy_seconds": run.busy_seconds, **tables})


def read_run(path: Path) -> tuple[Run, dict[str, Any]]:
    """Return the rows of a cell's file, and the settings of its run.

    Raises:
        ValueError: the file is damaged, or from another version.
    """
    content = read_json(path)
    try:
        tables: dict[str, Any] = {
            name: tuple(kind(**dict(zip(content[name]["columns"], row, strict=True))) for row in content[name]["rows"])
            for name, kind in _TABLES.items()
        }
        return Run(**tables, busy_seconds=content["busy_seconds"]), content["settings"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is from another version of omni-jax ({error}); delete it") from error


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically, gzipped if the name ends with .gz."""
    data = json.dumps(content, allow_nan=False).encode()  # NaN is no JSON
    write_bytes(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def read_json(path: Path) -> Any:
    """Read a file of write_json.

    Raises:
        ValueError: the file is damaged.
    """
    data = path.read_bytes()
    try:
        return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it") from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)


def _rounded(value: Any) -> Any:
    return round(value, DIGITS) if isinstance(value, float) else value
