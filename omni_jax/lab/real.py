"""Backend that runs the real engine, in this process and thread: requests are added when they are due, between steps.

Prompts are built and cut before a run, so it measures the engine without tokenizers and HTTP. Each set of settings has
one engine, which is kept: its later runs find everything compiled and its step times learnt. Runs share neither image
features nor blocks of the prefix cache.
"""

import collections
import dataclasses
import gc
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_jax.engine.config import EngineConfig
from omni_jax.engine.engine import Engine
from omni_jax.lab.experiment import TINY_VL, Arm, Experiment, naming, workload
from omni_jax.lab.machine import machine_facts
from omni_jax.lab.model import tiny_vl
from omni_jax.lab.records import Run, RunRecorder, make_run
from omni_jax.progress import StageReport
from omni_jax.requests import Request
from omni_jax.segments.policies import make_policy
from omni_jax.segments.prompt_view import prompt_view
from omni_jax.simulation.workload import Arrival, build

logger = logging.getLogger(__name__)

WARM_UP = 24  # number of requests, which arrive at once
LEAD = 0.02  # seconds from the end of the preparations to the start of a run


class RealBackend:
    """The real engine, see backend.Backend."""

    def __init__(self, experiment: Experiment, progress: StageReport | None = None):
        self._experiment, self._progress = experiment, progress
        self._engines: dict[EngineConfig, Engine] = {}
        self._model = tiny_vl() if experiment.model == TINY_VL else Path(experiment.model)

    def replay(
        self, arm: Arm, arrivals: Sequence[Arrival], *, tag: str = "", done: Callable[[], None] | None = None
    ) -> Run:
        """See Backend."""
        return _replay(self._engine(arm), arm, arrivals, tag, done)

    def max_running(self, arm: Arm) -> int:
        """See Backend."""
        return self._engine(arm).info.max_num_seqs

    def facts(self) -> Mapping[str, Any]:
        """See Backend."""
        engine = self._engine(self._experiment.baseline_arm)
        return {
            **machine_facts(),
            "device": engine.info.device,
            "sequences at once": engine.info.max_num_seqs,
            "tokens a step": engine.info.max_num_batched_tokens,
        }

    def step_times(self) -> Mapping[str, Any] | None:
        """See Backend."""
        return json.loads(self._engine(self._experiment.baseline_arm).core.cost.to_json())

    def _engine(self, arm: Arm) -> Engine:
        shared: dict[str, Any] = {name: v for name, v in vars(self._experiment.engine).items() if v is not None}
        if arm.max_num_batched_tokens is not None:
            shared["max_num_batched_tokens"] = arm.max_num_batched_tokens
        config = EngineConfig(
            model_dir=self._model,
            seed=0,
            **shared,
            scheduling_policy=arm.scheduling_policy,
            aging_seconds=arm.aging_seconds if arm.scheduling_policy == "slo" else 10.0,
            enable_chunked_prefill=arm.enable_chunked_prefill,
            enable_prefix_caching=arm.enable_prefix_caching,
            recycling_policy=arm.recycling_policy,
        )
        if config not in self._engines:
            engine = self._engines[config] = Engine(config, self._progress)
            mix = next(iter(self._experiment.mixes))
            warm_up = workload(self._experiment, mix, 10**9, rate=1.0, count=WARM_UP)
            _replay(engine, arm, [dataclasses.replace(arrival, at=0.0) for arrival in warm_up], "warm-up", None)
        return self._engines[config]


def _replay(engine: Engine, arm: Arm, arrivals: Sequence[Arrival], tag: str, done: Callable[[], None] | None) -> Run:
    policy = make_policy(arm.segment_policy, allow_custom=True)
    requests = []
    for arrival in sorted(arrivals, key=lambda arrival: arrival.at):
        with naming(arm, arrival):
            requests.append(_prepare(engine, policy, arrival, tag))
    pending = collections.deque(requests)
    recorder = engine.recorder = RunRecorder()
    gc.collect()
    start = time.monotonic() + LEAD
    while pending or engine.has_work:
        now = time.monotonic()
        while pending and start + pending[0].arrival <= now:
            request = pending.popleft()
            engine.add(dataclasses.replace(request, arrival=start + request.arrival))
        if engine.has_work:
            for delta in engine.step():
                if delta.finish_reason == "error":  # has no latency, see summary.Judged
                    logger.warning("request %s of %s failed: %s", delta.request_id, tag, delta.error)
                if delta.finish_reason is not None and done is not None:
                    done()
        elif pending:
            time.sleep(max(0.0, start + pending[0].arrival - time.monotonic()))
    return make_run(recorder.records, recorder.steps, recorder.requests, start=start)


def _prepare(engine: Engine, policy: Callable, arrival: Arrival, tag: str) -> Request:
    request = build(arrival, engine.tokenizer, engine.vision, patches=True)
    media = tuple(
        dataclasses.replace(span, key=hashlib.sha256(span.key + tag.encode()).digest()) for span in request.media
    )
    segments = policy(prompt_view(request.prompt_ids, media, engine.tokenizer))
    request = dataclasses.replace(request, media=media, segments=segments, cache_salt=tag)
    engine.check(request)
    return request
