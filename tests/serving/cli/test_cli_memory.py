"""Flags of the engine's memory: to its settings, from a file, and refused where they cannot be."""

import logging
from pathlib import Path

import pytest
import yaml

from omni_jax.engine.config import EngineConfig
from serving.cli.memory_summary import memory_summary
from tests.serving.cli.test_cli import made

EVERY = {
    "kv_cache_dtype": "int8",
    "recycling_policy": "lru",
    "swap_space": 1.5,
    "swap_dir": "/somewhere/else",
    "swap_dir_space": 3.25,
    "max_swap_ops": 7,
    "num_swap_threads": 3,
    "preemption_mode": "swap",
    "kv_compress_ratio": 0.3,
    "kv_compress_controller": "tests.serving.custom_functions:third",
}
SWITCHES = ["--no-enable-prefix-caching", "--enable-adaptive-compression"]


def words(flags: dict) -> list[str]:
    return [word for name, value in flags.items() for word in ("--" + name.replace("_", "-"), str(value))]


def expected(model_dir, **fields) -> EngineConfig:
    fields |= {"swap_dir": Path(fields["swap_dir"])} if "swap_dir" in fields else {}
    return EngineConfig(model_dir=model_dir, **fields)


def test_flags_reach_the_engine(invoke, served, tmp_path):
    result = invoke("serve", str(tmp_path), "--port", "0", *words(EVERY), *SWITCHES)
    assert result.exit_code == 0, result.output
    both = {"enable_prefix_caching": False, "enable_adaptive_compression": True}
    assert served["config"] == expected(tmp_path, **EVERY, **both)
    for switch in ("--enable-prefix-caching", "--no-enable-adaptive-compression"):
        assert invoke("serve", str(tmp_path), "--port", "0", switch).exit_code == 0
        assert served["config"] == EngineConfig(model_dir=tmp_path)


def test_a_file_of_settings_has_them_too(invoke, served, tmp_path):
    file = tmp_path / "settings.yaml"
    both = {"enable_prefix_caching": False, "enable-adaptive-compression": True}
    file.write_text(yaml.safe_dump({"model": str(tmp_path), "port": 0} | EVERY | both))
    assert invoke("serve", "--config", file).exit_code == 0
    fields = {"enable_prefix_caching": False, "enable_adaptive_compression": True}
    assert served["config"] == expected(tmp_path, **EVERY, **fields)
    more = ["--enable-prefix-caching", "--swap-space", "8", "--preemption-mode", "auto"]
    assert invoke("serve", "--config", file, *more).exit_code == 0
    fields = EVERY | fields | {"enable_prefix_caching": True, "swap_space": 8.0, "preemption_mode": "auto"}
    assert served["config"] == expected(tmp_path, **fields)


WRONG = [
    (("--kv-cache-dtype", "fp8"), "int8"),
    (("--recycling-policy", "lfu"), "by_modality"),
    (("--recycling-policy", "a.b:"), "package.module:function"),
    *((("--swap-space", text), "swap") for text in ("-1", "nan", "inf", "much")),
    (("--swap-dir", "d"), "swap_space"),
    (("--swap-space", "1", "--swap-dir", "d", "--swap-dir-space", "0"), "swap_dir_space"),
    (("--max-swap-ops", "0"), "max_swap_ops"),
    (("--num-swap-threads", "0"), "num_swap_threads"),
    (("--preemption-mode", "drop"), "recompute"),
    (("--preemption-mode", "swap"), "swap_space"),
    *((("--kv-compress-ratio", text), "compress") for text in ("-0.1", "1", "1.5", "nan")),
    (("--recycling-policy", "no.such.module:oldest"), "cannot import"),
    (("--recycling-policy", "tests.serving.custom_functions:raises"), "failed"),
    (("--kv-compress-controller", "a.b:c"), "enable_adaptive_compression"),
    (("--enable-adaptive-compression", "--kv-compress-controller", "a.b"), "package.module:function"),
    (("--enable-adaptive-compression", "--kv-compress-controller", "no.such.module:c"), "no.such.module:c"),
    (("--enable-adaptive-compression", "--kv-compress-controller", "tests.serving.custom_functions:too_much"), "1.5"),
]


