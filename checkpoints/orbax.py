"""Weights in Orbax format: tensors under the checkpoint's own names and dtypes, read lazily.

A model directory keeps them in the folder `orbax`. It holds parts, `00000`, `00001`, …; each part is an Orbax
checkpoint of its own (a flat dictionary of names and arrays; OCDBT and zarr), so that a conversion needs memory for one
part only. Any device of any mesh can read any range of an array; only the chunks that the range touches are read.

Arrays are read with TensorStore, the library below Orbax, because Orbax silently casts to a template's dtype. This
module casts only if the caller allows it. JAX, Orbax and TensorStore are imported where they are needed, because most
commands only inspect checkpoints.
"""

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.safetensors_header import DTYPES, TensorInfo

if TYPE_CHECKING:
    import jax

FOLDER = "orbax"
METADATA = "_METADATA"  # Orbax's file in each part: names of the arrays and the storage format
CHECKSUMS = "checksums.json"  # beside the parts: sizes of all files, and a checksum of each tensor
CHUNK_BYTES = 64 << 20  # maximum chunk size: reading a small range reads at least one chunk
CACHE_BYTES = 256 << 20  # TensorStore's cache: indexes, and chunks while they are read

PIECE_BYTES = 16 << 20
ALGORITHM = "crc32 of the crc32 of each 16 MiB"

Index = tuple[slice, ...]


class OrbaxWeights:
    """The weights in a folder. Only indexes are read until `read` or `restore`.

    Attributes:
        tensors: TensorInfo by name; `file` is the part, `offset` is 0.
        checksums: checksum of each tensor's bytes by name; empty for a copy that has none.
    """

    def __init__(self, folder: Path | str):
        """Open every array.

        Raises:
            CheckpointError: lists every fault: parts that are not Orbax checkpoints, names in two parts, missing
                chunks, unsupported dtypes, files of another size than was written.
        """
        import tensorstore as ts

        self.folder = Path(folder)
        sizes, self.checksums = _read_checksums(self.folder)
        self.tensors: dict[str, TensorInfo] = {}
        self._stores: dict[str, Any] = {}
        context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
        parts = sorted(part for part in self.folder.iterdir() if part.is_dir())
        faults = [] if parts else [f"{self.folder.name} has no parts"]
        for part in parts:
            try:
                for name, store in _open(part, context).items():
                    if name in self._stores:
                        faults.append(f"tensor {name!r} is in {self.tensors[name].file.name} and in {part.name}")
                    self._stores[name] = store
                    self.tensors[name] = TensorInfo(
                        shape=tuple(store.shape), dtype=np.dtype(store.dtype.numpy_dtype), file=part, offset=0
                    )
            except CheckpointError as error:
                faults += error.faults
        faults += [fault for name, size in sizes.items() if (fault := _wrong_size(self.folder, name, size))]
        if self.checksums and self.checksums.keys() != self.tensors.keys() and not faults:
            differ = sorted(self.checksums.keys() ^ self.tensors.keys())
            faults.append(f"{CHECKSUMS} is of another copy: it has other tensors, the first: {differ[0]!r}")
        if faults:
            raise CheckpointError(faults)

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Read one tensor, or a range of it, into a new array. The checksum of a whole tensor is verified.

        Raises:
            KeyError: no such tensor.
            CheckpointError: its data cannot be read, or was changed.
        """
        try:
            array = self._stores[name][index].read().result()
        except ValueError as error:
            raise CheckpointError(_unreadable(name, self.tensors[name].file, error)) from error
        if not index and self.checksums and checksum(array) != self.checksums[name]:
            raise CheckpointError(
                f"tensor {name!r} in {self.tensors[name].file.name} was changed after it was written (its checksum "
                "differs): copy or convert the model again"
            )
        return array

    def restore(
        self, name: str, sharding: "jax.sharding.Sharding", *, dtype: Any = None, cast: bool = False
    ) -> "jax.Array":
        """Read one tensor with any sharding, independent of the one it was saved with: each device reads its own range.

        Args:
            dtype: the expected dtype. Default: the stored one.
            cast: cast a floating point tensor of another dtype to `dtype`.

        Raises:
            KeyError: no such tensor.
            CheckpointError: the tensor has another dtype and is not cast, or its data cannot be read.
            ValueError: the dtype has 64 bits and JAX is set up for 32, which would change it silently.
        """
        import jax
        import jax.numpy as jnp

        stored = self.tensors[name].dtype
        expected = stored if dtype is None else np.dtype(dtype)
        if expected != stored:
            floating = all(jnp.issubdtype(each, jnp.floating) for each in (expected, stored))
            if not (cast and floating):
                hint = "only floating point tensors can be cast" if cast else "pass cast=True to convert it"
                raise CheckpointError(f"tensor {name!r} is {stored}, expected {expected}: {hint}")
        if jax.dtypes.canonicalize_dtype(expected) != expected:
            raise ValueError(f"tensor {name!r} is {expected}, which JAX supports only with jax_enable_x64")
        return jax.make_array_from_callback(
            self.tensors[name].shape, sharding, lambda index: self.read(name, index or ()).astype(expected, copy=False)
        )


def save_part(folder: Path, number: int, arrays: Mapping[str, "np.ndarray | jax.Array"]) -> Path:
    """Write one part, without compression: weights hardly shrink.

    An array that is sharded over devices is stored in one chunk per shard, so that the same number of devices reads
    nothing twice. Other arrays are stored in chunks of up to CHUNK_BYTES.

    Returns:
        The part's folder, which Orbax creates atomically.
    """
    import orbax.checkpoint as ocp

    part = Path(folder).absolute() / f"{number:05d}"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        save_args = dict.fromkeys(arrays, ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES))
        checkpointer.save(part, args=ocp.args.PyTreeSave(dict(arrays), save_args=save_args))
    return part


def checksum(array: np.ndarray) -> str:
    """The checksum (ALGORITHM) of an array's values in C order. Threads compute it, so that loading is not slower."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    pieces = [data[first : first + PIECE_BYTES] for first in range(0, len(data), PIECE_BYTES)]
    with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1)) as threads:
        sums = [each.to_bytes(4, "little") for each in threads.map(zlib.crc32, pieces)]
    return f"{zlib.crc32(b''.join(sums)):08x}"


