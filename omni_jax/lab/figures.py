"""Figures of an experiment: PNG files, drawn without a display."""

import collections
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from omni_jax.lab.experiment import Experiment
from omni_jax.lab.records import Run, StepRow, write_bytes
from omni_jax.lab.summary import ALL, Line, Runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"text": "#1f77b4", "image": "#d95f02", "table": "#1b9e77", "decode": "#999999", "encode": "#e7298a"}
WINDOW_STEPS = 80  # steps that the timeline shows
MAX_TIMELINES = 4  # arms that the timeline shows


class NoMatplotlib(RuntimeError):
    """Matplotlib, of the extra `lab`, is not installed."""


def write_figures(directory: Path, experiment: Experiment, runs: Runs, lines: Sequence[Line]) -> dict[str, str]:
    """Draw the figures for which the runs have data.

    Returns:
        captions by file name.

    Raises:
        NoMatplotlib: it is not installed.
    """
    drawn: dict[str, tuple[str, Callable[[], Figure | None]]] = {}
    for mix in experiment.mixes:
        for rate in experiment.rates:
            drawn[f"latency-{mix}-{rate.name.replace('%', 'pct')}.png"] = (
                f"Latency ({mix}, {rate.name}): cumulative share of requests by kind, all seeds together",
                lambda mix=mix, rate=rate: _latencies(experiment, runs, mix, rate.name),
            )
        drawn[f"timeline-{mix}.png"] = (
            f"Segments over time ({mix}, last rate, first seed): a line for each request, a bar for each step that "
            "computed tokens of its prompt, coloured by the segment's modality; below, decoding and the vision tower. "
            "All arms show the same seconds, those in which the baseline computed most segments",
            lambda mix=mix: _timeline(experiment, runs, mix),
        )
        drawn[f"p95-{mix}.png"] = (
            f"P95 of latency against the rate ({mix}), with 95 % intervals over seeds",
            lambda mix=mix: _rates(experiment, lines, mix),
        )
    drawn["segments.png"] = (
        "Device time of a prompt's segment, by arm and modality, without the vision tower: the bar is the middle half, "
        "the mark the median, the line from the 5th to the 95th percentile, the number the standard deviation over the "
        "mean",
        lambda: _segments(experiment, runs),
    )
    written = {}
    for name, (caption, draw) in drawn.items():
        figure = draw()
        if figure is not None:
            data = io.BytesIO()
            figure.savefig(data, format="png", dpi=130, bbox_inches="tight")
            write_bytes(directory / name, data.getvalue())
            written[name] = caption
    return written


