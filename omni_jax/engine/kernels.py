"""Which kernels an engine runs: chosen for the model and the device, tried once, and what came of it."""

import logging
from typing import Any

from kernels_pallas.paged_attention import PagedKernels
from kernels_pallas.paged_attention.choose import choose
from kernels_pallas.paged_attention.self_test import BrokenDevice, replace_failed, self_test
from omni_jax.models import ModelConfig
from omni_jax.requests import EngineError

logger = logging.getLogger(__name__)


def choose_kernels(
    asked: str, model: ModelConfig, device: Any, *, block_size: int, dtype: Any, kv_cache_dtype: str
) -> tuple[PagedKernels, tuple[str, ...]]:
    """Implementations of attention over the cache, and why those are XLA's that ought not to be.

    Args:
        asked: EngineConfig.attention_backend. What is asked for by its name works or is an error.
        model: whose heads count.
        device: a jax.Device.
        block_size: tokens of a block.
        dtype: of weights and cache.
        kv_cache_dtype: "auto" or "int8".

    Raises:
        ValueError: what is asked for does not support the model or the device.
        EngineError: it does, but has failed its self-test; or any kernel has left the device unusable.
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
        backend=asked,
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
    if failures and asked != "auto":
        told = "; ".join(f"{op}: {fault}" for op, fault in failures.items())
        raise EngineError(f"attention backend {asked!r} failed its self-test on this device, use auto or xla; {told}")
    fallbacks += tuple(f"{op} uses XLA, as a kernel failed its self-test: {fault}" for op, fault in failures.items())
    for fallback in fallbacks:
        logger.warning("SLOWER THAN IT SHOULD BE: %s", fallback)
    kernels = replace_failed(kernels, failures)
    logger.info("attention: decode %s, mixed %s, write %s", kernels.decode, kernels.mixed, kernels.write)
    return kernels, fallbacks
