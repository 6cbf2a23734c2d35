"""Progress and summary of `describe-images`."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

INTERRUPTED = 130  # exit code of shells for SIGINT

_LINE_PERIOD = 10.0  # seconds between lines of progress without a terminal
_MAX_SKIPPED = 20  # skipped files that the summary names
_MAX_REASONS = 5  # kinds of failures that the summary shows

Count = Callable[[Mapping[str, Any]], None]


@dataclasses.dataclass(kw_only=True)
class Summary:
    """Result of a run.

    Attributes:
        sources: number of sources, the sum of the next five.
        done_before: sources that already had a good row.
        failed_before: sources that had failed and were not retried.
        not_sent: sources beyond the limit, or without an answer when the run was interrupted or stopped.
        described: sources with a new good row.
        failed: sources with a new error row.
        prompt_tokens, completion_tokens: sums over the `usage` of answers.
        seconds: duration of the run.
        interrupted: whether a signal ended the run.
        stopped: why the run stopped early by itself; None if it did not.
        resume: the command that sends the rest, after an interrupted or stopped run.
        out: path of the output file.
        skipped: files of a folder that are not sent, as (path, reason).
        reasons: failures by HTTP status, or by type if there was no response: their count, and the message of one.
    """

    sources: int
    done_before: int = 0
    failed_before: int = 0
    not_sent: int
    described: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    stopped: str | None = None
    resume: str | None = None
    out: str
    skipped: tuple[tuple[str, str], ...] = ()
    reasons: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def count(self, row: Mapping[str, Any]) -> None:
        """Add a row that was written."""
        self.not_sent -= 1
        error = row.get("error")
        if error is None:
            self.described += 1
            self.prompt_tokens += _tokens(row["usage"], "prompt_tokens")
            self.completion_tokens += _tokens(row["usage"], "completion_tokens")
        else:
            self.failed += 1
            kind = str(error["type"] if error["status"] is None else error["status"])
            reason = self.reasons.setdefault(kind, {"count": 0, "message": error["message"]})
            reason["count"] += 1

    @property
    def exit_code(self) -> int:
        if self.interrupted:
            return INTERRUPTED
        return 1 if self.failed or self.failed_before else 0


def progress(summary: Summary, total: int, console: Console) -> contextlib.AbstractContextManager[Count]:
    """Return a context whose value counts rows, in the summary and in the progress shown.

    Progress is a bar on a terminal, and a line every ten seconds elsewhere.

    Args:
        total: number of rows to come.
    """
    return (_bar if console.is_terminal else _lines)(summary, total, console)


def show(summary: Summary, console: Console) -> None:
    """Print the summary."""
    counts = [f"{summary.described} described", f"{summary.failed} failed", f"{summary.done_before} done before"]
    if summary.failed_before:
        counts.append(f"{summary.failed_before} failed before")
    if summary.not_sent:
        counts.append(f"{summary.not_sent} not sent")
    speed = (summary.described + summary.failed) / max(summary.seconds, 1e-9)
    lines = [f"{summary.sources} sources: {', '.join(counts)}. {summary.seconds:.1f} s, {speed:.1f}/s."]
    for kind, reason in sorted(summary.reasons.items(), key=lambda item: -item[1]["count"])[:_MAX_REASONS]:
        lines.append(f"  {reason['count']} x {kind}, such as: {reason['message']}")
    if summary.skipped:
        lines.append(f"{len(summary.skipped)} files of the folder were skipped:")
        lines += [f"  {name}: {reason}" for name, reason in summary.skipped[:_MAX_SKIPPED]]
        if (more := len(summary.skipped) - _MAX_SKIPPED) > 0:
            lines.append(f"  and {more} more")
    if summary.interrupted:
        lines.append("Interrupted.")
    if summary.stopped is not None:
        lines.append(f"Stopped: {summary.stopped}.")
    if summary.resume is not None:
        lines.append(f"To resume: {summary.resume}")
    lines.append(f"Rows: {summary.out}")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def _bar(summary: Summary, total: int, console: Console) -> Iterator[Count]:
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[at]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("describing", total=total, at="")

        def count(row: Mapping[str, Any]) -> None:
            summary.count(row)
            bar.update(task, advance=1, at=f"{summary.failed} failed, {_rate(summary, started):.1f}/s")

        yield count


@contextlib.contextmanager
def _lines(summary: Summary, total: int, console: Console) -> Iterator[Count]:
    started = time.monotonic()

    async def lines() -> None:
        while True:
            await asyncio.sleep(_LINE_PERIOD)
            done, rate = summary.described + summary.failed, _rate(summary, started)
            left = f", {(total - done) / rate:.0f} s left" if done else ""
            text = f"describing: {done} of {total}, {summary.failed} failed, {rate:.1f}/s{left}"
            console.print(text, highlight=False, markup=False, soft_wrap=True)

    printing = asyncio.get_running_loop().create_task(lines())
    try:
        yield summary.count
    finally:
        printing.cancel()


def _rate(summary: Summary, started: float) -> float:
    return (summary.described + summary.failed) / max(time.monotonic() - started, 1e-9)


def _tokens(usage: Any, name: str) -> int:
    tokens = usage.get(name) if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else 0
