"""`omni-jax plan` against arithmetic by hand: numbers of the config.json multiplied out here, nothing of ours used."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from omni_jax.cost import published_config
from omni_jax.lab.experiment import load_experiment
from omni_jax.lab.simulated import SimulatedBackend
from omni_jax.planner.plan import Asked, make_plan
from serving.cli.main import app

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
    asked = ("Qwen2-VL-72B", "--gpu", "h100", "--num", "2")
    plan = run(*asked, code=3)
    weights = 2 * (text_parameters(**VL_72B, devices=2) + tower_parameters(8192, 2))
    assert plan["memory"]["weights"] == pytest.approx(weights, rel=0.001)
    assert weights == pytest.approx(73.4e9, rel=0.001)
    assert not plan["fits"]
    assert plan["speed"] is None
    flags = [remedy["flags"] for remedy in plan["remedies"]]
    assert [flag.partition(" --max-model-len")[0] for flag in flags] == [
        "--num 4",
        "--gpu-memory-utilization 0.95",
        "--kv-cache-dtype int8 --gpu-memory-utilization 0.95",
        "--gpu h200",
    ]
    for flag in flags:
        assert run(*asked, *flag.split())["fits"], flag


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
    assert "over 8 devices: 28 attention heads do not divide" in message
    message = refused("Qwen2-0.5B", "--gpu", "h100", "--num", "7", "-tp", "7")
    assert "over 7 devices: 2 KV heads, 4864 intermediate columns" in message


def test_a_mesh_that_is_larger_than_the_gpus_is_refused_with_both_numbers():
    message = refused("Qwen2-VL-7B", "--gpu", "h100", "--num", "4", "--mesh", "data=2,model=4")
    assert "needs 8 GPUs, --num is 4" in message
    assert "must be like data=2,model=4, got 'data=x'" in refused("Qwen2-VL-7B", "--gpu", "h100", "--mesh", "data=x")


def test_unknown_models_and_gpus_list_what_is_known(tmp_path):
    assert "Qwen2-0.5B, Qwen2.5-7B, Qwen2-VL-7B, Qwen2-VL-72B, Llama-3-8B, Llama-3-70B" in refused(
        "GPT-5", "--gpu", "h100"
    )
    assert "give one of a100-40gb, a100, h100, h200" in refused("Qwen2-VL-7B", "--gpu", "tpu")
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    assert "MambaForCausalLM" in refused(str(tmp_path), "--gpu", "h100")
    (tmp_path / "config.json").write_text("[]")
    assert "must hold a JSON object" in refused(str(tmp_path), "--gpu", "h100")


# -- what else it says ------------------------------------------------------------------------------------------------


def test_a_directory_and_a_config_file_say_the_same(tmp_path):
    """config.json is enough: no weights, no tokenizer."""
    config = published_config("Llama-3-8B")
    (tmp_path / "config.json").write_text(json.dumps(config))
    plans = [run(str(of), "--gpu", "h200") for of in (tmp_path, tmp_path / "config.json", "Llama-3-8B")]
    assert len({json.dumps(plan | {"name": ""}) for plan in plans}) == 1
    # 8.03 billion parameters of 2 bytes, as its model card says.
    assert plans[0]["memory"]["weights"] == pytest.approx(16.06e9, rel=0.001)
    assert plans[0]["memory"]["features"] == 0
    assert plans[0]["speed"]["image_seconds"] is None


def test_int8_takes_the_cache_s_bytes_with_a_scale_a_row():
    whole, int8 = (run("Llama-3-8B", "--gpu", "a100", "--kv-cache-dtype", kind) for kind in ("auto", "int8"))
    assert int8["memory"]["block_bytes"] == 2 * 32 * 8 * 16 * (128 + 4)
    assert whole["memory"]["block_bytes"] == 2 * 32 * 8 * 16 * 256
    assert int8["full_requests"] > 1.8 * whole["full_requests"]
    step = [{(s["rows"], s["context"]): s["seconds"] for s in plan["speed"]["decode"]} for plan in (whole, int8)]
    assert step[1][256, 1024] < step[0][256, 1024]


def test_a_prompt_s_seconds_are_those_of_hand_arithmetic():
    """Qwen2-VL-7B on an A100 at half its peak: 512 tokens take 13.05 GFLOP each; half a millisecond is overhead."""
    plan = run("Qwen2-VL-7B", "--gpu", "a100", "--max-num-batched-tokens", "8192")
    found = {step["tokens"]: step["seconds"] for step in plan["speed"]["prefill"]}
    flops = 512 * 13_050_576_896 + 2 * 3584 * 152064 + 4 * 3584 * 28 * 512 * 513 // 2
    assert found[512] == pytest.approx(flops / (0.5 * 312e12) + 0.5e-3, rel=1e-3)


def test_what_requests_are_like_decides_how_many_run():
    short, long = (
        run("Qwen2-VL-7B", "--gpu", "a100-40gb", "--prompt-tokens", str(n), "--output-tokens", "128")
        for n in (256, 16000)
    )
    for plan in (short, long):
        tokens = plan["speed"]["typical"]["prompt_tokens"] + 128
        assert plan["settings"]["max_num_seqs"] * tokens <= plan["tokens"]
        assert plan["speed"]["running"] == plan["settings"]["max_num_seqs"]
    assert short["settings"]["max_num_seqs"] == 256
    assert long["settings"]["max_num_seqs"] < 32


def test_the_mesh_is_the_smallest_model_axis_that_fits_with_data_rows_beside():
    plan = run("Qwen2-VL-72B", "--gpu", "h100", "--num", "8")
    assert plan["mesh"] == "data=2,model=4"
    assert "--tensor-parallel-size 4 --data-parallel-size 2" in " ".join(plan["serve_flags"])
    alone = run("Qwen2-VL-72B", "--gpu", "h100", "--num", "4")
    assert plan["speed"]["output_tokens_per_second"] == pytest.approx(2 * alone["speed"]["output_tokens_per_second"])
    assert run("Qwen2-VL-7B", "--gpu", "h100", "--num", "8")["mesh"] == "data=8,model=1"
    left = run("Qwen2-VL-72B", "--gpu", "h100", "--num", "7")
    assert left["mesh"] == "data=1,model=4"
    assert "3 of 7 GPUs are left over" in left["notes"][0]


def test_more_context_than_the_cache_holds_says_which_length_would_do():
    """A token takes 327,680 bytes, a quarter of that on each of four devices: 10.7 GB for 131,072. 44 GB hold that less
    the weights' 36.7 and what else there is."""
    config = published_config("Qwen2-VL-72B") | {"max_position_embeddings": 131072}
    asked = Asked(config=config, gpu="h100", num=4, max_model_len=131072)
    assert make_plan(asked).fits
    tight = make_plan(dataclasses.replace(asked, gpu_memory_utilization=0.55))
    assert not tight.fits
    lengths = {remedy.flags for remedy in tight.remedies}
    assert "--gpu-memory-utilization 0.95" in lengths
    (shorter,) = (int(flags.split()[1]) for flags in lengths if flags.startswith("--max-model-len"))
    assert make_plan(dataclasses.replace(asked, gpu_memory_utilization=0.55, max_model_len=shorter)).fits
    assert not make_plan(dataclasses.replace(asked, gpu_memory_utilization=0.55, max_model_len=int(1.2 * shorter))).fits


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--max-model-len", "40000"), "--max-model-len 40000 is more than the 32768 positions"),
        (("--mesh", "model=2", "-tp", "2"), "says it all: leave out --tensor-parallel-size"),
        (("--max-num-seqs", "512", "--max-num-batched-tokens", "256"), "(256) must be at least --max-num-seqs (512)"),
        (("--dtype", "int4"), "--dtype must be auto, float32 or bfloat16, got 'int4'"),
    ],
)
def test_settings_that_cannot_be_are_refused(args, message):
    assert message in refused("Qwen2-VL-7B", "--gpu", "h100", "--num", "2", *args)


