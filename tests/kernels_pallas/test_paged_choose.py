"""Which kernels a model gets on a device, and with which settings."""

import jax.numpy as jnp
import pytest

from kernels_pallas.paged_attention import PagedKernels
from kernels_pallas.paged_attention.choose import addressable, choose
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
def test_the_best_for_a_device(device, kernels):
    assert choose(**device, **QWEN) == (kernels, ())
    assert choose(**device, **QWEN, asked="xla") == (XLA, ())


@pytest.mark.parametrize("device", [V100, AMD])
def test_an_old_or_unknown_gpu_uses_xla_and_says_so(device):
    kernels, (reason,) = choose(**device, **QWEN)
    assert kernels == XLA
    assert "8.0 or above" in reason
    assert repr(device["device_kind"]) in reason


@pytest.mark.parametrize(
    "model", [{"head_dim": 80}, {"page_size": 512}, {"heads": 64}, {"dtype": jnp.float64}], ids=str
)
def test_a_model_that_no_kernel_supports(model):
    """By itself it falls back and says so; by name it is an error. Both name what was given and what would do."""
    kernels, (reason,) = choose(**H100, **QWEN | model)
    assert kernels == XLA
    assert "support" in reason
    with pytest.raises(ValueError, match=r"'triton' cannot be used: .* support .* use auto or xla"):
        choose(**H100, **QWEN | model, asked="triton")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_int8_and_other_dtypes_have_triton(dtype):
    assert choose(**A100, **QWEN | {"dtype": dtype}, kv_cache_dtype="int8") == (TRITON, ())


def test_mosaic_is_taken_by_name_only():
    model = QWEN | {"head_dim": 128}
    assert choose(**H100, **model, asked="mosaic") == (
        PagedKernels(decode="mosaic", mixed="triton", write="triton"),
        (),
    )
    for device in (CPU, A100, B200):
        with pytest.raises(ValueError, match=r"'mosaic' cannot be used: .* 9.0 \(H100, H200\), the device is '.*' \("):
            choose(**device, **model, asked="mosaic")
    with pytest.raises(ValueError, match=r"'mosaic' cannot be used: .*int8"):
        choose(**H100, **model, kv_cache_dtype="int8", asked="mosaic")


def test_a_backend_by_name_where_it_does_not_run():
    for device in (CPU, V100, AMD):
        with pytest.raises(ValueError, match="'triton' cannot be used: triton needs an NVIDIA GPU"):
            choose(**device, **QWEN, asked="triton")
    with pytest.raises(ValueError, match="one of auto, xla, triton, mosaic, got 'flash'"):
        choose(**CPU, **QWEN, asked="flash")


# -- settings ---------------------------------------------------------------------------------------------------------


def test_devices_are_known_by_the_names_jax_gives_them():
    assert device_named("NVIDIA A100-SXM4-80GB") is TABLE["a100"]
    assert device_named("NVIDIA H100 80GB HBM3") is TABLE["h100"]
    assert device_named("NVIDIA H200") is TABLE["h200"]
    assert device_named("") is device_named("NVIDIA GeForce RTX 4090") is TABLE["default"]


def decode(rows, kv_heads, *, most_tokens=32768, head_dim=64, kind="NVIDIA H100 80GB HBM3"):
    sizes = {"group": 7, "page_size": 16, "itemsize": 2}
    return decode_settings(kind, rows=rows, kv_heads=kv_heads, head_dim=head_dim, most_tokens=most_tokens, **sizes)


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", ""])
@pytest.mark.parametrize("rows", [8, 24, 48, 96, 256])
@pytest.mark.parametrize("kv_heads", [2, 4, 8])
def test_splits_fill_the_device(kind, rows, kv_heads):
    sms, programs = device_named(kind).multiprocessors, rows * kv_heads
    found = decode(rows, kv_heads, kind=kind)
    assert found.splits == 1 or programs * found.splits <= 4 * sms
    assert programs * found.splits > 2 * sms or found.splits * 64 == 4096  # a merge takes no more
    if programs > 2 * sms:
        assert found.splits == 1


def test_no_split_is_without_a_tile_and_no_merge_is_too_large():
    assert decode(1, 2, most_tokens=40).splits == 1
    short = decode(1, 2, most_tokens=640)
    assert short.splits * short.key_tile <= 640
    for head_dim in (64, 128, 256):
        assert decode(1, 1, head_dim=head_dim).splits * head_dim <= 4096


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256, 512])
@pytest.mark.parametrize("most_tokens", [1, 16, 17, 100_000])
def test_tiles_are_powers_of_two_that_tensor_cores_take(head_dim, most_tokens):
    sizes = {"kv_heads": 2, "group": 3, "page_size": 16, "itemsize": 2, "head_dim": head_dim}
    for tokens in (1, 5, 4096):
        mixed = mixed_settings("", tokens=tokens, rows=2, most_tokens=most_tokens, **sizes)
        tiles = mixed.query_tile, mixed.key_tile, decode_settings("", rows=2, most_tokens=most_tokens, **sizes).key_tile
        for tile in tiles:
            assert tile >= 16
            assert tile & (tile - 1) == 0


@pytest.mark.parametrize(
    ("pages", "expected"), [(1000, 1000), (2**16, 2**16), (2**16 + 1, 2**16), (2**17, 2**16), (2**17 + 1, 2**17 + 1)]
)
def test_arrays_that_cannot_be_addressed_are_smaller(pages, expected):
    """int8 pages of 2**15 numbers: from 2**31 numbers to 2**32, Pallas's offsets would be negative."""
    page = (8, 32, 128)
    triton = PagedKernels(decode="triton", mixed="triton", write="triton")
    assert addressable(triton, pages, page, quantised=True) == expected
    assert addressable(triton, pages, page, quantised=False) == pages
    assert addressable(PagedKernels(), pages, page, quantised=True) == pages
