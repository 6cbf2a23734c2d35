"""Model directories in Hugging Face layout: verified as a whole, then read tensor by tensor.

Weights are read from memory-mapped safetensors files or from Orbax (checkpoints/orbax.py).

Which files are read: the files that `model.safetensors.index.json` names, if it exists, each tensor from the file the
index assigns it to; otherwise `model.safetensors`; otherwise the folder `orbax`. Other *.safetensors files (a quantised
copy, an adapter) are ignored.

Which paths are allowed: names that a file holds (the index) are relative and without `..`. Links in the directory are
the operator's own and are followed, as in the Hugging Face cache and in a shared store of weights.
"""

import json
import math
import mmap
import os
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.orbax import FOLDER, OrbaxWeights, checksum
from checkpoints.safetensors_header import TensorInfo, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

__all__ = ["Checkpoint", "CheckpointError", "TensorInfo", "check", "faults", "locate", "verify"]


class Checkpoint:
    """A verified model directory.

    Attributes:
        directory: the directory.
        config: config.json.
        generation_config: generation_config.json; empty if the file is missing.
        tensors: TensorInfo by tensor name, sorted by file and offset, the fastest order of reading.
        nbytes: total size of all tensors in bytes.
        orbax: the weights in Orbax; None for safetensors.
        ignored: names of stray weight files, and of tensors that the index does not assign to their file; never read.
    """

    def __init__(self, directory: Path | str):
        """Verify the directory without reading weights.

        Raises:
            CheckpointError: lists every fault.
        """
        self.directory = Path(directory)
        found, faults = _inspect(self.directory)
        if faults:
            raise CheckpointError(faults, what=f"{self.directory} is not a usable model directory:")
        self.config: dict = found["config.json"]
        self.generation_config: dict = found["generation_config.json"]
        self.tensors: dict[str, TensorInfo] = found["tensors"]
        self.ignored: tuple[str, ...] = tuple(found["ignored"])
        self.nbytes = sum(info.nbytes for info in self.tensors.values())
        self.orbax: OrbaxWeights | None = found["orbax"]
        self._maps: dict[Path, mmap.mmap] = {}

    def read(self, name: str) -> np.ndarray:
        """One tensor.

        From safetensors it is a read-only view of the memory-mapped file: nothing is copied, and pages are read when
        they are touched. From Orbax it is read at once.

        Raises:
            KeyError: no such tensor.
            CheckpointError: the file has become shorter since it was verified, or the Orbax data cannot be read.
        """
        info = self.tensors[name]
        if self.orbax is not None:
            return self.orbax.read(name)
        if not info.nbytes:
            return np.empty(info.shape, info.dtype)
        if info.file not in self._maps:
            with info.file.open("rb") as stream:
                self._maps[info.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        data = self._maps[info.file]
        if info.offset + info.nbytes > len(data):
            raise CheckpointError(
                f"{info.file.name} was changed while it was in use: tensor {name!r} lies beyond its end"
            )
        return np.ndarray(info.shape, info.dtype, buffer=data, offset=info.offset)

    def read_all(self) -> None:
        """Read every byte of the weights; raise CheckpointError with every tensor that cannot be read."""
        found = []
        for name in self.tensors:
            try:
                checksum(self.read(name))
            except CheckpointError as error:
                found += error.faults
        if found:
            raise CheckpointError(found, what=f"{self.directory} is damaged:")


def verify(directory: Path | str) -> None:
    """Raise CheckpointError with every fault unless the directory can be loaded. Reads headers, not weights."""
    found = faults(directory)
    if found:
        raise CheckpointError(found, what=f"{directory} is not a usable model directory:")


def faults(directory: Path | str) -> list[str]:
    """Everything that is wrong with a model directory, one sentence each; empty if it can be loaded."""
    return _inspect(Path(directory))[1]


def check(directory: Path | str, *, full: bool = False) -> str:
    """Verify a directory and describe its contents in text.

    Args:
        full: read all weights too. Those of an Orbax copy without checksums are always read.

    Raises:
        CheckpointError: lists every fault.
    """
    checkpoint = Checkpoint(directory)
    unverified = checkpoint.orbax is not None and not checkpoint.orbax.checksums
    if full or unverified:
        checkpoint.read_all()
    tensors = checkpoint.tensors.values()
    named = checkpoint.config.get("architectures")
    architectures = named if isinstance(named, list) else []
    dtypes = Counter()
    for info in tensors:
        dtypes[str(info.dtype)] += math.prod(info.shape)
    lines = [
        f"{checkpoint.directory}: good",
        f"  architecture  {', '.join(map(str, architectures)) or 'not stated'}",
        f"  weights       {len(tensors)} tensors in {len({info.file for info in tensors})} file(s), "
        f"{checkpoint.nbytes / 1e6:,.1f} MB",
        f"  parameters    {', '.join(f'{count:,} {dtype}' for dtype, count in dtypes.most_common())}",
    ]
    if unverified:
        lines.append("  checksums     none: changed bytes are not found; convert the model again")
    lines += [f"  not read      {what}" for what in checkpoint.ignored]
    return "\n".join(lines)


def _inspect(directory: Path) -> tuple[dict, list[str]]:
    """Return the contents of a directory and its faults.

    Without faults the contents are complete: "config.json", "generation_config.json", "tensors", "ignored", "orbax".
    """
    try:
        listing = sorted(os.listdir(directory))
    except (OSError, ValueError) as error:
        return {}, [_unlistable(directory, error)]
    found: dict = {"generation_config.json": {}, "tensors": {}, "ignored": [], "orbax": None}
    faults: list[str] = []
    if "config.json" not in listing and not any(name.endswith((".safetensors", ".json")) for name in listing):
        return {}, [f"it is not a model directory: expected config.json, tokenizer.json and {SINGLE} or {INDEX}, "
                    f"it holds {_summary(listing)}"]  # fmt: skip
    for name, required in (("config.json", True), ("tokenizer.json", True), ("generation_config.json", False)):
        if not required and name not in listing:
            continue
        try:
            found[name] = _json_object(directory, name)
        except CheckpointError as error:
            faults += error.faults
    try:
        if INDEX in listing:
            found["tensors"], found["ignored"] = _indexed(directory, listing)
        elif SINGLE in listing:
            found["tensors"], found["ignored"] = _single(directory, listing)
        elif FOLDER in listing:
            found["orbax"] = OrbaxWeights(directory / FOLDER)
            found["tensors"] = found["orbax"].tensors
        else:
            faults.append(f"it has neither {SINGLE} nor {INDEX} nor {FOLDER}/; it holds {_summary(listing)}")
        if FOLDER in listing and found["orbax"] is None:
            faults.append(f"it has both safetensors and {FOLDER}/, so the weights are ambiguous: move one of them away")
    except CheckpointError as error:
        faults += error.faults
    else:
        if not found["tensors"] and not faults:
            faults.append("it has no tensors")
    order = sorted(found["tensors"].items(), key=lambda item: (item[1].file.name, item[1].offset))
    found["tensors"] = dict(order)
    return found, faults


def _unlistable(directory: Path, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such directory"
    if isinstance(error, NotADirectoryError):
        hint = f"; `omni-jax convert {directory} OUT` makes a directory of it" if directory.suffix == ".gguf" else ""
        return f"expected a directory, this is a file{hint}"
    return f"it cannot be read: {getattr(error, 'strerror', None) or error}"


def _summary(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(repr(name) for name in names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def locate(directory: Path, name: str) -> Path:
    """The path of an untrusted file name, by the rules at the top of this file.

    Raises:
        CheckpointError: the name leaves the directory, or there is no regular file of this name.
    """
    pure = PurePosixPath(name)
    # isprintable() is False for NUL, other control characters and lone surrogates, which file system calls reject.
    if not name or not name.isprintable() or "\\" in name or pure.is_absolute() or ".." in pure.parts:
        raise CheckpointError(f"the file name {name!r} is not a plain path inside the directory")
    file = directory.absolute() / pure
    try:
        if not file.is_file():
            if file.is_symlink() and not file.exists():
                raise CheckpointError(f"{name!r} is a link to {os.readlink(file)}, which is missing")
            raise CheckpointError(f"{name!r} {'is not a regular file' if file.exists() else 'is missing'}")
    except OSError as error:  # for example a name that is too long, or a folder without permission
        raise CheckpointError(f"{name!r} cannot be read: {error.strerror}") from error
    return file


def _json_object(directory: Path, name: str) -> dict:
    file = locate(directory, name)
    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not a valid JSON file: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{name} must hold a JSON object, got a {type(content).__name__}")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dictionary; a key that is given twice is an error, since readers differ in which one they take."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"it has the key {twice!r} twice")
    return found


def _single(directory: Path, listing: list[str]) -> tuple[dict[str, TensorInfo], list[str]]:
    tensors, ignored, faults = read_header(locate(directory, SINGLE), SINGLE), [], []
    for name in listing:
        if not name.endswith(".safetensors") or name == SINGLE:
            continue
        ignored.append(name)
        try:
            both = tensors.keys() & read_header(locate(directory, name), name).keys()
        except CheckpointError:
            continue  # an ignored file may hold anything
        if both:
            faults.append(
                f"{SINGLE} and {name} both hold {len(both)} tensors ({_summary(sorted(both)[:1])}, ...) and no {INDEX} "
                "assigns them to a file: move one of the files away"
            )
    if faults:
        raise CheckpointError(faults)
    return tensors, ignored


def _indexed(directory: Path, listing: list[str]) -> tuple[dict[str, TensorInfo], list[str]]:
    weight_map = _json_object(directory, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{INDEX} must hold a weight_map from tensor names to file names")
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, []).append(name)
    tensors, faults = {}, []
    ignored = [name for name in listing if name.endswith(".safetensors") and name not in by_file]
    for file, names in sorted(by_file.items()):
        try:
            held = read_header(locate(directory, file), file)
        except CheckpointError as error:
            expected = f"{INDEX} assigns {len(names)} tensors to it, the first: {_summary(sorted(names)[:3])}"
            faults += [f"{fault} ({expected})" for fault in error.faults]
            continue
        for name in sorted(names):
            if name in held:
                tensors[name] = held[name]
            else:
                faults.append(f"tensor {name!r} is not in {file}, the file that {INDEX} assigns it to")
        ignored += [f"{name} in {file}" for name in sorted(held.keys() - set(names))]
    if faults:
        raise CheckpointError(faults)
    return tensors, ignored
