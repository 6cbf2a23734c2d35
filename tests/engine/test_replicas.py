"""Replicas: combined statistics, refused settings, and the tests of on_eight_devices.py."""

import dataclasses
import itertools
from pathlib import Path

import jax
import pytest

from omni_jax.engine.config import EngineConfig
from omni_jax.engine.stats import EngineStats, total
from omni_jax.memory.accounting import PoolUsage
from omni_jax.memory.host_tier import HostTierStats
from omni_jax.telemetry.recorder import Recorder
from tests.engines import Setup, compile_tiny
from tests.virtual_devices import passes_on_eight_devices


def test_on_eight_virtual_devices():
    passes_on_eight_devices(Path(__file__).with_name("on_eight_devices.py"))


MEANS = ("kv_cache_usage", "encoder_cache_usage", "store_bandwidth", "load_bandwidth")
MEANS += ("disk_write_bandwidth", "disk_read_bandwidth")


def filled(kind, numbers):
    """An instance of a dataclass of figures: each number, also in mappings, tuples and dataclasses, is another one."""
    values = {}
    for field in dataclasses.fields(kind):
        if field.name == "block_size":
            values[field.name] = 16
        elif field.name in ("pool", "swap"):
            values[field.name] = filled({"pool": PoolUsage, "swap": HostTierStats}[field.name], numbers)
        elif "dict" in str(field.type) or "Mapping" in str(field.type):
            values[field.name] = {"text": next(numbers), f"only in {next(numbers)}": next(numbers)}
        elif "tuple" in str(field.type):
            values[field.name] = (next(numbers), next(numbers))
        else:
            values[field.name] = next(numbers)
    return kind(**values)


def check_combined(whole, parts):
    for field in dataclasses.fields(whole):
        found, given = getattr(whole, field.name), [getattr(part, field.name) for part in parts]
        if dataclasses.is_dataclass(found):
            check_combined(found, given)
        elif isinstance(found, dict):
            assert found == {key: sum(part.get(key, 0) for part in given) for key in {*given[0], *given[1]}}, field.name
        elif isinstance(found, tuple):
            assert found == given[0] + given[1], field.name
        elif field.name == "block_size":
            assert found == 16
        else:
            assert found == sum(given) / (2 if field.name in MEANS else 1), field.name


def test_stats_of_replicas_are_added_shares_and_speeds_averaged():
    """Also those of a new field: who adds one must think of replicas."""
    numbers = itertools.count(1)
    parts = [filled(EngineStats, numbers) for _ in range(2)]
    check_combined(total(parts), parts)
    assert total(parts[:1]) is parts[0]


def test_stats_that_only_one_replica_has_are_its_own():
    one = filled(EngineStats, itertools.count(1))
    assert total([one, EngineStats()]).swap == one.swap
    assert total([one, EngineStats()]).pool == one.pool
    assert total([EngineStats(), EngineStats()]).pool is None


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
