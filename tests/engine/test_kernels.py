"""What a start does with kernels that do not fit, do not work, or break the device."""

import logging
import types

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.paged_attention import PagedKernels
from kernels_pallas.paged_attention.self_test import BrokenDevice
from omni_jax.engine import kernels
from omni_jax.engine.kernels import choose_kernels
from omni_jax.models import model_config
from omni_jax.requests import EngineError
from tests import tiny
from tests.engines import load_tiny

pytestmark = pytest.mark.smoke

H100 = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")

TRITON = PagedKernels(decode="triton", mixed="triton", write="triton")


def chosen(asked="auto", *, device=H100, **model):
    config = model_config(tiny.config("qwen2", **model))
    return choose_kernels(asked, config, device, block_size=16, dtype=jnp.bfloat16, kv_cache_dtype="auto")


@pytest.fixture
def tests_find(monkeypatch):
    """Sets what the self-test returns, or raises; gives what it was asked."""
    asked = {}

    def find(result):
        def self_test(kernels, **options):
            asked.update(options, kernels=kernels)
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(kernels, "self_test", self_test)
        return asked

    return find


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_kernels_that_work(tests_find, caplog):
    caplog.set_level(logging.INFO)
    asked = tests_find({})
    assert chosen() == (TRITON, ())
    assert asked["kernels"] == TRITON
    assert (asked["head_dim"], asked["group"], asked["page_size"]) == (16, 2, 16)
    assert caplog.messages == ["attention: decode triton, mixed triton, write triton"]


def test_one_that_does_not_is_replaced_with_one_warning(tests_find, caplog):
    tests_find({"mixed": "triton: rows of ones: off by 1.5, 0.03 is allowed"})
    mine, (reason,) = chosen()
    assert mine == PagedKernels(decode="triton", mixed="xla", write="triton")
    (warning,) = warnings(caplog)
    assert reason in warning
    assert "mixed uses XLA, as a kernel failed its self-test: triton: rows of ones: off by 1.5" in reason


def test_one_that_was_asked_for_by_name_ends_the_start(tests_find):
    tests_find({"decode": "triton: off by 1.5"})
    with pytest.raises(EngineError, match=r"'triton' failed its self-test .* auto or xla; decode: triton: off by 1.5"):
        chosen("triton")
    tests_find(BrokenDevice("the device is gone"))
    with pytest.raises(EngineError, match="the device is gone"):
        chosen()


def test_a_model_that_kernels_do_not_support(tests_find, caplog):
    tests_find({})
    mine, (reason,) = chosen(head_dim=24)
    assert mine == PagedKernels()
    assert "head_dim 24: the Triton kernels support" in reason
    assert len(warnings(caplog)) == 1
    with pytest.raises(ValueError, match="head_dim 24: the Triton kernels support"):
        chosen("triton", head_dim=24)


def test_a_cpu_has_xla_and_no_warning(caplog):
    assert chosen(device=jax.devices("cpu")[0]) == (PagedKernels(), ())
    assert warnings(caplog) == []
    with pytest.raises(ValueError, match="'triton' cannot be used: triton needs an NVIDIA GPU"):
        chosen("triton", device=jax.devices("cpu")[0])


def test_an_engine_tells_what_it_runs():
    info = load_tiny("qwen2").info
    assert (info.attention, info.attention_fallbacks) == ({"decode": "xla", "mixed": "xla", "write": "xla"}, ())
