"""`omni-jax check` finds what a start would refuse: both use the same functions."""

import copy
import json
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from checkpoints.errors import CheckpointError
from checkpoints.orbax_convert import to_orbax
from checkpoints.reader import check
from omni_jax.models.config import UnsupportedModel
from serving.cli.convert import _engine_lines
from tests import tiny, tiny_vl
from tests.checkpoints import gguf_files
from tests.command_line import run_command


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    return [
        tiny.write_shards(tiny.write_tiny(home / "text", "llama"), 2),
        tiny_vl.write_tiny_vl(home / "vision", "qwen2_5_vl", layout="5"),
    ]


WRONG = [
    "x",
    "7",
    0.5,
    -1,
    0,
    True,
    None,
    [],
    {},
    [1],
    ["a"],
    {"a": 1},
    2**40,
    -(2**70),
    float("nan"),
    [[[]]],
    "\ufffd",
]


def places(value, place=()):
    """The path of every value in a JSON document; of a list's items only the first two."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*place, key)
        yield from places(inner, (*place, key))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_changed_value_gives_a_good_model_or_a_sentence(models, data):
    """No value of any JSON file makes a reader fail with an exception that is not about the checkpoint."""
    directory = data.draw(st.sampled_from(models))
    file = data.draw(st.sampled_from([f for f in sorted(directory.glob("*.json")) if f.name != "tokenizer.json"]))
    text = file.read_text()
    changed = copy.deepcopy(json.loads(text))
    *inner, last = data.draw(st.sampled_from(list(places(changed))))
    value = changed
    for key in inner:
        value = value[key]
    value[last] = data.draw(st.sampled_from(WRONG))
    raised = None
    try:
        file.write_text(json.dumps(changed))
        check(directory)
        _engine_lines(directory)
    except ValueError as error:
        raised = error
    finally:
        file.write_text(text)
    # Not their subclasses, which json and numpy raise.
    assert raised is None or (type(raised) in (CheckpointError, UnsupportedModel, ValueError) and str(raised))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", '{"a": 1, "a": 2}', "config.json is not a valid JSON file: it has the key 'a' twice"),
        (
            "generation_config.json",
            '{"top_p": NaN}',
            "top_p must be a number from 0 to 1, got nan",
        ),
        ("config.json", '{"a": ' * 99_999, "config.json is not a valid JSON file"),
        ("model.safetensors.index.json", '{"weight_map": {"x": "a", "x": "b"}}', "it has the key 'x' twice"),
    ],
)
def test_malformed_files_are_told(tmp_path, file, content, message):
    model = tiny.write_shards(tiny.write_tiny(tmp_path, "llama"), 2)
    (model / file).write_text(content)
    result = run_command("check", model)
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr


def test_ck_10_check_agrees_with_a_start_on_weights(tmp_path):
    """`check` called a directory good that a start then refused with a KeyError."""
    model = tiny.write_tiny(tmp_path, "llama3")  # tied
    tensors = load_file(model / "model.safetensors")
    embed = tensors.pop("model.embed_tokens.weight")
    save_file(tensors | {"lm_head.weight": embed}, model / "model.safetensors")
    assert run_command("check", model).exit_code == 0  # tests/models/test_decoder.py loads the same
    save_file(tensors, model / "model.safetensors")
    result = run_command("check", model)
    assert result.exit_code == 1
    assert "missing tensor model.embed_tokens.weight" in result.stderr
    save_file(tensors | {"lm_head.weight": embed.astype(np.int8)}, model / "model.safetensors")
    assert "belong to quantised weights" in run_command("check", model).stderr


def test_check_reads_weights_if_asked_or_if_there_are_no_checksums(tmp_path):
    model = to_orbax(tiny.write_tiny(tmp_path / "source", "llama"), tmp_path / "orbax")
    file = max(model.rglob("d/*"), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert run_command("check", model).exit_code == 0  # sizes are right, and no weights are read
    result = run_command("check", model, "--full")
    assert result.exit_code == 1
    assert "was changed after it was written" in result.stderr
    (model / "orbax" / "checksums.json").unlink()
    assert "checksums     none" in run_command("check", model).stdout
    file.write_bytes(content[: len(content) // 2])
    assert run_command("check", model).exit_code == 1


def test_a_terminated_conversion_leaves_no_directory(tmp_path):
    gguf_files.write(tmp_path / "model.gguf", "llama")
    code = (
        "import checkpoints.gguf_convert as g, sys, time\n"
        "g._write_weights = lambda *_: (print('writing', flush=True), time.sleep(60))\n"
        "from serving.cli import main\n"
        "main.main(['convert', sys.argv[1], sys.argv[2]])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model.gguf"), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        assert any(path.name.startswith(".out.partial") for path in tmp_path.iterdir())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
