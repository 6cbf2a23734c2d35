"""EngineConfig refuses impossible settings, with errors that name the given and the possible values."""

import math

import pytest

from omni_jax.engine.config import EngineConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"swap_space": value}, "swap_space must be") for value in (-1.0, math.nan, math.inf)),
        ({"swap_space": 1, "swap_dir_space": -1.0}, "swap_dir_space must be at least 0, got -1.0"),
        ({"swap_dir": "d"}, "swap_dir needs a swap_space"),
        ({"swap_dir": "d", "swap_space": 1, "swap_dir_space": 0}, "swap_dir needs a swap_space"),
        ({"max_swap_ops": 0}, "max_swap_ops must be at least 1, got 0"),
        ({"num_swap_threads": 0}, "num_swap_threads must be at least 1, got 0"),
        ({"preemption_mode": "drop"}, "'auto', 'swap' or 'recompute', got 'drop'"),
        ({"preemption_mode": "swap"}, "needs a swap_space above 0"),
        *(({"kv_compress_ratio": value}, "kv_compress_ratio must be") for value in (-0.1, 1, math.nan)),
        (
            {"enable_adaptive_compression": True, "preemption_mode": "recompute"},
            "cannot be combined with preemption_mode",
        ),
        ({"kv_compress_controller": "a.b:c"}, "needs enable_adaptive_compression"),
        (
            {"kv_compress_controller": "a.b", "enable_adaptive_compression": True},
            "'package.module:function', got 'a.b'",
        ),
        ({"kv_cache_dtype": "fp8"}, "'auto' or 'int8', got 'fp8'"),
        *(({"recycling_policy": value}, "recycling_policy must be") for value in ("", "lfu", "a:", ":b", "a b:c")),
    ],
)
def test_impossible_memory_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(model_dir="m", **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"swap_space": 0.5, "swap_dir": "d", "preemption_mode": "swap", "max_swap_ops": 1, "num_swap_threads": 1},
        {"swap_space": 4, "preemption_mode": "recompute"},
        {"enable_adaptive_compression": True, "kv_compress_ratio": 0, "kv_compress_controller": "a.b:c.d"},
        {"recycling_policy": "a:b", "enable_prefix_caching": False, "kv_cache_dtype": "int8"},
        {"recycling_policy": "lru", "kv_compress_ratio": 0.99},
    ],
)
def test_possible_memory_settings_are_accepted(fields):
    EngineConfig(model_dir="m", **fields)
