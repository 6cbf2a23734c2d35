"""`omni-jax plan` against arithmetic by hand: numbers of the config.json multiplied out here, nothing of ours used."""

import json

import pytest
from typer.testing import CliRunner

from serving.cli import app

WITHIN = 0.03

# Qwen2-VL-7B and -72B by their config.json. Per layer: query, key, value (with biases), output, gate, up, down, norms.
VL_7B = {"hidden": 3584, "inner": 18944, "layers": 28, "heads": 28, "kv": 4, "vocab": 152064}
VL_72B = {"hidden": 8192, "inner": 29568, "layers": 80, "heads": 64, "kv": 8, "vocab": 152064}


def run(*args: str, code: int = 0) -> dict:
    result = CliRunner().invoke(app, ["plan", *args, "--json", "--no-compile"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def text_parameters(hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, devices: int) -> int:
    """Of one device. Heads are 128 wide. Matrices and query-key-value biases are split, norms are whole."""
    kv_here = max(1, kv // devices)
    qkv = (heads // devices + 2 * kv_here) * 128
    layer = hidden * qkv + qkv + hidden * heads * 128 // devices + 3 * hidden * inner // devices + 2 * hidden
    return layers * layer + 2 * vocab * hidden // devices + hidden


def tower_parameters(hidden: int, devices: int) -> float:
    """Of Qwen2-VL's tower, 32 layers of 1,280, whose merger goes from 4 x 1,280 to the text's width."""
    layer = 4 * 1280 * 1280 + 2 * 1280 * 5120 + (3 * 1280 + 1280 + 5120 + 1280) + 4 * 1280
    merger = 5120 * 5120 + 5120 + 5120 * hidden + hidden
    return (32 * layer + merger) / devices + 3 * 2 * 14 * 14 * 1280


@pytest.mark.parametrize(
    ("args", "sizes", "devices", "total"),
    [
        (("Qwen2-VL-7B", "--gpu", "a100-40gb"), VL_7B, 1, 40e9),
        (("Qwen2-VL-72B", "--gpu", "h100", "--num", "4"), VL_72B, 4, 80e9),
        (("Qwen2-VL-72B", "--gpu", "h100", "--num", "8", "-tp", "8"), VL_72B, 8, 80e9),
    ],
)
def test_bytes_are_those_of_hand_arithmetic(args, sizes, devices, total):
    plan = run(*args)
    memory, settings = plan["memory"], plan["settings"]
    assert plan["mesh"] == f"data=1,model={devices}"
    weights = 2 * (text_parameters(**sizes, devices=devices) + tower_parameters(sizes["hidden"], devices))
    assert memory["weights"] == pytest.approx(weights, rel=WITHIN)
    # Keys and values, of each layer and KV head here, 16 tokens of 128 values of 2 bytes.
    block = 2 * sizes["layers"] * max(1, sizes["kv"] // devices) * 16 * 128 * 2
    assert memory["block_bytes"] == block
    assert memory["features"] == pytest.approx(8192 * sizes["hidden"] * 2, rel=WITHIN)
    # 92 % of the memory, and what is not weights, features, temporaries or state is cache, but for rounding down to
    # five significant bits.
    left = 0.92 * total - weights - sum(memory[name] for name in ("features", "temporaries", "results", "state"))
    assert 0.93 * left <= memory["kv_cache"] <= 1.01 * left
    assert memory["kv_cache"] == (memory["num_blocks"] + 1) * block
    assert plan["tokens"] == memory["num_blocks"] * 16
    assert plan["full_requests"] == memory["num_blocks"] // (settings["max_model_len"] // 16) >= 1
    parts = ("reserved", "weights", "features", "state", "temporaries", "results", "kv_cache", "free")
    assert sum(memory[name] for name in parts) == memory["total"] == total


def test_what_does_not_fit_says_what_would():
    """73.4 of 73.6 GB are weights on each of two; every remedy is tried."""
    plan = run("Qwen2-VL-72B", "--gpu", "h100", "--num", "2", code=3)
    weights = 2 * (text_parameters(**VL_72B, devices=2) + tower_parameters(8192, 2))
    assert plan["memory"]["weights"] == pytest.approx(weights, rel=0.001)
    assert weights == pytest.approx(73.4e9, rel=0.001)
    assert not plan["fits"]
    assert plan["speed"] is None
    flags = [remedy["flags"] for remedy in plan["remedies"]]
    assert flags == ["--num 4", "--gpu h200"]
    for flag in flags:
        assert run("Qwen2-VL-72B", "--gpu", "h100", "--num", "2", *flag.split())["fits"]


def refused(*args: str) -> str:
    result = CliRunner().invoke(app, ["plan", *args])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())


def test_kv_heads_that_are_fewer_than_devices_are_replicated():
    """8 KV heads on 16 devices: each holds one, and two hold the same."""
    plan = run("Qwen2-VL-72B", "--gpu", "h100", "--num", "16", "-tp", "16")
    assert plan["memory"]["block_bytes"] == 2 * 80 * 1 * 16 * 128 * 2
    weights = 2 * (text_parameters(**VL_72B, devices=16) + tower_parameters(8192, 16))
    assert plan["memory"]["weights"] == pytest.approx(weights, rel=WITHIN)
    assert "beyond a node of 8" in plan["notes"][0]


def test_a_mesh_that_does_not_divide_the_model_is_refused_with_both_numbers():
    message = refused("Qwen2-VL-7B", "--gpu", "h100", "--num", "8", "-tp", "8")
    assert "over 8 devices: 28 attention heads cannot be shared out" in message
    message = refused("Qwen2-0.5B", "--gpu", "h100", "--num", "7", "-tp", "7")
    assert "over 7 devices: 2 KV heads, 4864 inner columns" in message


def test_a_mesh_that_is_larger_than_the_gpus_is_refused_with_both_numbers():
    message = refused("Qwen2-VL-7B", "--gpu", "h100", "--num", "4", "--mesh", "data=2,model=4")
    assert "needs 8 GPUs, --num is 4" in message
    assert "must be like data=2,model=4, got 'data=x'" in refused("Qwen2-VL-7B", "--gpu", "h100", "--mesh", "data=x")


def test_unknown_models_and_gpus_list_what_is_known(tmp_path):
    assert "Qwen2-0.5B, Qwen2.5-7B, Qwen2-VL-7B, Qwen2-VL-72B, Llama-3-8B, Llama-3-70B" in refused(
        "GPT-5", "--gpu", "h100"
    )
    assert "known are a100-40gb, a100, h100, h200" in refused("Qwen2-VL-7B", "--gpu", "tpu")
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    assert "MambaForCausalLM" in refused(str(tmp_path), "--gpu", "h100")
    (tmp_path / "config.json").write_text("[]")
    assert "must hold a JSON object" in refused(str(tmp_path), "--gpu", "h100")
