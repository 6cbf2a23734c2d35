"""Replicas: combined statistics, refused settings, and the tests of on_eight_devices.py."""

import dataclasses
from pathlib import Path

import jax
import pytest

from omni_jax.engine.config import EngineConfig
from omni_jax.engine.stats import EngineStats, total
from omni_jax.memory.accounting import PoolUsage
from omni_jax.telemetry.recorder import Recorder
from tests.engines import Setup, compile_tiny
from tests.virtual_devices import passes_on_eight_devices


def test_on_eight_virtual_devices():
    passes_on_eight_devices(Path(__file__).with_name("on_eight_devices.py"))


def stats(**changes) -> EngineStats:
    pool = PoolUsage(
        block_size=16,
        total=10,
        free=4,
        cached=1,
        active=5,
        peak_active=7,
        shared=0,
        active_slots={"text": 60, "image": 3},
        unfilled_slots=17,
        evictions={"text": 1},
    )
    given = {"kv_cache_usage": 0.5, "steps": 3, "step_seconds": (0.1,), "compiles_after_warmup": 0, "pool": pool}
    return EngineStats(**(given | changes))


def test_stats_of_replicas_are_combined():
    one, two = stats(), stats(kv_cache_usage=0.0, steps=5, step_seconds=(0.2, 0.3), compiles_after_warmup=2)
    both = total([one, two])
    assert (both.steps, both.kv_cache_usage, both.step_seconds) == (8, 0.25, (0.1, 0.2, 0.3))
    assert both.compiles_after_warmup == 2
    assert both.requests_finished == {"stop": 0, "length": 0, "abort": 0, "error": 0}
    assert both.pool is not None
    assert (both.pool.block_size, both.pool.total, both.pool.free, both.pool.active) == (16, 20, 8, 10)
    assert both.pool.active_slots == {"text": 120, "image": 6}
    assert both.swap is None
    assert total([one]) is one


def test_every_field_of_stats_can_be_combined():
    """A new field of EngineStats must be a number, mapping, tuple or dataclass to be combined over replicas."""
    for field in dataclasses.fields(EngineStats):
        value = getattr(total([stats(), stats()]), field.name)
        assert value is None or isinstance(value, int | float | tuple | dict) or dataclasses.is_dataclass(value)


def test_recorders_of_replicas_are_merged():
    parts = [Recorder(), Recorder()]
    parts[0].pauses, parts[1].pauses, parts[1].preemptions["class"] = 2, 3, 4
    whole = Recorder.of([part.state() for part in parts])
    assert (whole.pauses, whole.preemptions) == (5, {"blocks": 0, "class": 4})
    assert whole.summary()["requests"]["finished"] == 0


def test_error_for_pipeline_parallelism_names_alternatives():
    with pytest.raises(ValueError, match=r"pipeline_parallel_size 2 is not supported.*tensor_parallel_size.*data_par"):
        EngineConfig(model_dir="x", pipeline_parallel_size=2)
    for name in ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            EngineConfig(model_dir="x", **{name: 0})


def test_error_for_too_few_devices_names_both_numbers():
    with pytest.raises(ValueError, match=rf"data=3 x model=2 needs 6 devices, but there are {len(jax.devices())}"):
        compile_tiny(Setup(), data_parallel_size=3, tensor_parallel_size=2)
