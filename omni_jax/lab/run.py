"""Carries out an experiment: measures what is needed, runs the cells that have no file yet, writes tables, figures and
the report.

    results/cells/*.json.gz   one file a cell, written whole or not at all: an interrupted run goes on where it was
    results/measures.json     capacities, and what requests take alone
    results/step-times.json   what steps took here: `step_times:` of a simulation
    results/report.md, figures, requests.csv, segments.csv, steps.csv, summary.csv
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from omni_jax.lab.backend import Backend, make_backend
from omni_jax.lab.experiment import (
    Cell,
    Experiment,
    cells,
    digest,
    plain,
    settings_of,
    shared_settings,
    told,
    workload,
)
from omni_jax.lab.figures import NoMatplotlib, write_figures
from omni_jax.lab.measures import Shape, alone, capacity, seconds_alone, shape_of
from omni_jax.lab.records import read_json, read_run, write_bytes, write_json, write_run
from omni_jax.lab.report import write_report
from omni_jax.lab.summary import Judged, judge, summarise, write_tables

logger = logging.getLogger(__name__)

Report = Callable[[str, int], None]  # (what it is at, requests that ended since the last call)


class OtherSettings(ValueError):
    """The results in the directory were made with other settings."""


@dataclasses.dataclass(kw_only=True)
class _Measures:
    """What measures.json holds."""

    settings: dict[str, Any]
    traffic: dict[str, Any] = dataclasses.field(default_factory=dict)  # that the capacities are of
    capacities: dict[str, float] = dataclasses.field(default_factory=dict)
    alone: dict[Shape, tuple[float, float]] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def run_experiment(
    experiment: Experiment, out: Path, *, overwrite: bool = False, backend: Backend | None = None, quiet: bool = False
) -> Path:
    """Runs what is missing in `out`, and writes everything anew that follows from the runs.

    Args:
        overwrite: runs again what other settings made; else they are an error.
        backend: in place of the one that the experiment asks for.
        quiet: no progress bar.

    Returns:
        the report's path.

    Raises:
        OtherSettings: `out` holds runs of other settings; the message names the first that differs.
        ValueError: a workload that can never run, settings that the engine refuses, a file in `out` that is not whole.
        OSError: a model, trace or directory that cannot be read or written.
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
        measures.facts = dict(backend.facts())
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
            report(f"{left} requests alone", 0)
            measures.alone = alone(experiment, backend, arrivals, measures.alone)
        _write_measures(out, measures)
        for number, cell in enumerate(todo, 1):
            at = f"{number}/{len(todo)} {cell.name}"
            report(at, 0)
            arrivals = told(_workload(experiment, cell, measures), cell.arm)
            run = backend.replay(cell.arm, arrivals, tag=cell.name, done=lambda at=at: report(at, 1))
            write_run(_file(out, cell), run, _settings(experiment, cell, measures))
        if (times := backend.step_times()) is not None:
            write_json(out / "step-times.json", times)


def write_results(experiment: Experiment, out: Path) -> Path:
    """Tables, figures and report of the cells that `out` has.

    Returns:
        the report's path.
    """
    measures = _read_measures(experiment, out, False)
    runs, missing = {}, []
    for cell in cells(experiment):
        if not _is_done(experiment, cell, out, measures, False):
            missing.append(cell.name)
            continue
        run, _ = read_run(_file(out, cell))
        seconds = seconds_alone(_workload(experiment, cell, measures), measures.alone) if experiment.slowdown else {}
        judged: tuple[Judged, ...] = tuple(
            judge(row, experiment.slo.get(row.kind), seconds.get(row.id)) for row in run.requests
        )
        runs[cell.name] = cell, run, judged
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
        facts=measures.facts,
    )
    write_bytes(out / "report.md", text.encode())
    return out / "report.md"


def _workload(experiment: Experiment, cell: Cell, measures: _Measures):
    return workload(experiment, cell.mix, cell.seed, rate=_per_second(cell, measures))


def _per_second(cell: Cell, measures: _Measures) -> float | None:
    if cell.rate.of_capacity is None:
        return cell.rate.per_second
    return cell.rate.of_capacity * measures.capacities[cell.mix]


# -- what is there ----------------------------------------------------------------------------------------------------


def _file(out: Path, cell: Cell) -> Path:
    return out / "cells" / f"{cell.name}.json.gz"


def _settings(experiment: Experiment, cell: Cell, measures: _Measures) -> dict[str, Any]:
    settings = settings_of(experiment, cell) | {"requests_per_second": _per_second(cell, measures)}
    return settings | {"digest": digest(settings)}


def _is_done(experiment: Experiment, cell: Cell, out: Path, measures: _Measures, overwrite: bool) -> bool:
    path = _file(out, cell)
    if not path.exists():
        return False
    if cell.rate.of_capacity is not None and cell.mix not in measures.capacities:
        if overwrite:
            return False
        raise OtherSettings(f"{path} is there, and the capacity it goes by is not: {out / 'measures.json'} is missing")
    settings = _settings(experiment, cell, measures)
    _, found = read_run(path)
    if found == settings:
        return True
    if overwrite:
        return False
    raise OtherSettings(
        f"{path} was made with other settings ({_difference(found, settings)}): choose another directory, or "
        "--overwrite to run these cells again"
    )


def _difference(found: Any, wanted: Any, where: str = "") -> str:
    """The first setting that differs."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in [*wanted, *(key for key in found if key not in wanted)]:
            if key != "digest" and found.get(key) != wanted.get(key):
                return _difference(found.get(key), wanted.get(key), f"{where}.{key}" if where else key)
    return f"{where} was {found!r} and is {wanted!r} now"


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
            f"{path} was made with other settings ({_difference(content['settings'], settings)}): choose another "
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
                f"({_difference(found['traffic'], traffic)}): call the mix something else, or --overwrite"
            )
    return _Measures(
        settings=settings,
        traffic={name: found["traffic"] for name, found in content["capacities"].items()},
        capacities=capacities,
        alone={(kind, text, pixels): (first, pace) for kind, text, pixels, first, pace in content["alone"]},
        facts=content["facts"],
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
    """A bar over all requests on a terminal, a line for each piece of work elsewhere."""
    console = Console(stderr=True, quiet=quiet)
    if not console.is_terminal or quiet:
        said = ""

        def tell(at: str, ended: int) -> None:
            nonlocal said
            if at != said:
                said = at
                console.print(at, highlight=False, soft_wrap=True)

        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda at, ended: bar.update(task, description=at, advance=ended)
