"""Starts contenders, each in its own process (see worker.py), and prints progress."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Worker:
    """A contender in its process. It computes only between a command and its answer."""

    def __init__(self, command: list[str], log: Path):
        self._log = log.open("w+")
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            cwd=ROOT,
            text=True,
        )
        self.about = self._answer()

    @property
    def name(self) -> str:
        return self.about["name"]

    def ask(self, do: str, **arguments) -> dict:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            tail = "".join(self._log.readlines()[-20:])
            code = self._process.returncode
            raise SystemExit(f"{' '.join(self._process.args)} failed with exit code {code}:\n{tail}")
        return json.loads(line)


_BEGIN = time.monotonic()


def log(text: str, indent: int = 0) -> None:
    """Print a line of progress to standard error."""
    print(f"[{time.monotonic() - _BEGIN:5.0f} s] {'  ' * indent}{text}", file=sys.stderr, flush=True)
