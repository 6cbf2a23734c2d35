"""Orbax copies of checkpoints: bits, dtypes, meshes, and what is damaged. The oracles are the safetensors library, for
values, and Orbax's own API, for the files."""

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
from checkpoints.orbax import OrbaxWeights
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
    "u8": np.uint8,  # two int4 in a byte, as packed formats have them
    "i32": np.int32,
    "i64": np.int64,
    "bool": np.bool_,
}


@pytest.fixture
def small(tmp_path):
    return tiny.write_tiny(tmp_path / "small", "qwen2")


@pytest.fixture
def mixed(tmp_path, small):
    """A directory whose weights are of every dtype, every bit pattern of 16 bits among them; and its tensors."""
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
    tensors["large i32"] = np.array([16777217, -(2**31)], np.int32)  # no float32 has it
    tensors["scalar"] = np.array(3.0, np.float32)
    directory = tmp_path / "mixed"
    shutil.copytree(small, directory)
    save_file(tensors, directory / "model.safetensors")
    return directory, tensors  # which the safetensors library cannot read again where they are of 8 bits


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
    """Two families, text and vision; every other file byte by byte."""
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
        others = {file.name for file in source.iterdir() if "safetensors" not in file.name}
        assert {"config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"} <= others
        for directory in (orbax, back):
            assert {
                file.name for file in directory.iterdir() if file.is_file() and "safetens" not in file.name
            } == others
            for name in others:
                assert (directory / name).read_bytes() == (source / name).read_bytes()


def test_ck_07_another_dtype_is_reported_or_cast_when_asked(mixed, tmp_path):
    source, tensors = mixed
    to_orbax(source, tmp_path / "orbax")
    weights = OrbaxWeights(tmp_path / "orbax" / "orbax")
    here = SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(CheckpointError, match="'f16' is float16, float32 was asked for: ask for a cast"):
        weights.restore("f16", here, dtype=np.float32)
    with pytest.raises(CheckpointError, match="'large i32' is int32, float32 was asked for: only floating point"):
        weights.restore("large i32", here, dtype=np.float32, cast=True)
    with pytest.raises(CheckpointError, match="'u8' is uint8, int8 was asked for"):
        weights.restore("u8", here, dtype=np.int8, cast=True)
    with pytest.raises(ValueError, match="'i64' is int64, which JAX has only with jax_enable_x64"):
        weights.restore("i64", here)
    assert weights.restore("large i32", here).dtype == np.int32
    assert int(weights.restore("large i32", here)[0]) == 16777217
    wide = weights.restore("f16", here, dtype=np.float32, cast=True)
    np.testing.assert_array_equal(np.asarray(wide), tensors["f16"].astype(np.float32))


def test_orbax_itself_reads_what_was_written(small, tmp_path):
    import orbax.checkpoint as ocp

    to_orbax(small, tmp_path / "orbax")
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "orbax" / "orbax" / "00000")
    assert_same_tensors({name: np.asarray(array) for name, array in found.items()}, tensors_of(small))


# -- meshes -----------------------------------------------------------------------------------------------------------


def test_ck_08_saved_on_8_devices_restored_on_1_2_and_4(tmp_path):
    """The mesh of the checkpoint does not matter; each device gets its part, as the sharding asked for says."""
    source = tiny.write_tiny(tmp_path / "source", "qwen2")
    run_mesh("save", source, tmp_path / "eight", 8)
    to_orbax(source, tmp_path / "one")
    held = {}
    for count in (1, 2, 4):
        held[count] = run_mesh("restore", source, tmp_path / "eight", count)["held"]
    assert held[1] == 2 * held[2] == 4 * held[4]
    assert run_mesh("restore", source, tmp_path / "one", 4)["held"] == held[4]


def test_a_range_is_read_from_the_chunks_it_touches(tmp_path):
    """A matrix saved for 8 devices lies in 8 chunks along the axis that they share out."""
    source = tiny.write_tiny(tmp_path / "source", "qwen2")
    run_mesh("save", source, tmp_path / "eight", 8)
    stores = OrbaxWeights(tmp_path / "eight" / "orbax")._stores
    for name, axis in (("model.embed_tokens.weight", 0), ("model.layers.0.mlp.down_proj.weight", 1)):
        chunk = stores[name].chunk_layout.read_chunk.shape
        assert chunk[axis] == stores[name].shape[axis] // 8
        assert chunk[1 - axis] == stores[name].shape[1 - axis]


def test_more_devices_than_there_are_is_refused(small, tmp_path):
    there = len(jax.devices("cpu"))
    with pytest.raises(
        ValueError, match=f"chunks for 64 devices need as many JAX devices on the CPU, there are {there}"
    ):
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


def test_what_is_there_is_not_replaced(small, tmp_path):
    (tmp_path / "orbax").mkdir()
    (tmp_path / "orbax" / "mine").touch()
    with pytest.raises(FileExistsError, match="is there already"):
        to_orbax(small, tmp_path / "orbax")


@pytest.fixture
def orbax(small, tmp_path, monkeypatch):
    """Several parts."""
    monkeypatch.setattr(orbax_convert, "PART_BYTES", 200_000)
    return to_orbax(small, tmp_path / "orbax")


def test_a_good_one_is_reported_as_such(orbax, small):
    report = check(orbax)
    assert "good" in report
    assert f"{len(tensors_of(small))} tensors" in report


def test_a_part_that_is_missing_names_its_tensors_at_load(orbax):
    """Nothing lists the parts, so the strict loader does: every tensor of the model has to be there."""
    names = set(OrbaxWeights(orbax / "orbax").tensors)
    shutil.rmtree(orbax / "orbax" / "00001")
    assert not faults(orbax)
    missing = names - set(Checkpoint(orbax).tensors)
    assert missing
    from omni_jax.models import load_weights, model_config

    checkpoint = Checkpoint(orbax)
    with pytest.raises(CheckpointError, match="missing tensor") as error:
        load_weights(checkpoint, model_config(checkpoint.config), np.dtype(np.float32))
    assert all(any(name in fault for fault in error.value.faults) for name in missing)


@pytest.mark.parametrize("what", ["_METADATA", "manifest.ocdbt"])
def test_a_part_without_its_index_is_a_fault(orbax, what):
    (orbax / "orbax" / "00001" / what).unlink()
    assert "00001" in faults(orbax)[0]


def test_data_that_is_gone_or_cut_short_is_never_read_as_zeros(orbax):
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


def test_a_chunk_that_is_not_there_is_a_fault(orbax):
    """zarr reads it as zeros."""
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
    assert "nothing says which are meant" in faults(orbax)[0]


def test_a_folder_that_is_no_checkpoint_is_a_fault(small, tmp_path):
    directory = tmp_path / "other"
    shutil.copytree(small, directory)
    (directory / "model.safetensors").unlink()
    (directory / "orbax" / "00000").mkdir(parents=True)
    assert "00000 is no Orbax checkpoint" in faults(directory)[0]
