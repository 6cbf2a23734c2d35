"""report.md: the results of an experiment."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from omni_jax.lab.experiment import Arm, Experiment, Rate, cells, plain
from omni_jax.lab.summary import ALL, Line
from omni_jax.stats.intervals import Comparison, Interval

FEW_SEEDS = 5  # below this the report warns
_UNITS = {"latency_ms": "ms", "ttft_ms": "ms", "tpot_ms": "ms", "queue_ms": "ms", "slowdown": "times"}
_ATTAINMENT = ("slo_attainment", "share")


def write_report(
    experiment: Experiment,
    lines: Sequence[Line],
    *,
    capacities: Mapping[str, float],
    figures: Mapping[str, str],
    missing: Sequence[str] = (),
    failing: Sequence[str] = (),
    facts: Sequence[Mapping[str, Any]],
) -> str:
    """Return the report in Markdown.

    Args:
        capacities: capacity of the baseline in requests per second, by mix.
        figures: captions by file name.
        missing: names of cells that have not run.
        failing: descriptions of cells in which too many requests failed.
        facts: facts about the machine and versions; several if cells ran on different ones.
    """
    parts = [f"# {experiment.name}", experiment.about.strip()]
    if missing:
        some = f"{len(missing)} of {sum(1 for _ in cells(experiment))} cells have not run; the first is {missing[0]}"
        parts.append(f"**Incomplete:** {some}. What is below comes from the others.")
    if failing:
        parts.append(
            f"**Failed requests:** {'; '.join(failing)}. Latencies are those of the requests that ended well, so these "
            "arms cannot be compared."
        )
    if (most := max((line.value.runs for line in lines), default=0)) == 1:
        parts.append(
            "**One seed: no intervals.** The seed is the unit, and one says nothing about how much another would "
            "differ. Seeds can be added to the experiment; only they run then."
        )
    elif 1 < most < FEW_SEEDS:
        parts.append(f"**Only {most} seeds:** intervals are wide and rough. Seeds can be added; only they run then.")
    parts += [
        "## Summary",
        _summary(experiment, lines),
        "## Setup",
        *_setup(experiment, capacities, facts),
    ]
    for mix in experiment.mixes:
        for rate in experiment.rates:
            chosen = [line for line in lines if (line.mix, line.rate) == (mix, rate.name)]
            if chosen:
                parts += [f"## Results: {mix}, {_rate(rate, capacities.get(mix))}", *_results(experiment, chosen)]
    if figures:
        parts.append("## Figures")
        parts += [f"![{caption}]({name})\n\n{caption}." for name, caption in figures.items()]
    parts += ["## How to read this", _NOTES]
    return "\n\n".join(part for part in parts if part) + "\n"


def _summary(experiment: Experiment, lines: Sequence[Line]) -> str:
    """Return a table of changes against the baseline."""
    by = {
        (line.arm, line.mix, line.rate, line.kind, line.metric, line.statistic): line.against
        for line in lines
        if line.against is not None
    }
    metric = "slowdown" if any(key[4] == "slowdown" for key in by) else "latency_ms"
    kinds = [kind for kind in ("text", "image", "table") if any(key[3] == kind for key in by)]
    columns = [((kind, metric, "p95"), f"{kind}, P95") for kind in kinds]
    columns += [((kind, metric, "sd"), f"{kind}, sd") for kind in kinds[:1]]
    columns += [((ALL, *_ATTAINMENT), "SLO attainment, points"), ((ALL, "tokens_per_second", "mean"), "tokens/s")]
    columns = [column for column in columns if any(key[3:] == column[0] for key in by)]

    def row(arm: str, mix: str, rate: str) -> list[str]:
        found = [by.get((arm, mix, rate, *key)) for key, _ in columns]
        seeds = max(against.difference.runs for against in found if against is not None)
        return [
            *(arm, mix, rate, str(seeds)),
            *(_change(against, key[1:]) for against, (key, _) in zip(found, columns, strict=True)),
        ]

    rows = [
        row(arm.name, mix, rate.name)
        for mix in experiment.mixes
        for rate in experiment.rates
        for arm in experiment.arms
        if any(key[:3] == (arm.name, mix, rate.name) for key in by)
    ]
    if not rows:
        return "No comparison yet." if len(experiment.arms) > 1 else "One arm: nothing to compare."
    what = "slowdown (latency over that of the same request alone)" if metric == "slowdown" else "latency"
    return (
        f"Change of {what} against {experiment.baseline_arm.name}, by kind of request; the unit is the seed. **Bold**: "
        "the 95 % interval excludes no change.\n\n"
        + _table(["arm", "mix", "rate", "seeds", *(name for _, name in columns)], rows)
    )


def _change(against: Comparison | None, what: tuple[str, str]) -> str:
    """Format a ratio as a change in per cent, and shares as a change in percentage points."""
    if against is None:
        return "-"
    points = what == _ATTAINMENT
    found, none = (against.difference, 0) if points else (against.ratio, 1)
    value, low, high = (100 * (bound - none) for bound in (found.value, found.low, found.high))
    if not math.isfinite(value):
        return "-"
    text = f"{value:+.1f}" if points else f"{value:+.1f} %"
    if math.isfinite(low):
        text += f" [{low:+.1f}, {high:+,.1f}]"
    return f"**{text}**" if found.excludes(none) else text


def _setup(experiment: Experiment, capacities: Mapping[str, float], facts: Sequence[Mapping[str, Any]]) -> list[str]:
    if experiment.backend == "real":
        how = f"The real engine, model `{_model_name(experiment)}`."
    elif experiment.gpu is not None:
        count = f"{experiment.devices} x " if experiment.devices > 1 else ""
        how = f"A simulation: the engine's scheduler on a virtual clock, step times of {count}{experiment.gpu} by its "
        how += f"roofline for the model `{_model_name(experiment)}`. These are predictions; nothing ran on such a GPU."
    else:
        how = "A simulation: the engine's scheduler on a virtual clock, with step times measured in an earlier run "
        how += f"(`{experiment.step_times.name if experiment.step_times else ''}`)."
    cells = f"{experiment.requests} requests x {len(experiment.seeds)} seeds for each arm, mix and rate; "
    cells += "each arm got the same requests at the same times."
    rows = [
        [
            f"{arm.name}{' (baseline)' if arm == experiment.baseline_arm else ''}",
            _policy(arm),
            arm.scheduling_policy + (f", {experiment.router(arm)}" if experiment.replicas > 1 else ""),
            "yes" if arm.enable_chunked_prefill else "no",
            str(arm.max_num_batched_tokens or experiment.engine.max_num_batched_tokens or "default"),
            arm.about.strip().replace("\n", " "),
        ]
        for arm in experiment.arms
    ]
    parts = [f"{how} {cells}", _table(["arm", "segments", "scheduler", "chunked", "tokens a step", ""], rows)]
    objectives = [
        [kind, *(_or_dash(value) for value in (slo.priority, slo.ttft_ms, slo.tpot_ms, slo.e2e_ms))]
        for kind, slo in experiment.slo.items()
    ]
    if objectives:
        parts.append("Objectives, by which all arms are judged:")
        parts.append(_table(["kind", "priority", "TTFT ms", "TPOT ms", "end to end ms"], objectives))
    if capacities:
        served = ", ".join(f"{mix} {capacity:.3g} requests/s" for mix, capacity in capacities.items())
        parts.append(f"Capacity of the baseline, to which percentages of rate refer: {served}.")
    if len(facts) > 1:
        parts.append(f"**The cells ran on {len(facts)} machines or versions:**")
    parts += ["; ".join(f"{name}: {value}" for name, value in found.items()) + "." for found in facts]
    return parts


def _model_name(experiment: Experiment) -> str:
    return experiment.model.rstrip("/").rsplit("/", 2)[-1]


def _policy(arm: Arm) -> str:
    spec = arm.segment_policy
    return spec if isinstance(spec, str) else f"`{json.dumps(plain(spec))}`"


def _rate(rate: Rate, capacity: float | None) -> str:
    if rate.of_capacity is not None and capacity is not None:
        return f"{rate.name} of capacity ({rate.of_capacity * capacity:.3g} requests/s)"
    return f"{rate.name} requests/s" if rate.per_second is not None else f"{rate.name} rate"


def _results(experiment: Experiment, lines: Sequence[Line]) -> Iterable[str]:
    by = {(line.arm, line.kind, line.metric, line.statistic): line for line in lines}
    arms = [arm.name for arm in experiment.arms if any(line.arm == arm.name for line in lines)]
    kinds = list(dict.fromkeys(line.kind for line in lines))
    for metric, title in (
        ("latency_ms", "Latency, ms (arrival to last token)"),
        ("ttft_ms", "Time to first token, ms"),
        ("slowdown", "Slowdown (latency over that of the same request alone)"),
    ):
        rows = [
            [
                kind if first else "",
                arm,
                str(by[arm, kind, metric, "mean"].requests),
                _failed(by[arm, kind, "failed", "count"]),
                *(_number(by[arm, kind, metric, name].value) for name in ("mean", "p50", "p95", "p99", "sd")),
            ]
            for kind in kinds
            for first, arm in _mark_first(arm for arm in arms if (arm, kind, metric, "mean") in by)
        ]
        if rows:
            yield f"### {title}"
            yield _table(["kind", "arm", "n", "failed", "mean", "P50", "P95", "P99", "sd"], rows)
    rows = [
        [kind if first else "", arm, _share(by[arm, kind, *_ATTAINMENT].value)]
        for kind in kinds
        for first, arm in _mark_first(arm for arm in arms if (arm, kind, *_ATTAINMENT) in by)
    ]
    if rows:
        yield "### SLO attainment"
        yield _table(["kind", "arm", "share of requests that met all objectives"], rows)
    metrics = ("requests_per_second", "tokens_per_second", "busy_tokens_per_second", "pauses", "preemptions")
    rows = [[arm, *(_number(by[arm, ALL, metric, "mean"].value) for metric in metrics)] for arm in arms]
    for row, arm in zip(rows, arms, strict=True):
        row[1:1] = [str(by[arm, ALL, metrics[0], "mean"].value.runs), _failed(by[arm, ALL, "failed", "count"])]
    yield "### Throughput"
    names = ["requests/s", "tokens/s", "tokens/s while busy", "pauses a seed", "preemptions a seed"]
    yield _table(["arm", "seeds", "failed", *names], rows)
    compared = [line for line in lines if line.against is not None and _in_report(line)]
    if compared:
        yield f"### Paired with {experiment.baseline_arm.name}, by seed and request"
        yield _table(
            ["arm", "kind", "metric", "seeds", "requests", "difference", "ratio"],
            [
                [
                    line.arm,
                    line.kind,
                    f"{_NAMES.get(line.metric, line.metric)} {_STATISTICS.get(line.statistic, '')}".strip(),
                    str(line.against.difference.runs),
                    str(line.paired),
                    _number(line.against.difference, _UNITS.get(line.metric, "")),
                    _number(line.against.ratio),
                ]
                for line in compared
                if line.against is not None
            ],
        )


_NAMES = {
    "latency_ms": "latency",
    "ttft_ms": "TTFT",
    "slo_attainment": "SLO attainment",
    "tokens_per_second": "tokens/s",
}
_NAMES |= {"busy_tokens_per_second": "tokens/s while busy"}
_STATISTICS = {"mean": "mean", "p50": "P50", "p95": "P95", "p99": "P99", "sd": "sd"}


def _in_report(line: Line) -> bool:
    """Whether the report has the comparison; summary.csv has all."""
    if line.metric in ("latency_ms", "slowdown"):
        return line.statistic in ("mean", "p95", "sd")
    if line.metric == "ttft_ms":
        return line.statistic == "p95"
    return line.metric in ("slo_attainment", "tokens_per_second", "busy_tokens_per_second")


def _failed(line: Line) -> str:
    """Return the number of failed requests of all seeds."""
    return str(round(line.value.value * line.value.runs))


def _mark_first(names: Iterable[str]) -> Iterable[tuple[bool, str]]:
    return ((number == 0, name) for number, name in enumerate(names))


def _number(interval: Interval, unit: str = "") -> str:
    """Format a value with its bounds; a bound that overflowed has infinity's sign."""
    if not math.isfinite(interval.value):
        return "-"
    text = _digits(interval.value) + (f" {unit}" if unit else "")
    return text if not math.isfinite(interval.low) else f"{text} [{_digits(interval.low)}, {_digits(interval.high)}]"


