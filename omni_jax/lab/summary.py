"""Tables of an experiment: a line for each request, and a line for each statistic of each arm with its interval and its
paired difference from the baseline.

A statistic is computed for each seed, and intervals are over seeds (omni_jax.stats.intervals). A comparison pairs
seeds, and within a seed the requests with the same id that ended well under both arms.
"""

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
from omni_jax.stats.intervals import STATISTICS, Comparison, Interval, Statistic, compare, over_runs

ALL = "all"  # all kinds of requests together
METRICS = ("latency_ms", "ttft_ms", "tpot_ms", "queue_ms", "slowdown")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """A request with its latencies in milliseconds. A failed request has none: it would count as a fast one.

    Attributes:
        failed: see RequestRow.
        queue_ms: from arrival until it is first scheduled.
        ttft_ms: from arrival to the first token.
        tpot_ms: average from token to token; None with fewer than two tokens.
        latency_ms: from arrival to the last token.
        alone_ms: latency of the same request on an idle engine; None if not measured.
        slowdown: latency_ms / alone_ms.
        slo_met: whether it met all objectives of its kind, which a failed request does not; None if there are none.
    """

    row: RequestRow
    failed: bool
    queue_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    latency_ms: float | None
    alone_ms: float | None
    slowdown: float | None
    slo_met: bool | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A statistic of an arm.

    Attributes:
        kind: kind of request, or all.
        metric, statistic: latency_ms, ttft_ms, tpot_ms, queue_ms or slowdown with mean, p50, p95, p99 or sd;
            slo_attainment with share; failed with count; requests_per_second, tokens_per_second,
            busy_tokens_per_second, pauses and preemptions with mean.
        requests: number of requests, of all seeds, that it comes from.
        value: mean over seeds of the statistic of each seed.
        paired: number of requests in the comparison.
        against: comparison with the baseline; None for the baseline itself, and without a seed that both ran.
    """

    arm: str
    mix: str
    rate: str
    kind: str
    metric: str
    statistic: str
    requests: int
    value: Interval
    paired: int = 0
    against: Comparison | None = None


def judge(row: RequestRow, slo: SLO | None, alone: float | None) -> Judged:
    """Return the latencies of a request.

    Args:
        slo: objectives that it is judged by.
        alone: seconds that the same request takes on an idle engine.
    """
    failed = row.failed
    first = None if failed else row.first_token_at
    latency = None if failed else 1000 * (row.ended_at - row.arrival)
    ttft = None if first is None else 1000 * (first - row.arrival)
    tpot = None if first is None or row.output_tokens < 2 else 1000 * (row.ended_at - first) / (row.output_tokens - 1)
    met = None
    if slo is not None and (slo.ttft_ms, slo.tpot_ms, slo.e2e_ms) != (None, None, None):
        pairs = ((slo.ttft_ms, ttft), (slo.tpot_ms, tpot), (slo.e2e_ms, latency))
        met = not failed and all(limit is None or value is None or value <= limit for limit, value in pairs)
    return Judged(
        row=row,
        failed=failed,
        queue_ms=None if failed or row.scheduled_at is None else 1000 * (row.scheduled_at - row.arrival),
        ttft_ms=ttft,
        tpot_ms=tpot,
        latency_ms=latency,
        alone_ms=None if alone is None else 1000 * alone,
        slowdown=None if alone is None or latency is None else latency / (1000 * alone),
        slo_met=met,
    )


Runs = Mapping[str, tuple[Cell, Run, tuple[Judged, ...]]]  # by name of the cell, in the experiment's order


def summarise(experiment: Experiment, runs: Runs) -> list[Line]:
    """Return all statistics of all arms, from the cells that have run. An arm is compared with the baseline over the
    seeds that both have run."""
    lines = []
    for mix in experiment.mixes:
        for rate in experiment.rates:
            of_arm: dict[str, _Seeds] = {arm.name: {} for arm in experiment.arms}
            for cell, run, some in runs.values():
                if (cell.mix, cell.rate.name) == (mix, rate.name):
                    of_arm[cell.arm.name][cell.seed] = run, some
            baseline = experiment.baseline_arm.name
            for name, mine in of_arm.items():
                if mine:
                    other = {} if name == baseline else of_arm[baseline]
                    lines += [
                        Line(arm=name, mix=mix, rate=rate.name, **found)
                        for found in (*_of_requests(mine, other), *_of_runs(mine, other))
                    ]
    return lines


_Seeds = dict[int, tuple[Run, tuple[Judged, ...]]]  # the runs of one arm, mix and rate
_Values = dict[int, dict[str, float]]  # by seed and id of the request


def _of_requests(mine: _Seeds, baseline: _Seeds) -> Iterable[dict[str, Any]]:
    for kind in _kinds(mine):
        for metric, statistics, most in (
            *((metric, STATISTICS, math.inf) for metric in METRICS),
            ("slo_attainment", {"share": STATISTICS["mean"]}, 1.0),
            ("failed", {"count": lambda values: float(values.sum())}, math.inf),
        ):
            values, others = _values(mine, kind, metric), _values(baseline, kind, metric)
            if not values:
                continue
            pairs = _pairs(values, others)
            for name, function in statistics.items():
                yield {
                    "kind": kind,
                    "metric": metric,
                    "statistic": name,
                    "requests": sum(map(len, values.values())),
                    "value": over_runs([_of(function, run) for run in values.values()], most=most),
                    "paired": sum(map(len, pairs.values())),
                    "against": compare(
                        [_of(function, values[seed], ids) for seed, ids in pairs.items()],
                        [_of(function, others[seed], ids) for seed, ids in pairs.items()],
                        most=most,
                    )
                    if pairs
                    else None,
                }


def _of_runs(mine: _Seeds, baseline: _Seeds) -> Iterable[dict[str, Any]]:
    both = [seed for seed in mine if seed in baseline]
    for metric, function in _RUN_METRICS.items():
        yield {
            "kind": ALL,
            "metric": metric,
            "statistic": "mean",
            "requests": sum(len(run.requests) for run, _ in mine.values()),
            "value": over_runs([function(run) for run, _ in mine.values()]),
            "paired": sum(len(mine[seed][0].requests) for seed in both),
            "against": compare(
                [function(mine[seed][0]) for seed in both], [function(baseline[seed][0]) for seed in both]
            )
            if both
            else None,
        }


def _kinds(runs: _Seeds) -> list[str]:
    found = {judged.row.kind for _, some in runs.values() for judged in some}
    return [ALL, *(kind for kind in ("text", "image", "table") if kind in found)]


def _values(runs: _Seeds, kind: str, metric: str) -> _Values:
    """Return a metric of each request of a kind. Requests without it, and seeds without such requests, are left out."""
    name = {"slo_attainment": "slo_met"}.get(metric, metric)
    found = {
        seed: {
            judged.row.id: float(value)
            for judged in some
            if kind in (ALL, judged.row.kind) and (value := getattr(judged, name)) is not None
        }
        for seed, (_, some) in runs.items()
    }
    return {seed: values for seed, values in found.items() if values}


def _pairs(mine: _Values, others: _Values) -> dict[int, list[str]]:
    """Return, by seed, the ids that both have."""
    found = {seed: [name for name in values if name in others.get(seed, {})] for seed, values in mine.items()}
    return {seed: names for seed, names in found.items() if names}


def _of(function: Statistic, values: Mapping[str, float], ids: Iterable[str] | None = None) -> float:
    return function(np.array([values[name] for name in (values if ids is None else ids)]))


def _tokens(run: Run) -> int:
    return sum(row.prompt_tokens + row.output_tokens for row in run.requests if not row.failed)


def _span(run: Run) -> float:
    """Return the seconds from the first arrival to the last completion."""
    return max(row.ended_at for row in run.requests) - min(row.arrival for row in run.requests)


_RUN_METRICS = {
    "requests_per_second": lambda run: sum(not row.failed for row in run.requests) / max(_span(run), 1e-9),
    "tokens_per_second": lambda run: _tokens(run) / max(_span(run), 1e-9),
    "busy_tokens_per_second": lambda run: _tokens(run) / max(run.busy_seconds, 1e-9),
    "pauses": lambda run: float(sum(row.pauses for row in run.requests)),
    "preemptions": lambda run: float(sum(row.preemptions for row in run.requests)),
}


# -- files ------------------------------------------------------------------------------------------------------------

_CELL = ("arm", "mix", "rate", "seed")
_DERIVED = ("failed", "queue_ms", "ttft_ms", "tpot_ms", "latency_ms", "alone_ms", "slowdown", "slo_met")
REQUEST_COLUMNS = (*_CELL, *(field.name for field in dataclasses.fields(RequestRow)), *_DERIVED)
SEGMENT_COLUMNS = (*_CELL, *(field.name for field in dataclasses.fields(SegmentRow)))
STEP_COLUMNS = (*_CELL, *(field.name for field in dataclasses.fields(StepRow)))
SUMMARY_COLUMNS = (
    *("arm", "mix", "rate", "kind", "metric", "statistic", "requests", "runs", "value", "low", "high"),
    *("paired_requests", "paired_runs", "difference", "difference_low", "difference_high"),
    *("ratio", "ratio_low", "ratio_high"),
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
    row = [line.arm, line.mix, line.rate, line.kind, line.metric, line.statistic]
    row += [line.requests, line.value.runs, line.value.value, line.value.low, line.value.high]
    if line.against is None:
        return row + [None] * (len(SUMMARY_COLUMNS) - len(row))
    row += [line.paired, line.against.difference.runs]
    for part in (line.against.difference, line.against.ratio):
        row += [part.value, part.low, part.high]
    return row


def _csv_value(value: Any) -> Any:
    """Empty for None and what is not finite; floats with six decimal places."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return round(value, 6) if isinstance(value, float) else value
