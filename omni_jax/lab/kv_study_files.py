"""Results of finished plans, so that `omni-jax kv-study` goes on where it was interrupted.

A plan's file is written when all its windows have run. Single windows are not kept: windows share steps, and with other
neighbours the last bits of a logprob may differ, so the result would not equal an uninterrupted one.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from omni_jax.lab.experiment import plain
from omni_jax.lab.fingerprint import model_digest
from omni_jax.lab.kv_study import Measured, Plan, Window
from omni_jax.lab.records import read_json, write_json
from omni_jax.lab.resume import is_kept, stamped

_ARRAYS = ("nll", "rows", "blocks")


def plan_settings(plan: Plan, windows: Sequence[Window], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that a plan's numbers depend on, as plain values.

    Args:
        options: fields of EngineConfig that all plans share.
    """
    shared = plain({name: value for name, value in options.items() if name != "compilation_cache_dir"})
    ids = json.dumps([[window.document, window.prompt_ids, window.forced_ids] for window in windows])
    return stamped(
        {
            "engine": shared,
            "model_files": model_digest(Path(options["model_dir"])),
            "plan": plain(plan.options),
            "windows": len(windows),
            "prompt_tokens": len(windows[0].prompt_ids),
            "decode_steps": len(windows[0].forced_ids) - 1,
            "text": hashlib.sha256(ids.encode()).hexdigest()[:16],
        }
    )


def write_plan(out: Path, found: Measured, settings: Mapping[str, Any]) -> None:
    """Write the file of a plan, atomically."""
    values = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    arrays = {name: values[name].tolist() for name in _ARRAYS}
    write_json(_file(out, found.plan), {"settings": settings, "measured": {**plain(values), **arrays}})


def kept_plans(out: Path, settings: Mapping[str, Mapping[str, Any]], *, overwrite: bool) -> dict[str, Measured]:
    """Return the results that `out` has of plans with these settings.

    Args:
        settings: by plan.
        overwrite: leave out results of other settings instead of raising.

    Raises:
        OtherSettings: a plan was run with other settings; the message names the first that differs.
        ValueError: a file is damaged, or from another version.
    """
    kept = {}
    for plan, wanted in settings.items():
        path = _file(out, plan)
        if path.exists():
            content = read_json(path)
            try:
                if is_kept(path, content["settings"], wanted, overwrite=overwrite):
                    values = content["measured"]
                    arrays = {name: np.array(values[name]) for name in _ARRAYS}
                    kept[plan] = Measured(**{**values, **arrays, "documents": tuple(values["documents"])})
            except (KeyError, TypeError) as error:
                raise ValueError(f"{path} is from another version of omni-jax ({error}); delete it") from error
    return kept


def _file(out: Path, plan: str) -> Path:
    return out / "plans" / f"{quote(plan, safe='+')}.json.gz"