def _digits(value: float) -> str:
    """Format with three significant digits, never with an exponent."""
    if value == 0 or not math.isfinite(value):
        return "∞" if value == math.inf else f"{value:g}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def _share(interval: Interval) -> str:
    text = f"{100 * interval.value:.1f} %"
    return text if not math.isfinite(interval.low) else f"{text} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _or_dash(value: Any) -> str:
    return "-" if value is None else f"{value:g}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


_NOTES = """\
- **Unit and test.** The unit is the seed: a statistic is computed from the requests of each seed, and a number here is
  its mean over seeds. Brackets hold 95 % intervals by Student's t over seeds: of the numbers themselves on the log
  scale, so that none reaches below zero; of paired differences; of the logarithms of paired ratios, whose mean is
  geometric. Two arms without a difference are called different in about 5 % of comparisons. The tables make many
  comparisons and do not correct for that.
- **Pairs.** A comparison takes the seeds that both arms ran, and in each seed the requests (by id) that ended well
  under both. An interval covers other seeds, so other requests and arrivals; it does not cover other machines or mixes.
- **Failed requests** have no latency and are in no latency statistic; they miss their objectives. Their number is in
  the column `failed`.
- Percentiles are interpolated between ranks; sd is the standard deviation of a seed's requests, the jitter. A P99 of a
  few hundred requests depends on a handful of them.
- Arrivals keep their times even if the engine falls behind, and latency counts from the arrival.
- Slowdown is a request's latency over that of the same request on an idle engine with the baseline's settings, for
  which lengths are grouped in steps of 9 %.
- Throughput counts prompt and output tokens until the last request ended. Below capacity it follows the arrivals, so
  tokens/s while busy, that is while a step was running, reflects cost better.
- `requests.csv`, `segments.csv` and `steps.csv` hold every request, segment and step; `summary.csv` all statistics."""
