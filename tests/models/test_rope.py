"""Rope scaling: lengths, YaRN's attention factor, and values that must not be ignored."""

import math

import numpy as np
import pytest

from omni_jax.models.config import model_config
from omni_jax.models.rope import max_positions, rope_from_config
from tests import tiny

pytestmark = pytest.mark.smoke

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def config(positions, scaling, **others):
    return {"max_position_embeddings": positions, "rope_theta": 10000.0, "rope_scaling": scaling} | others


@pytest.mark.parametrize(
    ("positions", "scaling", "expected"),
    [
        (256, None, 256),
        (256, YARN, 1024),
        (1024, YARN, 1024),  # raised already
        (320, YARN, 1024),  # Qwen3: room for the answer is in max_position_embeddings
        (2048, YARN, 2048),
        (256, {"type": "yarn", "factor": 4.0}, 1024),
        (256, {"type": "yarn", "factor": 2.5, "original_max_position_embeddings": 256}, 640),
        (256, {"type": "linear", "factor": 4}, 1024),
        (1024, {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        (1024, LLAMA3 | {"original_max_position_embeddings": 128}, 1024),
        (256, {"type": "mrope", "mrope_section": [2, 3, 3]}, 256),
        (256, YARN | {"mrope_section": [2, 3, 3]}, 1024),  # Qwen2.5-VL
    ],
)
def test_ck_09_scaling_extends_the_context(positions, scaling, expected):
    assert max_positions(config(positions, scaling)) == expected


def test_ck_09_scaling_in_rope_parameters_extends_the_context_too():
    given = tiny.config("llama", max_position_embeddings=256)
    assert model_config(given).max_position_embeddings == 256
    assert model_config(given | {"rope_parameters": YARN | {"rope_theta": 1e4}}).max_position_embeddings == 1024
    # A rope_scaling added by hand replaces what transformers 5 wrote.
    by_hand = model_config(given | {"rope_scaling": YARN})
    assert by_hand == model_config(given | {"rope_parameters": YARN | {"rope_theta": 1e4}})
    nested = {"text_config": given | {"rope_scaling": YARN}, "architectures": given["architectures"]}
    assert model_config(nested) == by_hand


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attn_factor": 0.8782488562869419}, 1.0),  # DeepSeek-R1-0528-Qwen3-8B: its authors and vLLM have 1.0
        ({"attn_factor": 2}, 2 * (0.1 * math.log(4) + 1)),
        ({"attention_factor": 0.9}, 0.9),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        ({"mscale": 1.0, "mscale_all_dim": 0}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_the_attention_factor_of_yarn_is_its_authors_formula(given, expected):
    assert rope_from_config(config(256, YARN | given), 16).factor == pytest.approx(expected, abs=1e-6)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    plain = np.array(rope_from_config(config(256, None), 128).frequencies)

    def ratios(**given):
        scaling = YARN | {"original_max_position_embeddings": 4096} | given
        return np.array(rope_from_config(config(4096, scaling), 128).frequencies) / plain

    # Pair i turns 4096 * 10000**(-i/64) / 2 pi times: 32 times at 20.95, once at 45.03.
    default = ratios()
    np.testing.assert_allclose(default[:21], 1.0)
    np.testing.assert_allclose(default[46:], 0.25)
    np.testing.assert_allclose(default[20:47], 0.25 + 0.75 * (46 - np.arange(20, 47)) / 26)
    exact = ratios(truncate=False)
    low, high = (64 * math.log(4096 / (turns * 2 * math.pi)) / math.log(10000) for turns in (32, 1))
    np.testing.assert_allclose(exact[21:46], 0.25 + 0.75 * (high - np.arange(21, 46)) / (high - low))
    assert (ratios(beta_fast=64)[20], ratios(beta_slow=2)[41]) != (default[20], default[41])
    np.testing.assert_allclose(ratios(beta_slow=2)[41:], 0.25)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (YARN | {"long_factor": [1.0]}, "rope_type 'yarn' with long_factor is not supported"),
        (YARN | {"low_freq_factor": 1.0}, "with low_freq_factor is not supported"),
        ({"factor": 4.0}, "rope_type 'default' with factor is not supported"),
        ({"type": "dynamic", "factor": 4.0}, "rope_type 'dynamic' is not supported"),
        ({"type": ["yarn"]}, "is not supported"),
        ({"type": "yarn", "rope_type": "default", "factor": 4.0}, "rope_type is 'default', but type is 'yarn'"),
        (YARN | {"attn_factor": 1.0, "attention_factor": 1.0}, "both attention_factor and attn_factor"),
        (YARN | {"mscale": 1.0}, "needs both mscale and mscale_all_dim"),
        (YARN | {"extrapolation_factor": 0.5}, "extrapolation_factor must be a number from 1 to 1, got 0.5"),
        (YARN | {"truncate": "no"}, "rope_scaling: truncate must be true or false, got 'no'"),
        (YARN | {"beta_fast": 1, "beta_slow": 2}, "beta_fast .* must be at least beta_slow"),
        ({"type": "yarn"}, "config.json: rope_scaling has no factor"),
        ({"type": "linear", "factor": 0.5}, "factor must be a number from 1 to .*, got 0.5"),
        ({"type": "linear", "factor": math.inf}, "factor must be a number .*, got inf"),
        ({"type": "linear", "factor": "4"}, "factor must be a number .*, got '4'"),
        ({"type": "linear", "factor": True}, "factor must be a number .*, got True"),
        (YARN | {"attn_factor": 0}, "attn_factor must be a number .*, got 0"),
        (
            YARN | {"original_max_position_embeddings": -1},
            "original_max_position_embeddings must be an integer from 1 .*, got -1",
        ),
        (LLAMA3 | {"low_freq_factor": 4.0}, "must be below high_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ("yarn", "rope_scaling must be an object, got 'yarn'"),
    ],
)
def test_no_key_or_value_of_a_scaling_is_ignored(scaling, message):
    with pytest.raises(ValueError, match=message):
        rope_from_config(config(256, scaling), 16)
