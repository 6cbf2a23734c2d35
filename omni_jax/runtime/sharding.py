"""Sharding of weights and state over a mesh, and programs that run on all its devices.

A mesh has the axes "data" and "model". Each replica has its own mesh (data = 1), weights, pool and Runner, and replicas
exchange nothing. Within a replica every device runs the same program on its parts (shard_map): weights are split by KV
heads, intermediate size and vocabulary, the pool by KV heads, and hidden states are replicated. Devices communicate
twice per layer, once for the embeddings, and in the head for a few numbers per row (models.axis). A replica of one
device runs the program without shard_map.
"""

import dataclasses
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from omni_jax.models.axis import MODEL, ModelAxis
from omni_jax.models.config import ModelConfig

DATA = "data"
WHOLE = P()  # replicated on every device

# The axis that is split over the devices of a replica, by name without layer numbers. A parameter without a rule is an
# error, so that none is replicated by accident.
RULES: Mapping[str, P] = types.MappingProxyType(
    {
        # Decoder: [vocab, hidden], [hidden, kv_heads, group + 2, head_dim], [hidden, heads * head_dim], …
        "embed": P(MODEL),
        "head": P(MODEL),
        "norm.weight": WHOLE,
        "layers.input_norm.weight": WHOLE,
        "layers.post_norm.weight": WHOLE,
        "layers.attention.qkv": P(None, MODEL),
        "layers.attention.qkv_bias": P(MODEL),
        "layers.attention.q_norm.weight": WHOLE,
        "layers.attention.k_norm.weight": WHOLE,
        "layers.attention.out": P(None, MODEL),
        "layers.mlp.gate_up": P(None, None, MODEL),
        "layers.mlp.down": P(None, MODEL),
        # Vision tower, split where sizes divide: [3, heads, head_dim, hidden], [hidden, heads, head_dim], …
        "patch_embed.weight": WHOLE,
        "blocks.norm1.weight": WHOLE,
        "blocks.norm1.bias": WHOLE,
        "blocks.norm2.weight": WHOLE,
        "blocks.norm2.bias": WHOLE,
        "blocks.attention.qkv.weight": P(None, MODEL),
        "blocks.attention.qkv.bias": P(None, MODEL),
        "blocks.attention.out.weight": P(None, MODEL),
        "blocks.attention.out.bias": WHOLE,
        "blocks.mlp.gate_up.weight": P(None, MODEL),
        "blocks.mlp.gate_up.bias": P(None, MODEL),
        "blocks.mlp.down.weight": P(None, MODEL),
        "blocks.mlp.down.bias": WHOLE,
        "blocks.mlp.fc1.weight": P(MODEL),
        "blocks.mlp.fc1.bias": P(MODEL),
        "blocks.mlp.fc2.weight": P(None, MODEL),
        "blocks.mlp.fc2.bias": WHOLE,
        "merger.norm.weight": WHOLE,
        "merger.norm.bias": WHOLE,
        "merger.fc1.weight": P(MODEL),
        "merger.fc1.bias": P(MODEL),
        "merger.fc2.weight": P(None, MODEL),
        "merger.fc2.bias": WHOLE,
        # State: [pages, kv_heads, …], [slots, vocab]
        "pool": P(None, MODEL),
        "history": P(None, MODEL),
        # Arguments and results of steps: [blocks, words of all devices, device by device], [tokens, hidden], …
        "words": P(None, MODEL),
        "hidden": WHOLE,
        "features": WHOLE,
        "packed": WHOLE,
    }
)
_WHOLE_IF_INDIVISIBLE = ("blocks.", "merger.")


