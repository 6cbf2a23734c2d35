"""Orbax copies of checkpoints: bits, dtypes, meshes and damaged files.

The oracles are the safetensors library for values and Orbax's own API for the files.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from checkpoints import orbax_convert
from checkpoints.errors import CheckpointError
from checkpoints.orbax import OrbaxWeights, checksum
from checkpoints.orbax_convert import to_orbax, to_safetensors
from checkpoints.reader import Checkpoint, check, faults
from tests import tiny, tiny_vl

ROOT = Path(__file__).resolve().parents[2]
MIXED = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "f8": ml_dtypes.float8_e4m3fn,
    "i8": np.int8,
    "u8": np.uint8,  # packed formats store two int4 values in one byte
    "i32": np.int32,
    "i64": np.int64,
    "bool": np.bool_,
}


@pytest.fixture
def small(tmp_path):
    return tiny.write_tiny(tmp_path / "small", "qwen2")


@pytest.fixture
def mixed(tmp_path, small):
    """A directory with weights of every dtype, including every 16-bit pattern; and its tensors.

    The tensors are returned because the safetensors library cannot read those of 8 bits back.
    """
    random = np.random.default_rng(0)
    bits = {
        np.dtype(kind).itemsize: random.integers(0, 256, 4096 * np.dtype(kind).itemsize, np.uint8)
        for kind in MIXED.values()
    }
    bits[2] = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)  # NaNs with their payloads, infinities, subnormals
    tensors = {
        name: (bits[1] % 2).astype(bool) if kind is np.bool_ else bits[np.dtype(kind).itemsize].view(kind)
        for name, kind in MIXED.items()
    }
    tensors = {name: array.reshape(-1, 64) for name, array in tensors.items()}
    tensors["large i32"] = np.array([16777217, -(2**31)], np.int32)  # float32 cannot represent 16777217
    tensors["scalar"] = np.array(3.0, np.float32)
    directory = tmp_path / "mixed"
    shutil.copytree(small, directory)
    save_file(tensors, directory / "model.safetensors")
    return directory, tensors


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    return {k: v for file in sorted(directory.glob("*.safetensors")) for k, v in load_file(file).items()}


def assert_same_tensors(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


def run_mesh(*args: object) -> dict | None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoints.orbax_mesh", *map(str, args)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout.strip() else None


# -- bits -------------------------------------------------------------------------------------------------------------


def test_ck_07_every_dtype_keeps_every_bit(mixed, tmp_path):
    source, tensors = mixed
    to_orbax(source, tmp_path / "orbax")
    to_safetensors(tmp_path / "orbax", tmp_path / "back")
    for directory in (tmp_path / "orbax", tmp_path / "back"):
        checkpoint = Checkpoint(directory)
        assert_same_tensors({name: checkpoint.read(name) for name in checkpoint.tensors}, tensors)


@pytest.mark.parametrize("part_bytes", [10_000, 1 << 30], ids=["many parts", "one part"])
def test_hf_orbax_hf_is_identity(tmp_path, monkeypatch, part_bytes):
    """Holds for a text and a vision model, and for all other files byte by byte."""
    monkeypatch.setattr(orbax_convert, "PART_BYTES", part_bytes)
    monkeypatch.setattr(orbax_convert, "SHARD_BYTES", 2 * part_bytes)
    for source in (
        tiny.write_shards(tiny.write_tiny(tmp_path / "llama", "llama")),
        tiny_vl.write_tiny_vl(tmp_path / "vl", "qwen2_vl"),
    ):
        orbax, back = tmp_path / f"{source.name}-orbax", tmp_path / f"{source.name}-back"
        reports = []
        to_orbax(source, orbax, progress=lambda *report: reports.append(report))  # noqa: B023
        assert reports[-1][1:] == (Checkpoint(source).nbytes,) * 2
        to_safetensors(orbax, back)
        assert_same_tensors(tensors_of(back), tensors_of(source))
        assert not faults(back)
        assert (len(list(back.glob("*.safetensors"))) > 1) == (back / "model.safetensors.index.json").exists()
        others = {file.name for file in source.glob("[!.]*") if "safetensors" not in file.name}
        assert {"config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"} <= others
        for directory in (orbax, back):
            assert {
                file.name for file in directory.iterdir() if file.is_file() and "safetens" not in file.name
            } == others
            for name in others:
                assert (directory / name).read_bytes() == (source / name).read_bytes()


def test_ck_07_another_dtype_is_an_error_unless_a_cast_is_requested(mixed, tmp_path):
    source, tensors = mixed
    to_orbax(source, tmp_path / "orbax")
    weights = OrbaxWeights(tmp_path / "orbax" / "orbax")
    here = SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(CheckpointError, match="'f16' is float16, expected float32: pass cast=True"):
        weights.restore("f16", here, dtype=np.float32)
    with pytest.raises(CheckpointError, match="'large i32' is int32, expected float32: only floating point"):
        weights.restore("large i32", here, dtype=np.float32, cast=True)
    with pytest.raises(CheckpointError, match="'u8' is uint8, expected int8"):
        weights.restore("u8", here, dtype=np.int8, cast=True)
    with pytest.raises(ValueError, match="'i64' is int64, which JAX supports only with jax_enable_x64"):
        weights.restore("i64", here)
    assert weights.restore("large i32", here).dtype == np.int32
    assert int(weights.restore("large i32", here)[0]) == 16777217
    wide = weights.restore("f16", here, dtype=np.float32, cast=True)
    np.testing.assert_array_equal(np.asarray(wide), tensors["f16"].astype(np.float32))


def test_orbax_own_api_reads_the_written_files(small, tmp_path):
    import orbax.checkpoint as ocp

    to_orbax(small, tmp_path / "orbax")
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "orbax" / "orbax" / "00000")
    assert_same_tensors({name: np.asarray(array) for name, array in found.items()}, tensors_of(small))


# -- meshes -----------------------------------------------------------------------------------------------------------


def test_ck_08_saved_on_8_devices_restored_on_1_2_and_4(tmp_path):
    """The mesh of the checkpoint does not matter: each device reads its part of the requested sharding."""
    source = tiny.write_tiny(tmp_path / "source", "qwen2")
    run_mesh("save", source, tmp_path / "eight", 8)
    to_orbax(source, tmp_path / "one")
    held = {}
    for count in (1, 2, 4):
        held[count] = run_mesh("restore", source, tmp_path / "eight", count)["held"]
    assert held[1] == 2 * held[2] == 4 * held[4]
    assert run_mesh("restore", source, tmp_path / "one", 4)["held"] == held[4]


def test_a_matrix_saved_for_8_devices_has_8_chunks_along_its_sharded_axis(tmp_path):
    source = tiny.write_tiny(tmp_path / "source", "qwen2")
    run_mesh("save", source, tmp_path / "eight", 8)
    stores = OrbaxWeights(tmp_path / "eight" / "orbax")._stores
    for name, axis in (("model.embed_tokens.weight", 0), ("model.layers.0.mlp.down_proj.weight", 1)):
        chunk = stores[name].chunk_layout.read_chunk.shape
        assert chunk[axis] == stores[name].shape[axis] // 8
        assert chunk[1 - axis] == stores[name].shape[1 - axis]


def test_a_mesh_larger_than_the_cpu_devices_is_refused(small, tmp_path):
    found = len(jax.devices("cpu"))
    with pytest.raises(ValueError, match=f"chunks for 64 devices need 64 JAX CPU devices, found {found}"):
        to_orbax(small, tmp_path / "orbax", devices=64)
    assert not (tmp_path / "orbax").exists()


def test_tensors_without_values_are_refused(small, tmp_path):
    save_file({"none": np.zeros((0, 4), np.float32)}, small / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensor 'none' has no values"):
        to_orbax(small, tmp_path / "orbax")


# -- damage -----------------------------------------------------------------------------------------------------------


def test_an_interrupted_conversion_leaves_nothing_that_loads(small, tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_convert, "PART_BYTES", 10_000)
    save = orbax_convert.save_part

    def killed(folder, number, arrays):
        if number == 2:
            raise KeyboardInterrupt
        return save(folder, number, arrays)

    monkeypatch.setattr(orbax_convert, "save_part", killed)
    with pytest.raises(KeyboardInterrupt):
        to_orbax(small, tmp_path / "orbax")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small"]


def test_a_directory_with_files_is_not_replaced(small, tmp_path):
    (tmp_path / "orbax").mkdir()
    (tmp_path / "orbax" / "mine").touch()
    with pytest.raises(FileExistsError, match="already exists"):
        to_orbax(small, tmp_path / "orbax")


@pytest.fixture
def orbax(small, tmp_path, monkeypatch):
    """The small model in several Orbax parts."""
    monkeypatch.setattr(orbax_convert, "PART_BYTES", 200_000)
    return to_orbax(small, tmp_path / "orbax")


def test_check_reports_a_good_directory(orbax, small):
    report = check(orbax)
    assert "good" in report
    assert f"{len(tensors_of(small))} tensors" in report


def test_loading_names_the_tensors_of_a_missing_part(orbax):
    """A copy without checksums: no file lists the parts, so only the strict loader finds what is missing."""
    names = set(OrbaxWeights(orbax / "orbax").tensors)
    shutil.rmtree(orbax / "orbax" / "00001")
    assert any(fault.startswith("orbax/00001/") and fault.endswith("is missing") for fault in faults(orbax))
    (orbax / "orbax" / "checksums.json").unlink()
    assert not faults(orbax)
    missing = names - set(Checkpoint(orbax).tensors)
    assert missing
    from omni_jax.models.config import model_config
    from omni_jax.models.weights import load_weights

    checkpoint = Checkpoint(orbax)
    with pytest.raises(CheckpointError, match="missing tensor") as error:
        load_weights(checkpoint, model_config(checkpoint.config), np.dtype(np.float32))
    assert all(any(name in fault for fault in error.value.faults) for name in missing)


@pytest.mark.parametrize("what", ["_METADATA", "manifest.ocdbt"])
def test_a_part_without_its_index_is_a_fault(orbax, what):
    (orbax / "orbax" / "00001" / what).unlink()
    assert "00001" in faults(orbax)[0]


def test_missing_or_truncated_data_is_never_read_as_zeros(orbax):
    part = orbax / "orbax" / "00000"
    largest = max((file for file in part.rglob("d/*") if file.is_file()), key=lambda file: file.stat().st_size)
    whole = largest.read_bytes()
    for damaged in (None, whole[: len(whole) // 2]):
        largest.unlink() if damaged is None else largest.write_bytes(damaged)
        try:
            checkpoint = Checkpoint(orbax)
        except CheckpointError as error:
            assert "00000" in str(error)  # noqa: PT017
            continue
        with pytest.raises(CheckpointError, match="00000"):
            [checkpoint.read(name) for name in checkpoint.tensors]
        largest.write_bytes(whole)


def largest_file(part):
    return max((file for file in part.rglob("d/*") if file.is_file()), key=lambda file: file.stat().st_size)


def test_a_file_that_was_cut_short_is_found_without_reading_weights(orbax):
    file = largest_file(orbax / "orbax" / "00001")
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[: size // 2])
    (fault,) = faults(orbax)
    name = file.relative_to(orbax).as_posix()
    assert fault == f"{name} has {size // 2:,} bytes, it was written with {size:,}: copy or convert the model again"


def test_one_flipped_bit_is_never_loaded(orbax):
    file = largest_file(orbax / "orbax" / "00001")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    checkpoint = Checkpoint(orbax)
    with pytest.raises(CheckpointError, match=r"tensor '.*' in 00001 was changed after it was written"):
        [checkpoint.read(name) for name in checkpoint.tensors]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"algorithm": "md5", "files": {}, "tensors": []}'])
def test_damaged_checksums_are_a_fault(orbax, content):
    (orbax / "orbax" / "checksums.json").write_text(content)
    assert "orbax/checksums.json is damaged" in faults(orbax)[0]


def test_a_checksum_is_of_all_pieces(monkeypatch):
    array = np.arange(1000, dtype=np.float32).reshape(10, 100)
    before = checksum(array), checksum(array.T)
    assert before[0] != before[1]
    monkeypatch.setattr("checkpoints.orbax.PIECE_BYTES", 1024)
    sums = {checksum(array)}
    for place in range(0, 1000, 111):
        changed = array.copy()
        changed.reshape(-1)[place] += 1
        sums.add(checksum(changed))
    assert len(sums) == 11


def test_a_missing_chunk_is_a_fault(orbax):
    """zarr would read it as zeros."""
    import tensorstore as ts

    base = {"driver": "ocdbt", "base": f"file://{orbax}/orbax/00000/"}
    store = ts.KvStore.open(base).result()
    key = next(key for key in sorted(store.list().result()) if not key.endswith(b".zarray"))
    store.delete_range(ts.KvStore.KeyRange(key, key + b"\0")).result()
    name = key.decode().rpartition("/")[0]
    assert f"tensor {name!r} has 0 of 1 chunks" in faults(orbax)[0]


def test_a_name_in_two_parts_is_a_fault(orbax):
    shutil.copytree(orbax / "orbax" / "00000", orbax / "orbax" / "00009")
    assert any("is in 00000 and in 00009" in fault for fault in faults(orbax))


def test_safetensors_beside_orbax_are_ambiguous(orbax, small):
    shutil.copy(small / "model.safetensors", orbax)
    assert "the weights are ambiguous" in faults(orbax)[0]


def test_a_folder_that_is_not_a_checkpoint_is_a_fault(small, tmp_path):
    directory = tmp_path / "other"
    shutil.copytree(small, directory)
    (directory / "model.safetensors").unlink()
    (directory / "orbax" / "00000").mkdir(parents=True)
    assert "00000 is not an Orbax checkpoint" in faults(directory)[0]
