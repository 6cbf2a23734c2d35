"""Progress of long tasks: bars on a terminal, a few lines elsewhere."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

logger = logging.getLogger(__name__)

Report = Callable[[str, int, int], None]  # (current item, bytes done, total bytes)
# (stage, done, total, current item); stages are "load", which counts bytes, and "compile", which counts executables
StageReport = Callable[[str, int, int, str], None]

START_SHARES = {"load": (0.0, 0.2), "compile": (0.2, 1.0)}  # parts of the bar of a start, by typical duration

LOG_SECONDS = 30.0  # between two lines in the log, where there is no terminal


@contextlib.contextmanager
def progress_bar(title: str, console: Console | None = None) -> Iterator[Report]:
    """Yield a function that reports progress. A call with another total starts a new bar.

    Args:
        title: name of the task.
        console: where to print; standard error by default.
    """
    console = console or Console(stderr=True)
    with (_bar if console.is_terminal else _lines)(title, console) as report:
        yield report


@contextlib.contextmanager
def _bar(title: str, console: Console) -> Iterator[Report]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("[dim]{task.fields[item]}"), console=console) as progress:
        tasks = {}

        def report(item: str, done: int, total: int) -> None:
            if total not in tasks:
                tasks[total] = progress.add_task(title, total=total, item=item)
            progress.update(tasks[total], completed=done, item=item)

        yield report


@contextlib.contextmanager
def _lines(title: str, console: Console) -> Iterator[Report]:
    shown: dict[int, int] = {}

    def report(item: str, done: int, total: int) -> None:
        quarter = 4 * done // max(total, 1)
        if quarter > shown.get(total, -1):
            shown[total] = quarter
            line = f"{title}: {25 * quarter} % of {total / 1e6:.1f} MB ({item})"
            console.print(line, highlight=False, soft_wrap=True)

    yield report


@contextlib.contextmanager
def stage_bars(console: Console | None = None) -> Iterator[StageReport]:
    """Yield a function that reports stages: as bars on a terminal, elsewhere as a line in the log every 30 s.

    Loading and compiling share one bar, which ends when the engine can take requests. Any other stage has its own bar.
    Bars are shown until they are full, or until the context ends.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _log_stages()
        return
    bars: dict[str, tuple[Progress, TaskID]] = {}

    def report(stage: str, done: int, total: int, item: str) -> None:
        start, stop = START_SHARES.get(stage, (0.0, 1.0))
        title = "starting" if stage in START_SHARES else stage
        if title not in bars:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            progress = Progress(*columns, TextColumn("[dim]{task.fields[item]}"), console=console, transient=True)
            bars[title] = progress, progress.add_task(title, total=1.0, item=item)
            progress.start()
        progress, task = bars[title]
        share = start + (stop - start) * done / max(total, 1)
        progress.update(task, completed=share, item=f"{_count(stage, done, total)} {item}")
        if share >= 1.0:
            progress.stop()

    try:
        yield report
    finally:
        for progress, _ in bars.values():
            progress.stop()


def _log_stages() -> StageReport:
    """A function that logs what it is told, at most once in LOG_SECONDS."""
    logged = time.monotonic()

    def report(stage: str, done: int, total: int, item: str) -> None:
        nonlocal logged
        if time.monotonic() - logged >= LOG_SECONDS:
            logged = time.monotonic()
            title = "starting" if stage in START_SHARES else stage
            logger.info("%s: %s %s", title, _count(stage, done, total), item)

    return report


@contextlib.contextmanager
def request_bar(wanted: bool | Callable[..., Any], total: int) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that reports how many of `total` requests have ended, and how many tokens were generated.

    Args:
        wanted: True: a bar on a terminal; False: nothing; or what makes a bar with tqdm's arguments and methods.
    """
    started = time.monotonic()
    if callable(wanted):
        bar, seen = wanted(total=total, desc="Processed prompts"), 0

        def update(done: int, tokens: int) -> None:
            nonlocal seen
            bar.update(done - seen)
            seen = done

        try:
            yield update
        finally:
            bar.close()
        return
    with stage_bars() if wanted else contextlib.nullcontext() as report:

        def show(done: int, tokens: int) -> None:
            if report is not None:
                speed = tokens / max(time.monotonic() - started, 1e-9)
                report("generating", done, total, f"requests, {tokens} tokens, {speed:.0f}/s")

        yield show


def _count(stage: str, done: int, total: int) -> str:
    if stage == "load":
        return f"weights: {done / 1e6:.0f} of {total / 1e6:.0f} MB"
    return f"programs: {done} of {total}" if stage == "compile" else f"{done} of {total}"
