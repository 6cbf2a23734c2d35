"""The output of `describe-images`: a JSON Lines file that survives crashes and is never written by two at once.

Beside OUT.jsonl lies OUT.jsonl.run.json with the settings that shaped its texts (prompt, model, ...): rows of different
prompts must not end up in one file. It is also what a run holds its lock on, since it is never replaced.

Rows are appended as they come. A source that failed in an earlier run and is tried again has two rows for a while, of
which the last counts; closing writes the file anew with one row a source, and a run that was killed before that leaves
it to the next.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from serving.describe.sources import UsageError


class Row(NamedTuple):
    start: int  # its byte in the file
    good: bool  # it has a text, not an error


@dataclasses.dataclass(kw_only=True)
class Index:
    """What a file holds.

    Attributes:
        rows: the last row of each source.
        end: bytes up to the end of the last whole row; what follows was cut off by a crash.
        unended: only the line feed of that row is missing.
        stale: lines that do not count: superseded rows, blank lines, lines that are no rows.
    """

    rows: dict[str, Row] = dataclasses.field(default_factory=dict)
    end: int = 0
    unended: bool = False
    stale: int = 0

    def add(self, source: str, row: Row) -> None:
        self.stale += source in self.rows
        self.rows[source] = row


class RowFile:
    """An open output file; made by `open_rows`."""

    def __init__(self, path: Path, file: BinaryIO, index: Index):
        self._path = path
        self._file = file
        self._index = index
        self._fault: OSError | None = None

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes a row, which is safe from a crash of this process when this returns.

        Raises:
            OSError: the disk is full, for instance. Every later row is then refused in the same way: other workers may
                have one before they are stopped, and it must not be written behind half a line.
        """
        if self._fault is not None:
            raise self._fault
        # A lone surrogate from a server's answer cannot be written and becomes a question mark.
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        try:
            _write(self._file, line)
        except OSError as error:
            self._fault = error
            raise
        self._index.add(row["source"], Row(self._index.end, "error" not in row))
        self._index.end += len(line)

    def rows(self) -> dict[str, bool]:
        """Whether a source's row is a good one, for each source that has a row."""
        return {source: row.good for source, row in self._index.rows.items()}

    def close(self) -> None:
        """Puts every row on the disk, one a source."""
        if self._index.stale:
            _rewrite(self._path, {row.start for row in self._index.rows.values()})
        else:
            os.fsync(self._file.fileno())


@contextlib.contextmanager
def open_rows(path: Path, settings: Mapping[str, Any], *, overwrite: bool) -> Iterator[RowFile]:
    """Opens an output file to append to, after what earlier runs left there.

    Args:
        path: made when it is not there; a half-written last line is cut.
        settings: what shapes the texts.
        overwrite: throws away what the file holds.

    Raises:
        UsageError: its rows were made with other settings, or another process writes to it.
        OSError: it cannot be written.
    """
    path = _real(path)
    if not overwrite and path.exists() and path.stat().st_size and not _beside(path, ".run.json").exists():
        _check(path, settings)  # before a file is made beside what may not be ours
    with open(_beside(path, ".run.json"), "a+b") as header:
        try:
            fcntl.flock(header, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process is writing to {path}; wait for it, or choose another -o") from None
        with open(path, "ab", buffering=0) as file:
            if overwrite:
                file.truncate(0)
            index = _scan(path)
            if index.end:
                _check(path, settings)
            else:
                header.truncate(0)
                header.write(json.dumps(settings, indent=1).encode() + b"\n")
                header.flush()
                os.fsync(header.fileno())
            file.truncate(index.end)
            if index.unended:
                _write(file, b"\n")
                index.end += 1
            rows = RowFile(path, file, index)
            try:
                yield rows
            finally:
                rows.close()


def read_rows(path: Path, settings: Mapping[str, Any]) -> dict[str, bool]:
    """What `open_rows(...).rows()` would say, changing nothing. A setting that is None is not compared.

    Raises:
        UsageError: the rows were made with other settings.
    """
    path = _real(path)
    if not path.exists():
        return {}
    index = _scan(path)
    if index.end:
        _check(path, {name: value for name, value in settings.items() if value is not None})
    return {source: row.good for source, row in index.rows.items()}


def _real(path: Path) -> Path:
    """A rewrite must replace the file, not a link to it."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise UsageError(f"the output {path} is not a regular file; name one with -o")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} for the output; make it first")
    return path


def _check(path: Path, settings: Mapping[str, Any]) -> None:
    beside = _beside(path, ".run.json")
    choose = "Choose another file with -o, or write this one anew with --overwrite."
    try:
        written = json.loads(beside.read_bytes())
    except (OSError, ValueError):
        written = None
    if not isinstance(written, dict):
        raise UsageError(f"{path} has rows, but no {beside.name} beside it says which prompt they are of. {choose}")
    other = [name for name, value in settings.items() if written.get(name) != value]
    if other:
        both = "; ".join(f"{name} {written.get(name)!r} there, {settings[name]!r} now" for name in other)
        raise UsageError(f"the rows of {path} were made with other settings: {both}. {choose}")


def _scan(path: Path) -> Index:
    index = Index()
    start = 0
    with open(path, "rb") as file:
        for line in file:
            parsed = _parse(line)
            ended = line.endswith(b"\n")
            if parsed is not None:
                index.add(parsed[0], Row(start, parsed[1]))
            elif ended:
                index.stale += 1
            start += len(line)
            if ended or parsed is not None:
                index.end, index.unended = start, not ended
    return index


def _parse(line: bytes) -> tuple[str, bool] | None:
    """The source of a row and whether it is good; None for what is no row."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("source"), str):
        return None
    if isinstance(row.get("error"), dict):
        return row["source"], False
    return (row["source"], True) if isinstance(row.get("text"), str) else None


def _rewrite(path: Path, starts: set[int]) -> None:
    """Keeps the lines at these bytes. The new file takes the old one's place at once, whole and on the disk."""
    temporary = _beside(path, ".tmp")
    try:
        with open(path, "rb") as old, open(temporary, "wb") as new:
            start = 0
            for line in old:
                if start in starts:
                    new.write(line)
                start += len(line)
            new.flush()
            os.fsync(new.fileno())
        shutil.copymode(path, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(file: BinaryIO, data: bytes) -> None:
    """All of `data`: an unbuffered file may take a part of it."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
