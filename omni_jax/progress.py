"""Progress of long work: bars on a terminal, a few lines elsewhere."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

Report = Callable[[str, int, int], None]  # (what it is at, bytes done, bytes in all)
StageReport = Callable[[str, int, int, str], None]  # (stage, done, in all, what it is at); "load" counts bytes


@contextlib.contextmanager
def progress_bar(title: str, console: Console | None = None) -> Iterator[Report]:
    """Gives the function to report to. A new number of bytes in all begins a new piece of work.

    Args:
        title: what the work is.
        console: where to show it; standard error by default.
    """
    console = console or Console(stderr=True)
    with (_bar if console.is_terminal else _lines)(title, console) as report:
        yield report


@contextlib.contextmanager
def _bar(title: str, console: Console) -> Iterator[Report]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("[dim]{task.fields[at]}"), console=console) as progress:
        tasks = {}

        def report(at: str, done: int, total: int) -> None:
            if total not in tasks:
                tasks[total] = progress.add_task(title, total=total, at=at)
            progress.update(tasks[total], completed=done, at=at)

        yield report


@contextlib.contextmanager
def _lines(title: str, console: Console) -> Iterator[Report]:
    shown: dict[int, int] = {}

    def report(at: str, done: int, total: int) -> None:
        quarter = 4 * done // max(total, 1)
        if quarter > shown.get(total, -1):
            shown[total] = quarter
            console.print(f"{title}: {25 * quarter} % of {total / 1e6:.1f} MB ({at})", highlight=False, soft_wrap=True)

    yield report


@contextlib.contextmanager
def stage_bars(console: Console | None = None) -> Iterator[StageReport | None]:
    """Gives the function that an engine reports its start to; None without a terminal, where the log says it all.

    A stage's bar is shown until it is done; leaving takes away what a failed start has left.
    """
    console = console or Console(stderr=True)
    bars: dict[str, tuple[Progress, TaskID]] = {}

    def report(stage: str, done: int, total: int, at: str) -> None:
        if stage not in bars:
            count = DownloadColumn() if stage == "load" else MofNCompleteColumn()
            columns = (TextColumn("{task.description}"), BarColumn(), count, TextColumn("[dim]{task.fields[at]}"))
            progress = Progress(*columns, console=console, transient=True)
            bars[stage] = progress, progress.add_task(stage, total=total, at=at)
            progress.start()
        progress, task = bars[stage]
        progress.update(task, completed=done, at=at)
        if done >= total:
            progress.stop()

    try:
        yield report if console.is_terminal else None
    finally:
        for progress, _ in bars.values():
            progress.stop()
