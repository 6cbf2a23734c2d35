"""Every fault of a model directory is found and named before any weight is read.

The oracle for values is the safetensors library.
"""

import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save, save_file

from checkpoints.errors import CheckpointError
from checkpoints.reader import Checkpoint, check, faults, verify
from checkpoints.safetensors_header import read_header
from tests import tiny


@pytest.fixture
def single(tmp_path):
    return tiny.write_tiny(tmp_path / "single", "llama")


@pytest.fixture
def sharded(tmp_path):
    return tiny.write_shards(tiny.write_tiny(tmp_path / "sharded", "llama"), 3)


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def only_fault(directory):
    found = faults(directory)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_values_equal_those_of_the_safetensors_library(layout, request):
    directory = request.getfixturevalue(layout)
    expected = {k: v for file in directory.glob("*.safetensors") for k, v in load_file(file).items()}
    verify(directory)
    checkpoint = Checkpoint(directory)
    assert checkpoint.tensors.keys() == expected.keys()
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in expected.values())
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.generation_config["eos_token_id"] == [2, 0]
    for name, tensor in expected.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor)
        assert checkpoint.tensors[name].shape == tensor.shape


def test_read_returns_a_read_only_view(single):
    checkpoint = Checkpoint(single)
    first, again = checkpoint.read("lm_head.weight"), checkpoint.read("lm_head.weight")
    assert np.shares_memory(first, again)
    assert not first.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        first[0, 0] = 0
    with pytest.raises(KeyError):
        checkpoint.read("no.such.tensor")


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "bool"]
    + [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)],
)
def test_each_dtype_is_read(single, dtype):
    values = np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, dtype, dtype))
    dtype = values.dtype
    save_file(
        {"x": values, "empty": np.zeros((0, 3), dtype), "scalar": values[1, 1:2].reshape(())},
        single / "model.safetensors",
    )
    checkpoint = Checkpoint(single)
    assert checkpoint.read("x").dtype == dtype
    np.testing.assert_array_equal(checkpoint.read("x").astype(np.float64), values.astype(np.float64))
    assert checkpoint.read("empty").shape == (0, 3)
    assert checkpoint.read("scalar").shape == ()
    assert float(checkpoint.read("scalar")) == float(values[1, 1])


def test_an_unsupported_dtype_is_named(single):
    write_raw(single / "model.safetensors", {"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, b"ab")
    assert "tensor 'x' has the unsupported dtype 'F4'; supported: F64, F32" in only_fault(single)


def test_ck_01_missing_shard(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    assert "'model-00002-of-00003.safetensors' is missing" in only_fault(sharded)
    assert "'model.layers." in only_fault(sharded)  # the fault names some tensors of the missing shard
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors' is missing"):
        Checkpoint(sharded)


def test_ck_01_an_indexed_tensor_is_not_in_its_file(sharded):
    file, index = "model-00001-of-00003.safetensors", "model.safetensors.index.json"
    edit_json(sharded / index, lambda content: content["weight_map"].update({"ghost": file}))
    assert only_fault(sharded) == f"tensor 'ghost' is not in {file}, the file that {index} assigns it to"


def test_every_fault_is_listed_at_once(sharded):
    (sharded / "model-00001-of-00003.safetensors").unlink()
    (sharded / "tokenizer.json").write_text("{")
    (sharded / "config.json").unlink()
    (sharded / "generation_config.json").write_text("[]")
    truncate(sharded / "model-00003-of-00003.safetensors", 10)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(sharded)
    assert len(caught.value.faults) == 5
    for word in ("00001-of-00003", "00003-of-00003", "tokenizer.json", "config.json' is missing", "generation_config"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "a/../../secret.safetensors", "{secret}", "x\0y", "", "..\\s"]
)
def test_ck_04_names_that_leave_the_directory_are_refused(sharded, monkeypatch, name):
    secret = sharded.parent / "secret.safetensors"
    save_file({"w": np.ones(3, np.float32)}, secret)
    name = name.format(secret=secret)
    edit_json(sharded / "model.safetensors.index.json", lambda index: index["weight_map"].update({"w": name}))
    opened = []
    monkeypatch.setattr(
        "checkpoints.reader.read_header", lambda file, label: opened.append(file) or read_header(file, label)
    )
    assert "not a plain path inside the directory" in only_fault(sharded)
    assert opened
    assert secret not in opened


def test_links_to_a_shared_store_are_followed(sharded, tmp_path):
    """The directory is the operator's, and so are its links; only names that a file holds must stay inside it."""
    expected = Checkpoint(sharded).read("model.norm.weight").copy()
    (tmp_path / "linked").mkdir()
    for file in sharded.iterdir():
        (tmp_path / "linked" / file.name).symlink_to(file)
    np.testing.assert_array_equal(Checkpoint(tmp_path / "linked").read("model.norm.weight"), expected)
    (sharded / "model-00002-of-00003.safetensors").unlink()
    fault = only_fault(tmp_path / "linked")
    assert "'model-00002-of-00003.safetensors' is a link to " in fault
    assert "which is missing" in fault


def test_ck_04_hugging_face_cache_layout_is_read(sharded, tmp_path):
    snapshot, blobs = tmp_path / "models--x--y" / "snapshots" / "abc", tmp_path / "models--x--y" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(sharded.iterdir())):
        file.rename(blobs / f"{i:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i:064x}")
    checkpoint = Checkpoint(snapshot)
    np.testing.assert_array_equal(
        checkpoint.read("model.norm.weight"), tiny.weights(tiny.config("llama"))["model.norm.weight"]
    )
    assert checkpoint.ignored == ()


def test_a_linked_directory_and_links_inside_it_are_read(single, tmp_path):
    (single / "model.safetensors").rename(single / "weights.bin")
    (single / "model.safetensors").symlink_to("weights.bin")
    (tmp_path / "link").symlink_to(single)
    verify(tmp_path / "link")


def test_ck_05_stray_files_are_not_read(sharded):
    right = tiny.weights(tiny.config("llama"))
    wrong = {name: tensor + 1 for name, tensor in right.items()}
    save_file(wrong, sharded / "consolidated.safetensors")
    save_file(wrong, sharded / "model.safetensors")
    (sharded / "adapter.safetensors").write_bytes(b"no safetensors at all")
    checkpoint = Checkpoint(sharded)
    for name, tensor in right.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor)
    assert checkpoint.ignored == ("adapter.safetensors", "consolidated.safetensors", "model.safetensors")
    assert "not read      adapter.safetensors" in check(sharded)


