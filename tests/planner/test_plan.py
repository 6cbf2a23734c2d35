"""`omni-jax plan` against arithmetic by hand from the numbers in config.json, without the planner's code."""

import dataclasses
import json

import pytest

from omni_jax.cost.published import published_config
from omni_jax.lab.experiment import load_experiment
from omni_jax.lab.simulated import SimulatedBackend
from omni_jax.planner.plan import PlanOptions, make_plan
from serving.cli.app import app
from tests.command_line import run_command

WITHIN = 0.03

# Qwen2-VL-7B and -72B by their config.json. Per layer: query, key, value (with biases), output, gate, up, down, norms.
VL_7B = {"hidden": 3584, "inner": 18944, "layers": 28, "heads": 28, "kv": 4, "vocab": 152064}
VL_72B = {"hidden": 8192, "inner": 29568, "layers": 80, "heads": 64, "kv": 8, "vocab": 152064}


def run(*args: str, code: int = 0) -> dict:
    result = run_command("plan", *args, "--json", "--no-compile")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def text_parameters(hidden: int, inner: int, layers: int, heads: int, kv: int, vocab: int, devices: int) -> int:
    """Return the parameters on one device. Heads have 128 values. Matrices and QKV biases are split, norms are not."""
    kv_here = max(1, kv // devices)
    qkv = (heads // devices + 2 * kv_here) * 128
    layer = hidden * qkv + qkv + hidden * heads * 128 // devices + 3 * hidden * inner // devices + 2 * hidden
    return layers * layer + 2 * vocab * hidden // devices + hidden


def tower_parameters(hidden: int, devices: int) -> float:
    """Return the parameters of Qwen2-VL's tower on one device: 32 layers of 1,280, and a merger of 4 x 1,280 values."""
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
def test_bytes_equal_arithmetic_by_hand(args, sizes, devices, total):
    plan = run(*args)
    memory, settings = plan["memory"], plan["settings"]
    assert plan["mesh"] == f"data=1,model={devices}"
    weights = 2 * (text_parameters(**sizes, devices=devices) + tower_parameters(sizes["hidden"], devices))
    assert memory["weights"] == pytest.approx(weights, rel=WITHIN)
    # Keys and values of each layer and local KV head: 16 tokens of 128 values of 2 bytes.
    block = 2 * sizes["layers"] * max(1, sizes["kv"] // devices) * 16 * 128 * 2
    assert memory["block_bytes"] == block
    assert settings["max_pixels"] == 16384 * 28 * 28  # the published limit, and half of a context of 32,768
    assert memory["features"] == pytest.approx(16384 * sizes["hidden"] * 2, rel=WITHIN)
    # 92 % of the memory less weights, features, temporaries and state is cache, rounded down to five significant bits.
    left = 0.92 * total - weights - sum(memory[name] for name in ("features", "temporaries", "results", "state"))
    assert 0.93 * left <= memory["kv_cache"] <= 1.01 * left
    assert memory["kv_cache"] == (memory["num_blocks"] + 1) * block
    assert plan["tokens"] == memory["num_blocks"] * 16
    assert plan["full_requests"] == memory["num_blocks"] // (settings["max_model_len"] // 16) >= 1
    parts = ("reserved", "weights", "features", "state", "temporaries", "results", "kv_cache", "free")
    assert sum(memory[name] for name in parts) == memory["total"] == total


def test_a_plan_that_does_not_fit_has_remedies_that_do():
    """On each of two devices, weights take 73.4 of 73.6 GB."""
    options = ("Qwen2-VL-72B", "--gpu", "h100", "--num", "2")
    plan = run(*options, code=3)
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
        assert run(*options, *flag.split())["fits"], flag


def refused(*args: str) -> str:
    result = run_command("plan", *args)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())


def test_kv_heads_are_replicated_over_more_devices():
    """With 8 KV heads on 16 devices, each holds one and two hold the same."""
    plan = run("Qwen2-VL-72B", "--gpu", "h100", "--num", "16", "-tp", "16")
    assert plan["memory"]["block_bytes"] == 2 * 80 * 1 * 16 * 128 * 2
    weights = 2 * (text_parameters(**VL_72B, devices=16) + tower_parameters(8192, 16))
    assert plan["memory"]["weights"] == pytest.approx(weights, rel=WITHIN)
    assert "larger than a node of 8" in plan["notes"][0]


def test_a_mesh_that_does_not_divide_the_model_is_refused_with_both_numbers():
    message = refused("Qwen2-VL-7B", "--gpu", "h100", "--num", "8", "-tp", "8")
    assert "over 8 devices: 28 attention heads do not divide" in message
    message = refused("Qwen2-0.5B", "--gpu", "h100", "--num", "7", "-tp", "7")
    assert "over 7 devices: 2 KV heads, 4864 intermediate columns" in message


def test_a_mesh_larger_than_the_gpus_is_refused_with_both_numbers():
    message = refused("Qwen2-VL-7B", "--gpu", "h100", "--num", "4", "--mesh", "data=2,model=4")
    assert "needs 8 GPUs, but --num is 4" in message
    assert "must be like data=2,model=4, got 'data=x'" in refused("Qwen2-VL-7B", "--gpu", "h100", "--mesh", "data=x")


def test_errors_for_unknown_models_and_gpus_list_the_known_ones(tmp_path):
    assert "Qwen2-0.5B, Qwen2.5-7B, Qwen2-VL-7B, Qwen2-VL-72B, Llama-3-8B, Llama-3-70B" in refused(
        "GPT-5", "--gpu", "h100"
    )
    assert '"a100-40gb", "a100", "h100", "h200"' in refused("Qwen2-VL-7B", "--gpu", "tpu")
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    assert "MambaForCausalLM" in refused(str(tmp_path), "--gpu", "h100")
    (tmp_path / "config.json").write_text("[]")
    assert "must hold a JSON object" in refused(str(tmp_path), "--gpu", "h100")


# -- settings, speed, output ------------------------------------------------------------------------------------------


def test_a_directory_a_config_file_and_a_name_give_the_same_plan(tmp_path):
    """A config.json is enough, without weights and tokenizer."""
    config = published_config("Llama-3-8B")
    (tmp_path / "config.json").write_text(json.dumps(config))
    plans = [run(str(of), "--gpu", "h200") for of in (tmp_path, tmp_path / "config.json", "Llama-3-8B")]
    assert len({json.dumps(plan | {"name": ""}) for plan in plans}) == 1
    # The model card: 8.03 billion parameters, of 2 bytes each.
    assert plans[0]["memory"]["weights"] == pytest.approx(16.06e9, rel=0.001)
    assert plans[0]["memory"]["features"] == 0
    assert plans[0]["speed"]["image_seconds"] is None


def test_an_int8_cache_has_a_scale_in_each_row():
    whole, int8 = (run("Llama-3-8B", "--gpu", "a100", "--kv-cache-dtype", kind) for kind in ("auto", "int8"))
    assert int8["memory"]["block_bytes"] == 2 * 32 * 8 * 16 * (128 + 4)
    assert whole["memory"]["block_bytes"] == 2 * 32 * 8 * 16 * 256
    assert int8["full_requests"] > 1.8 * whole["full_requests"]
    step = [{(s["rows"], s["context"]): s["seconds"] for s in plan["speed"]["decode"]} for plan in (whole, int8)]
    assert step[1][256, 1024] < step[0][256, 1024]


def test_prefill_seconds_equal_arithmetic_by_hand():
    """Qwen2-VL-7B on an A100 at half its peak: 512 tokens of 13.05 GFLOP each, and half a millisecond of overhead."""
    plan = run("Qwen2-VL-7B", "--gpu", "a100", "--max-num-batched-tokens", "8192")
    found = {step["tokens"]: step["seconds"] for step in plan["speed"]["prefill"]}
    flops = 512 * 13_050_576_896 + 2 * 3584 * 152064 + 4 * 3584 * 28 * 512 * 513 // 2
    assert found[512] == pytest.approx(flops / (0.5 * 312e12) + 0.5e-3, rel=1e-3)


def test_typical_lengths_decide_how_many_sequences_run():
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


@pytest.mark.parametrize(
    ("lengths", "longest"), [((9000, 9000), "8,192"), ((8192, 1), "8,192"), ((None, 8192), "8,192")]
)
def test_a_typical_request_that_does_not_fit_the_context_is_refused(lengths, longest):
    names = ("--prompt-tokens", "--output-tokens")
    args = [word for name, n in zip(names, lengths, strict=True) if n for word in (name, str(n))]
    assert f"longer than max_model_len, {longest}" in refused("Llama-3-8B", "--gpu", "h100", *args)


@pytest.mark.parametrize(
    ("args", "typical"),
    [
        ((), (1024, 256)),
        (("--max-model-len", "1024"), (768, 256)),
        (("--max-model-len", "256"), (128, 128)),
        (("--max-model-len", "1024", "--prompt-tokens", "1000"), (1000, 24)),
        (("--max-model-len", "1024", "--output-tokens", "1000"), (24, 1000)),
    ],
)
def test_the_default_typical_request_fits_the_context(args, typical):
    found = run("Llama-3-8B", "--gpu", "h100", *args)["speed"]["typical"]
    assert (found["prompt_tokens"], found["output_tokens"]) == typical


def test_the_longest_step_reads_the_whole_prompt():
    """The last 512 of 32,768 tokens attend to all tokens before them."""
    options = ("Qwen2-VL-7B", "--gpu", "h100", "--max-num-batched-tokens", "512")
    speed = run(*options)["speed"]
    flops = 4 * 3584 * 28 * (512 * 32256)  # products of queries with keys, of probabilities with values
    assert speed["longest_step_seconds"] - speed["full_step_seconds"] == pytest.approx(flops / (0.5 * 989e12), rel=0.05)
    short = run(*options, "--max-model-len", "256")["speed"]
    assert short["longest_step_seconds"] == short["full_step_seconds"]


GIVEN = ("--dtype", "float32", "--block-size", "32", "--encoder-cache-tokens", "9000", "--max-pixels", "501760")


def test_serve_accepts_the_start_command_and_means_the_same(tmp_path):
    plan = run("Qwen2-VL-7B", "--gpu", "h200", "--num", "2", "--kv-cache-dtype", "int8", *GIVEN)
    _, bound, _ = app.parse_args(["serve", str(tmp_path), *plan["serve_flags"]], exit_on_error=False)
    given = {
        name: value
        for settings in bound.arguments.values()
        if hasattr(settings, "values")
        for name, value in settings.values().items()
    }
    settings = plan["settings"]
    assert {name: given[name] for name in settings} == settings
    assert given["data_parallel_size"] == 2


def test_the_start_command_names_what_serve_takes(tmp_path):
    """A repository or a directory: not a short name, nor the config.json."""
    (tmp_path / "config.json").write_text(json.dumps(published_config("Qwen2-VL-7B")))
    named = {
        "Qwen2-VL-7B": "Qwen/Qwen2-VL-7B-Instruct",
        "qwen/qwen2-vl-7b-instruct": "Qwen/Qwen2-VL-7B-Instruct",
        str(tmp_path): str(tmp_path),
        str(tmp_path / "config.json"): str(tmp_path),
    }
    for model, name in named.items():
        output = run_command("plan", model, "--gpu", "h100", "--no-compile").output
        assert f"omni-jax serve {name} --max-model-len" in " ".join(output.split())


def test_the_mesh_has_the_smallest_model_axis_that_fits_and_replicas():
    plan = run("Qwen2-VL-72B", "--gpu", "h100", "--num", "8")
    assert plan["mesh"] == "data=2,model=4"
    assert "--tensor-parallel-size 4 --data-parallel-size 2" in " ".join(plan["serve_flags"])
    alone = run("Qwen2-VL-72B", "--gpu", "h100", "--num", "4")
    assert plan["speed"]["output_tokens_per_second"] == pytest.approx(2 * alone["speed"]["output_tokens_per_second"])
    assert run("Qwen2-VL-7B", "--gpu", "h100", "--num", "8")["mesh"] == "data=8,model=1"
    left = run("Qwen2-VL-72B", "--gpu", "h100", "--num", "7")
    assert left["mesh"] == "data=1,model=4"
    assert "3 of 7 GPUs are unused" in left["notes"][0]


def test_a_context_longer_than_the_cache_gives_the_length_that_fits():
    """A token takes 327,680 bytes, a quarter of them on each of four devices: 10.7 GB for 131,072 tokens. 44 GB less
    36.7 GB of weights and the rest is less than that."""
    config = dict(published_config("Qwen2-VL-72B")) | {"max_position_embeddings": 131072}
    options = PlanOptions(config=config, gpu="h100", num=4, max_model_len=131072)
    assert make_plan(options).fits
    tight = make_plan(dataclasses.replace(options, gpu_memory_utilization=0.55))
    assert not tight.fits
    lengths = {remedy.flags for remedy in tight.remedies}
    assert "--gpu-memory-utilization 0.95" in lengths
    (shorter,) = (int(flags.split()[1]) for flags in lengths if flags.startswith("--max-model-len"))
    for length, fits in ((shorter, True), (int(1.2 * shorter), False)):
        changed = dataclasses.replace(options, gpu_memory_utilization=0.55, max_model_len=length)
        assert make_plan(changed).fits == fits


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--max-model-len", "40000"), "--max-model-len 40000 exceeds the model's 32768 positions"),
        (("--mesh", "model=2", "-tp", "2"), "sets both sizes: leave out --tensor-parallel-size"),
        (("--max-num-seqs", "512", "--max-num-batched-tokens", "256"), "(256) must be at least --max-num-seqs (512)"),
        (("--block-size", "17"), "block_size must be a power of two, got 17"),
        (("--dtype", "int4"), 'Invalid value "int4" for --dtype'),
    ],
)
def test_invalid_settings_are_refused(args, message):
    assert message in refused("Qwen2-VL-7B", "--gpu", "h100", "--num", "2", *args)


