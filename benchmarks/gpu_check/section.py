"""A running section of benchmarks.gpu_check, and its file. Imports no JAX."""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any


@dataclasses.dataclass(kw_only=True)
class Section:
    """A running section. Each row is written to its file at once, so that a crash loses nothing.

    Attributes:
        file: file of facts and rows.
        dry_run: whether it runs on a CPU with tiny sizes.
        deadline: time.monotonic() after which nothing new begins.
        scratch: directory for models, removed at the end.
        programs: directory for compiled programs, shared by all sections.
        ceilings: facts of the section "ceilings"; empty if it failed.
    """

    file: Path
    dry_run: bool
    deadline: float
    scratch: Path
    programs: Path
    ceilings: dict[str, Any]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def state(self, **facts: Any) -> None:
        """Write facts, which are figures outside the table."""
        self.facts |= facts
        self._write()

    def add(self, **row: Any) -> None:
        """Write a row of the section's table."""
        self.rows.append(row)
        print("   " + ", ".join(f"{name} {_short(value)}" for name, value in row.items()), flush=True)
        self._write()

    def has_time(self, seconds: float, *, for_: str) -> bool:
        """Return whether so many seconds are left; if not, record `for_` as left out."""
        if time.monotonic() + seconds <= self.deadline:
            return True
        self.state(left_out=[*self.facts.get("left_out", []), for_])
        return False

    def _write(self) -> None:
        write_atomically(self.file, json.dumps({"facts": self.facts, "rows": self.rows}, indent=1) + "\n")


def write_atomically(file: Path, text: str) -> None:
    """Write a file so that a process that is killed leaves the old one."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text)
    os.replace(partial, file)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
