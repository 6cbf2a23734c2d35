"""The choice of paged-attention implementations for a model on a device."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.api import PagedKernels
from kernels_pallas.paged_attention.pages import QuantPages

BACKENDS = ("auto", "xla", "triton", "mosaic")


def choose(
    *,
    platform: str,
    device_kind: str,
    compute_capability: str | None,
    head_dim: int,
    page_size: int,
    heads: int,
    kv_heads: int,
    dtype: Any,
    kv_cache_dtype: str = "auto",
    backend: str = "auto",
) -> tuple[PagedKernels, tuple[str, ...]]:
    """Choose the kernels.

    "auto" is Triton on NVIDIA GPUs of compute capability 8.0 and above, otherwise XLA. "mosaic" uses Mosaic for decode
    batches and Triton for the rest; "auto" does not choose it until it is measured on a device.

    Args:
        platform: `device.platform`: "cpu", "gpu".
        device_kind: `device.device_kind`, for example "NVIDIA H100 80GB HBM3".
        compute_capability: `device.compute_capability`, for example "9.0"; None if the device has none.
        head_dim: head size of keys and values.
        page_size: tokens per page.
        heads: number of query heads.
        kv_heads: number of KV heads.
        dtype: dtype of queries, and of pages unless they are quantised.
        kv_cache_dtype: "auto" or "int8".
        backend: one of BACKENDS. A named one is an error where decode batches cannot use it; mixed batches and writes
            may still be another backend's.

    Returns:
        The kernels, and the reasons for each fallback.

    Raises:
        ValueError: there is no such backend, or the named one does not support this model or device.
    """
    if backend not in BACKENDS:
        raise ValueError(f"attention backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "xla" or (backend == "auto" and platform == "cpu"):
        return PagedKernels(), ()
    device = (platform, device_kind, compute_capability)
    shape = (1, kv_heads, page_size, head_dim)
    pages = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    if kv_cache_dtype == "int8":
        scales = jax.ShapeDtypeStruct(shape[:3], jnp.float32)
        pages = QuantPages(values=jax.ShapeDtypeStruct(shape, jnp.int8), scales=scales)
    model = (jax.ShapeDtypeStruct((1, heads, head_dim), jnp.dtype(dtype)), pages, pages)
    obstacle = _obstacle("mosaic" if backend == "mosaic" else "triton", device, model)
    if obstacle is None and backend == "mosaic":
        rest = _obstacle("triton", device, model)
        if rest is None:
            return PagedKernels(decode="mosaic", mixed="triton", write="triton"), ()
        return PagedKernels(decode="mosaic"), (f"mixed batches and writes use XLA: {rest}",)
    if obstacle is None:
        return PagedKernels(decode="triton", mixed="triton", write="triton"), ()
    if backend == "auto":
        return PagedKernels(), (f"attention uses XLA: {obstacle}",)
    raise ValueError(f"attention backend {backend!r} cannot be used: {obstacle}; use auto or xla")


def addressable_pages(kernels: PagedKernels, num_pages: int, page: tuple[int, int, int], *, quantised: bool) -> int:
    """The largest page count, at most `num_pages`, that the kernels can address.

    Args:
        kernels: the chosen kernels.
        num_pages: the desired number of pages.
        page: [kv_heads, page_size, head_dim] on one device.
        quantised: pages are int8.
    """
    limit = 2**31 // math.prod(page)
    # Pallas computes offsets in signed 32-bit integers for arrays of up to 4 GiB, in 64-bit ones for larger arrays. An
    # int8 array between 2 and 4 GiB has more elements than 32 bits address.
    if quantised and "triton" in dataclasses.astuple(kernels) and limit < num_pages <= 2 * limit:
        return limit
    return num_pages


def _obstacle(name: str, device: tuple[str, str, str | None], model: tuple[Any, Any, Any]) -> str | None:
    """The reason why an implementation does not support a model (queries, keys, values) or device; None if it does."""
    # Imported here, because importing Pallas is slow and CPUs do not need it.
    if name == "triton":
        from kernels_pallas.paged_attention.triton_common import unsupported

        needed, fits = "8.0 or above", lambda version: version >= (8, 0)
    else:
        from kernels_pallas.paged_attention.mosaic import unsupported

        # Not above: the kernel uses Hopper's instructions, which Blackwell does not have.
        needed, fits = "9.0 (H100, H200)", lambda version: version[0] == 9
    platform, device_kind, compute_capability = device
    version = _version(compute_capability) if platform != "cpu" else None
    if version is None or not fits(version):
        return (
            f"{name} needs an NVIDIA GPU of compute capability {needed}, the device is {device_kind!r} ({platform}) "
            f"of compute capability {compute_capability or 'none'}"
        )
    return unsupported(*model)


def _version(compute_capability: str | None) -> tuple[int, int] | None:
    """Parse "8.0" as (8, 0); None for anything else, for example AMD's "gfx942"."""
    major, _, minor = (compute_capability or "").partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None
