"""The choice of kernels and their settings for a model on a device."""

import jax.numpy as jnp
import pytest

from kernels_pallas.paged_attention import PagedKernels
from kernels_pallas.paged_attention.choose import addressable_pages, choose
from kernels_pallas.paged_attention.settings import TABLE, decode_settings, device_named, mixed_settings

pytestmark = pytest.mark.smoke

H100 = {"platform": "gpu", "device_kind": "NVIDIA H100 80GB HBM3", "compute_capability": "9.0"}
A100 = {"platform": "gpu", "device_kind": "NVIDIA A100-SXM4-80GB", "compute_capability": "8.0"}
B200 = {"platform": "gpu", "device_kind": "NVIDIA B200", "compute_capability": "10.0"}
V100 = {"platform": "gpu", "device_kind": "Tesla V100-SXM2-32GB", "compute_capability": "7.0"}
AMD = {"platform": "gpu", "device_kind": "AMD Instinct MI300X", "compute_capability": "gfx942"}
CPU = {"platform": "cpu", "device_kind": "cpu", "compute_capability": None}
QWEN = {"head_dim": 64, "page_size": 16, "heads": 14, "kv_heads": 2, "dtype": jnp.bfloat16}
XLA, TRITON = PagedKernels(), PagedKernels(decode="triton", mixed="triton", write="triton")


@pytest.mark.parametrize(("device", "kernels"), [(CPU, XLA), (A100, TRITON), (H100, TRITON), (B200, TRITON)])
def test_auto_chooses_the_best_kernels_for_a_device(device, kernels):
    assert choose(**device, **QWEN) == (kernels, ())
    assert choose(**device, **QWEN, backend="xla") == (XLA, ())


@pytest.mark.parametrize("device", [V100, AMD])
def test_an_old_or_unknown_gpu_uses_xla_with_a_reason(device):
    kernels, (reason,) = choose(**device, **QWEN)
    assert kernels == XLA
    assert "8.0 or above" in reason
    assert repr(device["device_kind"]) in reason


@pytest.mark.parametrize(
    "model", [{"head_dim": 80}, {"page_size": 512}, {"heads": 64}, {"dtype": jnp.float64}], ids=str
)
def test_an_unsupported_model_falls_back_with_auto_and_fails_by_name(model):
    """Both messages have what was given and what is supported."""
    kernels, (reason,) = choose(**H100, **QWEN | model)
    assert kernels == XLA
    assert "support" in reason
    with pytest.raises(ValueError, match=r"'triton' cannot be used: .* support .* use auto or xla"):
        choose(**H100, **QWEN | model, backend="triton")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_triton_supports_int8_pages_with_other_dtypes(dtype):
    assert choose(**A100, **QWEN | {"dtype": dtype}, kv_cache_dtype="int8") == (TRITON, ())


def test_mosaic_is_chosen_by_name_only():
    model = QWEN | {"head_dim": 128}
    assert choose(**H100, **model, backend="mosaic") == (
        PagedKernels(decode="mosaic", mixed="triton", write="triton"),
        (),
    )
    for device in (CPU, A100, B200):
        with pytest.raises(ValueError, match=r"'mosaic' cannot be used: .* 9.0 \(H100, H200\), the device is '.*' \("):
            choose(**device, **model, backend="mosaic")
    with pytest.raises(ValueError, match=r"'mosaic' cannot be used: .*int8"):
        choose(**H100, **model, kv_cache_dtype="int8", backend="mosaic")


def test_a_named_backend_on_an_unsupported_device_is_an_error():
    for device in (CPU, V100, AMD):
        with pytest.raises(ValueError, match="'triton' cannot be used: triton needs an NVIDIA GPU"):
            choose(**device, **QWEN, backend="triton")
    with pytest.raises(ValueError, match="one of auto, xla, triton, mosaic, got 'flash'"):
        choose(**CPU, **QWEN, backend="flash")


# -- settings ---------------------------------------------------------------------------------------------------------


def test_devices_are_recognised_by_their_jax_names():
    assert device_named("NVIDIA A100-SXM4-80GB") is TABLE["a100"]
    assert device_named("NVIDIA H100 80GB HBM3") is TABLE["h100"]
    assert device_named("NVIDIA H200") is TABLE["h200"]
    assert device_named("") is device_named("NVIDIA GeForce RTX 4090") is TABLE["default"]


def decode(rows, kv_heads, *, max_context=32768, head_dim=64, kind="NVIDIA H100 80GB HBM3"):
    sizes = {"group": 7, "page_size": 16, "itemsize": 2}
    return decode_settings(kind, rows=rows, kv_heads=kv_heads, head_dim=head_dim, max_context=max_context, **sizes)


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", ""])
@pytest.mark.parametrize("rows", [8, 24, 48, 96, 256])
@pytest.mark.parametrize("kv_heads", [2, 4, 8])
def test_splits_fill_the_device(kind, rows, kv_heads):
    sms, programs = device_named(kind).multiprocessors, rows * kv_heads
    found = decode(rows, kv_heads, kind=kind)
    assert found.splits == 1 or programs * found.splits <= 4 * sms
    assert programs * found.splits > 2 * sms or found.splits * 64 == 4096  # the limit of a merge
    if programs > 2 * sms:
        assert found.splits == 1


def test_every_split_has_a_tile_and_no_merge_is_too_large():
    assert decode(1, 2, max_context=40).splits == 1
    short = decode(1, 2, max_context=640)
    assert short.splits * short.key_tile <= 640
    for head_dim in (64, 128, 256):
        assert decode(1, 1, head_dim=head_dim).splits * head_dim <= 4096


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256, 512])
@pytest.mark.parametrize("max_context", [1, 16, 17, 100_000])
def test_tiles_are_powers_of_two_from_16(head_dim, max_context):
    sizes = {"kv_heads": 2, "group": 3, "page_size": 16, "itemsize": 2, "head_dim": head_dim}
    for tokens in (1, 5, 4096):
        mixed = mixed_settings("", tokens=tokens, rows=2, max_context=max_context, **sizes)
        tiles = mixed.query_tile, mixed.key_tile, decode_settings("", rows=2, max_context=max_context, **sizes).key_tile
        for tile in tiles:
            assert tile >= 16
            assert tile & (tile - 1) == 0


@pytest.mark.parametrize(
    ("pages", "expected"), [(1000, 1000), (2**16, 2**16), (2**16 + 1, 2**16), (2**17, 2**16), (2**17 + 1, 2**17 + 1)]
)
def test_arrays_that_cannot_be_addressed_are_made_smaller(pages, expected):
    """int8 pages of 2**15 values: in arrays of 2**31 to 2**32 values, Pallas's offsets would be negative."""
    page = (8, 32, 128)
    triton = PagedKernels(decode="triton", mixed="triton", write="triton")
    assert addressable_pages(triton, pages, page, quantised=True) == expected
    assert addressable_pages(triton, pages, page, quantised=False) == pages
    assert addressable_pages(PagedKernels(), pages, page, quantised=True) == pages
