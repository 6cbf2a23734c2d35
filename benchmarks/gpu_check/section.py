"""What a section of benchmarks.gpu_check writes down, and when. No JAX here."""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any


@dataclasses.dataclass(kw_only=True)
class Section:
    """A running section. Each row goes to its file at once, so that nothing is lost to a crash.

    Attributes:
        file: what is written.
        dry_run: on a CPU, tiny.
        deadline: on time.monotonic; nothing new is begun behind it.
        scratch: a directory for models, removed at the end.
        programs: a directory for compiled programs, which later sections find there.
        ceilings: facts of the section "ceilings", empty if it did not get there.
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
        """Writes figures that stand for themselves."""
        self.facts |= facts
        self._write()

    def add(self, **row: Any) -> None:
        """Writes a row of the section's table."""
        self.rows.append(row)
        print("   " + ", ".join(f"{name} {_short(value)}" for name, value in row.items()), flush=True)
        self._write()

    def has_time(self, seconds: float, *, for_: str) -> bool:
        """Whether so many seconds are left; if not, says what is left out for it."""
        if time.monotonic() + seconds <= self.deadline:
            return True
        self.state(left_out=[*self.facts.get("left_out", []), for_])
        return False

    def _write(self) -> None:
        write_atomically(self.file, json.dumps({"facts": self.facts, "rows": self.rows}, indent=1) + "\n")


def write_atomically(file: Path, text: str) -> None:
    """Whoever is killed meanwhile leaves the old file."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text)
    os.replace(partial, file)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
