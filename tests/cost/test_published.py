"""Configs that are kept, against the parameters that their model cards publish."""

import pytest

from omni_jax.cost import ModelSizes, published_config, published_names

BILLIONS = {  # model cards on Hugging Face; safetensors counts
    "Qwen2-0.5B": 0.494,
    "Qwen2.5-7B": 7.62,
    "Qwen2-VL-7B": 8.29,
    "Qwen2-VL-72B": 73.4,
    "Llama-3-8B": 8.03,
    "Llama-3-70B": 70.55,
}


@pytest.mark.parametrize("name", published_names())
def test_parameters_are_those_published(name):
    assert ModelSizes.from_config(published_config(name)).parameters == pytest.approx(BILLIONS[name] * 1e9, rel=0.002)


def test_names_in_any_case_and_of_repositories():
    assert published_config("qwen2-vl-7b") is published_config("Qwen/Qwen2-VL-7B-Instruct")


def test_an_unknown_name_lists_those_known():
    with pytest.raises(ValueError, match=r"no model is known as 'GPT-2'.* Qwen2-0\.5B, Qwen2\.5-7B.* Llama-3-70B"):
        published_config("GPT-2")
