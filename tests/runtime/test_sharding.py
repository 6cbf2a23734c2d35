"""The rules, and everything of the *_on_eight_devices.py here, which need processes with eight devices."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from omni_jax.models.config import model_config
from omni_jax.models.weights import abstract_weights
from omni_jax.runtime.sharding import RULES, fit, make_mesh, replica_meshes, sharding_of, spec_of
from tests import tiny, tiny_vl
from tests.virtual_devices import passes_on_eight_devices

FILES = {file.stem.partition("_")[0]: file for file in Path(__file__).parent.glob("*_on_eight_devices.py")}


@pytest.mark.parametrize("name", [pytest.param("text", marks=pytest.mark.smoke), "caches", "vision"])
def test_on_eight_virtual_devices(name):
    passes_on_eight_devices(FILES[name])


@pytest.mark.full
@pytest.mark.parametrize("name", ["text", "vision"])
def test_more_on_eight_virtual_devices(name):
    passes_on_eight_devices(FILES[name], marked="full")


def test_every_file_for_eight_devices_is_run():
    assert FILES.keys() == {"text", "caches", "vision"}


def test_every_parameter_of_every_model_has_a_rule():
    mesh = make_mesh(jax.devices())
    configs = [tiny.config(name) for name in tiny.VARIANTS] + [tiny_vl.config(name) for name in tiny_vl.FAMILIES]
    for config in configs:
        abstract_weights(model_config(config), np.dtype(np.float32), sharding_of(mesh))


def test_a_parameter_without_a_rule_is_an_error():
    with pytest.raises(KeyError, match="mixer"):
        spec_of("layers.0.mixer.weight", (8, 8), 2)


def test_the_rules_cannot_be_changed():
    with pytest.raises(TypeError):
        RULES["embed"] = RULES["hidden"]  # type: ignore[index]


@pytest.mark.parametrize(("devices", "kv_heads", "repeats"), [(1, 2, 1), (2, 2, 1), (4, 4, 2), (8, 8, 4)])
def test_md_01_kv_heads_are_repeated_where_there_are_more_devices(devices, kv_heads, repeats):
    model = dataclasses.replace(model_config(tiny.config("llama")), num_attention_heads=8)
    fitted = fit(model, devices)
    assert (fitted.num_key_value_heads, fitted.kv_repeats) == (kv_heads, repeats)
    assert dataclasses.replace(fitted, num_key_value_heads=2, kv_repeats=1) == model


@pytest.mark.parametrize(
    ("changes", "devices", "named"),
    [
        ({}, 3, "2 KV heads, 8 attention heads, 128 intermediate columns, 512 tokens of the vocabulary do not divide"),
        ({}, 16, "16 devices: 8 attention heads do not divide"),
        ({"vocab_size": 511}, 2, "511 tokens of the vocabulary"),
        ({"intermediate_size": 100}, 8, "100 intermediate columns do not divide. Possible .* 1, 2, 4$"),
        ({"num_key_value_heads": 3, "num_attention_heads": 12}, 2, "3 KV heads"),
    ],
)
def test_md_01_what_does_not_divide_is_refused_with_the_sizes(changes, devices, named):
    model = dataclasses.replace(model_config(tiny.config("llama")), num_attention_heads=8)
    with pytest.raises(ValueError, match=named):
        fit(dataclasses.replace(model, **changes), devices)


def test_parts_of_a_tower_that_do_not_divide_are_whole():
    assert spec_of("blocks.3.attention.qkv.weight", (3, 16, 80, 1280), 8) == RULES["blocks.attention.qkv.weight"]
    assert spec_of("blocks.3.attention.qkv.weight", (3, 3, 16, 48), 2) == RULES["hidden"]
    with pytest.raises(ValueError, match=r"layers.3.mlp.down \[64, 100\]: an axis of 100 cannot .* 8 devices"):
        spec_of("layers.3.mlp.down", (64, 100), 8)


def test_meshes_and_their_rows():
    devices = [f"device {n}" for n in range(8)]
    mesh = make_mesh(devices, data=2, model=3)
    assert dict(mesh.shape) == {"data": 2, "model": 3}
    assert [row.devices.tolist() for row in replica_meshes(mesh)] == [[devices[:3]], [devices[3:6]]]
    with pytest.raises(ValueError, match=r"data=3 x model=3 needs 9 devices, but there are 8"):
        make_mesh(devices, data=3, model=3)
    with pytest.raises(ValueError, match="at least one"):
        make_mesh(devices, data=0)
