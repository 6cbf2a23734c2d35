"""The default limit on the pixels of an image: the checkpoint's own, within the context and the memory."""

import json
import logging
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from omni_jax.cost.published import published_config
from omni_jax.engine.config import EngineConfig
from omni_jax.engine.loading import _cache_tokens, _encoder, _vision
from omni_jax.engine.vision_limits import encoder_cache_tokens, image_limit, tower_bytes
from omni_jax.models.config import model_config
from omni_jax.planner.plan import PlanOptions, make_plan
from tests.inputs import media

CONFIG = published_config("Qwen2-VL-7B")
MODEL = model_config(CONFIG)
assert MODEL.vision is not None
TOWER = MODEL.vision
OWN = 12_845_056  # 16,384 tokens
BFLOAT16 = np.dtype("float16")  # as wide
GPU = 80 * 10**9


def limit(given: int | None = None, *, max_model_len: int = 32768, memory: int = GPU, own: int = OWN) -> int:
    return image_limit(given, own, TOWER, max_model_len=max_model_len, memory=memory, width=2).pixels


def test_the_default_is_the_checkpoints_own_limit_within_context_and_memory():
    assert limit() == OWN
    assert limit(own=1_003_520) == 1_003_520
    assert limit(max_model_len=4096) == 2048 * 28 * 28
    assert limit(max_model_len=1) == 28 * 28
    one = tower_bytes(TOWER, OWN // 14**2, 2)
    assert limit(memory=8 * one) == OWN
    assert limit(memory=8 * one - 8) == OWN // 2
    assert limit(memory=one) == OWN // 8
    assert limit(memory=1) >= 14 * 14
    # --max-pixels overrides both bounds, but not the checkpoint.
    assert limit(5_000_000, max_model_len=4096, memory=one) == 5_000_000
    assert limit(10**9) == OWN


def test_the_encoder_cache_holds_the_largest_image_by_default():
    assert encoder_cache_tokens(None, OWN, TOWER) == 16384
    assert encoder_cache_tokens(None, 1_003_520, TOWER) == 8192
    assert encoder_cache_tokens(100, OWN, TOWER) == 100


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(media.QWEN2_VL))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "pixels", "reason"),
    [
        ({}, OWN, "the checkpoint's own limit"),
        ({"max_model_len": 4096}, 2048 * 784, "half of max_model_len, 4,096 tokens"),
        ({"max_pixels": 1_003_520}, 1_003_520, "--max-pixels"),
    ],
)
def test_the_start_says_what_limits_images_and_a_plan_agrees(
    directory, caplog, options: dict[str, Any], pixels, reason
):
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": int(0.92 * GPU)})
    config = EngineConfig(model_dir=directory, **options)
    with caplog.at_level(logging.INFO):
        vision = _vision(config, MODEL, BFLOAT16, device)
    assert vision is not None
    assert vision.settings.max_pixels == pixels
    assert f"images: up to {pixels:,} pixels, {pixels // 784:,} tokens, after resizing: {reason} " in caplog.text
    assert "--max-pixels lowers it" in caplog.text
    assert "CPU" not in caplog.text
    encoder = _encoder(config, vision, device)
    assert encoder.buckets[-1] * 196 >= pixels
    assert encoder.feature_rows >= pixels // 784
    plan = make_plan(PlanOptions(config=CONFIG, gpu="h100", num=1, checkpoint_pixels=OWN, **options))
    assert plan.settings.max_pixels == pixels
    assert plan.memory.features == encoder.feature_rows * MODEL.hidden_size * 2
    assert _cache_tokens(config, vision) == max(8192, pixels // 784)


def test_a_cpu_has_the_same_default_and_says_that_it_is_slow(directory, caplog, monkeypatch):
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PHYS_PAGES": 2**24, "SC_PAGE_SIZE": 4096}[name])
    caplog.set_level(logging.INFO)
    vision = _vision(EngineConfig(model_dir=directory), MODEL, BFLOAT16, SimpleNamespace(platform="cpu"))
    assert cast(Any, vision).settings.max_pixels == OWN
    assert "on a CPU an image of a million pixels takes seconds" in caplog.text
    small = 2**30 // 4096  # a host of 1 GiB
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PHYS_PAGES": small, "SC_PAGE_SIZE": 4096}[name])
    vision = _vision(EngineConfig(model_dir=directory), MODEL, BFLOAT16, SimpleNamespace(platform="cpu"))
    assert cast(Any, vision).settings.max_pixels == OWN // 16
    assert "an eighth of the 1.1 GB of memory, for the tower" in caplog.text
