"""Where everything lies on a mesh, and how one program runs on all its devices.

A mesh has the axes "data" and "model". A replica is a mesh of its own (data = 1), with its own weights, pool and
Runner; nothing is exchanged between rows. Within a row every device runs the same program on its parts (shard_map):
parts of the weights by KV heads, inner width and vocabulary, the KV heads of the pool that go with them, and whole
hidden states. The devices meet twice a layer, once for the embeddings, and in the head for a few numbers a row
(models.axis). A row of one device runs the program as it is.
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

from omni_jax.models import ModelConfig
from omni_jax.models.axis import MODEL, ModelAxis

DATA = "data"
WHOLE = P()  # the same on every device

# Which axis the devices of a row share out, by name; layers' numbers are left out. Parameters and state that are not
# here are an error, not whole by accident. What stands in no table lives within one device's program.
RULES: Mapping[str, P] = types.MappingProxyType(
    {
        # the decoder: [vocab, hidden], [hidden, kv_heads, group + 2, head_dim], [hidden, heads * head_dim], …
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
        # the vision tower, each where it divides: [3, heads, head_dim, hidden], [hidden, heads, head_dim], …
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
        # state: [pages, kv_heads, …], [slots, vocab]
        "pool": P(None, MODEL),
        "history": P(None, MODEL),
        # what steps hand on or take: [blocks, words of all devices one after another], [tokens, hidden], …
        "words": P(None, MODEL),
        "hidden": WHOLE,
        "features": WHOLE,
        "packed": WHOLE,
    }
)
_MAY_BE_WHOLE = ("blocks.", "merger.")


def make_mesh(devices: Sequence[Any], *, data: int = 1, model: int = 1) -> Mesh:
    """A mesh [data, model] of the first data * model of `devices`. (Auto axes: JAX's default, Explicit, refuses to
    index the embedding with tokens.)

    Raises:
        ValueError: there are fewer devices.
    """
    if data < 1 or model < 1:
        raise ValueError(f"a mesh needs at least one device on each axis, got data={data}, model={model}")
    if data * model > len(devices):
        raise ValueError(
            f"a mesh of data={data} x model={model} needs {data * model} devices, and there are {len(devices)}: give "
            "smaller --data-parallel-size and --tensor-parallel-size"
        )
    grid = np.asarray(devices[: data * model], dtype=object).reshape(data, model)
    return Mesh(grid, (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto))


def replica_meshes(mesh: Mesh) -> tuple[Mesh, ...]:
    """A mesh for each replica."""
    return tuple(make_mesh(list(devices), model=len(devices)) for devices in mesh.devices)


def axis_of(mesh: Mesh) -> ModelAxis:
    """The devices of a row, for the programs that run on it.

    Raises:
        ValueError: the mesh has several rows.
    """
    if mesh.shape[DATA] != 1:
        raise ValueError(
            f"a program runs on one replica, and this mesh has {mesh.shape[DATA]}: take one of replica_meshes"
        )
    return ModelAxis(size=mesh.shape[MODEL])


def fit(config: ModelConfig, devices: int) -> ModelConfig:
    """The model as it is spread over the `devices` of a row. With more devices than KV heads, each KV head stands
    several times in it, once for each device that holds it.

    Raises:
        ValueError: what does not divide, with the sizes.
    """
    faults = _misfits(config, devices)
    if faults:
        most = min(config.num_attention_heads, 64)
        possible = [str(n) for n in range(1, most + 1) if not _misfits(config, n)]
        raise ValueError(
            f"{config.architecture} cannot be spread over {devices} devices: {', '.join(faults)} cannot be shared out. "
            f"Possible for this model: --tensor-parallel-size {', '.join(possible)}"
        )
    repeats = max(1, devices // config.num_key_value_heads)
    return dataclasses.replace(config, num_key_value_heads=config.num_key_value_heads * repeats, kv_repeats=repeats)


def part_of(config: ModelConfig, devices: int) -> ModelConfig:
    """What one device of a row computes of a model that `fit`: its heads, and the vocabulary and inner width it has."""
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
        "inner columns": config.intermediate_size,
        "tokens of the vocabulary": config.vocab_size,
    }
    faults = [f"{size} {name}" for name, size in sizes.items() if size % devices]
    if kv_heads % devices and devices % kv_heads:
        faults.insert(0, f"{kv_heads} KV heads")
    return faults


def spec_of(name: str, shape: Sequence[int], devices: int) -> P:
    """The rule for a parameter (`layers.3.mlp.down`), or for what steps hand on.

    Raises:
        KeyError: there is none.
        ValueError: an axis does not divide. Parts of the vision tower are whole then.
    """
    spec = RULES[re.sub(r"\.\d+(?=\.)", "", name)]
    for size, axis in zip(shape, spec, strict=False):
        if axis == MODEL and size % devices:
            if name.startswith(_MAY_BE_WHOLE):
                return WHOLE
            raise ValueError(f"{name} {list(shape)}: an axis of {size} cannot be shared out to {devices} devices")
    return spec


def sharding_of(mesh: Mesh) -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """For `load_weights`: (parameter, shape) -> its sharding."""
    devices = mesh.shape[MODEL]
    return lambda name, shape: NamedSharding(mesh, spec_of(name, shape, devices))


def placed(mesh: Mesh, tree: Any, name: str = "packed") -> Any:
    """Shapes, with the sharding that the rule `name` gives them."""
    sharding = NamedSharding(mesh, RULES[name])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def zeros(shapes: Any) -> Any:
    """Arrays of zeros where `placed` says, each device's part by itself. (Not through `put`: a large array of numpy's
    zeros takes no memory until somebody reads it.)"""

    def one(x):
        part = x.sharding.shard_shape(x.shape)
        return jax.make_array_from_callback(x.shape, x.sharding, lambda _: np.zeros(part, x.dtype))

    return jax.tree.map(one, shapes)


def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """An array on the devices of this process that have a part of it, each part by itself. (jax.device_put would have
    the processes compare what they put.)"""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: np.ascontiguousarray(array[index]))


def bytes_per_device(tree: Any) -> int:
    """What one device of a row holds of arrays, or of shapes that are `placed`."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def spread(mesh: Mesh, function: Callable, arguments: Any, results: Any) -> Callable:
    """`function`, which computes with one device's parts, as a function of whole arrays.

    Args:
        arguments: shapes with shardings, for each argument a pytree.
        results: rules for the results, a prefix of their pytree.
    """
    if mesh.size == 1:
        return function
    # Not checked by JAX: that a result is the same on all devices where its rule says so. What the kernels and
    # while loops do cannot be followed that far.
    specs = jax.tree.map(lambda x: x.sharding.spec, arguments)
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
