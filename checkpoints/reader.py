"""Model directories in Hugging Face layout: verified as a whole, then read tensor by tensor from memory-mapped files,
or from Orbax (checkpoints/orbax.py), which `omni-jax convert --orbax` puts in their place.

Which files count: `model.safetensors.index.json` if it is there, and then the files it names and nothing else, each
tensor from the file the index assigns it to; otherwise `model.safetensors`; otherwise the folder `orbax`. Other
*.safetensors files (a quantised copy, an adapter) are never read by pattern.

Which paths count: names in the index are relative, without `..`, and no file may lie outside the directory, links
resolved. The one exception is the Hugging Face cache, where a directory `<repo>/snapshots/<revision>` holds links into
`<repo>/blobs`: a link from a directory whose parent is called `snapshots` may point to a file directly inside the
`blobs` folder beside `snapshots`.
"""

import json
import math
import mmap
import os
from collections import Counter
from pathlib import Path, PurePosixPath

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.orbax import FOLDER, OrbaxWeights
from checkpoints.safetensors_header import TensorInfo, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

__all__ = ["Checkpoint", "CheckpointError", "TensorInfo", "check", "faults", "locate", "verify"]


class Checkpoint:
    """A verified model directory.

    Attributes:
        directory: the directory.
        config: config.json.
        generation_config: generation_config.json; empty when there is none.
        tensors: TensorInfo by tensor name, sorted by file and place in it, the order in which reading is fastest.
        nbytes: bytes of all tensors.
        ignored: what lies in the directory but is not read: stray files, and tensors that the index does not assign to
            the file they are in.
    """

    def __init__(self, directory: Path | str):
        """Verifies the directory; no weights are read yet.

        Raises:
            CheckpointError: listing every fault.
        """
        self.directory = Path(directory)
        found, faults = _inspect(self.directory)
        if faults:
            raise CheckpointError(faults, what=f"{self.directory} is no usable model directory:")
        self.config: dict = found["config.json"]
        self.generation_config: dict = found["generation_config.json"]
        self.tensors: dict[str, TensorInfo] = found["tensors"]
        self.ignored: tuple[str, ...] = tuple(found["ignored"])
        self.nbytes = sum(info.nbytes for info in self.tensors.values())
        self._orbax: OrbaxWeights | None = found["orbax"]
        self._maps: dict[Path, mmap.mmap] = {}

    def read(self, name: str) -> np.ndarray:
        """One tensor as a read-only view of its memory-mapped file: nothing is copied, and pages are read when touched.
        From Orbax it is read at once.

        Raises:
            KeyError: no such tensor.
            CheckpointError: the file has become shorter since it was verified, or Orbax's cannot be read.
        """
        info = self.tensors[name]
        if self._orbax is not None:
            return self._orbax.read(name)
        if not info.nbytes:
            return np.empty(info.shape, info.dtype)
        if info.file not in self._maps:
            with info.file.open("rb") as stream:
                self._maps[info.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        data = self._maps[info.file]
        if info.offset + info.nbytes > len(data):
            raise CheckpointError(
                f"{info.file.name} was changed while it was in use: tensor {name!r} is beyond its end"
            )
        return np.ndarray(info.shape, info.dtype, buffer=data, offset=info.offset)


def verify(directory: Path | str) -> None:
    """Raises CheckpointError, listing every fault, unless the directory can be loaded. Reads headers, not weights."""
    found = faults(directory)
    if found:
        raise CheckpointError(found, what=f"{directory} is no usable model directory:")


def faults(directory: Path | str) -> list[str]:
    """Everything that is wrong with a model directory, one sentence each; empty when it can be loaded."""
    return _inspect(Path(directory))[1]


def check(directory: Path | str) -> str:
    """A report on a directory for people to read: what is in it.

    Raises:
        CheckpointError: listing every fault.
    """
    checkpoint = Checkpoint(directory)
    tensors = checkpoint.tensors.values()
    config = checkpoint.config
    eos = checkpoint.generation_config.get("eos_token_id", config.get("eos_token_id"))
    dtypes = Counter()
    for info in tensors:
        dtypes[str(info.dtype)] += math.prod(info.shape)
    lines = [
        f"{checkpoint.directory}: good",
        f"  architecture  {', '.join(config.get('architectures') or ['not stated'])}",
        f"  weights       {len(tensors)} tensors in {len({info.file for info in tensors})} file(s), "
        f"{checkpoint.nbytes / 1e6:,.1f} MB",
        f"  parameters    {', '.join(f'{count:,} {dtype}' for dtype, count in dtypes.most_common())}",
        f"  context       {config.get('max_position_embeddings', 'not stated')} tokens",
        f"  ends at       token ids {eos}",
    ]
    lines += [f"  not read      {what}" for what in checkpoint.ignored]
    return "\n".join(lines)


def _inspect(directory: Path) -> tuple[dict, list[str]]:
    """What a directory holds, and its faults. Without faults the first is complete: "config.json",
    "generation_config.json", "tensors", "ignored"."""
    try:
        listing = sorted(os.listdir(directory))
    except (OSError, ValueError) as error:
        return {}, [_no_directory(directory, error)]
    found: dict = {"generation_config.json": {}, "tensors": {}, "ignored": [], "orbax": None}
    faults: list[str] = []
    if "config.json" not in listing and not any(name.endswith((".safetensors", ".json")) for name in listing):
        return {}, [f"it is no model directory: config.json, tokenizer.json and {SINGLE} or {INDEX} were expected, "
                    f"it holds {_some(listing)}"]  # fmt: skip
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
            faults.append(f"there is neither {SINGLE} nor {INDEX} nor {FOLDER}/; it holds {_some(listing)}")
        if FOLDER in listing and found["orbax"] is None:
            faults.append(f"it has safetensors and {FOLDER}/, and nothing says which are meant: move one of them away")
    except CheckpointError as error:
        faults += error.faults
    else:
        if not found["tensors"] and not faults:
            faults.append("there are no tensors in it")
    order = sorted(found["tensors"].items(), key=lambda item: (item[1].file.name, item[1].offset))
    found["tensors"] = dict(order)
    return found, faults


def _no_directory(directory: Path, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such directory"
    if isinstance(error, NotADirectoryError):
        hint = f"; `omni-jax convert {directory} OUT` makes one from it" if directory.suffix == ".gguf" else ""
        return f"a directory was expected, this is a file{hint}"
    return f"it cannot be read: {getattr(error, 'strerror', None) or error}"


def _some(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(repr(name) for name in names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def locate(directory: Path, name: str) -> Path:
    """The real path of a file named by untrusted text, by the rule at the top of this file.

    Raises:
        CheckpointError: the name leaves the directory, or there is no regular file of this name.
    """
    pure = PurePosixPath(name)
    # isprintable() is False for NUL, other control characters and lone surrogates, which file system calls trip over.
    if not name or not name.isprintable() or "\\" in name or pure.is_absolute() or ".." in pure.parts:
        raise CheckpointError(f"refused the file name {name!r}: it is not a plain path inside the directory")
    root = Path(os.path.realpath(directory))
    real = Path(os.path.realpath(root / pure))
    in_cache = root.parent.name == "snapshots" and real.parent == root.parent.parent / "blobs"
    if not real.is_relative_to(root) and not in_cache:
        raise CheckpointError(f"refused {name!r}: it links to a file outside the directory")
    try:
        if not real.is_file():
            kind = "is no regular file" if real.exists() else "is missing"
            raise CheckpointError(f"{name!r} {kind}")
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise CheckpointError(f"{name!r} cannot be read: {error.strerror}") from error
    return real


def _json_object(directory: Path, name: str) -> dict:
    file = locate(directory, name)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is no JSON file: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{name} must hold a JSON object, it holds a {type(content).__name__}")
    return content


def _single(directory: Path, listing: list[str]) -> tuple[dict[str, TensorInfo], list[str]]:
    tensors, ignored, faults = read_header(locate(directory, SINGLE), SINGLE), [], []
    for name in listing:
        if not name.endswith(".safetensors") or name == SINGLE:
            continue
        ignored.append(name)
        try:
            both = tensors.keys() & read_header(locate(directory, name), name).keys()
        except CheckpointError:
            continue  # it is not read, so it may be anything
        if both:
            faults.append(
                f"{SINGLE} and {name} both hold {len(both)} tensors ({_some(sorted(both)[:1])}, ...) and no {INDEX} "
                "says which file is meant: move one of them away"
            )
    if faults:
        raise CheckpointError(faults)
    return tensors, ignored


def _indexed(directory: Path, listing: list[str]) -> tuple[dict[str, TensorInfo], list[str]]:
    weight_map = _json_object(directory, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{INDEX} must hold a weight_map of tensor names to file names")
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, []).append(name)
    tensors, faults = {}, []
    ignored = [name for name in listing if name.endswith(".safetensors") and name not in by_file]
    for file, names in sorted(by_file.items()):
        try:
            held = read_header(locate(directory, file), file)
        except CheckpointError as error:
            named = f"{INDEX} expects {len(names)} tensors in it: {_some(sorted(names)[:3])}"
            faults += [f"{fault} ({named})" for fault in error.faults]
            continue
        for name in sorted(names):
            if name in held:
                tensors[name] = held[name]
            else:
                faults.append(f"tensor {name!r} is not in {file}, where {INDEX} says it is")
        ignored += [f"{name} in {file}" for name in sorted(held.keys() - set(names))]
    if faults:
        raise CheckpointError(faults)
    return tensors, ignored
