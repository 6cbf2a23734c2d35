"""Tables of an experiment: a line for each request, and a line for each statistic of each arm with its interval and its
paired difference from the baseline."""

import csv
import dataclasses
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omni_jax.lab.experiment import Cell, Experiment
from omni_jax.lab.records import RequestRow, Run, SegmentRow, StepRow, write_bytes
from omni_jax.requests.slo import SLO
from omni_jax.stats.intervals import STATISTICS, Comparison, Interval, compare, interval, over_runs, resamples

ALL = "all"  # all kinds of requests together
METRICS = ("latency_ms", "ttft_ms", "tpot_ms", "queue_ms", "slowdown")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """A request with its latencies in milliseconds.

    Attributes:
        queue_ms: from arrival until it is first scheduled.
        ttft_ms: from arrival to the first token.
        tpot_ms: average from token to token; None with fewer than two tokens.
        latency_ms: from arrival to the last token.
        alone_ms: latency of the same request on an idle engine; None if not measured.
        slowdown: latency_ms / alone_ms.
        slo_met: whether it met all objectives of its kind; None if there are none.
    """

    row: RequestRow
    queue_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    latency_ms: float
    alone_ms: float | None
    slowdown: float | None
    slo_met: bool | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A statistic of an arm.

    Attributes:
        kind: kind of request, or all.
        metric, statistic: latency_ms, ttft_ms, tpot_ms, queue_ms or slowdown with mean, p50, p95, p99 or sd;
            slo_attainment with share; requests_per_second, tokens_per_second, busy_tokens_per_second, pauses and
            preemptions with mean (over runs).
        count: number of requests, or of runs.
        against: comparison with the baseline; None for the baseline itself, and if requests cannot be paired.
    """

    arm: str
    mix: str
    rate: str
    kind: str
    metric: str
    statistic: str
    count: int
    value: Interval
    against: Comparison | None = None


def judge(row: RequestRow, slo: SLO | None, alone: float | None) -> Judged:
    """Return the latencies of a request.

    Args:
        slo: objectives that it is judged by.
        alone: seconds that the same request takes on an idle engine.
    """
    whole = row.finish_reason in ("stop", "length")
    first = row.first_token_at
    latency = 1000 * (row.ended_at - row.arrival)
    ttft = None if first is None else 1000 * (first - row.arrival)
    tpot = None if first is None or row.output_tokens < 2 else 1000 * (row.ended_at - first) / (row.output_tokens - 1)
    met = None
    if slo is not None and (slo.ttft_ms, slo.tpot_ms, slo.e2e_ms) != (None, None, None):
        pairs = ((slo.ttft_ms, ttft), (slo.tpot_ms, tpot), (slo.e2e_ms, latency))
        met = whole and all(limit is None or value is None or value <= limit for limit, value in pairs)
    return Judged(
        row=row,
        queue_ms=None if row.scheduled_at is None else 1000 * (row.scheduled_at - row.arrival),
        ttft_ms=ttft,
        tpot_ms=tpot,
        latency_ms=latency,
        alone_ms=None if alone is None else 1000 * alone,
        slowdown=None if alone is None else latency / (1000 * alone),
        slo_met=met,
    )


Runs = Mapping[str, tuple[Cell, Run, tuple[Judged, ...]]]  # by name of the cell, in the experiment's order


def summarise(experiment: Experiment, runs: Runs) -> list[Line]:
    """Return all statistics of all arms, from the cells that have run. An arm is compared with the baseline only if
    both have the same seeds."""
    lines = []
    for mix in experiment.mixes:
        for rate in experiment.rates:
            of_arm = {
                arm.name: [
                    runs[name] for name, (cell, *_) in runs.items() if _is_cell_of(cell, mix, rate.name, arm.name)
                ]
                for arm in experiment.arms
            }
            baseline = of_arm[experiment.baseline_arm.name]
            for arm in experiment.arms:
                if of_arm[arm.name]:
                    other = baseline if arm != experiment.baseline_arm else []
                    lines += _lines_of_arm(experiment, (arm.name, mix, rate.name), of_arm[arm.name], other)
    return lines


def _is_cell_of(cell: Cell, mix: str, rate: str, arm: str) -> bool:
    return (cell.mix, cell.rate.name, cell.arm.name) == (mix, rate, arm)


def _lines_of_arm(experiment: Experiment, where: tuple[str, str, str], mine: list, baseline: list) -> list[Line]:
    lines: list[Line] = []
    names = dict(zip(("arm", "mix", "rate"), where, strict=True))
    paired = [cell.seed for cell, *_ in mine] == [cell.seed for cell, *_ in baseline]
    for kind in _kinds(mine):
        for metric in METRICS:
            values, sizes = _column(mine, kind, metric)
            other = _column(baseline, kind, metric) if paired else None
            if not values.size:
                continue
            drawn = resamples(sizes, count=experiment.resamples, seed=0)
            same = other is not None and other[1] == sizes
            for statistic, function in STATISTICS.items():
                against = compare(values, other[0], function, drawn) if same and other is not None else None
                value = interval(values, function, drawn)
                lines.append(
                    Line(
                        **names,
                        kind=kind,
                        metric=metric,
                        statistic=statistic,
                        count=values.size,
                        value=value,
                        against=against,
                    )
                )
        met, sizes = _column(mine, kind, "slo_met")
        if met.size:
            other = _column(baseline, kind, "slo_met") if paired else None
            drawn = resamples(sizes, count=experiment.resamples, seed=0)
            mean = STATISTICS["mean"]
            against = compare(met, other[0], mean, drawn) if other is not None and other[1] == sizes else None
            lines.append(
                Line(
                    **names,
                    kind=kind,
                    metric="slo_attainment",
                    statistic="share",
                    count=met.size,
                    value=interval(met, mean, drawn),
                    against=against,
                )
            )
    for metric, function in _RUN_METRICS.items():
        values = [function(run) for _, run, _ in mine]
        others = [function(run) for _, run, _ in baseline] if paired else []
        against = None
        if others and all(others):
            differences = [value - other for value, other in zip(values, others, strict=True)]
            against = Comparison(difference=over_runs(differences), ratio=over_runs(values, others))
        lines.append(
            Line(
                **names,
                kind=ALL,
                metric=metric,
                statistic="mean",
                count=len(values),
                value=over_runs(values),
                against=against,
            )
        )
    return lines


def _kinds(runs: list) -> list[str]:
    found = {judged.row.kind for _, _, some in runs for judged in some}
    return [ALL, *(kind for kind in ("text", "image", "table") if kind in found)]


def _column(runs: list, kind: str, metric: str) -> tuple[np.ndarray, list[int]]:
    """Return a metric of each request of a kind, by run and arrival, and the number of requests of each run. Requests
    without the metric, and runs without such requests, are left out."""
    columns = []
    for _, _, some in runs:
        chosen = [judged for judged in some if kind in (ALL, judged.row.kind)]
        found = [getattr(judged, metric) for judged in sorted(chosen, key=lambda judged: judged.row.arrival)]
        columns.append([float(value) for value in found if value is not None])
    columns = [column for column in columns if column]
    return np.array([value for column in columns for value in column]), [len(column) for column in columns]


def _tokens(run: Run) -> int:
    return sum(row.prompt_tokens + row.output_tokens for row in run.requests if row.finish_reason in ("stop", "length"))


def _span(run: Run) -> float:
    """Return the seconds from the first arrival to the last completion."""
    return max(row.ended_at for row in run.requests) - min(row.arrival for row in run.requests)


_RUN_METRICS = {
    "requests_per_second": lambda run: (
        sum(row.finish_reason in ("stop", "length") for row in run.requests) / max(_span(run), 1e-9)
    ),
    "tokens_per_second": lambda run: _tokens(run) / max(_span(run), 1e-9),
    "busy_tokens_per_second": lambda run: _tokens(run) / max(run.busy_seconds, 1e-9),
    "pauses": lambda run: float(sum(row.pauses for row in run.requests)),
    "preemptions": lambda run: float(sum(row.preemptions for row in run.requests)),
}


# -- files ------------------------------------------------------------------------------------------------------------

_CELL = ("arm", "mix", "rate", "seed")
_DERIVED = ("queue_ms", "ttft_ms", "tpot_ms", "latency_ms", "alone_ms", "slowdown", "slo_met")
REQUEST_COLUMNS = (*_CELL, *(field.name for field in dataclasses.fields(RequestRow)), *_DERIVED)
SEGMENT_COLUMNS = (*_CELL, *(field.name for field in dataclasses.fields(SegmentRow)))
STEP_COLUMNS = (*_CELL, *(field.name for field in dataclasses.fields(StepRow)))
SUMMARY_COLUMNS = (
    *("arm", "mix", "rate", "kind", "metric", "statistic", "count", "value", "low", "high"),
    *("difference", "difference_low", "difference_high", "ratio", "ratio_low", "ratio_high"),
)


def write_tables(directory: Path, runs: Runs, lines: Sequence[Line]) -> None:
    """Write requests.csv, segments.csv, steps.csv and summary.csv."""

    def cells(attribute: str) -> Iterable[list[Any]]:
        for cell, run, _ in runs.values():
            for row in getattr(run, attribute):
                yield [*_cell_columns(cell), *vars(row).values()]

    requests = (
        [*_cell_columns(cell), *vars(judged.row).values(), *(getattr(judged, name) for name in _DERIVED)]
        for cell, _, some in runs.values()
        for judged in some
    )
    for name, columns, rows in (
        ("requests", REQUEST_COLUMNS, requests),
        ("segments", SEGMENT_COLUMNS, cells("segments")),
        ("steps", STEP_COLUMNS, cells("steps")),
        ("summary", SUMMARY_COLUMNS, map(_summary_row, lines)),
    ):
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([[_csv_value(value) for value in row] for row in rows])
        write_bytes(directory / f"{name}.csv", text.getvalue().encode())


def _cell_columns(cell: Cell) -> list[Any]:
    return [cell.arm.name, cell.mix, cell.rate.name, cell.seed]


def _summary_row(line: Line) -> list[Any]:
    parts = [line.value, *([line.against.difference, line.against.ratio] if line.against else [])]
    numbers = [number for part in parts for number in (part.value, part.low, part.high)]
    head = [line.arm, line.mix, line.rate, line.kind, line.metric, line.statistic, line.count]
    return head + numbers + [None] * (9 - len(numbers))


def _csv_value(value: Any) -> Any:
    """Empty for None and NaN; floats with six decimal places."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return round(value, 6) if isinstance(value, float) else value
