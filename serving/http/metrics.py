"""Prometheus metrics under vLLM's names, and a few of our own under `omni_jax:`."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from omni_jax.requests import SamplingParams
from omni_jax.telemetry.figures import SECONDS
from omni_jax.telemetry.recorder import Recorder
from serving.http.memory_metrics import MemoryCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_CHOICES = (1, 2, 5, 10, 20, 50, 100)

_GAUGES = (
    ("vllm:num_requests_running", "num_requests_running", "Sequences in the running batch."),
    ("vllm:num_requests_waiting", "num_requests_waiting", "Sequences queued."),
    ("vllm:kv_cache_usage_perc", "kv_cache_usage", "Share of KV blocks in use; 1 is all of them."),
    ("omni_jax:encoder_cache_usage_perc", "encoder_cache_usage", "Share of the feature array held; 1 is all of it."),
)
_COUNTERS = (
    ("vllm:num_preemptions", "num_preemptions", "Sequences whose blocks were taken and which are computed again."),
    ("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens prefilled."),
    ("vllm:generation_tokens", "generation_tokens", "Tokens generated."),
    ("vllm:corrupted_requests", "corrupted_requests", "Continuations ended because their logits were NaN."),
    ("omni_jax:steps", "steps", "Compiled steps run."),
    ("omni_jax:compiles_after_warmup", "compiles_after_warmup", "Compilations since warm-up; stays 0."),
    ("omni_jax:real_tokens", "real_tokens", "Tokens that the steps were asked for."),
    ("omni_jax:padded_tokens", "padded_tokens", "Tokens that the steps were padded with to reach a bucket."),
    (
        "vllm:mm_cache_queries",
        "encoder_cache_queries",
        "Times that features of an image or video were needed.",
    ),
    ("vllm:mm_cache_hits", "encoder_cache_hits", "Times that they were there, or being computed already."),
    ("omni_jax:encoder_calls", "encoder_calls", "Calls of the vision tower."),
    ("omni_jax:encoder_patches", "encoder_patches", "Patches that the calls were asked for."),
    ("omni_jax:encoder_padded_patches", "encoder_padded_patches", "Patches that the calls were padded with."),
)


class _EngineCollector(Collector):
    """Reads the engine's own counts when somebody asks for them."""

    def __init__(self, stats: Callable[[], Any], info: Any, model_name: str):
        self._stats = stats
        self._info = info
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, field, text in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], getattr(stats, field))
            yield gauge
        for name, field, text in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model_name], getattr(stats, field))
            yield counter
        finished = CounterMetricFamily(
            "vllm:request_success", "Continuations by the reason they ended.", labels=["model_name", "finished_reason"]
        )
        for reason, count in stats.requests_finished.items():
            finished.add_metric([self._model_name, reason], count)
        yield finished
        items = CounterMetricFamily(
            "omni_jax:mm_items", "Images and videos of requests.", labels=["model_name", "modality"]
        )
        for modality, count in stats.mm_items.items():
            items.add_metric([self._model_name, modality], count)
        yield items
        cache = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV pool; always 1.", labels=["model_name", "block_size", "num_gpu_blocks"]
        )
        cache.add_metric([self._model_name, str(self._info.block_size), str(self._info.num_blocks)], 1)
        yield cache
        attention = GaugeMetricFamily(
            "omni_jax:attention_info",
            "What computes attention, and writes keys and values; always 1.",
            labels=["model_name", "op", "implementation"],
        )
        for op, implementation in self._info.attention.items():
            attention.add_metric([self._model_name, op, implementation], 1)
        yield attention
        fallbacks = GaugeMetricFamily(
            "omni_jax:attention_fallbacks",
            "Reasons why XLA computes attention where kernels were to be expected; /stats has them.",
            labels=["model_name"],
        )
        fallbacks.add_metric([self._model_name], len(self._info.attention_fallbacks))
        yield fallbacks


