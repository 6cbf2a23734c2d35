"""The header of a safetensors file: the location of each tensor, checked before any data is read.

Layout (https://github.com/huggingface/safetensors#format): 8 bytes, the header's length as a little-endian unsigned
integer; the header, a JSON object {name: {"dtype", "shape", "data_offsets": [begin, end]}}; then the data. Offsets
count from the end of the header. The tensors cover the data without holes or overlaps.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import TypeGuard

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
MAX_DIMENSIONS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """The location of a tensor.

    Attributes:
        shape: the tensor's shape.
        dtype: its numpy dtype; ml_dtypes.bfloat16 for BF16.
        file: the file that holds it.
        offset: bytes from the beginning of the file to the tensor's first byte.
        nbytes: its size in bytes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(file: Path, label: str) -> dict[str, TensorInfo]:
    """The tensors of one file, by name.

    Args:
        file: a regular file.
        label: the file's name in error messages.

    Raises:
        CheckpointError: the file cannot be read, or its header has faults.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    [f"{label} is truncated or not a safetensors file: its {size} bytes do not hold the header"]
                )
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError([f"{label} cannot be read: {error.strerror}"]) from error
    entries = _parse(text, label)
    notes = entries.pop("__metadata__", None)
    tensors = _tensors(entries, file, label, start=8 + length, end=size)
    if isinstance(notes, dict):  # safetensors' save_model stores a shared tensor once, and notes its other names
        tensors |= {
            name: tensors[kept]
            for name, kept in notes.items()
            if isinstance(kept, str) and kept in tensors and name not in tensors
        }
    return tensors


def _parse(text: bytes, label: str) -> dict:
    repeated = []

    def unique(pairs):
        result = dict(pairs)
        if len(result) != len(pairs):
            repeated.append(True)
        return result

    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError([f"{label} has a corrupt header: it is not JSON ({error})"]) from error
    if not isinstance(entries, dict):
        raise CheckpointError([f"{label} has a corrupt header: expected a JSON object"])
    if repeated:
        raise CheckpointError([f"{label} has a corrupt header: it names a tensor or a field twice"])
    return entries


def _tensors(entries: dict, file: Path, label: str, *, start: int, end: int) -> dict[str, TensorInfo]:
    tensors, faults, spans = {}, [], []
    for name, entry in entries.items():
        try:
            info, span = _tensor(name, entry, file, label, start)
        except CheckpointError as error:
            faults += error.faults
            continue
        tensors[name] = info
        spans.append((*span, name))
    if faults:  # the check below would blame the neighbours of an invalid entry
        raise CheckpointError(faults)
    covered = 0
    for begin, stop, name in sorted(spans):
        if begin != covered:
            kind = "overlaps the tensor before it" if begin < covered else "leaves a hole before it"
            raise CheckpointError([f"{label}: tensor {name!r} begins at byte {begin}, expected {covered}: it {kind}"])
        covered = stop
    if start + covered > end:
        raise CheckpointError(
            [f"{label} is truncated: its header describes {start + covered} bytes, the file has {end}"]
        )
    if start + covered < end:
        raise CheckpointError(
            [f"{label} has {end - start - covered} bytes after its last tensor: the file has {end} bytes, "
             f"its header describes {start + covered}"]
        )  # fmt: skip
    return tensors


def _tensor(name: str, entry, file: Path, label: str, start: int) -> tuple[TensorInfo, tuple[int, int]]:
    """Parse one header entry into a TensorInfo and its (begin, end) within the data."""
    what = f"{label}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise CheckpointError([f"{what} has a corrupt entry"])
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError([f"{what} has the unsupported dtype {dtype!r}; supported: {', '.join(DTYPES)}"])
    if not _sizes(shape) or len(shape) > MAX_DIMENSIONS or math.prod(n for n in shape if n) >= 2**56:
        raise CheckpointError([f"{what} has the impossible shape {shape!r}"])
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError([f"{what} has the impossible data_offsets {offsets!r}"])
    info = TensorInfo(shape=tuple(shape), dtype=DTYPES[dtype], file=file, offset=start + offsets[0])
    if info.nbytes != offsets[1] - offsets[0]:
        raise CheckpointError(
            [f"{what} has {offsets[1] - offsets[0]} bytes, but {dtype} {list(shape)} takes {info.nbytes}"]
        )
    return info, (offsets[0], offsets[1])


def _sizes(value) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
