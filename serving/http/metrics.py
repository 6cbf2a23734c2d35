"""The app's Prometheus metrics: those of vLLM under its names and descriptions, others under `omni_jax:`."""

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from omni_jax.requests import SamplingParams
from omni_jax.telemetry.figures import REQUEST_SECONDS
from omni_jax.telemetry.recorder import Recorder
from serving.http.collectors import EngineCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_CHOICES = (1, 2, 5, 10, 20, 50, 100)


class Metrics:
    """The metrics of one app, in its own registry; or those of the apps of several processes, if they are shared.

    Args:
        stats: returns the engine's EngineStats.
        info: the engine's EngineInfo.
        model_name: value of the label model_name.
        recorder: returns the engine's Recorder.
        shared: whether other API server processes have such an app. Then all of them have the sums of what they
            counted, in the files of metrics_directory, and this process's own memory and CPU time are left out.
    """

    def __init__(
        self,
        *,
        stats: Callable[[], Any],
        info: Any,
        model_name: str,
        recorder: Callable[[], Recorder],
        shared: bool = False,
    ):
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(stats, recorder, info, model_name))
        counted = None if shared else self._registry  # where what is counted here is registered
        self._counts = MultiProcessCollector(self._registry) if shared else self._registry
        if not shared:
            ProcessCollector(registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"vllm:{name}", text, ["model_name"], registry=counted, buckets=buckets)
            return family.labels(model_name)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ["model_name", *labels], registry=counted)

        ended = counter("vllm:request_success", "Count of successfully processed requests.", "finished_reason")
        self._ended = {reason: ended.labels(model_name, reason) for reason in ("stop", "length", "abort", "error")}
        self._model_name = model_name
        self._responses = counter("omni_jax:http_responses", "Number of HTTP responses.", "endpoint", "status")
        self._segments = counter("omni_jax:segments", "Number of prompt segments.", "policy")
        self._cut_prompts = counter("omni_jax:cut_prompts", "Number of prompts cut into segments.", "policy")
        self._first_token = histogram(
            "time_to_first_token_seconds", "Histogram of time to first token in seconds.", _FIRST_TOKEN_SECONDS
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", _TOKEN_SECONDS
        )
        self._e2e = histogram(
            "e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", REQUEST_SECONDS
        )
        self._prompt_tokens = histogram("request_prompt_tokens", "Number of prefill tokens processed.", _TOKENS)
        self._generated = histogram("request_generation_tokens", "Number of generation tokens processed.", _TOKENS)
        self._n = histogram("request_params_n", "Histogram of the n request parameter.", _CHOICES)
        self._max_tokens = histogram(
            "request_params_max_tokens", "Histogram of the max_tokens request parameter.", _TOKENS
        )

    def first_token(self, seconds: float) -> None:
        """Records a choice's time to first token."""
        self._first_token.observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        """Records `tokens` that arrived together, `seconds` after the choice's previous ones."""
        for _ in range(tokens):
            self._inter_token.observe(seconds / tokens)

    def choices_ended(self, reasons: Iterable[str]) -> None:
        """Records the finish reasons of an engine request, one per choice."""
        for reason in reasons:
            self._ended[reason].inc()

    def responded(self, endpoint: str, status: int) -> None:
        """Records an HTTP response.

        Args:
            endpoint: the path of a route, never what a client chose.
        """
        self._responses.labels(self._model_name, endpoint, str(status)).inc()

    def prompt_cut(self, policy: str, segments: int) -> None:
        """Records a prompt that a policy cut into segments."""
        self._cut_prompts.labels(self._model_name, policy).inc()
        self._segments.labels(self._model_name, policy).inc(segments)

    def segment_counts(self) -> dict[str, dict[str, int]]:
        """Prompts and segments so far, by policy."""
        names = {"omni_jax:cut_prompts_total": "prompts", "omni_jax:segments_total": "segments"}
        found: dict[str, dict[str, int]] = {}
        for family in self._counts.collect():
            for sample in family.samples:
                if sample.name in names:
                    found.setdefault(sample.labels["policy"], {})[names[sample.name]] = int(sample.value)
        return {policy: {name: found[policy].get(name, 0) for name in names.values()} for policy in sorted(found)}

    def request_finished(
        self, *, seconds: float, prompt_tokens: int, generated_tokens: int, params: SamplingParams
    ) -> None:
        """Records an engine request that ended without error or abort."""
        self._e2e.observe(seconds)
        self._prompt_tokens.observe(prompt_tokens)
        self._generated.observe(generated_tokens)
        self._n.observe(params.n)
        if params.max_tokens is not None:
            self._max_tokens.observe(params.max_tokens)

    def exposition(self) -> bytes:
        """All metrics in Prometheus's text format. Takes milliseconds, so call it in a thread."""
        return generate_latest(self._registry)