def write_checksums(folder: Path, tensors: Mapping[str, str]) -> None:
    """Write the sizes of all files in a folder, and the checksums of its tensors."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
    content = {"algorithm": ALGORITHM, "files": sizes, "tensors": dict(tensors)}
    (folder / CHECKSUMS).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _read_checksums(folder: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Sizes by file and checksums by tensor; empty if the copy has none."""
    file = folder / CHECKSUMS
    if not file.exists():
        return {}, {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        sizes, tensors, algorithm = content["files"], content["tensors"], content["algorithm"]
        names, numbers = [*tensors, *tensors.values(), *sizes], [*sizes.values()]
        if algorithm != ALGORITHM or not tensors or not all(isinstance(name, str) for name in names):
            raise ValueError("unknown content")
        if not all(type(number) is int for number in numbers) or any(".." in Path(name).parts for name in sizes):
            raise ValueError("unknown content")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder.name}/{CHECKSUMS} is damaged: {error!r}") from error
    return sizes, tensors


def _wrong_size(folder: Path, name: str, size: int) -> str | None:
    try:
        found = (folder / name).stat().st_size
    except FileNotFoundError:
        return f"{folder.name}/{name} is missing"
    except OSError as error:
        return f"{folder.name}/{name} cannot be read: {error.strerror}"
    if found != size:
        return (
            f"{folder.name}/{name} has {found:,} bytes, it was written with {size:,}: copy or convert the model again"
        )
    return None


def _open(part: Path, context: Any) -> dict[str, Any]:
    """Open the arrays of a part, by name, without reading them."""
    import tensorstore as ts

    names, driver = _read_metadata(part)
    base = {"driver": "ocdbt", "base": f"file://{part.absolute()}/"}
    try:
        stored = _count_chunks(ts.KvStore.open(base, context=context).result().list().result())
        opening = {
            name: ts.open({"driver": driver, "kvstore": base | {"path": f"{name}/"}}, open=True, context=context)
            for name in names
        }
        stores = {name: store.result() for name, store in opening.items()}
    except ValueError as error:
        raise CheckpointError(f"{part.name} is damaged: {_summary(error)}") from error
    faults = []
    for name, store in stores.items():
        grid: Any = store.chunk_layout.write_chunk.shape or ()  # None for a scalar
        chunks = math.prod(-(-size // chunk) for size, chunk in zip(store.shape, grid, strict=True))
        if stored.get(name, 0) < chunks:
            faults.append(f"{part.name}: tensor {name!r} has {stored.get(name, 0)} of {chunks} chunks")
        if np.dtype(store.dtype.numpy_dtype) not in DTYPES.values():
            faults.append(f"{part.name}: tensor {name!r} has the unsupported dtype {store.dtype.name}")
    if faults:
        raise CheckpointError(faults)
    return stores


def _read_metadata(part: Path) -> tuple[list[str], str]:
    """Return the names of a part's arrays and the TensorStore driver that reads them."""
    try:
        found = json.loads((part / METADATA).read_text(encoding="utf-8"))
        names = [entry["key_metadata"][-1]["key"] for entry in found["tree_metadata"].values()]
        nested = any(len(entry["key_metadata"]) != 1 for entry in found["tree_metadata"].values())
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise CheckpointError(f"{part.name} is not an Orbax checkpoint of a dictionary of arrays: {error!r}") from error
    if nested or not found.get("use_ocdbt"):
        raise CheckpointError(
            f"{part.name} is not a flat dictionary in OCDBT format; convert the model with `omni-jax convert --orbax`"
        )
    return names, "zarr3" if found.get("use_zarr3") else "zarr"


def _count_chunks(keys: Iterable[bytes]) -> dict[str, int]:
    """Count the stored chunks of each array, because TensorStore reads a missing chunk as zeros."""
    stored: dict[str, int] = {}
    for key in keys:
        name, _, chunk = key.decode().rpartition("/")
        if name and not chunk.startswith(".z") and chunk != "zarr.json":
            name = name.partition("/c/")[0].removesuffix("/c")  # chunk keys: c/0/0 in zarr3, 0.0 in zarr
            stored[name] = stored.get(name, 0) + 1
    return stored


def _unreadable(name: str, part: Path, error: ValueError) -> str:
    return f"tensor {name!r} cannot be read from {part.name}: {_summary(error)}"


def _summary(error: ValueError) -> str:
    """TensorStore's message without its list of source locations."""
    return str(error).partition("[")[0].strip()
