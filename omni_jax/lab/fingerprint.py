"""Digests of what a study depends on beside its settings: the files of the model, and the code of custom functions."""

import hashlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SUFFIXES = (".gguf", ".jinja", ".json", ".model", ".safetensors")  # of a model's files; a directory may hold others
WHOLE = 1 << 20  # bytes up to which a file is read whole
PIECES, PIECE = 64, 1 << 14  # of a larger one, so that a checkpoint of any size takes a moment

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def model_digest(model: Path) -> str | None:
    """Return 16 hexadecimal characters for the files of a model directory, or for a file; None if there is no such one.

    Large files count by their length and by pieces that are spread over them. A whole checkpoint that was trained or
    converted anew differs in them; a single changed number may not.
    """
    if not model.exists():
        return None
    digest = hashlib.sha256()
    files = [model] if model.is_file() else [file for file in model.iterdir() if file.suffix in SUFFIXES]
    files += (model / "orbax").rglob("*")
    for file in sorted(file for file in files if file.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            if size <= WHOLE:
                digest.update(content.read())
                continue
            for piece in range(PIECES):
                content.seek(piece * (size - PIECE) // (PIECES - 1))
                digest.update(content.read(PIECE))
    return digest.hexdigest()[:16]


def code_digests(settings: Any) -> dict[str, str]:
    """Return a digest of the module of each custom function, package.module:function, that settings name."""
    found = {}
    for path in sorted(set(_functions(settings))):
        try:
            spec = importlib.util.find_spec(path.partition(":")[0])
        except (ImportError, ValueError):
            continue
        if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
            found[path] = hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:16]
    return found


def _functions(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if _FUNCTION.fullmatch(value):
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _functions(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _functions(item)
