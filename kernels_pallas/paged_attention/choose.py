"""Which implementation computes what, for a model on a device."""

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
    asked: str = "auto",
) -> tuple[PagedKernels, tuple[str, ...]]:
    """The kernels, and why whatever is not the best for the device is not.

    "auto" is XLA on a CPU, Triton on NVIDIA GPUs of compute capability 8.0 and above, and XLA elsewhere. Mosaic is only
    taken by its name, until a device has measured it; it then computes decode batches, and Triton the rest.

    Args:
        platform: `device.platform`: "cpu", "gpu".
        device_kind: `device.device_kind`, such as "NVIDIA H100 80GB HBM3".
        compute_capability: `device.compute_capability`, such as "9.0"; None where a device has none.
        head_dim: of keys and values.
        page_size: tokens a page.
        heads: of queries.
        kv_heads: of keys and values.
        dtype: of queries, and of the pages unless they are quantised.
        kv_cache_dtype: "auto" or "int8".
        asked: one of BACKENDS. What is asked for by name never falls back as a whole.

    Raises:
        ValueError: no such backend, or the one that is asked for computes neither this model nor on this device.
    """
    if asked not in BACKENDS:
        raise ValueError(f"attention backend must be one of {', '.join(BACKENDS)}, got {asked!r}")
    if asked == "xla" or (asked == "auto" and platform == "cpu"):
        return PagedKernels(), ()
    device = (platform, device_kind, compute_capability)
    shape = (1, kv_heads, page_size, head_dim)
    pages = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    if kv_cache_dtype == "int8":
        scales = jax.ShapeDtypeStruct(shape[:3], jnp.float32)
        pages = QuantPages(values=jax.ShapeDtypeStruct(shape, jnp.int8), scales=scales)
    model = (jax.ShapeDtypeStruct((1, heads, head_dim), jnp.dtype(dtype)), pages, pages)
    obstacle = _obstacle("mosaic" if asked == "mosaic" else "triton", device, model)
    if obstacle is None and asked == "mosaic":
        rest = _obstacle("triton", device, model)
        if rest is None:
            return PagedKernels(decode="mosaic", mixed="triton", write="triton"), ()
        return PagedKernels(decode="mosaic"), (f"mixed batches and writes use XLA: {rest}",)
    if obstacle is None:
        return PagedKernels(decode="triton", mixed="triton", write="triton"), ()
    if asked == "auto":
        return PagedKernels(), (f"attention uses XLA: {obstacle}",)
    raise ValueError(f"attention backend {asked!r} cannot be used: {obstacle}; use auto or xla")


def addressable(kernels: PagedKernels, num_pages: int, page: tuple[int, int, int], *, quantised: bool) -> int:
    """So many of `num_pages` that the kernels can tell places in an array of them.

    Args:
        kernels: what was chosen.
        num_pages: wanted.
        page: [kv_heads, page_size, head_dim] of a device.
        quantised: numbers are int8.
    """
    most = 2**31 // math.prod(page)
    # Pallas reckons in signed 32-bit numbers up to 4 GiB of an array, and beyond that in 64-bit ones. That is right for
    # numbers of two bytes and more.
    if quantised and "triton" in dataclasses.astuple(kernels) and most < num_pages <= 2 * most:
        return most
    return num_pages


def _obstacle(name: str, device: tuple[str, str, str | None], model: tuple[Any, Any, Any]) -> str | None:
    """Why an implementation does not compute this model (queries, keys, values) on this device, None if it does."""
    # Here, because Pallas takes its time to import, and a CPU has no use for it.
    if name == "triton":
        from kernels_pallas.paged_attention.triton_common import unsupported

        needed, fits = "8.0 or above", lambda version: version >= (8, 0)
    else:
        from kernels_pallas.paged_attention.mosaic import unsupported

        # Not above: the kernel is of Hopper's instructions, which Blackwell does not have.
        needed, fits = "9.0 (H100, H200)", lambda version: version[0] == 9
    platform, device_kind, compute_capability = device
    version = _version(compute_capability) if platform != "cpu" else None
    if version is None or not fits(version):
        return (
            f"{name} needs an NVIDIA GPU of compute capability {needed}, the device is {device_kind!r} ({platform}) "
            f"of {compute_capability or 'none'}"
        )
    return unsupported(*model)


def _version(compute_capability: str | None) -> tuple[int, int] | None:
    """(8, 0) of "8.0"; None of anything else, such as AMD's "gfx942"."""
    major, _, minor = (compute_capability or "").partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None