def subplots(rows: int, columns: int, *, width: float, height: float, **shared: Any) -> "tuple[Figure, list[Axes]]":
    """Return a new figure on the Agg canvas, without a window and pyplot's state, and its axes."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlib('figures need matplotlib: pip install "omni-jax[lab]"') from error
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **shared).flat)


def _latencies(experiment: Experiment, runs: Runs, mix: str, rate: str) -> "Figure | None":
    chosen = [found for found in runs.values() if (found[0].mix, found[0].rate.name) == (mix, rate)]
    kinds = _ordered({judged.row.kind for *_, some in chosen for judged in some})
    if not kinds:
        return None
    figure, axes = subplots(1, len(kinds), width=4, height=3.2, sharey=True)
    for ax, kind in zip(axes, kinds, strict=True):
        for number, arm in enumerate(experiment.arms):
            of_arm = [judged for cell, _, some in chosen if cell.arm == arm for judged in some]
            mine = [judged.latency_ms for judged in of_arm if judged.row.kind == kind]
            values = sorted(latency / 1000 for latency in mine if latency is not None)
            if values:
                shares = np.arange(1, len(values) + 1) / len(values)
                ax.plot(values, shares, label=arm.name, color=f"C{number}")
        ax.set(title=kind, xlabel="latency, s", xscale="log")
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter("")
        ax.grid(alpha=0.3)
        ax.axhline(0.95, color="black", linewidth=0.6, linestyle=":")
    axes[0].set_ylabel("share of requests")
    axes[-1].legend()
    return figure


def _ordered(kinds: set[str]) -> list[str]:
    return [kind for kind in ("text", "image", "table") if kind in kinds]


def _timeline(experiment: Experiment, runs: Runs, mix: str) -> "Figure | None":
    chosen: dict[str, Run] = {}
    for cell, run, _ in runs.values():
        here = (cell.mix, cell.rate, cell.seed) == (mix, experiment.rates[-1], experiment.seeds[0])
        if here and run.steps:
            chosen[cell.arm.name] = run
    baseline = chosen.get(experiment.baseline_arm.name)
    if baseline is None:
        return None
    begin, end = _window(baseline.steps)
    shown = list(chosen.items())[:MAX_TIMELINES]
    figure, axes = subplots(len(shown), 1, width=9, height=2.4, sharex=True)
    for ax, (name, run) in zip(axes, shown, strict=True):
        _draw_steps(ax, run.steps, begin, end)
        ax.set(title=name, ylabel="request", xlim=(0, end - begin))
    axes[-1].set_xlabel("seconds")
    figure.legend(
        handles=[_patch(colour, label) for label, colour in COLOURS.items()],
        loc="outside lower center",
        ncols=len(COLOURS),
        fontsize="small",
    )
    return figure


def _window(steps: Sequence[StepRow]) -> tuple[float, float]:
    """Return the begin and end of the WINDOW_STEPS consecutive steps that computed most segments of prompts."""
    segments: dict[int, set[tuple[str, int]]] = collections.defaultdict(set)
    times: dict[int, tuple[float, float]] = {}
    for step in steps:
        times[step.step] = step.started_at, step.ended_at
        if step.request_id:
            segments[step.step].add((step.request_id, step.segment))
    last = max(times)
    starts = range(0, max(last - WINDOW_STEPS, 0) + 1, WINDOW_STEPS // 2)
    first = max(starts, key=lambda at: len(set().union(*(segments[n] for n in range(at, at + WINDOW_STEPS)))))
    return times[first][0], times[min(first + WINDOW_STEPS - 1, last)][1]


def _draw_steps(ax: "Axes", steps: Sequence[StepRow], begin: float, end: float) -> None:
    shown = [step for step in steps if step.ended_at > begin and step.started_at < end]
    prompts = dict.fromkeys(step.request_id for step in shown if step.request_id)
    lanes = {name: lane for lane, name in enumerate(prompts, 1)}
    for step in shown:
        lane = {"decode": 0, "encode": -1}[step.compute] if step.compute in COLOURS else lanes[step.request_id]
        colour = COLOURS.get(step.compute) or COLOURS.get(step.modality, "black")
        width = step.ended_at - step.started_at
        ax.barh(lane, width, left=step.started_at - begin, color=colour, height=0.8, linewidth=0)
    ax.set_yticks([-1, 0], ["tower", "decode"], fontsize="small")
    ax.grid(axis="x", alpha=0.3)


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _rates(experiment: Experiment, lines: Sequence[Line], mix: str) -> "Figure | None":
    chosen = [line for line in lines if (line.mix, line.metric, line.statistic) == (mix, "latency_ms", "p95")]
    kinds = _ordered({line.kind for line in chosen})
    if not kinds:
        return None
    figure, axes = subplots(1, len(kinds), width=4, height=3.2)
    names = [rate.name for rate in experiment.rates]
    for ax, kind in zip(axes, kinds, strict=True):
        for number, arm in enumerate(experiment.arms):
            of_arm = {line.rate: line.value for line in chosen if (line.arm, line.kind) == (arm.name, kind)}
            at = [place for place, name in enumerate(names) if name in of_arm]
            values = [of_arm[names[place]] for place in at]
            spread = [
                [max(0.0, value.value - value.low) / 1000 for value in values],
                [max(0.0, value.high - value.value) / 1000 for value in values],
            ]
            beside = [place + 0.06 * (number - len(experiment.arms) / 2) for place in at]
            middle = [value.value / 1000 for value in values]
            ax.errorbar(beside, middle, yerr=spread, label=arm.name, color=f"C{number}", marker="o", capsize=3)
        ax.set(title=kind, xlabel="rate", xlim=(-0.6, len(names) - 0.4))
        ax.set_xticks(range(len(names)), names)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("P95 of latency, s")
    axes[-1].legend()
    return figure


def _segments(experiment: Experiment, runs: Runs) -> "Figure | None":
    found = {
        arm.name: [segment for cell, run, _ in runs.values() if cell.arm == arm for segment in run.segments]
        for arm in experiment.arms
    }
    modalities = _ordered({segment.modality for segments in found.values() for segment in segments})
    if not modalities:
        return None
    figure, axes = subplots(1, len(modalities) + 1, width=3.2, height=1.0 + 0.4 * len(found), sharey=True)
    for ax, modality in zip(axes, [ALL, *modalities], strict=True):
        for lane, segments in enumerate(found.values()):
            values = np.array([1000 * s.seconds for s in segments if modality in (ALL, s.modality)])
            if values.size:
                low, first, middle, third, high = np.percentile(values, (5, 25, 50, 75, 95))
                ax.barh(lane, third - first, left=first, height=0.6, color=f"C{lane}", alpha=0.5)
                ax.plot([low, high], [lane, lane], color=f"C{lane}", linewidth=1)
                ax.plot([middle], [lane], "k|", markersize=12)
                spread = f" {values.std() / max(values.mean(), 1e-12):.2f}"
                ax.annotate(spread, (high, lane), fontsize="small", verticalalignment="center")
        ax.set(title=f"{modality} segments", xscale="log", xlabel="device time, ms")
        ax.margins(x=0.25)
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter("")
        ax.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(found)), list(found))
    axes[0].invert_yaxis()
    return figure
