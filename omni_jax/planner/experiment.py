"""A plan as an experiment that `omni-jax ablate` simulates: the same cost model, the engine's scheduler, made-up
traffic."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from omni_jax.cost import ModelSizes
from omni_jax.planner.plan import Plan

HEAD = """\
# Written by `omni-jax plan`. Run it with: omni-jax ablate {file} -o results/
# One replica of {data}: give each row its share of the requests. Efficiencies are assumptions (docs/scale.md).
"""
INT8 = "# The plan keeps keys and values in int8. The simulation has its blocks, but reads them as the model's dtype.\n"


def write_experiment(plan: Plan, config: Mapping[str, Any], name: str, directory: Path) -> Path:
    """Writes experiment.yaml and the model's config.json. Returns the first.

    Raises:
        ValueError: the plan does not fit, so there is nothing to simulate.
        FileExistsError: the directory has one already.
    """
    if not plan.fits:
        raise ValueError("a plan that does not fit cannot be simulated")
    file = directory / "experiment.yaml"
    if file.exists():
        raise FileExistsError(f"{file} is there already; name another directory, or remove it first")
    settings = plan.settings
    # The simulator divides by what a block takes of all devices together, without copies of KV heads.
    per_token = ModelSizes.from_config(config).kv_bytes_per_token(settings.dtype.itemsize)
    experiment = {
        "name": f"{name} on {plan.model} x {plan.gpu}",
        "backend": "simulated",
        "gpu": plan.gpu_key,
        "devices": plan.model,
        "model": "config.json",
        "engine": {
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "block_size": settings.block_size,
            "kv_cache_memory_bytes": plan.tokens * per_token,
            "dtype": str(settings.dtype),
            "max_pixels": settings.max_pixels,
        },
        "arms": [
            {"name": "fcfs", "about": "first come first served"},
            {"name": "slo", "about": "by class and deadline", "scheduling_policy": "slo", "segment_policy": "hybrid"},
        ],
        "mixes": {"usual": {}},
        "rates": ["60%", "80%", "95%"],
    }
    head = HEAD.format(file=file, data=plan.data) + (INT8 if settings.kv_cache_dtype == "int8" else "")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    file.write_text(head + yaml.safe_dump(experiment, sort_keys=False, width=120), encoding="utf-8")
    return file
