"""Runs an experiment: takes the preliminary measurements, runs the cells without a file, writes tables, figures and the
report.

    results/cells/*.json.gz   one file a cell, written atomically, so that an interrupted run can be resumed
    results/measures.json     capacities, and latencies of requests on an idle engine
    results/step-times.json   measured step times, for `step_times:` of a simulation
    results/report.md, figures, requests.csv, segments.csv, steps.csv, summary.csv
"""

import collections
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from omni_jax.lab.backend import Backend, make_backend
from omni_jax.lab.experiment import (
    Cell,
    Experiment,
    cells,
    plain,
    settings_of,
    shared_settings,
    with_slo_of,
    workload,
)
from omni_jax.lab.figures import NoMatplotlib, write_figures
from omni_jax.lab.measures import Shape, alone, capacity, seconds_alone, shape_of
from omni_jax.lab.records import Run, read_json, read_run, write_bytes, write_json, write_run
from omni_jax.lab.report import write_report
from omni_jax.lab.resume import OtherSettings, difference, is_kept, stamped
from omni_jax.lab.summary import Runs, judge, summarise, write_tables
from omni_jax.requests import EngineError
from omni_jax.simulation.workload import Arrival

logger = logging.getLogger(__name__)

Report = Callable[[str, int], None]  # (current work, requests that ended since the last call)

MAX_FAILED = 0.01  # share of a run's requests that may fail; the others no longer stand for all


@dataclasses.dataclass(kw_only=True)
class _Measures:
    """Content of measures.json."""

    settings: dict[str, Any]
    traffic: dict[str, Any] = dataclasses.field(default_factory=dict)  # by mix; what the capacities were measured with
    capacities: dict[str, float] = dataclasses.field(default_factory=dict)
    alone: dict[Shape, tuple[float, float]] = dataclasses.field(default_factory=dict)
    facts: list[dict[str, Any]] = dataclasses.field(
        default_factory=list
    )  # more than one if machine or versions changed


def run_experiment(
    experiment: Experiment, out: Path, *, overwrite: bool = False, backend: Backend | None = None, quiet: bool = False
) -> Path:
    """Run the cells that `out` lacks, and write tables, figures and the report.

    Args:
        overwrite: run cells of other settings again instead of raising.
        backend: replaces the experiment's.
        quiet: whether to show no progress bar.

    Returns:
        the path of the report.

    Raises:
        OtherSettings: `out` holds runs of other settings; the message names the first that differs.
        EngineError: the engine failed; or more than MAX_FAILED of a run's requests did, and the report is written.
        ValueError: a workload can never run, the engine refuses its settings, or a file in `out` is damaged.
        OSError: a model, trace or directory cannot be read or written.
    """
    out.mkdir(parents=True, exist_ok=True)
    measures = _read_measures(experiment, out, overwrite)
    todo = [cell for cell in cells(experiment) if not _is_done(experiment, cell, out, measures, overwrite)]
    if todo:
        _run_cells(experiment, todo, out, measures, backend, quiet)
    return write_results(experiment, out)


def _run_cells(
    experiment: Experiment, todo: list[Cell], out: Path, measures: _Measures, backend: Backend | None, quiet: bool
) -> None:
    with contextlib.ExitStack() as stack:
        if backend is None:
            from omni_jax.progress import stage_bars

            backend = make_backend(experiment, stack.enter_context(stage_bars()))
        report = stack.enter_context(_progress(len(todo) * experiment.requests, quiet))
        if (facts := dict(backend.facts())) not in measures.facts:
            measures.facts.append(facts)
        wanted = dict.fromkeys(cell.mix for cell in todo if cell.rate.of_capacity is not None)
        for mix in wanted:
            if mix not in measures.capacities:
                report(f"capacity of {mix}", 0)
                measures.capacities[mix] = capacity(experiment, backend, mix)
                measures.traffic[mix] = plain(experiment.mixes[mix])
                _write_measures(out, measures)
        if experiment.slowdown:
            arrivals = [
                arrival
                for mix in dict.fromkeys(cell.mix for cell in todo)
                for seed in experiment.seeds
                for arrival in workload(experiment, mix, seed, rate=1.0)
            ]
            left = len({shape_of(arrival) for arrival in arrivals} - measures.alone.keys())
            report(f"{left} requests on an idle engine", 0)
            measures.alone = alone(experiment, backend, arrivals, measures.alone)
        _write_measures(out, measures)
        for number, cell in enumerate(todo, 1):
            at = f"{number}/{len(todo)} {cell.name}"
            report(at, 0)
            arrivals = with_slo_of(cell.arm, _workload(experiment, cell, measures))
            run = backend.replay(cell.arm, arrivals, tag=cell.name, done=lambda at=at: report(at, 1))
            _check_complete(run, arrivals, cell)
            write_run(_file(out, cell), run, _settings(experiment, cell, measures))
        if (times := backend.step_times()) is not None:
            write_json(out / "step-times.json", times)


def _check_complete(run: Run, arrivals: Sequence[Arrival], cell: Cell) -> None:
    if missing := sorted({arrival.id for arrival in arrivals} - {row.id for row in run.requests}):
        raise EngineError(f"{cell.name}: {len(missing)} of {len(arrivals)} requests never ended, such as {missing[0]}")


