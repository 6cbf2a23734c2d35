"""What the server tells of the engine's memory: a line at the start, /stats, metrics."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:  # the engine brings JAX with it
    from omni_jax.engine.config import EngineConfig
    from omni_jax.engine.stats import EngineStats
    from omni_jax.memory import PoolUsage
    from omni_jax.memory.host_tier import HostTierStats


def features(config: "EngineConfig") -> str:
    """Which of them are on, in one line."""
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


def figures(stats: "EngineStats") -> dict[str, Any]:
    """What /stats says of it, as JSON can hold it. pool and swap are null where the engine has none to tell of."""
    return {
        "pool": None if stats.pool is None else {**_plain(stats.pool), "swapped": stats.blocks_swapped},
        "swap": _plain(stats.swap),
        "prefix_cache": {"queries": dict(stats.prefix_queries), "hits": dict(stats.prefix_hits)},
        "blocks_swapped": {"out": stats.blocks_swapped_out, "in": stats.blocks_swapped_in},
        "tokens_dropped": stats.tokens_dropped,
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


class MemoryCollector(Collector):
    """Metrics of the prefix cache (vLLM's names), the blocks, swap and compression, read when somebody asks."""

    def __init__(self, stats: "Callable[[], EngineStats]", model_name: str):
        self._stats, self._model_name = stats, model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats.pool is not None:
            yield from self._pool(stats.pool, stats.blocks_swapped)
        if stats.swap is not None:
            yield from self._swap(stats.swap)
        for what, counts, text in (
            ("queries", stats.prefix_queries, "Prompt tokens looked up in the prefix cache"),
            ("hits", stats.prefix_hits, "Prompt tokens found there and not computed again"),
        ):
            yield self._counter(f"vllm:prefix_cache_{what}", f"{text}.", sum(counts.values()))
            yield self._by(CounterMetricFamily, f"omni_jax:prefix_cache_{what}", f"{text}.", "modality", counts)
        moved = {"out": stats.blocks_swapped_out, "in": stats.blocks_swapped_in}
        yield self._by(
            CounterMetricFamily, "omni_jax:blocks_swapped", "Blocks copied to the host tier, and back.", "way", moved
        )
        yield self._counter(
            "omni_jax:kv_tokens_dropped", "Rows that compression took from caches.", stats.tokens_dropped
        )

    def _pool(self, pool: "PoolUsage", swapped: int) -> Iterator[Metric]:
        states = {"free": pool.free, "cached": pool.cached, "active": pool.active, "swapped": swapped}
        text = "Blocks of the KV cache; those swapped are elsewhere."
        yield self._by(GaugeMetricFamily, "omni_jax:kv_blocks", text, "state", states)
        filled = {**pool.active_slots, "unfilled": pool.unfilled_slots}
        yield self._by(GaugeMetricFamily, "omni_jax:kv_slots", "Slots of blocks in use.", "content", filled)
        text = "Cached blocks given up for others."
        yield self._by(CounterMetricFamily, "omni_jax:kv_evictions", text, "modality", pool.evictions)

    def _swap(self, swap: "HostTierStats") -> Iterator[Metric]:
        sizes = {"host": swap.host_bytes, "disk": swap.disk_bytes}
        yield self._by(GaugeMetricFamily, "omni_jax:swap_bytes", "Bytes of swapped blocks.", "tier", sizes)
        yield self._counter("omni_jax:swap_lost", "Swapped sequences lost to an error and computed again.", swap.lost)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, text, labels=["model_name"])
        counter.add_metric([self._model_name], value)
        return counter

    def _by(self, family: type, name: str, text: str, label: str, counts: Mapping[Any, float]) -> Metric:
        metric = family(name, text, labels=["model_name", label])
        for key, count in counts.items():
            metric.add_metric([self._model_name, key], count)
        return metric