class _RecordCollector(Collector):
    """Reads what became of requests and segments. Every label has few values: none is a client's to choose."""

    def __init__(
        self, recorder: Callable[[], Recorder], cuts: Callable[[], Mapping[str, Mapping[str, int]]], model_name: str
    ):
        self._recorder, self._cuts, self._model_name = recorder, cuts, model_name

    def collect(self) -> Iterator[Metric]:
        recorder, model = self._recorder(), self._model_name
        attainment = GaugeMetricFamily(
            "omni_jax:slo_attainment",
            "Share of the latest requests that met an objective, of those that had it.",
            labels=["model_name", "class", "objective"],
        )
        for kind, shares in recorder.attainment().items():
            for objective, share in shares.items():
                attainment.add_metric([model, kind, objective], share)
        yield attainment
        pauses = CounterMetricFamily("omni_jax:pauses", "Times a sequence lost its turn.", labels=["model_name"])
        pauses.add_metric([model], recorder.pauses)
        yield pauses
        preemptions = CounterMetricFamily(
            "omni_jax:preemptions",
            "Times a sequence lost its slot or blocks: to one that decodes (blocks), to a more urgent one (class).",
            labels=["model_name", "reason"],
        )
        for reason, count in dict(recorder.preemptions).items():
            preemptions.add_metric([model, reason], count)
        yield preemptions
        cut = CounterMetricFamily(
            "omni_jax:segments", "Segments that prompts were cut into.", labels=["model_name", "policy"]
        )
        for policy, counts in self._cuts().items():
            cut.add_metric([model, policy], counts["segments"])
        yield cut
        seconds = HistogramMetricFamily(
            "omni_jax:segment_seconds", "Of segments, by class and stage.", labels=["model_name", "class", "stage"]
        )
        bounds = [*(str(bound) for bound in SECONDS), "+Inf"]
        for (kind, stage), (counts, total) in recorder.histograms().items():
            up_to = list(zip(bounds, itertools.accumulate(counts), strict=True))
            seconds.add_metric([model, kind, stage], up_to, total)
        yield seconds


class Metrics:
    """The metrics of one app, in a registry of its own.

    Args:
        stats: returns the engine's EngineStats.
        info: the engine's EngineInfo.
        model_name: the label that every metric carries.
        recorder: returns what knows of requests and segments what became of them.
        cuts: returns policy -> {"segments": count}.
    """

    def __init__(
        self,
        *,
        stats: Callable[[], Any],
        info: Any,
        model_name: str,
        recorder: Callable[[], Recorder],
        cuts: Callable[[], Mapping[str, Mapping[str, int]]],
    ):
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats, info, model_name))
        self._registry.register(_RecordCollector(recorder, cuts, model_name))
        self._registry.register(MemoryCollector(stats, model_name))
        ProcessCollector(registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"vllm:{name}", text, ["model_name"], registry=self._registry, buckets=buckets)
            return family.labels(model_name)

        self._first_token = histogram(
            "time_to_first_token_seconds", "From submission to a choice's first token.", _FIRST_TOKEN_SECONDS
        )
        self._between_tokens = histogram(
            "inter_token_latency_seconds", "Between two deltas of a choice, per token.", _TOKEN_SECONDS
        )
        self._whole = histogram("e2e_request_latency_seconds", "From submission to a request's end.", _REQUEST_SECONDS)
        self._prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generated = histogram("request_generation_tokens", "Tokens generated for a request.", _TOKENS)
        self._n = histogram("request_params_n", "The parameter n.", _CHOICES)
        self._max_tokens = histogram("request_params_max_tokens", "The parameter max_tokens.", _TOKENS)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """`tokens` came together, `seconds` after the ones before."""
        for _ in range(tokens):
            self._between_tokens.observe(seconds / tokens)

    def request_finished(
        self, *, seconds: float, prompt_tokens: int, generated_tokens: int, params: SamplingParams
    ) -> None:
        self._whole.observe(seconds)
        self._prompt_tokens.observe(prompt_tokens)
        self._generated.observe(generated_tokens)
        self._n.observe(params.n)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)

    def exposition(self) -> bytes:
        """The text that a Prometheus server scrapes."""
        return generate_latest(self._registry)