def test_ck_05_duplicates_without_an_index_are_refused(single):
    save_file({"model.norm.weight": np.ones(64, np.float32)}, single / "copy.safetensors")
    assert "model.safetensors and copy.safetensors both hold 1 tensors ('model.norm.weight'" in only_fault(single)
    save_file({"other": np.ones(64, np.float32)}, single / "copy.safetensors")
    assert Checkpoint(single).ignored == ("copy.safetensors",)


@pytest.mark.parametrize("listed", [1, 2])
def test_ck_06_the_index_decides_which_copy_counts(single, listed):
    right, wrong = np.full(4, 1, np.float32), np.full(4, 2, np.float32)
    (single / "model.safetensors").unlink()
    for i in (1, 2):
        save_file({"x": right if i == listed else wrong, f"y{i}": wrong}, single / f"model-{i}.safetensors")
    weight_map = {"x": f"model-{listed}.safetensors", "y1": "model-1.safetensors", "y2": "model-2.safetensors"}
    (single / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = Checkpoint(single)
    np.testing.assert_array_equal(checkpoint.read("x"), right)
    assert checkpoint.ignored == (f"x in model-{3 - listed}.safetensors",)


def test_paths_that_are_not_model_directories(tmp_path, single):
    assert only_fault(tmp_path / "nothing") == "there is no such directory"
    assert "this is a file" in only_fault(single / "config.json")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "omni-jax convert" in only_fault(tmp_path / "model.gguf")
    (tmp_path / "empty").mkdir()
    assert "it holds nothing" in only_fault(tmp_path / "empty")
    (tmp_path / "empty" / "README.md").write_text("hello")
    assert "it holds 'README.md'" in only_fault(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="not a usable model directory"):
        verify(tmp_path / "empty")
    assert faults("a\0b")


def test_the_fault_of_missing_weights_lists_the_files(single):
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    fault = only_fault(single)
    assert "neither model.safetensors nor model.safetensors.index.json" in fault
    assert "'pytorch_model.bin'" in fault


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "{}", "[" * 100_000, "\x00"]
)
def test_a_corrupt_index_is_a_fault(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in only_fault(sharded)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe{}", None])
def test_config_and_tokenizer_must_exist_and_parse(single, name, content):
    (single / name).unlink()
    if content is not None:
        (single / name).write_bytes(content)
    assert name in only_fault(single)


def test_a_folder_or_a_pipe_is_not_a_weights_file(single):
    (single / "model.safetensors").unlink()
    os.mkfifo(single / "model.safetensors")
    assert only_fault(single) == "'model.safetensors' is not a regular file"
    (single / "model.safetensors").unlink()
    (single / "model.safetensors").mkdir()
    assert only_fault(single) == "'model.safetensors' is not a regular file"
    (single / "model.safetensors").rmdir()
    (single / "model.safetensors").symlink_to("model.safetensors")
    assert "'model.safetensors'" in only_fault(single)


def test_a_file_truncated_after_verification_is_an_error(single):
    checkpoint = Checkpoint(single)
    truncate(single / "model.safetensors", 100)
    with pytest.raises(CheckpointError, match="was changed while it was in use"):
        [checkpoint.read(name) for name in checkpoint.tensors]


def x(**changes):
    return {"x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes}


@pytest.mark.parametrize(
    ("header", "data", "fault"),
    [
        (x(), 20, "is truncated: its header describes"),
        (x(), 30, "has 6 bytes after its last tensor"),
        (x(shape=[2, 4]), 24, r"tensor 'x' has 24 bytes, but F32 \[2, 4\] takes 32"),
        (x(dtype="F16"), 24, r"tensor 'x' has 24 bytes, but F16 \[2, 3\] takes 12"),
        (x(dtype=["F32"]), 24, "unsupported dtype"),
        (x(shape=[2, -3]), 24, "impossible shape"),
        (x(shape=[2, True, 3]), 24, "impossible shape"),
        (x(shape=[2.0, 3]), 24, "impossible shape"),
        (x(shape=[2**40, 2**40, 0]), 0, "impossible shape"),
        (x(shape=[1] * 40), 4, "impossible shape"),
        (x(data_offsets=[24, 0]), 24, "impossible data_offsets"),
        (x(data_offsets=[0]), 24, "impossible data_offsets"),
        (x(data_offsets=[-4, 20]), 24, "impossible data_offsets"),
        (x(data_offsets=[4, 28]), 28, "leaves a hole before it"),
        (x() | {"y": x()["x"]}, 24, "overlaps the tensor before it"),
        ({"x": 3}, 0, "corrupt entry"),
        ([], 0, "expected a JSON object"),
    ],
)  # fmt: skip
def test_each_corrupt_header_has_one_fault(single, header, data, fault):
    write_raw(single / "model.safetensors", header, bytes(data))
    with pytest.raises(CheckpointError, match=fault) as caught:
        verify(single)
    assert len(caught.value.faults) == 1


def test_a_tensor_named_twice_is_refused(single):
    entry = json.dumps(x()["x"])
    (single / "model.safetensors").write_bytes(raw(f'{{"x": {entry}, "x": {entry}}}'.encode(), bytes(24)))
    assert "names a tensor or a field twice" in only_fault(single)


def test_a_header_longer_than_the_file_is_a_fault(single):
    for length in (0, 7, 8, 2**40, 2**63):
        (single / "model.safetensors").write_bytes(struct.pack("<Q", length)[: min(length, 8)])
        assert "model.safetensors" in only_fault(single)


SMALL = save({"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 2), np.float16)})


@settings(max_examples=200, deadline=None)
@given(length=st.integers(0, len(SMALL) - 1))
def test_any_truncation_is_found(tmp_path_factory, length):
    file = tmp_path_factory.getbasetemp() / "truncated.safetensors"
    file.write_bytes(SMALL[:length])
    with pytest.raises(CheckpointError):
        read_header(file, "f")


@settings(max_examples=300, deadline=None)
@given(changes=st.dictionaries(st.integers(0, len(SMALL) - 33), st.integers(0, 255), min_size=1, max_size=4))
def test_any_corruption_of_the_header_is_a_checkpoint_error_or_harmless(tmp_path_factory, changes):
    content = bytearray(SMALL)
    for place, byte in changes.items():
        content[place] = byte
    file = tmp_path_factory.getbasetemp() / "corrupt.safetensors"
    file.write_bytes(content)
    try:
        tensors = read_header(file, "f")
    except CheckpointError:
        return
    for info in tensors.values():  # accepted tensors lie within the file
        assert 8 <= info.offset <= info.offset + info.nbytes <= len(content)
        np.ndarray(info.shape, info.dtype, buffer=bytes(content) + b"\0", offset=info.offset)


def test_check_reports_architecture_and_parameters(single):
    report = check(single)
    tensors = tiny.weights(tiny.config("llama"))
    parameters = sum(tensor.size for tensor in tensors.values())
    for text in ("LlamaForCausalLM", f"{parameters:,} float32", f"{len(tensors)} tensors in 1 file"):
        assert text in report


def raw(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def write_raw(path, header, data):
    path.write_bytes(raw(json.dumps(header).encode(), data))


def truncate(path, by):
    os.truncate(path, path.stat().st_size - by)
