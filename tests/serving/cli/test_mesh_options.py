"""The flags of meshes, by vLLM's names and by our own."""

import json

import pytest

from omni_jax.engine.config import EngineConfig


@pytest.mark.parametrize(
    ("flags", "model", "data"),
    [
        ([], 1, 1),
        (["--tensor-parallel-size", "4"], 4, 1),
        (["-tp", "4", "-dp", "2", "-pp", "1"], 4, 2),
        (["--mesh", "data=2,model=4"], 4, 2),
        (["--mesh", "model=8"], 8, 1),
    ],
)
def test_serve_takes_a_mesh(served, invoke, tmp_path, flags, model, data):
    result = invoke("serve", str(tmp_path), "--port", "0", *flags)
    assert result.exit_code == 0, result.output
    assert served["config"] == EngineConfig(model_dir=tmp_path, tensor_parallel_size=model, data_parallel_size=data)


def test_a_file_of_settings_may_have_it(served, invoke, tmp_path):
    file = tmp_path / "serve.json"
    file.write_text(json.dumps({"model": str(tmp_path), "port": 0, "mesh": "data=2,model=2"}))
    assert invoke("serve", "--config", file).exit_code == 0
    assert served["config"].data_parallel_size == 2


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--mesh", "data=2,model=4", "-tp", "4"], "leave out --tensor-parallel-size and --data-parallel-size"),
        (["--mesh", "2x4"], "--mesh must be like data=2,model=4, got '2x4'"),
        (["--mesh", "data=0"], "must be like"),
        (["-tp", "0"], "tensor_parallel_size must be at least 1, got 0"),
    ],
)
def test_what_is_no_mesh_is_a_usage_error(served, invoke, tmp_path, flags, told):
    result = invoke("serve", str(tmp_path), "--port", "0", *flags)
    assert result.exit_code == 2
    assert told in result.output
    assert "config" not in served


def test_pipeline_parallelism_is_refused_with_what_to_use_instead(served, invoke, tmp_path):
    result = invoke("serve", str(tmp_path), "--port", "0", "--pipeline-parallel-size", "2")
    assert result.exit_code == 2
    assert "Use tensor_parallel_size to share each layer among devices" in result.output
    assert "config" not in served
