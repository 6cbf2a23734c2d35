"""The line that `serve` logs at start-up about memory features."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imports JAX
    from omni_jax.engine.config import EngineConfig


def memory_summary(config: "EngineConfig") -> str:
    """Which memory features are on, in one line."""
    caching = f"on (recycling {config.recycling_policy})" if config.enable_prefix_caching else "off"
    swap, preemption = "off", config.preemption_mode
    if config.swap_space and preemption != "recompute":
        disk = "" if config.swap_dir is None else f" and {config.swap_dir_space:g} GiB in {config.swap_dir}"
        swap = f"{config.swap_space:g} GiB of host memory{disk}"
    else:
        preemption = "recompute"
    compression = "off"
    if config.enable_adaptive_compression:
        schedule = config.kv_compress_controller or "default schedule"
        compression = f"up to {config.kv_compress_ratio:g} ({schedule})"
    return (
        f"KV cache {config.kv_cache_dtype}, prefix cache {caching}, swap {swap}, preemption {preemption}, "
        f"adaptive compression {compression}"
    )
