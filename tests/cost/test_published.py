"""Kept configs have the parameter counts that their model cards publish."""

import pytest

from omni_jax.cost.published import published_config, published_names
from omni_jax.cost.roofline import ModelSizes

BILLIONS = {  # parameter counts of safetensors files on Hugging Face model cards
    "Qwen2-0.5B": 0.494,
    "Qwen2.5-7B": 7.62,
    "Qwen2-VL-7B": 8.29,
    "Qwen2-VL-72B": 73.4,
    "Llama-3-8B": 8.03,
    "Llama-3-70B": 70.55,
}


@pytest.mark.parametrize("name", published_names())
def test_parameter_counts_match_model_cards(name):
    assert ModelSizes.from_config(published_config(name)).parameters == pytest.approx(BILLIONS[name] * 1e9, rel=0.002)


def test_short_and_repository_names_match_in_any_case():
    assert published_config("qwen2-vl-7b") is published_config("Qwen/Qwen2-VL-7B-Instruct")


def test_error_for_an_unknown_name_lists_known_names():
    with pytest.raises(ValueError, match=r"unknown model 'GPT-2'.* Qwen2-0\.5B, Qwen2\.5-7B.* Llama-3-70B"):
        published_config("GPT-2")
