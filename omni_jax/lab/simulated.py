"""Backend that simulates: the engine's scheduler on a virtual clock, with a GPU's roofline or measured step times."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_jax.cost.model import CostModel
from omni_jax.cost.roofline import ModelSizes, Roofline
from omni_jax.cost.table import TableCost
from omni_jax.inputs.image import VisionSettings
from omni_jax.inputs.prompt import VisionInputs
from omni_jax.lab.experiment import TINY_VL, Arm, Experiment, naming
from omni_jax.lab.machine import machine_facts
from omni_jax.lab.model import tiny_vl
from omni_jax.lab.records import Run, make_run
from omni_jax.models.config import model_config
from omni_jax.requests import InvalidRequest
from omni_jax.scheduling.discipline import FirstCome, SLOFirst
from omni_jax.segments.policies import make_policy
from omni_jax.simulation.gpu import gpu_replica
from omni_jax.simulation.replica import ReplicaConfig
from omni_jax.simulation.simulator import prepare, simulate_requests
from omni_jax.simulation.texts import WordTokenizer
from omni_jax.simulation.workload import Arrival

# Defaults of the engine.
MAX_PIXELS = 1_003_520
UTILIZATION = 0.92
KV_CACHE_BYTES = 2 * 2**30  # on a CPU


class SimulatedBackend:
    """The simulation, see backend.Backend."""

    def __init__(self, experiment: Experiment):
        self._experiment, self._settings = experiment, experiment.engine
        path = tiny_vl() if experiment.model == TINY_VL else Path(experiment.model)
        if not path.exists():
            raise FileNotFoundError(f"no model at {path}: expected a directory with a config.json, or a config.json")
        self._config = json.loads((path / "config.json" if path.is_dir() else path).read_bytes())
        self._model = model_config(self._config)
        self._vision: VisionInputs | None = None  # None, with only a config.json: Qwen2-VL's settings
        if self._model.vision is not None and path.is_dir():
            settings = VisionSettings.from_directory(path, max_pixels=self._settings.max_pixels or MAX_PIXELS)
            self._vision = VisionInputs(config=self._model.vision, settings=settings)
        self._tokenizer = WordTokenizer()
        self._learnt = None if experiment.step_times is None else experiment.step_times.read_text(encoding="utf-8")

    def replay(
        self, arm: Arm, arrivals: Sequence[Arrival], *, tag: str = "", done: Callable[[], None] | None = None
    ) -> Run:
        """See Backend. The tag has no effect: each run starts with empty caches."""
        config, cost, vision = self._parts(arm)
        policy = make_policy(arm.segment_policy, allow_custom=True)
        requests = []
        for arrival in sorted(arrivals, key=lambda arrival: arrival.at):
            with naming(arm, arrival):
                requests.append(prepare(arrival, self._tokenizer, vision, policy, cost))
        try:
            result = simulate_requests(
                requests,
                config,
                cost,
                replicas=self._experiment.replicas,
                router=self._experiment.router(arm),
                segments=False,
            )
        except InvalidRequest as error:
            raise ValueError(f"arm {arm.name}: a request of the workload can never run: {error}") from error
        if done is not None:
            for _ in requests:
                done()
        run = make_run(result.requests, result.steps, {request.id: request for request in requests})
        return dataclasses.replace(run, busy_seconds=sum(result.busy_seconds))

    def max_running(self, arm: Arm) -> int:
        """See Backend."""
        return self._parts(arm)[0].max_num_seqs * self._experiment.replicas

    def facts(self) -> Mapping[str, Any]:
        """See Backend."""
        config, cost, _ = self._parts(self._experiment.baseline_arm)
        facts = machine_facts()
        if isinstance(cost, Roofline):
            facts |= {
                "parameters": f"{cost.sizes.parameters / 1e9:.2f} billion",
                "assumed share of peak FLOP/s": cost.mfu,
                "assumed share of memory bandwidth": cost.mbu,
            }
        if self._experiment.replicas > 1:
            facts["replicas"] = self._experiment.replicas
        return facts | {
            "sequences at once": config.max_num_seqs,
            "tokens a step": config.max_num_batched_tokens,
            "KV cache tokens": config.usable_blocks * config.block_size,
        }

    def step_times(self) -> Mapping[str, Any] | None:
        """See Backend."""
        return None

    def _parts(self, arm: Arm) -> tuple[ReplicaConfig, CostModel, VisionInputs | None]:
        """Return the configuration of an arm's engine, and the cost model of its steps."""
        settings, experiment = self._settings, self._experiment
        names = ("max_num_seqs", "max_model_len", "block_size", "encoder_cache_tokens")
        given: dict[str, Any] = {name: getattr(settings, name) for name in names} | {
            "max_num_batched_tokens": arm.max_num_batched_tokens or settings.max_num_batched_tokens
        }
        given = {name: value for name, value in given.items() if value is not None}
        discipline = SLOFirst(aging_seconds=arm.aging_seconds) if arm.scheduling_policy == "slo" else FirstCome()
        given |= {
            "chunked_prefill": arm.enable_chunked_prefill,
            "discipline": discipline,
            "prefix_caching": arm.enable_prefix_caching,
            "recycling": arm.recycling_policy,
        }
        dtype_bytes = 4 if settings.dtype in ("float32", "float") else 2
        kv_bytes = ModelSizes.from_config(self._config).kv_bytes_per_token(dtype_bytes)
        vision, pixels = self._model.vision, settings.max_pixels or MAX_PIXELS
        if vision is not None and settings.encoder_layers_per_slice is not None:
            given["encoder_slices"] = math.ceil(vision.depth / settings.encoder_layers_per_slice) + 1  # the merger
        if experiment.gpu is not None:
            if settings.kv_cache_memory_bytes is not None:
                given["num_blocks"] = settings.kv_cache_memory_bytes // (kv_bytes * given.get("block_size", 16))
            found = gpu_replica(
                self._config,
                experiment.gpu,
                devices=experiment.devices,
                gpu_memory_utilization=settings.gpu_memory_utilization or UTILIZATION,
                max_pixels=pixels,
                roofline={"dtype_bytes": dtype_bytes},
                **given,
            )
            return found.config, found.cost, self._vision or found.vision
        assert self._learnt is not None
        given.setdefault("max_model_len", self._model.max_position_embeddings)
        if vision is None:
            given["encoder_cache_tokens"] = 0
        else:
            given["max_patches"] = pixels // vision.patch_size**2
            given.setdefault("encoder_slices", vision.depth + 1)  # the engine's default on a CPU: one layer a slice
        config = ReplicaConfig(**given)
        room = (settings.kv_cache_memory_bytes or KV_CACHE_BYTES) // (kv_bytes * config.block_size)
        config = dataclasses.replace(config, num_blocks=min(room, config.usable_blocks))
        return config, TableCost.from_json(self._learnt), self._vision
