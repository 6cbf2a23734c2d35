"""Weights in Orbax: a checkpoint's tensors under their own names, in their own dtypes, in parts that are read lazily.

A model directory keeps them in the folder `orbax`. In it are parts, `00000`, `00001`, …, each of which is an Orbax
checkpoint by itself (a flat dictionary of names and arrays; OCDBT and zarr), so that a conversion never needs more
memory than a part. How an array is cut into chunks does not change what is read: any device of any mesh reads the range
it needs, and only the chunks that range touches.

Reading needs TensorStore, on which Orbax stands, and not Orbax itself, whose restoring casts to a template's dtype
without a word. Here nothing is cast unless that is asked for. All three (JAX, Orbax, TensorStore) are imported where
they are needed: most commands only look at checkpoints.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.safetensors_header import DTYPES, TensorInfo

if TYPE_CHECKING:
    import jax

FOLDER = "orbax"
METADATA = "_METADATA"  # of a part, written by Orbax: the tree's names, and how it is stored
CHUNK_BYTES = 64 << 20  # of an array, at most: what reading a small range may have to read
CACHE_BYTES = 256 << 20  # of TensorStore's cache, which holds indexes, and chunks while they are read

Index = tuple[slice, ...]


class OrbaxWeights:
    """The weights of a folder. Nothing but indexes is read until `read`.

    Attributes:
        tensors: TensorInfo by name; `file` is the part, `offset` is 0.
    """

    def __init__(self, folder: Path | str):
        """Opens every array.

        Raises:
            CheckpointError: listing every fault: parts that are no Orbax checkpoints, names in two parts, chunks that
                are missing, dtypes that no checkpoint has.
        """
        import tensorstore as ts

        self.folder = Path(folder)
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
        if faults:
            raise CheckpointError(faults)

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """One tensor, or a range of it; the caller's own.

        Raises:
            KeyError: no such tensor.
            CheckpointError: its data cannot be read.
        """
        try:
            return self._stores[name][index].read().result()
        except ValueError as error:
            raise CheckpointError(_unreadable(name, self.tensors[name].file, error)) from error

    def restore(
        self, name: str, sharding: "jax.sharding.Sharding", *, dtype: Any = None, cast: bool = False
    ) -> "jax.Array":
        """One tensor with the sharding asked for, whatever it was saved with: each device reads its own range.

        Args:
            dtype: what the tensor has to be; None takes it as it is.
            cast: a tensor of floating point numbers that is not of `dtype` is cast to it.

        Raises:
            KeyError: no such tensor.
            CheckpointError: it is of another dtype, or its data cannot be read.
            ValueError: JAX would change the dtype in silence (64 bits, while it is not set up for them).
        """
        import jax
        import jax.numpy as jnp

        stored = self.tensors[name].dtype
        wanted = stored if dtype is None else np.dtype(dtype)
        if wanted != stored:
            floating = all(jnp.issubdtype(each, jnp.floating) for each in (wanted, stored))
            if not (cast and floating):
                hint = "only floating point numbers are cast" if cast else "ask for a cast, if one is meant"
                raise CheckpointError(f"tensor {name!r} is {stored}, {wanted} was asked for: {hint}")
        if jax.dtypes.canonicalize_dtype(wanted) != wanted:
            raise ValueError(f"tensor {name!r} is {wanted}, which JAX has only with jax_enable_x64")
        return jax.make_array_from_callback(
            self.tensors[name].shape, sharding, lambda index: self.read(name, index or ()).astype(wanted, copy=False)
        )


def save_part(folder: Path, number: int, arrays: Mapping[str, "np.ndarray | jax.Array"]) -> Path:
    """Writes one part. Arrays on several devices are cut where the devices share them out, so that as many devices read
    nothing twice; others into pieces of CHUNK_BYTES. Nothing is compressed: weights hardly shrink.

    Returns:
        The part's folder, which Orbax makes in one step.
    """
    import orbax.checkpoint as ocp

    part = Path(folder).absolute() / f"{number:05d}"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        pieces = dict.fromkeys(arrays, ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES))
        checkpointer.save(part, args=ocp.args.PyTreeSave(dict(arrays), save_args=pieces))
    return part


def _open(part: Path, context: Any) -> dict[str, Any]:
    """The arrays of a part by name, opened but not read."""
    import tensorstore as ts

    names, driver = _listed(part)
    base = {"driver": "ocdbt", "base": f"file://{part.absolute()}/"}
    try:
        held = _chunks(ts.KvStore.open(base, context=context).result().list().result())
        opening = {
            name: ts.open({"driver": driver, "kvstore": base | {"path": f"{name}/"}}, open=True, context=context)
            for name in names
        }
        stores = {name: store.result() for name, store in opening.items()}
    except ValueError as error:
        raise CheckpointError(f"{part.name} is damaged: {_line(error)}") from error
    faults = []
    for name, store in stores.items():
        grid: Any = store.chunk_layout.write_chunk.shape or ()  # None for a scalar
        chunks = math.prod(-(-size // chunk) for size, chunk in zip(store.shape, grid, strict=True))
        if held.get(name, 0) < chunks:
            faults.append(f"{part.name}: tensor {name!r} has {held.get(name, 0)} of {chunks} chunks")
        if np.dtype(store.dtype.numpy_dtype) not in DTYPES.values():
            faults.append(f"{part.name}: tensor {name!r} has the unsupported dtype {store.dtype.name}")
    if faults:
        raise CheckpointError(faults)
    return stores


def _listed(part: Path) -> tuple[list[str], str]:
    """Names of a part's arrays, and the TensorStore driver that reads them."""
    try:
        found = json.loads((part / METADATA).read_text(encoding="utf-8"))
        names = [entry["key_metadata"][-1]["key"] for entry in found["tree_metadata"].values()]
        nested = any(len(entry["key_metadata"]) != 1 for entry in found["tree_metadata"].values())
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise CheckpointError(f"{part.name} is no Orbax checkpoint of a dictionary of arrays: {error!r}") from error
    if nested or not found.get("use_ocdbt"):
        raise CheckpointError(f"{part.name} is no flat dictionary in OCDBT, as `omni-jax convert --orbax` writes it")
    return names, "zarr3" if found.get("use_zarr3") else "zarr"


def _chunks(keys: Iterable[bytes]) -> dict[str, int]:
    """How many chunks of each array a part holds. A chunk that is not there reads as zeros, so they are counted."""
    held: dict[str, int] = {}
    for key in keys:
        name, _, chunk = key.decode().rpartition("/")
        if name and not chunk.startswith(".z") and chunk != "zarr.json":
            name = name.partition("/c/")[0].removesuffix("/c")  # zarr3 has c/0/0, zarr 0.0
            held[name] = held.get(name, 0) + 1
    return held


def _unreadable(name: str, part: Path, error: ValueError) -> str:
    return f"tensor {name!r} cannot be read from {part.name}: {_line(error)}"


def _line(error: ValueError) -> str:
    return str(error).partition("[")[0].strip()
