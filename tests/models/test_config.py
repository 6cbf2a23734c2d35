"""Values of a config.json are checked like values from a client."""

import re

import pytest

from checkpoints.errors import CheckpointError
from omni_jax.models.config import UnsupportedModel, model_config
from tests import tiny, tiny_vl


@pytest.mark.parametrize(
    ("change", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config (quant_method 'gptq')"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compression_config"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantization (quant_method 'not stated')"),  # MLX
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "text_config has a quantization_config"),
    ],
)
def test_quantised_models_are_refused_by_their_method(change, method):
    with pytest.raises(UnsupportedModel, match=re.escape(method)):
        model_config(tiny.config("llama") | change)


WRONG = ["64", 64.5, True, [64], {}, -1, 2**40, float("nan"), float("inf")]


@pytest.mark.parametrize("value", [*WRONG, 0])
@pytest.mark.parametrize(
    "key",
    [
        *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "intermediate_size"),
        *("num_hidden_layers", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "attention_bias"),
        *("dtype", "vision_config", "text_config"),
    ],
)
def test_wrong_values_of_a_config_are_refused_with_key_and_value(key, value):
    config = tiny_vl.config("qwen2_5_vl") if key == "vision_config" else tiny.config("llama")
    if (key, value) in (
        ("tie_word_embeddings", True),
        ("attention_bias", True),
        ("rms_norm_eps", True),
        ("dtype", "64"),
    ):
        return
    if key in ("text_config", "vision_config") and value == {}:
        return
    with pytest.raises((CheckpointError, UnsupportedModel)) as error:
        model_config(config | {key: value})
    assert key in str(error.value)
    assert "config.json: " in str(error.value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "vocab_size", "intermediate_size"])
def test_missing_values_of_a_config_are_refused(key):
    for config in ({k: v for k, v in tiny.config("llama").items() if k != key}, tiny.config("llama") | {key: None}):
        with pytest.raises(CheckpointError, match=f"config.json has no {key}"):
            model_config(config)