def test_the_printed_plan():
    result = run_command("plan", "Qwen2-VL-7B", "--gpu", "a100-40gb", "--no-compile")
    text = " ".join(result.output.split())
    for part in (
        "FITS Qwen2-VL-7B",
        "weights 16,582,751,232 16.58 ██",
        "temporaries (estimated)",
        "to the first token",
    ):
        assert part in text, part
    result = run_command("plan", "Qwen2-VL-72B", "--gpu", "h100", "--num", "2", "--no-compile")
    assert result.exit_code == 3
    assert result.output.startswith("DOES NOT FIT")
    assert "--gpu h200" in result.output


def test_ablate_simulates_the_plan(tmp_path):
    """Blocks, limits and step times of the simulation equal the plan's."""
    plan = run("Qwen2-VL-72B", "--gpu", "h100", "--num", "8", "--experiment", str(tmp_path / "lab"))
    experiment = load_experiment(tmp_path / "lab" / "experiment.yaml")
    config, cost, _ = SimulatedBackend(experiment)._parts(experiment.baseline_arm)
    assert config.usable_blocks == plan["memory"]["num_blocks"]
    assert config.max_num_seqs == plan["settings"]["max_num_seqs"]
    assert config.scheduler.max_num_batched_tokens == plan["settings"]["max_num_batched_tokens"]
    for step in plan["speed"]["decode"]:
        assert cost.decode_seconds(step["rows"], step["rows"] * step["context"]) == pytest.approx(step["seconds"])
    assert "already exists" in refused(
        *("Qwen2-VL-72B", "--gpu", "h100", "--num", "8", "--no-compile", "--experiment", str(tmp_path / "lab"))
    )
