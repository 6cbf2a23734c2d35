"""vLLM's command lines: flags without effect are taken, others refused with what to do instead; 32k is a number."""

import pytest

from omni_jax.engine.config import EngineConfig
from omni_jax.engine.tokenizer import read_tokenizer
from serving.cli.sources import _written_out
from serving.cli.vllm_flags import _INSTEAD
from tests.docs.cli import flags
from tests.engines import checkpoint


@pytest.mark.parametrize(
    ("text", "number"),
    [("32k", 32_000), ("32K", 32_768), ("1M", 1 << 20), ("25.6k", 25_600), ("2G", 2 << 30), ("1g", 10**9)],
)
def test_units_are_vllms(text, number):
    assert _written_out(text) == number


@pytest.mark.parametrize("text", ["32", "k", "1.5", "0.0001k", "32kb", "-1k", "1e3"])
def test_other_texts_have_no_unit(text):
    assert _written_out(text) is None


def test_a_length_with_a_unit_reaches_the_engine_from_flag_and_file(invoke, served, tmp_path):
    invoke("serve", tmp_path, "--max-model-len", "4k", "--max-num-batched-tokens=2K")
    assert (served["config"].max_model_len, served["config"].max_num_batched_tokens) == (4000, 2048)
    (tmp_path / "c.yaml").write_text("max_model_len: 8K\n")
    invoke("serve", tmp_path, "--config", tmp_path / "c.yaml")
    assert served["config"].max_model_len == 8192
    wrong = invoke("serve", tmp_path, "--max-model-len", "1.0001k")
    assert wrong.exit_code == 2
    assert "must be an integer" in wrong.stderr


def test_flags_without_effect_are_taken(invoke, served, tmp_path):
    taken = ("--enforce-eager", "--disable-log-requests", "--load-format", "auto", "--trust-remote-code")
    result = invoke("serve", tmp_path, *taken)
    assert result.exit_code == 0, result.stderr
    assert invoke("serve", tmp_path, "--load-format", "dummy").exit_code == 2


@pytest.mark.parametrize("flag", ["--quantization=awq", "--tool_call_parser", "--enable-lora", "--ssl-keyfile"])
def test_flags_that_would_matter_are_refused_with_what_to_do(invoke, served, tmp_path, flag):
    result = invoke("serve", tmp_path, flag, *(() if "=" in flag else ("x",)))
    assert result.exit_code == 2
    name = flag.partition("=")[0].replace("_", "-")
    assert result.stderr == f"omni-jax: {name} is a flag of vLLM that omni-jax does not have: {_INSTEAD[name]}\n"


def test_a_tokenizer_of_another_directory(tmp_path):
    model, other = checkpoint("llama"), checkpoint("qwen3")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((other / file).read_bytes())
    config = EngineConfig(model_dir=model, tokenizer=tmp_path)
    found = read_tokenizer(config, 10**6)
    assert found.encode("hello") == read_tokenizer(EngineConfig(model_dir=other), 10**6).encode("hello")
    assert read_tokenizer(config, found.max_token_id + 1).max_token_id == found.max_token_id
    with pytest.raises(ValueError, match=rf"has token ids up to {found.max_token_id}, but the vocabulary .* has 10 "):
        read_tokenizer(config, 10)
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json in"):
        read_tokenizer(EngineConfig(model_dir=model, tokenizer=tmp_path / "none"), 10**6)


def test_no_flag_is_both_taken_and_refused():
    assert not flags("serve") & _INSTEAD.keys()
