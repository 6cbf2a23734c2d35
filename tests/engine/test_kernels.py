"""Choice of kernels that are unsupported, fail their self-test, or break the device."""

import logging
import types

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas.paged_attention import PagedKernels
from kernels_pallas.paged_attention.self_test import BrokenDevice
from omni_jax.engine import kernels
from omni_jax.engine.kernels import choose_kernels
from omni_jax.models.config import model_config
from omni_jax.requests import EngineError
from tests import tiny
from tests.engines import load_tiny

pytestmark = pytest.mark.smoke

H100 = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")

TRITON = PagedKernels(decode="triton", mixed="triton", write="triton")


def chosen(backend="auto", *, device=H100, **model):
    config = model_config(tiny.config("qwen2", **model))
    return choose_kernels(backend, config, device, block_size=16, dtype=jnp.bfloat16, kv_cache_dtype="auto")


@pytest.fixture
def self_test_gives(monkeypatch):
    """A function that makes the self-test return or raise a result, and returns the arguments of the self-test."""
    arguments = {}

    def patch(result):
        def self_test(kernels, **options):
            arguments.update(options, kernels=kernels)
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(kernels, "self_test", self_test)
        return arguments

    return patch


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_working_kernels_are_chosen_and_logged(self_test_gives, caplog):
    caplog.set_level(logging.INFO)
    arguments = self_test_gives({})
    assert chosen() == (TRITON, ())
    assert arguments["kernels"] == TRITON
    assert (arguments["head_dim"], arguments["group"], arguments["page_size"]) == (16, 2, 16)
    assert caplog.messages == ["attention: decode triton, mixed triton, write triton"]


def test_a_failing_kernel_is_replaced_by_xla_with_one_warning(self_test_gives, caplog):
    self_test_gives({"mixed": "triton: rows of ones: off by 1.5, 0.03 is allowed"})
    mine, (reason,) = chosen()
    assert mine == PagedKernels(decode="triton", mixed="xla", write="triton")
    (warning,) = warnings(caplog)
    assert reason in warning
    assert "mixed uses XLA, as a kernel failed its self-test: triton: rows of ones: off by 1.5" in reason


def test_a_failing_kernel_of_a_named_backend_raises(self_test_gives):
    self_test_gives({"decode": "triton: off by 1.5"})
    with pytest.raises(EngineError, match=r"'triton' failed its self-test .* decode: triton: off by 1.5.* auto or xla"):
        chosen("triton")
    self_test_gives(BrokenDevice("the device is lost"))
    with pytest.raises(EngineError, match="the device is lost"):
        chosen()


def test_an_unsupported_model_uses_xla_unless_the_backend_is_named(self_test_gives, caplog):
    self_test_gives({})
    mine, (reason,) = chosen(head_dim=24)
    assert mine == PagedKernels()
    assert "head_dim 24: the Triton kernels support" in reason
    assert len(warnings(caplog)) == 1
    with pytest.raises(ValueError, match="head_dim 24: the Triton kernels support"):
        chosen("triton", head_dim=24)


def test_a_cpu_uses_xla_without_a_warning(caplog):
    assert chosen(device=jax.devices("cpu")[0]) == (PagedKernels(), ())
    assert warnings(caplog) == []
    with pytest.raises(ValueError, match="'triton' cannot be used: triton needs an NVIDIA GPU"):
        chosen("triton", device=jax.devices("cpu")[0])


def test_engine_info_names_the_kernels():
    info = load_tiny("qwen2").info
    assert (info.attention, info.attention_fallbacks) == ({"decode": "xla", "mixed": "xla", "write": "xla"}, ())