@pytest.mark.parametrize(("flags", "told"), WRONG)
def test_flags_that_are_wrong_are_usage_errors_that_say_what_is_right(invoke, served, tmp_path, flags, told):
    result = invoke("serve", str(tmp_path), "--port", "0", *flags)
    assert result.exit_code == 2, result.output
    assert told in result.stderr
    assert served == {}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"enable_prefix_caching": "perhaps"}, "enable-prefix-caching"),
        ({"swap_spaces": 1}, "did you mean swap_space?"),
        ({"swap_space": {"a": 1}}, "swap-space"),
        ({"swap_dir": "d"}, "swap_space"),
        ({"kv_compress_ratio": 2}, "kv_compress_ratio"),
    ],
)
def test_settings_that_are_wrong_are_usage_errors(invoke, served, tmp_path, settings, told):
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump({"model": str(tmp_path), "port": 0} | settings))
    result = invoke("serve", "--config", file)
    assert result.exit_code == 2, result.output
    assert told in result.stderr
    assert served == {}


def test_generate_has_those_that_change_what_one_prompt_gives(invoke, llm, tmp_path):
    flags = {name: EVERY[name] for name in ("kv_cache_dtype", "kv_compress_ratio", "kv_compress_controller")}
    result = invoke("generate", str(tmp_path), "hello", *words(flags), "--enable-adaptive-compression")
    assert result.exit_code == 0, result.output
    assert made(llm) == EngineConfig(model_dir=tmp_path, **flags, enable_adaptive_compression=True, max_num_seqs=1)
    result = invoke("generate", str(tmp_path), "hello", "--kv-compress-ratio", "1")
    assert (result.exit_code, "kv_compress_ratio must be below 1, got 1" in result.stderr) == (2, True)


def test_attention_has_a_backend(invoke, served, llm, tmp_path):
    assert invoke("serve", str(tmp_path), "--port", "0", "--attention-backend", "triton").exit_code == 0
    assert served["config"] == EngineConfig(model_dir=tmp_path, attention_backend="triton")
    file = tmp_path / "settings.json"
    file.write_text(f'{{"model": "{tmp_path}", "port": 0, "attention-backend": "xla"}}')
    assert invoke("serve", "--config", file).exit_code == 0
    assert served["config"] == EngineConfig(model_dir=tmp_path, attention_backend="xla")
    assert invoke("generate", str(tmp_path), "hello", "--attention-backend", "mosaic").exit_code == 0
    assert made(llm) == EngineConfig(model_dir=tmp_path, attention_backend="mosaic", max_num_seqs=1)
    result = invoke("serve", str(tmp_path), "--port", "0", "--attention-backend", "flash")
    assert (result.exit_code, "triton" in result.stderr) == (2, True)
    with pytest.raises(ValueError, match="attention_backend must be 'auto', 'xla', 'triton' or 'mosaic', got 'flash'"):
        EngineConfig(model_dir=".", attention_backend="flash")


def test_the_start_says_which_of_them_are_on(invoke, served, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert invoke("serve", str(tmp_path), "--port", "0").exit_code == 0
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("memory: ")]
    assert line == (
        "memory: KV cache auto, prefix cache on (recycling by_modality), swap off, preemption recompute, "
        "adaptive compression off"
    )
    fields = EVERY | {"enable_prefix_caching": False, "enable_adaptive_compression": True}
    assert memory_summary(expected(tmp_path, **fields)) == (
        "KV cache int8, prefix cache off, swap 1.5 GiB of host memory and 3.25 GiB in /somewhere/else, "
        "preemption swap, adaptive compression up to 0.3 (tests.serving.custom_functions:third)"
    )
