"""`omni-jax convert` between safetensors and Orbax, and an engine that starts from either."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints.reader import Checkpoint
from omni_jax import LLM
from omni_jax.requests import SamplingParams
from tests import tiny, tiny_vl
from tests.command_line import run_command

ROOT = Path(__file__).resolve().parents[3]


def convert(*args: object, code: int = 0) -> str:
    result = run_command("convert", *args)
    assert result.exit_code == code, result.output
    return result.output


def answer(directory: Path) -> list[int]:
    llm = LLM(directory, max_model_len=64, max_num_seqs=2, kv_cache_memory_bytes=1 << 20, max_num_batched_tokens=32)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    return llm.generate([tiny.prompt(9)], params)[0].outputs[0].token_ids


def test_an_engine_starts_from_orbax_and_says_the_same(tmp_path):
    source = tiny.write_tiny(tmp_path / "source", "qwen2")
    assert "wrote" in convert(source, tmp_path / "orbax", "--orbax")
    convert(tmp_path / "orbax", tmp_path / "back", "--safetensors")
    assert answer(tmp_path / "orbax") == answer(source) == answer(tmp_path / "back")


def test_a_mesh_cuts_without_that_many_devices(tmp_path):
    """The CPU poses as four. In a process of its own, since JAX has its devices here."""
    source = tiny_vl.write_tiny_vl(tmp_path / "source", "qwen2_vl")
    command = [
        sys.executable,
        "-m",
        "serving.cli.main",
        "convert",
        source,
        tmp_path / "orbax",
        "--orbax",
        "--mesh",
        "model=4",
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    expected, found = Checkpoint(source), Checkpoint(tmp_path / "orbax")
    assert found.tensors.keys() == expected.tensors.keys()
    for name in expected.tensors:
        assert found.read(name).tobytes() == expected.read(name).tobytes()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--orbax", "--safetensors"), "give --orbax or --safetensors, not both"),
        (("--mesh", "model=2"), "--mesh needs --orbax"),
        (("--orbax", "--dtype", "bfloat16"), "keep the type of every tensor"),
    ],
)
def test_flags_that_do_not_go_together(tmp_path, args, message):
    assert message in convert(tmp_path / "source", tmp_path / "out", *args, code=2)


def test_faults_are_told_in_a_line(tmp_path):
    source = tiny.write_tiny(tmp_path / "source", "llama")
    assert "is a directory: give --orbax or --safetensors" in convert(source, tmp_path / "out", code=2)
    assert "--mesh must be like data=2,model=4" in convert(source, tmp_path / "out", "--orbax", "--mesh", "8", code=2)
    assert "there is no directory" in convert(tmp_path / "no", tmp_path / "out", "--orbax", code=2)
    assert "there is no file" in convert(tmp_path / "no.gguf", tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()
