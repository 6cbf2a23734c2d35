"""Collectors: Prometheus metrics read from the engine on every scrape.

Metrics of vLLM have its names and descriptions. No label value is chosen by a client, so clients cannot add series.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from omni_jax.telemetry.figures import BOUNDS, SECONDS
from omni_jax.telemetry.recorder import Recorder

if TYPE_CHECKING:  # imports JAX
    from omni_jax.engine.stats import EngineStats
    from omni_jax.memory.accounting import PoolUsage
    from omni_jax.memory.host_tier import HostTierStats

_GAUGES = (  # name, field of EngineStats, description
    ("vllm:num_requests_running", "num_requests_running", "Number of requests in model execution batches."),
    ("vllm:num_requests_waiting", "num_requests_waiting", "Number of requests waiting to be processed."),
    ("vllm:kv_cache_usage_perc", "kv_cache_usage", "KV-cache usage. 1 means 100 percent usage."),
    ("omni_jax:encoder_cache_usage_perc", "encoder_cache_usage", "Encoder cache usage. 1 means 100 percent usage."),
)
_COUNTERS = (
    ("vllm:num_preemptions", "num_preemptions", "Cumulative number of preemption from the engine."),
    ("vllm:prompt_tokens", "prompt_tokens", "Number of prefill tokens processed."),
    ("vllm:generation_tokens", "generation_tokens", "Number of generation tokens processed."),
    (
        "vllm:corrupted_requests",
        "corrupted_requests",
        "Corrupted requests, in terms of total number of requests with NaNs in logits.",
    ),
    ("omni_jax:steps", "steps", "Number of steps executed."),
    ("omni_jax:compiles_after_warmup", "compiles_after_warmup", "Number of compilations after warm-up; expected 0."),
    ("omni_jax:real_tokens", "real_tokens", "Number of tokens computed in steps, without padding."),
    ("omni_jax:padded_tokens", "padded_tokens", "Number of padding tokens added to steps to fill a bucket."),
    (
        "vllm:mm_cache_queries",
        "encoder_cache_queries",
        "Multi-modal cache queries, in terms of number of queried items.",
    ),
    ("vllm:mm_cache_hits", "encoder_cache_hits", "Multi-modal cache hits, in terms of number of cached items."),
    ("omni_jax:encoder_calls", "encoder_calls", "Number of vision tower calls."),
    ("omni_jax:encoder_patches", "encoder_patches", "Number of patches encoded, without padding."),
    (
        "omni_jax:encoder_padded_patches",
        "encoder_padded_patches",
        "Number of padding patches added to vision tower calls to fill a bucket.",
    ),
)


_TOTALS = {  # histograms of the recorder; telemetry.figures.BOUNDS has their bounds
    "request_queue_time_seconds": "Histogram of time spent in WAITING phase for request.",
    "request_prefill_time_seconds": "Histogram of time spent in PREFILL phase for request.",
    "request_decode_time_seconds": "Histogram of time spent in DECODE phase for request.",
    "request_inference_time_seconds": "Histogram of time spent in RUNNING phase for request.",
    "request_time_per_output_token_seconds": "Histogram of time_per_output_token_seconds per request.",
    "iteration_tokens_total": "Histogram of number of tokens per engine_step.",
}


class _Families:
    """Makes metric families whose first label is the model's name."""

    def __init__(self, model_name: str):
        self._model_name = model_name

    def single(self, family: type, name: str, text: str, value: float) -> Metric:
        metric = family(name, text, labels=["model_name"])
        metric.add_metric([self._model_name], value)
        return metric

    def by_label(self, family: type, name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
        metric = family(name, text, labels=["model_name", label])
        for key, value in values.items():
            metric.add_metric([self._model_name, key], value)
        return metric

    def info(self, name: str, text: str, labels: Sequence[str], samples: Iterable[Sequence[str]]) -> Metric:
        """A gauge that is always 1; the values of its labels are the information."""
        metric = GaugeMetricFamily(name, text, labels=["model_name", *labels])
        for values in samples:
            metric.add_metric([self._model_name, *values], 1)
        return metric


class EngineCollector(Collector):
    """Metrics of one snapshot of an engine.

    Args:
        stats: returns the engine's EngineStats.
        recorder: returns the engine's Recorder.
        info: the engine's EngineInfo.
        model_name: value of the label model_name.
    """

    def __init__(self, stats: Callable[[], Any], recorder: Callable[[], Recorder], info: Any, model_name: str):
        self._stats, self._recorder, self._info, self._model_name = stats, recorder, info, model_name
        self._families = _Families(model_name)

    def collect(self) -> Iterator[Metric]:
        stats, recorder = self._stats(), self._recorder()
        yield from self._engine(stats)
        yield from self._memory(stats)
        yield from self._records(recorder)

    def _engine(self, stats: "EngineStats") -> Iterator[Metric]:
        """Steps, tokens and the model."""
        info, make = self._info, self._families
        for name, field, text in _GAUGES:
            yield make.single(GaugeMetricFamily, name, text, getattr(stats, field))
        for name, field, text in _COUNTERS:
            yield make.single(CounterMetricFamily, name, text, getattr(stats, field))
        text = "Number of images and videos in requests."
        yield make.by_label(CounterMetricFamily, "omni_jax:mm_items", text, "modality", stats.mm_items)
        yield make.info(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            ["block_size", "num_gpu_blocks"],
            [(str(info.block_size), str(info.num_blocks - 1))],  # without the block that padding is written to
        )
        yield make.info(
            "omni_jax:attention_info",
            "Implementation of each attention op; always 1.",
            ["op", "implementation"],
            info.attention.items(),
        )
        text = "Number of reasons for which XLA replaces an attention kernel; /stats lists them."
        yield make.single(GaugeMetricFamily, "omni_jax:attention_fallbacks", text, len(info.attention_fallbacks))

    def _memory(self, stats: "EngineStats") -> Iterator[Metric]:
        """The KV cache: prefix cache, blocks, swap and compression."""
        make = self._families
        if stats.pool is not None:
            yield from self._pool(stats.pool, stats.blocks_swapped)
        if stats.swap is not None:
            yield from self._swap(stats.swap)
        for what, counts, text in (
            ("queries", stats.prefix_queries, "Prefix cache queries, in terms of number of queried tokens."),
            ("hits", stats.prefix_hits, "Prefix cache hits, in terms of number of cached tokens."),
        ):
            name = f"prefix_cache_{what}"
            yield make.single(CounterMetricFamily, f"vllm:{name}", text, sum(counts.values()))
            yield make.by_label(CounterMetricFamily, f"omni_jax:{name}", text, "modality", counts)
        text = "Number of blocks copied to the host tier (out) and back (in)."
        copied = {"out": stats.blocks_swapped_out, "in": stats.blocks_swapped_in}
        yield make.by_label(CounterMetricFamily, "omni_jax:blocks_swapped", text, "way", copied)
        text = "Number of KV cache rows dropped by compression."
        yield make.single(CounterMetricFamily, "omni_jax:kv_tokens_dropped", text, stats.tokens_dropped)

    def _pool(self, pool: "PoolUsage", swapped: int) -> Iterator[Metric]:
        make = self._families
        states = {"free": pool.free, "cached": pool.cached, "active": pool.active, "swapped": swapped}
        text = "Number of KV cache blocks; swapped blocks are in the host tier."
        yield make.by_label(GaugeMetricFamily, "omni_jax:kv_blocks", text, "state", states)
        slots = {**pool.active_slots, "unfilled": pool.unfilled_slots}
        yield make.by_label(
            GaugeMetricFamily, "omni_jax:kv_slots", "Number of token slots in active blocks.", "content", slots
        )
        text = "Number of cached blocks evicted."
        yield make.by_label(CounterMetricFamily, "omni_jax:kv_evictions", text, "modality", pool.evictions)

    def _swap(self, swap: "HostTierStats") -> Iterator[Metric]:
        sizes = {"host": swap.host_bytes, "disk": swap.disk_bytes}
        yield self._families.by_label(
            GaugeMetricFamily, "omni_jax:swap_bytes", "Bytes of swapped blocks.", "tier", sizes
        )
        text = "Number of swapped sequences lost to an error and recomputed."
        yield self._families.single(CounterMetricFamily, "omni_jax:swap_lost", text, swap.lost)

    def _records(self, recorder: Recorder) -> Iterator[Metric]:
        """Objectives, pauses, preemptions and times of segments."""
        make = self._families
        attainment = GaugeMetricFamily(
            "omni_jax:slo_attainment",
            "Share of recent requests with an objective that met it.",
            labels=["model_name", "class", "objective"],
        )
        for kind, shares in recorder.attainment().items():
            for objective, share in shares.items():
                attainment.add_metric([self._model_name, kind, objective], share)
        yield attainment
        text = "Number of times a sequence was paused."
        yield make.single(CounterMetricFamily, "omni_jax:pauses", text, recorder.pauses)
        preemptions = CounterMetricFamily(
            "omni_jax:preemptions",
            "Number of preemptions: a decoding sequence needed blocks (blocks), or a more urgent one a slot or blocks "
            "(class). The blocks were swapped out (swap) or must be recomputed (recompute).",
            labels=["model_name", "reason", "way"],
        )
        for cause, count in recorder.preemptions.items():
            swapped = recorder.swapped[cause]
            preemptions.add_metric([self._model_name, cause, "swap"], swapped)
            preemptions.add_metric([self._model_name, cause, "recompute"], count - swapped)
        yield preemptions
        seconds = HistogramMetricFamily(
            "omni_jax:segment_seconds",
            "Histogram of time a segment spends in a stage in seconds.",
            labels=["model_name", "class", "stage"],
        )
        for (kind, stage), (counts, total) in recorder.histograms().items():
            seconds.add_metric([self._model_name, kind, stage], _cumulative(SECONDS, counts), total)
        yield seconds
        for name, (counts, total) in recorder.totals().items():
            family = HistogramMetricFamily(f"vllm:{name}", _TOTALS[name], labels=["model_name"])
            family.add_metric([self._model_name], _cumulative(BOUNDS[name], counts), total)
            yield family


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Buckets as Prometheus has them: each bound with the number of values up to it."""
    names = [*(floatToGoString(bound) for bound in bounds), "+Inf"]
    return list(zip(names, itertools.accumulate(counts), strict=True))
