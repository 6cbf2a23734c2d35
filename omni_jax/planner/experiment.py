"""Writes a plan as an experiment that `omni-jax ablate` simulates: the same cost model, the engine's scheduler, and the
default traffic."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from omni_jax.cost.roofline import ModelSizes
from omni_jax.planner.plan import Plan

HEAD = """\
# Written by `omni-jax plan`. Run it with: omni-jax ablate {file} -o results/
# It simulates one of {data} replica(s). Efficiencies are assumptions (docs/scale.md).
"""
INT8 = "# The plan has an int8 KV cache. The simulation has as many blocks, but reads them in the model's dtype.\n"


def write_experiment(plan: Plan, config: Mapping[str, Any], name: str, directory: Path) -> Path:
    """Write experiment.yaml and the model's config.json.

    Returns:
        the path of experiment.yaml.

    Raises:
        ValueError: the plan does not fit.
        FileExistsError: the directory already has an experiment.yaml.
    """
    if not plan.fits:
        raise ValueError("a plan that does not fit cannot be simulated")
    file = directory / "experiment.yaml"
    if file.exists():
        raise FileExistsError(f"{file} already exists; choose another directory, or remove the file first")
    settings = plan.settings
    # The simulator divides this by a block's bytes over all devices, without replicated KV heads.
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
