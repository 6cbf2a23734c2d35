"""Progress of long work with a known number of bytes: a bar on a terminal, a few lines elsewhere."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

Report = Callable[[str, int, int], None]  # (what it is at, bytes done, bytes in all)


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
