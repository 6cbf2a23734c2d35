"""Output of `describe-images`: a JSON Lines file that survives crashes, with a lock against concurrent runs.

OUT.jsonl.run.json beside OUT.jsonl holds the settings that determine the texts (prompt, model, ...), so that rows of
different prompts are not mixed. A run locks this file, since it is never replaced.

Rows are appended as they come. A source that failed before and is retried has two rows at first, of which the last
counts. Closing rewrites the file with one row for each source; after a crash, the next run does so.
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
    start: int  # offset in the file, in bytes
    good: bool  # whether it has a text, not an error


@dataclasses.dataclass(kw_only=True)
class Index:
    """Content of a file.

    Attributes:
        rows: last row of each source.
        end: offset of the end of the last complete row; the rest was cut off by a crash.
        unended: whether that row lacks its line feed.
        stale: number of lines to drop: superseded rows, blank lines, lines that are not rows.
    """

    rows: dict[str, Row] = dataclasses.field(default_factory=dict)
    end: int = 0
    unended: bool = False
    stale: int = 0

    def add(self, source: str, row: Row) -> None:
        self.stale += source in self.rows
        self.rows[source] = row


class RowFile:
    """Open output file; create it with `open_rows`."""

    def __init__(self, path: Path, file: BinaryIO, index: Index):
        self._path = path
        self._file = file
        self._index = index
        self._fault: OSError | None = None

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row. Once this returns, a crash of the process does not lose it.

        Raises:
            OSError: the row cannot be written, for example because the disk is full. Every later row is refused with
                the same error, so that other workers do not write behind half a line.
        """
        if self._fault is not None:
            raise self._fault
        # A lone surrogate in an answer cannot be encoded and becomes a question mark.
        line = json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        try:
            _write(self._file, line)
        except OSError as error:
            self._fault = error
            raise
        self._index.add(row["source"], Row(self._index.end, "error" not in row))
        self._index.end += len(line)

    def rows(self) -> dict[str, bool]:
        """Return whether the row is good, by source."""
        return {source: row.good for source, row in self._index.rows.items()}

    def close(self) -> None:
        """Write all rows to disk, one for each source."""
        if self._index.stale:
            _rewrite(self._path, {row.start for row in self._index.rows.values()})
        else:
            os.fsync(self._file.fileno())


@contextlib.contextmanager
def open_rows(path: Path, settings: Mapping[str, Any], *, overwrite: bool) -> Iterator[RowFile]:
    """Open an output file to append rows.

    Args:
        path: created if missing; an incomplete last line is removed.
        settings: settings that determine the texts.
        overwrite: whether to drop the rows of earlier runs.

    Raises:
        UsageError: the file has rows of other settings, or another process writes to it.
        OSError: the file cannot be written.
    """
    path = _real(path)
    if not overwrite and path.exists() and path.stat().st_size and not _beside(path, ".run.json").exists():
        _check(path, settings)  # before a file is created beside one that may be foreign
    with open(_beside(path, ".run.json"), "a+b") as header:
        try:
            fcntl.flock(header, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process writes to {path}; wait for it, or choose another -o") from None
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
    """Return what `open_rows(...).rows()` would, without changing the file. Settings that are None are not compared.

    Raises:
        UsageError: the file has rows of other settings.
    """
    path = _real(path)
    if not path.exists():
        return {}
    index = _scan(path)
    if index.end:
        _check(path, {name: value for name, value in settings.items() if value is not None})
    return {source: row.good for source, row in index.rows.items()}


def _real(path: Path) -> Path:
    """Resolve links, so that a rewrite replaces the file and not a link to it."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise UsageError(f"the output {path} is not a regular file; name one with -o")
    if not path.parent.is_dir():
        raise UsageError(f"the output folder {path.parent} does not exist; create it first")
    return path


def _check(path: Path, settings: Mapping[str, Any]) -> None:
    beside = _beside(path, ".run.json")
    choose = "Choose another file with -o, or replace this one with --overwrite."
    try:
        written = json.loads(beside.read_bytes())
    except (OSError, ValueError):
        written = None
    if not isinstance(written, dict):
        raise UsageError(f"{path} has rows of an unknown prompt: there is no {beside.name} beside it. {choose}")
    other = [name for name, value in settings.items() if written.get(name) != value]
    if other:
        both = "; ".join(f"{name} was {written.get(name)!r} and is now {settings[name]!r}" for name in other)
        raise UsageError(f"{path} has rows of other settings: {both}. {choose}")


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
    """Return the source of a row and whether it is good; None if the line is not a row."""
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
    """Keep only the lines at these offsets. The file is replaced atomically and synced to disk."""
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
    """Write all of `data`; one call may write only a part to an unbuffered file."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
