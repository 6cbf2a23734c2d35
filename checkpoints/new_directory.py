"""A directory that appears only when it is complete."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield a temporary folder; rename it to `out` on success, remove it on failure. A killed process leaves the
    temporary name, so nothing takes a partial copy for a model.

    Raises:
        FileExistsError: out exists and is not an empty directory.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise FileExistsError(f"{out} already exists; name a directory that does not exist, or remove it first")
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