def make_mesh(devices: Sequence[Any], *, data: int = 1, model: int = 1) -> Mesh:
    """A mesh [data, model] of the first data * model devices. (Its axes are Auto, because with JAX's default, Explicit,
    the embedding cannot be indexed with tokens.)

    Raises:
        ValueError: there are too few devices.
    """
    if data < 1 or model < 1:
        raise ValueError(f"a mesh needs at least one device on each axis, got data={data}, model={model}")
    if data * model > len(devices):
        raise ValueError(
            f"a mesh of data={data} x model={model} needs {data * model} devices, but there are {len(devices)}: lower "
            "--data-parallel-size or --tensor-parallel-size"
        )
    grid = np.asarray(devices[: data * model], dtype=object).reshape(data, model)
    return Mesh(grid, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def replica_meshes(mesh: Mesh) -> tuple[Mesh, ...]:
    """One mesh per replica."""
    return tuple(make_mesh(list(devices), model=len(devices)) for devices in mesh.devices)


def axis_of(mesh: Mesh) -> ModelAxis:
    """The model axis of a replica's mesh.

    Raises:
        ValueError: the mesh has several replicas.
    """
    if mesh.shape[DATA] != 1:
        raise ValueError(
            f"a program runs on one replica, but this mesh has {mesh.shape[DATA]}: use one of replica_meshes"
        )
    return ModelAxis(size=mesh.shape[MODEL])


def fit(config: ModelConfig, devices: int) -> ModelConfig:
    """The config of a model split over the `devices` of a replica. With more devices than KV heads, each KV head is
    repeated, once for each device that holds it.

    Raises:
        ValueError: a size does not divide.
    """
    faults = _misfits(config, devices)
    if faults:
        limit = min(config.num_attention_heads, 64)
        possible = [str(n) for n in range(1, limit + 1) if not _misfits(config, n)]
        raise ValueError(
            f"{config.architecture} cannot be split over {devices} devices: {', '.join(faults)} do not divide. "
            f"Possible for this model: --tensor-parallel-size {', '.join(possible)}"
        )
    repeats = max(1, devices // config.num_key_value_heads)
    return dataclasses.replace(config, num_key_value_heads=config.num_key_value_heads * repeats, kv_repeats=repeats)


def part_of(config: ModelConfig, devices: int) -> ModelConfig:
    """The config of one device's part of a model from `fit`: its heads, intermediate size and vocabulary."""
    return dataclasses.replace(
        config,
        num_attention_heads=config.num_attention_heads // devices,
        num_key_value_heads=config.num_key_value_heads // devices,
        intermediate_size=config.intermediate_size // devices,
        vocab_size=config.vocab_size // devices,
    )


def _misfits(config: ModelConfig, devices: int) -> list[str]:
    kv_heads = config.num_key_value_heads
    sizes = {
        "attention heads": config.num_attention_heads,
        "intermediate columns": config.intermediate_size,
        "tokens of the vocabulary": config.vocab_size,
    }
    faults = [f"{size} {name}" for name, size in sizes.items() if size % devices]
    if kv_heads % devices and devices % kv_heads:
        faults.insert(0, f"{kv_heads} KV heads")
    return faults


def spec_of(name: str, shape: Sequence[int], devices: int) -> P:
    """The partition spec of a parameter such as `layers.3.mlp.down`, or of another entry of RULES.

    Parameters of the vision tower are whole if their axis does not divide.

    Raises:
        KeyError: there is no rule.
        ValueError: an axis does not divide.
    """
    spec = RULES[re.sub(r"\.\d+(?=\.)", "", name)]
    for size, axis in zip(shape, spec, strict=False):
        if axis == MODEL and size % devices:
            if name.startswith(_WHOLE_IF_INDIVISIBLE):
                return WHOLE
            raise ValueError(f"{name} {list(shape)}: an axis of {size} cannot be split over {devices} devices")
    return spec


def sharding_of(mesh: Mesh) -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """A function (parameter, shape) -> sharding, for `load_weights`."""
    devices = mesh.shape[MODEL]
    return lambda name, shape: NamedSharding(mesh, spec_of(name, shape, devices))


def placed(mesh: Mesh, tree: Any, name: str = "packed") -> Any:
    """The shapes of a tree with the sharding of rule `name`."""
    sharding = NamedSharding(mesh, RULES[name])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def zeros(shapes: Any) -> Any:
    """Arrays of zeros for shapes from `placed`. Each device's part is created separately, so that no whole array is
    needed on the host."""

    def one(x):
        part = x.sharding.shard_shape(x.shape)
        return jax.make_array_from_callback(x.shape, x.sharding, lambda _: np.zeros(part, x.dtype))

    return jax.tree.map(one, shapes)


def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Put an array on this process's devices, each part separately. (jax.device_put would compare the array between
    processes.)"""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: np.ascontiguousarray(array[index]))


def bytes_per_device(tree: Any) -> int:
    """Bytes of arrays, or of shapes from `placed`, on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def spread(mesh: Mesh, function: Callable, arguments: Any, results: Any) -> Callable:
    """Turn a function of one device's parts into a function of whole arrays.

    Args:
        arguments: shapes with shardings, one pytree per argument.
        results: partition specs of the results, a prefix of their pytree.
    """
    if mesh.size == 1:
        return function
    # check_vma is off because JAX cannot verify through kernels and while loops that replicated results are equal.
    specs = jax.tree.map(lambda x: x.sharding.spec, arguments)
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
