"""Conversion of a model directory from safetensors to Orbax weights, and back.

Tensors keep their names, dtypes and bits. All other files of the model are copied.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.new_directory import new_directory
from checkpoints.orbax import FOLDER, checksum, save_part, write_checksums
from checkpoints.reader import INDEX, SINGLE, Checkpoint, locate
from checkpoints.safetensors_header import DTYPES

Progress = Callable[[str, int, int], None]  # called with name, bytes done, total bytes

PART_BYTES = 512 << 20  # tensors in one part; a conversion needs a few times that in memory
SHARD_BYTES = 5 * 10**9  # maximum size of a safetensors file, as Hugging Face has it
WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")  # not copied
# Matrices that a mesh shards by their second axis (inputs). All others are sharded by their first.
SPLIT_INPUTS = ("o_proj.weight", "down_proj.weight", "attn.proj.weight", "mlp.fc2.weight", "merger.mlp.2.weight")


def to_orbax(source: Path | str, out: Path | str, *, devices: int = 1, progress: Progress | None = None) -> Path:
    """Write a copy of a model directory with Orbax weights.

    Args:
        source: a model directory with safetensors or Orbax weights.
        out: the directory to create; it appears only when it is complete.
        devices: number of devices on the mesh's model axis. One chunk is written for each; any mesh can read them.
            JAX must have that many CPU devices.
        progress: called with (tensor name, bytes done, total bytes) after each part.

    Returns:
        out.

    Raises:
        CheckpointError: the source cannot be loaded, or has tensors without values.
        FileExistsError: out exists and is not an empty directory.
        ValueError: JAX has fewer CPU devices.
    """
    checkpoint = Checkpoint(source)
    if empty := [name for name, info in checkpoint.tensors.items() if not info.nbytes]:
        raise CheckpointError([f"tensor {name!r} has no values; Orbax cannot save empty arrays" for name in empty])
    place = _placer(devices)
    with new_directory(Path(out)) as partial:
        _copy_files(checkpoint.directory, partial)
        done, checksums = 0, {}
        for number, names in enumerate(_groups(checkpoint, PART_BYTES)):
            arrays = {name: checkpoint.read(name) for name in names}
            checksums |= {name: checksum(array) for name, array in arrays.items()}
            save_part(partial / FOLDER, number, {name: place(name, array) for name, array in arrays.items()})
            done += sum(checkpoint.tensors[name].nbytes for name in names)
            if progress is not None:
                progress(names[-1], done, checkpoint.nbytes)
        write_checksums(partial / FOLDER, checksums)
    return Path(out)


def to_safetensors(source: Path | str, out: Path | str, *, progress: Progress | None = None) -> Path:
    """Write a copy of a model directory with safetensors weights: one file, or files of up to SHARD_BYTES and an index.

    Arguments, return value and errors are those of `to_orbax`.
    """
    checkpoint = Checkpoint(source)
    with new_directory(Path(out)) as partial:
        _copy_files(checkpoint.directory, partial)
        groups = list(_groups(checkpoint, SHARD_BYTES))
        files = [SINGLE]
        if len(groups) > 1:
            files = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
            places = {name: file for file, names in zip(files, groups, strict=True) for name in names}
            index = {"metadata": {"total_size": checkpoint.nbytes}, "weight_map": dict(sorted(places.items()))}
            (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        done = 0
        for file, names in zip(files, groups, strict=True):
            for name, nbytes in _write_safetensors(partial / file, checkpoint, names):
                done += nbytes
                if progress is not None:
                    progress(name, done, checkpoint.nbytes)
    return Path(out)


def _copy_files(source: Path, target: Path) -> None:
    """Copy the regular files except hidden files and weights: config, tokenizer, generation config, templates, …"""
    for name in sorted(os.listdir(source)):
        if not name.startswith(".") and not name.endswith(WEIGHTS) and not (source / name).is_dir():
            shutil.copyfile(locate(source, name), target / name)


def _groups(checkpoint: Checkpoint, max_bytes: int) -> Iterator[list[str]]:
    """Yield groups of tensor names in reading order: up to `max_bytes` together, or one larger tensor."""
    group, nbytes = [], 0
    for name, info in checkpoint.tensors.items():
        if group and nbytes + info.nbytes > max_bytes:
            yield group
            group, nbytes = [], 0
        group.append(name)
        nbytes += info.nbytes
    yield group


def _placer(devices: int) -> Callable[[str, np.ndarray], Any]:
    """Return a function that shards an array over CPU devices; vectors, uneven axes and 64 bits stay in host memory."""
    if devices == 1:
        return lambda name, array: array
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    found = jax.devices("cpu")
    if len(found) < devices:
        raise ValueError(f"chunks for {devices} devices need {devices} JAX CPU devices, found {len(found)}")
    mesh = Mesh(np.asarray(found[:devices]), ("model",))

    def place(name: str, array: np.ndarray) -> Any:
        axis = 1 if name.endswith(SPLIT_INPUTS) else 0
        if array.ndim < 2 or array.shape[axis] % devices or jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
            return array
        spec = PartitionSpec(*(None,) * axis, "model")
        return jax.device_put(array, NamedSharding(mesh, spec))

    return place


def _write_safetensors(file: Path, checkpoint: Checkpoint, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Write a file (layout: safetensors_header.py), one tensor at a time; yield (tensor name, bytes written)."""
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        info = checkpoint.tensors[name]
        begin, end = end, end + info.nbytes
        header[name] = {"dtype": kinds[info.dtype], "shape": list(info.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            array = np.ascontiguousarray(checkpoint.read(name))
            yield name, stream.write(array.reshape(-1).view(np.uint8).data)
