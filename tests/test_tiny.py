"""The tiny checkpoints: deterministic, readable by transformers' config and tokenizer classes, sharded losslessly."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoTokenizer

from tests import tiny


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_transformers_reads_config_and_tokenizer(tmp_path, variant):
    directory = tiny.write_tiny(tmp_path / variant, variant)
    config = AutoConfig.from_pretrained(directory)
    assert config.architectures == tiny.config(variant)["architectures"]
    assert config.rope_parameters["rope_theta"] == 10000.0
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "The capital of France is Zürich? 東京 🙂\n\tno"
    assert tokenizer(text)["input_ids"] == tiny.tokenizer().encode(text).ids
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 512


def test_chat_template_accepts_null_content(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny.write_tiny(tmp_path, "qwen2"))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(text)["input_ids"][0] == 1  # <|im_start|> is one token


def test_weights_depend_on_the_seed_only():
    a, b, c = (tiny.weights(tiny.config("qwen3"), seed=seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not any(np.array_equal(a[name], c[name]) for name in a)
    query = a["model.layers.0.self_attn.q_proj.weight"]
    assert abs(query.std() * np.sqrt(query.shape[1]) - 1.7) < 0.05


def test_overrides_change_shapes_but_no_values(tmp_path):
    directory = tiny.write_tiny(tmp_path, "llama", num_hidden_layers=3, vocab_size=600)
    tensors, small = load_file(directory / "model.safetensors"), tiny.weights(tiny.config("llama"))
    assert tensors["lm_head.weight"].shape == (600, 64)
    assert "model.layers.2.mlp.up_proj.weight" in tensors
    name = "model.layers.1.mlp.up_proj.weight"
    np.testing.assert_array_equal(tensors[name], small[name])
    with pytest.raises(ValueError, match="unknown tiny variant 'gpt2'"):
        tiny.config("gpt2")


def test_shards_hold_the_same_tensors(tmp_path):
    whole = load_file(tiny.write_tiny(tmp_path, "llama3") / "model.safetensors")
    index = json.loads((tiny.write_shards(tmp_path, 3) / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(load_file(tmp_path / file)[name], whole[name])
    assert set(index["weight_map"]) == set(whole)
