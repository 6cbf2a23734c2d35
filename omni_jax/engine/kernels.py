"""Choice of an engine's attention kernels: by model and device, after a self-test."""

import logging
from typing import Any

from kernels_pallas.paged_attention import PagedKernels
from kernels_pallas.paged_attention.choose import choose
from kernels_pallas.paged_attention.self_test import BrokenDevice, replace_failed, self_test
from omni_jax.models.config import ModelConfig
from omni_jax.requests import EngineError

logger = logging.getLogger(__name__)


def choose_kernels(
    backend: str, model: ModelConfig, device: Any, *, block_size: int, dtype: Any, kv_cache_dtype: str
) -> tuple[PagedKernels, tuple[str, ...]]:
    """Choose the implementations of attention over the cache. Returns them, and the reasons for fallbacks to XLA.

    Args:
        backend: EngineConfig.attention_backend. Only "auto" may fall back to XLA; a named backend works or raises.
        model: config of one device's part of the model.
        device: a jax.Device.
        block_size: tokens per block.
        dtype: dtype of weights and activations.
        kv_cache_dtype: "auto" or "int8".

    Raises:
        ValueError: a named backend does not support the model or the device.
        EngineError: a named backend failed its self-test, or a kernel left the device unusable.
    """
    kernels, fallbacks = choose(
        platform=device.platform,
        device_kind=device.device_kind,
        compute_capability=getattr(device, "compute_capability", None),
        head_dim=model.head_dim,
        page_size=block_size,
        heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        backend=backend,
    )
    try:
        failures = self_test(
            kernels,
            device=device,
            head_dim=model.head_dim,
            page_size=block_size,
            group=model.num_attention_heads // model.num_key_value_heads,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
        )
    except BrokenDevice as error:
        raise EngineError(str(error)) from error
    if failures and backend != "auto":
        faults = "; ".join(f"{op}: {fault}" for op, fault in failures.items())
        raise EngineError(
            f"attention backend {backend!r} failed its self-test on this device: {faults}. Use auto or xla instead"
        )
    fallbacks += tuple(f"{op} uses XLA, as a kernel failed its self-test: {fault}" for op, fault in failures.items())
    for fallback in fallbacks:
        logger.warning("attention is slower than it could be: %s", fallback)
    kernels = replace_failed(kernels, failures)
    logger.info("attention: decode %s, mixed %s, write %s", kernels.decode, kernels.mixed, kernels.write)
    return kernels, fallbacks
