"""Will a model fit on these GPUs, how would it be split, and how fast would it be? Needs a config.json, and no GPU.

Bytes are those of the engine's own shapes (plan_memory), times those of the roofline that simulations use (plan_speed).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from omni_jax.cost import GPUS, Gpu, ModelSizes, Roofline, gpu_named
from omni_jax.models import ModelConfig, model_config
from omni_jax.planner.memory import DeviceMemory, Programs, Settings, device_memory, estimated_programs
from omni_jax.planner.speed import Speed, Typical, make_speed
from omni_jax.runtime.sharding import fit
from omni_jax.runtime.state import KVCacheDtype

DEFAULT_LEN = 32768  # unless the model knows fewer positions, or --max-model-len says otherwise
MOST_SEQS = 256  # the engine's default on a GPU, and for how many are planned at most unless they are asked for
MOST_TOKENS, FEWEST_TOKENS = 8192, 512  # of a step; the first is the engine's default on a GPU
MOST_SHARE = 0.95  # of the memory, that is proposed
SHORTEST = 256  # tokens: a shorter max_model_len is not proposed
NODE = 8  # devices that NVLink connects

Compile = Callable[[ModelConfig, Settings, int], Programs]  # the last is the mesh's model axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be planned. None leaves it to the planner.

    Attributes:
        config: a config.json.
        gpu: a key of cost.GPUS.
        num: GPUs.
        data, model: axes of the mesh; both or neither.
        typical: what requests are like, for tokens a second and max_num_seqs.
        link_bandwidth: bytes/s in one direction between devices, in place of the GPU's NVLink.
        others: EngineConfig's fields.
    """

    config: Mapping[str, Any]
    gpu: str
    num: int
    data: int | None = None
    model: int | None = None
    typical: Typical = dataclasses.field(default_factory=Typical)
    link_bandwidth: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    dtype: str = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    gpu_memory_utilization: float = 0.92
    max_pixels: int = 1_003_520
    encoder_cache_tokens: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remedy:
    """One change that makes a model fit which does not.

    Attributes:
        flags: what to give instead.
        requests: full-length requests that then fit on a replica.
    """

    flags: str
    requests: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer.

    Attributes:
        architecture, parameters: of the model.
        gpu, gpu_key: its name, and its key in cost.GPUS.
        num, data, model, idle: GPUs, the mesh's axes, GPUs outside it.
        settings: what to start the engine with.
        memory: of each device.
        programs: what they need.
        fits: whether there is room for a request of max_model_len.
        tokens: of the KV cache of a replica.
        full_requests, typical_requests: of max_model_len, and of the typical length, that it holds at once.
        speed: what to expect; None if it does not fit.
        remedies: what would make it fit, if it does not.
        notes: what else is to be said, a sentence each.
    """

    architecture: str
    parameters: int
    gpu: str
    gpu_key: str
    num: int
    data: int
    model: int
    idle: int
    settings: Settings
    memory: DeviceMemory
    programs: Programs
    fits: bool
    tokens: int
    full_requests: int
    typical_requests: int
    speed: Speed | None
    remedies: tuple[Remedy, ...]
    notes: tuple[str, ...]

    @property
    def mesh(self) -> str:
        return f"data={self.data},model={self.model}"


def make_plan(asked: Asked, compile_programs: Compile | None = None) -> Plan:
    """Plans.

    Args:
        compile_programs: compiles the largest programs for the GPU; without it their temporaries are estimated.

    Raises:
        ValueError: an unknown GPU, settings that cannot be, a mesh that is larger than the GPUs or does not divide the
            model; the numbers are in the message.
        UnsupportedModel: the engine does not run the model.
    """
    model, gpu = model_config(asked.config), _gpu(asked)
    _check(asked, model)
    data, axis = _mesh(asked, model, gpu)
    settings, programs, memory = _settle(asked, model, gpu, axis)
    notes = list(_notes(asked, data, axis))
    if compile_programs is not None:
        programs = compile_programs(model, settings, axis)
        memory = device_memory(model, settings, total=gpu.memory_bytes, devices=axis, programs=programs)
    fits = _full_requests(memory, settings) >= 1
    speed = None
    if fits:
        speed = make_speed(_cost(asked, gpu, model, settings, axis), settings, memory, asked.typical, data)
    return Plan(
        architecture=model.architecture,
        parameters=ModelSizes.from_config(asked.config).parameters,
        gpu=gpu.name,
        gpu_key=asked.gpu.lower(),
        num=asked.num,
        data=data,
        model=axis,
        idle=asked.num - data * axis,
        settings=settings,
        memory=memory,
        programs=programs,
        fits=fits,
        tokens=memory.num_blocks * settings.block_size,
        full_requests=_full_requests(memory, settings),
        typical_requests=_typical_requests(memory, settings, asked.typical),
        speed=speed,
        remedies=() if fits else tuple(_remedies(asked, model)),
        notes=tuple(notes),
    )


def _gpu(asked: Asked) -> Gpu:
    gpu = gpu_named(asked.gpu)
    return gpu if asked.link_bandwidth is None else dataclasses.replace(gpu, link_bandwidth=asked.link_bandwidth)


def _check(asked: Asked, model: ModelConfig) -> None:
    if asked.num < 1:
        raise ValueError(f"--num must be at least 1, got {asked.num}")
    if asked.max_model_len is not None and asked.max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"--max-model-len {asked.max_model_len} is more than the {model.max_position_embeddings} positions the "
            "model was made for"
        )
    if asked.data is not None and asked.model is not None:
        if asked.data * asked.model > asked.num:
            raise ValueError(
                f"a mesh of data={asked.data}, model={asked.model} needs {asked.data * asked.model} GPUs, --num is "
                f"{asked.num}"
            )
        fit(model, asked.model)


def _mesh(asked: Asked, model: ModelConfig, gpu: Gpu) -> tuple[int, int]:
    """(data, model): the smallest model axis that fits; the largest there can be, where none does."""
    if asked.data is not None and asked.model is not None:
        return asked.data, asked.model
    axes = [axis for axis in range(1, asked.num + 1) if _divides(model, axis)]
    axis = next((axis for axis in axes if _fits(asked, model, gpu, axis)), axes[-1])
    return asked.num // axis, axis


def _divides(model: ModelConfig, axis: int) -> bool:
    try:
        fit(model, axis)
    except ValueError:
        return False
    return True


def _fits(asked: Asked, model: ModelConfig, gpu: Gpu, axis: int) -> bool:
    settings, _, memory = _settle(asked, model, gpu, axis)
    return _full_requests(memory, settings) >= 1


def _settle(asked: Asked, model: ModelConfig, gpu: Gpu, axis: int) -> tuple[Settings, Programs, DeviceMemory]:
    """Settings for so many devices, the planner's where none were given, and what a device then holds.

    max_num_batched_tokens: the least with which a prompt is computed nearly as fast as with the most. max_num_seqs: the
    most, in powers of two, whose typical requests the cache holds.
    """
    settings = Settings(
        max_model_len=asked.max_model_len or min(DEFAULT_LEN, model.max_position_embeddings),
        max_num_seqs=asked.max_num_seqs or MOST_SEQS,
        max_num_batched_tokens=asked.max_num_batched_tokens or MOST_TOKENS,
        block_size=asked.block_size,
        dtype=_dtype(asked.dtype, model.dtype),
        kv_cache_dtype=asked.kv_cache_dtype,
        gpu_memory_utilization=asked.gpu_memory_utilization,
        max_pixels=asked.max_pixels,
        encoder_cache_tokens=asked.encoder_cache_tokens,
    )
    if asked.max_num_batched_tokens is None:
        tokens = _fewest_tokens(_cost(asked, gpu, model, settings, axis), at_least=asked.max_num_seqs or 1)
        settings = dataclasses.replace(settings, max_num_batched_tokens=tokens)
    if settings.max_num_batched_tokens < (asked.max_num_seqs or 1):
        raise ValueError(
            f"--max-num-batched-tokens ({settings.max_num_batched_tokens}) must be at least --max-num-seqs "
            f"({asked.max_num_seqs})"
        )
    seqs = asked.max_num_seqs or min(MOST_SEQS, settings.max_num_batched_tokens)
    while True:
        settings = dataclasses.replace(settings, max_num_seqs=seqs)
        programs = estimated_programs(model, settings, axis)
        memory = device_memory(model, settings, total=gpu.memory_bytes, devices=axis, programs=programs)
        enough = _full_requests(memory, settings) >= 1 and _typical_requests(memory, settings, asked.typical) >= seqs
        if enough or seqs == 1 or asked.max_num_seqs is not None:
            return settings, programs, memory
        seqs //= 2


def _cost(asked: Asked, gpu: Gpu, model: ModelConfig, settings: Settings, axis: int) -> Roofline:
    """The roofline of a replica, as simulations have it."""
    return Roofline(
        sizes=ModelSizes.from_config(asked.config),
        gpu=gpu,
        devices=axis,
        dtype_bytes=settings.dtype.itemsize,
        kv_bytes_per_value=(model.head_dim + 4) / model.head_dim if settings.kv_cache_dtype == "int8" else None,
        chunk_tokens=settings.max_num_batched_tokens,
    )


def _fewest_tokens(cost: Roofline, *, at_least: int) -> int:
    """The smallest power of two with which a token of a prompt takes at most a tenth longer than with MOST_TOKENS."""

    def per_token(tokens: int) -> float:
        return dataclasses.replace(cost, chunk_tokens=tokens).prefill_seconds(tokens, 0) / tokens

    tokens = FEWEST_TOKENS
    while tokens < MOST_TOKENS and (tokens < at_least or per_token(tokens) > 1.1 * per_token(MOST_TOKENS)):
        tokens *= 2
    return max(tokens, at_least)


def _full_requests(memory: DeviceMemory, settings: Settings) -> int:
    return memory.num_blocks // -(-settings.max_model_len // settings.block_size)


def _typical_requests(memory: DeviceMemory, settings: Settings, typical: Typical) -> int:
    tokens = min(typical.prompt_tokens + typical.output_tokens, settings.max_model_len)
    return memory.num_blocks // -(-tokens // settings.block_size)


def _dtype(asked: str, stored: str) -> np.dtype:
    """As engine.loading has it."""
    if asked not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"--dtype must be auto, float32 or bfloat16, got {asked!r}")
    chosen = asked if asked != "auto" else stored.removeprefix("torch.")
    return np.dtype(jnp.dtype("bfloat16" if chosen == "float16" else chosen))


def _notes(asked: Asked, data: int, axis: int) -> Iterator[str]:
    idle = asked.num - data * axis
    if idle:
        yield f"{idle} of {asked.num} GPUs are left over: a mesh of data={data}, model={axis} has {data * axis}"
    if axis > NODE and asked.link_bandwidth is None:
        yield (
            f"a model axis of {axis} reaches beyond a node of {NODE}: all-reduces are predicted at NVLink's speed, "
            "give --link-gb-per-second for the network between nodes"
        )


def _remedies(asked: Asked, model: ModelConfig) -> Iterator[Remedy]:
    """Changes each of which would do: more GPUs, less memory taken, other GPUs."""
    free = dataclasses.replace(asked, data=None, model=None)
    for num in range(asked.num + 1, 8 * NODE + 1):
        if (requests := _room(dataclasses.replace(free, num=num), model)) is not None:
            yield Remedy(flags=f"--num {num}", requests=requests)
            break
    yield from _savings(asked, model)
    for name, gpu in GPUS.items():
        if gpu.memory_bytes <= GPUS[asked.gpu.lower()].memory_bytes:
            continue
        if (requests := _room(dataclasses.replace(free, gpu=name), model)) is not None:
            yield Remedy(flags=f"--gpu {name}", requests=requests)


def _savings(asked: Asked, model: ModelConfig) -> Iterator[Remedy]:
    """On the same GPUs: int8, a larger share of the memory, or both; and a shorter max_model_len, by itself or where
    they are not enough."""
    changes: list[dict[str, Any]] = [{}]
    if asked.kv_cache_dtype == "auto":
        changes.append({"kv_cache_dtype": "int8"})
    if asked.gpu_memory_utilization < MOST_SHARE:
        changes += [change | {"gpu_memory_utilization": MOST_SHARE} for change in changes]
    for change in changes:
        changed = dataclasses.replace(asked, **change)
        gpu = _gpu(changed)
        _, axis = _mesh(changed, model, gpu)
        settings, _, memory = _settle(changed, model, gpu, axis)
        flags = [f"--{name.replace('_', '-')} {value}" for name, value in change.items()]
        if requests := _full_requests(memory, settings):
            yield Remedy(flags=" ".join(flags), requests=requests)
        elif (length := memory.num_blocks * settings.block_size) >= SHORTEST:
            # All there is room for: it is less than a request of max_model_len.
            yield Remedy(flags=" ".join([*flags, f"--max-model-len {length}"]), requests=1)


def _room(asked: Asked, model: ModelConfig) -> int | None:
    """Full-length requests that fit; None where not even one does."""
    gpu = _gpu(asked)
    _, axis = _mesh(asked, model, gpu)
    settings, _, memory = _settle(asked, model, gpu, axis)
    return _full_requests(memory, settings) or None
