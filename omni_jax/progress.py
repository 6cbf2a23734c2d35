"""Progress of long tasks: bars on a terminal, a few lines elsewhere."""

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

Report = Callable[[str, int, int], None]  # (current item, bytes done, total bytes)
# (stage, done, total, current item); stages are "load", which counts bytes, and "compile", which counts executables
StageReport = Callable[[str, int, int, str], None]


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
def stage_bars(console: Console | None = None) -> Iterator[StageReport | None]:
    """Yield a function that reports the start of an engine, or None without a terminal, where the log is enough.

    A stage's bar is shown until the stage is done, or until the context ends.
    """
    console = console or Console(stderr=True)
    bars: dict[str, tuple[Progress, TaskID]] = {}

    def report(stage: str, done: int, total: int, item: str) -> None:
        if stage not in bars:
            count = DownloadColumn() if stage == "load" else MofNCompleteColumn()
            columns = (TextColumn("{task.description}"), BarColumn(), count, TextColumn("[dim]{task.fields[item]}"))
            progress = Progress(*columns, console=console, transient=True)
            bars[stage] = progress, progress.add_task(stage, total=total, item=item)
            progress.start()
        progress, task = bars[stage]
        progress.update(task, completed=done, item=item)
        if done >= total:
            progress.stop()

    try:
        yield report if console.is_terminal else None
    finally:
        for progress, _ in bars.values():
            progress.stop()