def write_results(experiment: Experiment, out: Path) -> Path:
    """Write tables, figures and the report from the cells that `out` has.

    Returns:
        the path of the report.

    Raises:
        EngineError: more than MAX_FAILED of a run's requests failed; everything is written all the same.
    """
    measures = _read_measures(experiment, out, False)
    runs: dict[str, Any] = {}
    missing: list[str] = []
    for cell in cells(experiment):
        if not _is_done(experiment, cell, out, measures, False):
            missing.append(cell.name)
            continue
        run, _ = read_run(_file(out, cell))
        seconds = seconds_alone(_workload(experiment, cell, measures), measures.alone) if experiment.slowdown else {}
        judged = tuple(judge(row, experiment.slo.get(row.kind), seconds.get(row.id)) for row in run.requests)
        runs[cell.name] = cell, run, judged
    failing = list(_failing(runs))
    lines = summarise(experiment, runs)
    write_tables(out, runs, lines)
    try:
        figures = write_figures(out, experiment, runs, lines)
    except NoMatplotlib as error:
        logger.warning("%s", error)
        figures = {}
    text = write_report(
        experiment,
        lines,
        capacities=measures.capacities,
        figures=figures,
        missing=missing,
        failing=failing,
        facts=measures.facts,
    )
    write_bytes(out / "report.md", text.encode())
    if failing:
        raise EngineError(
            f"more than {100 * MAX_FAILED:g} % of the requests of a run failed: {'; '.join(failing)}. "
            f"{out / 'report.md'} is written, but compares what survived. To run a cell again, delete its file in "
            f"{out / 'cells'} and repeat the command"
        )
    return out / "report.md"


def _failing(runs: Runs) -> Iterator[str]:
    """Yield a description of each cell in which more than MAX_FAILED of the requests failed."""
    for name, (_, _, some) in runs.items():
        reasons = collections.Counter(judged.row.finish_reason for judged in some if judged.failed)
        if reasons.total() > MAX_FAILED * len(some):
            yield f"{reasons.total()} of {len(some)} requests of {name} ({', '.join(reasons)})"


def _workload(experiment: Experiment, cell: Cell, measures: _Measures):
    return workload(experiment, cell.mix, cell.seed, rate=_per_second(cell, measures))


def _per_second(cell: Cell, measures: _Measures) -> float | None:
    if cell.rate.of_capacity is None:
        return cell.rate.per_second
    return cell.rate.of_capacity * measures.capacities[cell.mix]


# -- files ------------------------------------------------------------------------------------------------------------


def _file(out: Path, cell: Cell) -> Path:
    return out / "cells" / f"{cell.name}.json.gz"


def _settings(experiment: Experiment, cell: Cell, measures: _Measures) -> dict[str, Any]:
    return stamped(settings_of(experiment, cell) | {"requests_per_second": _per_second(cell, measures)})


def _is_done(experiment: Experiment, cell: Cell, out: Path, measures: _Measures, overwrite: bool) -> bool:
    path = _file(out, cell)
    if not path.exists():
        return False
    if cell.rate.of_capacity is not None and cell.mix not in measures.capacities:
        if overwrite:
            return False
        raise OtherSettings(f"{path} needs the capacity it was run at, and {out / 'measures.json'} lacks it")
    _, found = read_run(path)
    return is_kept(path, found, _settings(experiment, cell, measures), overwrite=overwrite)


def _read_measures(experiment: Experiment, out: Path, overwrite: bool) -> _Measures:
    path = out / "measures.json"
    settings = _measure_settings(experiment)
    if not path.exists():
        return _Measures(settings=settings)
    content = read_json(path)
    if content["settings"] != settings:
        if overwrite:
            return _Measures(settings=settings)
        raise OtherSettings(
            f"{path} was measured with other settings ({difference(content['settings'], settings)}): choose another "
            "directory, or --overwrite to measure and run again"
        )
    capacities = {}
    for name, found in content["capacities"].items():
        traffic = plain(experiment.mixes[name]) if name in experiment.mixes else found["traffic"]
        if found["traffic"] == traffic:
            capacities[name] = found["requests_per_second"]
        elif not overwrite:
            raise OtherSettings(
                f"{path}: the capacity of the mix {name} was measured with other settings "
                f"({difference(found['traffic'], traffic)}): rename the mix, or --overwrite"
            )
    return _Measures(
        settings=settings,
        traffic={name: found["traffic"] for name, found in content["capacities"].items()},
        capacities=capacities,
        alone={(kind, text, pixels): (first, pace) for kind, text, pixels, first, pace in content["alone"]},
        facts=list(content["facts"]),
    )


def _measure_settings(experiment: Experiment) -> dict[str, Any]:
    arm = plain(experiment.baseline_arm)
    del arm["about"]
    return {**shared_settings(experiment), "baseline": arm, "capacity_requests": experiment.capacity_requests}


def _write_measures(out: Path, measures: _Measures) -> None:
    write_json(
        out / "measures.json",
        {
            "settings": measures.settings,
            "capacities": {
                name: {"traffic": measures.traffic[name], "requests_per_second": value}
                for name, value in measures.capacities.items()
            },
            "alone": [[*shape, *pace] for shape, pace in sorted(measures.alone.items())],
            "facts": measures.facts,
        },
    )


@contextlib.contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Report]:
    """Show a progress bar over all requests on a terminal; elsewhere print a line for each piece of work."""
    console = Console(stderr=True, quiet=quiet)
    if not console.is_terminal or quiet:
        printed = ""

        def print_work(at: str, ended: int) -> None:
            nonlocal printed
            if at != printed:
                printed = at
                console.print(at, highlight=False, soft_wrap=True)

        yield print_work
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda at, ended: bar.update(task, description=at, advance=ended)