def test_the_table_says_it_plainly():
    result = CliRunner().invoke(app, ["plan", "Qwen2-VL-7B", "--gpu", "a100-40gb", "--no-compile"])
    text = " ".join(result.output.split())
    for said in (
        "FITS Qwen2-VL-7B",
        "weights 16,582,751,232 16.58 ██",
        "temporaries (estimated)",
        "to the first token",
    ):
        assert said in text, said
    result = CliRunner().invoke(app, ["plan", "Qwen2-VL-72B", "--gpu", "h100", "--num", "2", "--no-compile"])
    assert result.exit_code == 3
    assert result.output.startswith("DOES NOT FIT")
    assert "--gpu h200" in result.output


def test_ablate_simulates_the_plan(tmp_path):
    """The blocks, the limits and the step times of the simulation are the plan's."""
    plan = run("Qwen2-VL-72B", "--gpu", "h100", "--num", "8", "--experiment", str(tmp_path / "lab"))
    experiment = load_experiment(tmp_path / "lab" / "experiment.yaml")
    config, cost, _ = SimulatedBackend(experiment)._parts(experiment.baseline_arm)
    assert config.usable_blocks == plan["memory"]["num_blocks"]
    assert config.max_num_seqs == plan["settings"]["max_num_seqs"]
    assert config.scheduler.max_num_batched_tokens == plan["settings"]["max_num_batched_tokens"]
    for step in plan["speed"]["decode"]:
        assert cost.decode_seconds(step["rows"], step["rows"] * step["context"]) == pytest.approx(step["seconds"])
    assert "is there already" in refused(
        *("Qwen2-VL-72B", "--gpu", "h100", "--num", "8", "--no-compile", "--experiment", str(tmp_path / "lab"))
    )
