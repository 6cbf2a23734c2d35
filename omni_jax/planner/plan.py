"""Plans a deployment: whether a model fits on given GPUs, the mesh, settings and speed. Needs only a config.json.

Bytes come from the engine's shapes (memory.py), times from the roofline that simulations use (speed.py).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omni_jax.cost.roofline import GPUS, Gpu, ModelSizes, Roofline, gpu_named
from omni_jax.engine.config import EngineConfig
from omni_jax.engine.vision_limits import image_limit
from omni_jax.models.config import ModelConfig, compute_dtype, model_config
from omni_jax.planner.memory import DeviceMemory, Programs, Settings, device_memory, estimated_programs
from omni_jax.planner.speed import Speed, Typical, make_speed
from omni_jax.runtime.sharding import fit
from omni_jax.runtime.state import KVCacheDtype

DEFAULT_LEN = 32768  # default of max_model_len, if the model has as many positions
PUBLISHED_MAX_PIXELS = 12_845_056  # in preprocessor_config.json of all published Qwen2-VL and Qwen2.5-VL
MAX_SEQS = 256  # largest max_num_seqs that the planner chooses: the engine's default on a GPU
MAX_TOKENS, MIN_TOKENS = 8192, 512  # bounds of max_num_batched_tokens that the planner chooses
MAX_UTILIZATION = 0.95  # largest gpu_memory_utilization that a remedy proposes
SHORTEST = 256  # smallest max_model_len that a remedy proposes
PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 256  # lengths of a typical request
NODE = 8  # GPUs that NVLink connects

# Fields of PlanOptions that are settings of the engine.
ENGINE_FIELDS = (
    *("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "dtype", "kv_cache_dtype"),
    *("gpu_memory_utilization", "max_pixels", "encoder_cache_tokens"),
)

Compile = Callable[[ModelConfig, Settings, int], Programs]  # the int is the model axis of the mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Input of a plan. None: the planner chooses.

    Attributes:
        config: content of the model's config.json.
        gpu: a key of cost.GPUS.
        checkpoint_pixels: the checkpoint's own limit on the pixels of an image.
        num: number of GPUs.
        data, model: axes of the mesh; both or neither.
        prompt_tokens, output_tokens: typical request, for tokens per second and max_num_seqs. None: 1,024 and 256, or
            less where max_model_len is shorter.
        link_bandwidth: bytes/s between GPUs in one direction, instead of NVLink's.
        others: fields of EngineConfig.
    """

    config: Mapping[str, Any]
    gpu: str
    num: int
    checkpoint_pixels: int = PUBLISHED_MAX_PIXELS
    data: int | None = None
    model: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    link_bandwidth: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    dtype: str = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    gpu_memory_utilization: float = 0.92
    max_pixels: int | None = None
    encoder_cache_tokens: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change that makes the model fit.

    Attributes:
        flags: flags to add or change.
        requests: number of full-length requests that then fit on a replica.
    """

    flags: str
    requests: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Result of the planner.

    Attributes:
        architecture, parameters: architecture of the model, and its number of parameters.
        gpu, gpu_key: name of the GPU, and its key in cost.GPUS.
        num, data, model, idle: number of GPUs, axes of the mesh, number of GPUs outside it.
        settings: settings of the engine.
        memory: memory of each device.
        programs: memory of programs.
        fits: whether the KV cache holds a request of max_model_len.
        tokens: tokens that the KV cache of a replica holds.
        full_requests, typical_requests: requests of max_model_len, and of the typical length, that it holds at once.
        speed: predicted speed; None if the model does not fit.
        remedies: changes that make it fit, if it does not.
        serve_flags: flags of `omni-jax serve` that start it, each followed by its value.
        notes: further remarks, a sentence each.
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
    serve_flags: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def mesh(self) -> str:
        return f"data={self.data},model={self.model}"


def make_plan(options: PlanOptions, compile_programs: Compile | None = None) -> Plan:
    """Plan a deployment.

    Args:
        compile_programs: compiles the largest programs for the GPU; None: their memory is estimated.

    Raises:
        ValueError: unknown GPU, invalid settings, or a mesh that needs more GPUs than there are or does not divide the
            model; the numbers are in the message.
        UnsupportedModel: the engine does not support the model.
    """
    model, gpu = model_config(options.config), _gpu(options)
    _check(options, model)
    data, axis = _mesh(options, model, gpu)
    settings, programs, memory = _settle(options, model, gpu, axis)
    notes = list(_notes(options, data, axis))
    if compile_programs is not None:
        programs = compile_programs(model, settings, axis)
        memory = device_memory(model, settings, total=gpu.memory_bytes, devices=axis, programs=programs)
    fits = _full_requests(memory, settings) >= 1
    speed = None
    if fits:
        speed = make_speed(_cost(options, gpu, model, settings, axis), settings, memory, _typical(options, model), data)
    return Plan(
        architecture=model.architecture,
        parameters=ModelSizes.from_config(options.config).parameters,
        gpu=gpu.name,
        gpu_key=options.gpu.lower(),
        num=options.num,
        data=data,
        model=axis,
        idle=options.num - data * axis,
        settings=settings,
        memory=memory,
        programs=programs,
        fits=fits,
        tokens=memory.num_blocks * settings.block_size,
        full_requests=_full_requests(memory, settings),
        typical_requests=_typical_requests(memory, settings, _typical(options, model)),
        speed=speed,
        remedies=() if fits else tuple(_remedies(options, model)),
        serve_flags=tuple(_serve_flags(options, settings, data, axis)),
        notes=tuple(notes),
    )


def _gpu(options: PlanOptions) -> Gpu:
    gpu = gpu_named(options.gpu)
    return gpu if options.link_bandwidth is None else dataclasses.replace(gpu, link_bandwidth=options.link_bandwidth)


def _check(options: PlanOptions, model: ModelConfig) -> None:
    if options.num < 1:
        raise ValueError(f"--num must be at least 1, got {options.num}")
    EngineConfig(model_dir="", **{name: getattr(options, name) for name in ENGINE_FIELDS})
    if options.max_model_len is not None and options.max_model_len > model.max_position_embeddings:
        raise ValueError(
            f"--max-model-len {options.max_model_len} exceeds the model's {model.max_position_embeddings} positions"
        )
    if options.data is not None and options.model is not None:
        if options.data * options.model > options.num:
            raise ValueError(
                f"a mesh of data={options.data}, model={options.model} needs {options.data * options.model} GPUs, but "
                f"--num is {options.num}"
            )
        fit(model, options.model)


def _max_model_len(options: PlanOptions, model: ModelConfig) -> int:
    return options.max_model_len or min(DEFAULT_LEN, model.max_position_embeddings)


def _max_pixels(options: PlanOptions, model: ModelConfig, gpu: Gpu, axis: int) -> int:
    """Choose the limit on images as engine.loading does."""
    if model.vision is None:
        return 0
    limit = image_limit(
        options.max_pixels,
        options.checkpoint_pixels,
        model.vision,
        max_model_len=_max_model_len(options, model),
        memory=int(gpu.memory_bytes * options.gpu_memory_utilization),
        width=compute_dtype(options.dtype, model.dtype).itemsize,
        devices=axis,
    )
    return limit.pixels


def _typical(options: PlanOptions, model: ModelConfig) -> Typical:
    """Return the typical request.

    Raises:
        ValueError: the lengths that were given exceed max_model_len.
    """
    longest = _max_model_len(options, model)
    output = options.output_tokens or max(1, min(OUTPUT_TOKENS, longest - (options.prompt_tokens or 1), longest // 2))
    prompt = options.prompt_tokens or max(1, min(PROMPT_TOKENS, longest - output))
    if prompt + output > longest:
        raise ValueError(
            f"a request of {prompt:,} prompt and {output:,} output tokens is longer than max_model_len, {longest:,}: "
            "lower --prompt-tokens and --output-tokens, or raise --max-model-len"
        )
    return Typical(prompt_tokens=prompt, output_tokens=output)


def _serve_flags(options: PlanOptions, settings: Settings, data: int, axis: int) -> Iterator[str]:
    """Yield the flags that the planner chose, and those that were given and differ from the engine's defaults."""
    sizes = {"tensor_parallel_size": axis, "data_parallel_size": data}
    chosen = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
    defaults = {field.name: field.default for field in dataclasses.fields(PlanOptions)}
    flags = {name: size for name, size in sizes.items() if size > 1}
    flags |= {name: getattr(settings, name) for name in chosen}
    flags |= {
        name: value
        for name in ENGINE_FIELDS
        if name not in chosen and (value := getattr(options, name)) != defaults[name]
    }
    for name, value in flags.items():
        yield from (f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value))


def _mesh(options: PlanOptions, model: ModelConfig, gpu: Gpu) -> tuple[int, int]:
    """Return (data, model) with the smallest model axis that fits; if none does, with the largest that divides."""
    if options.data is not None and options.model is not None:
        return options.data, options.model
    axes = [axis for axis in range(1, options.num + 1) if _divides(model, axis)]
    axis = next((axis for axis in axes if _fits(options, model, gpu, axis)), axes[-1])
    return options.num // axis, axis


def _divides(model: ModelConfig, axis: int) -> bool:
    try:
        fit(model, axis)
    except ValueError:
        return False
    return True


def _fits(options: PlanOptions, model: ModelConfig, gpu: Gpu, axis: int) -> bool:
    settings, _, memory = _settle(options, model, gpu, axis)
    return _full_requests(memory, settings) >= 1


def _settle(options: PlanOptions, model: ModelConfig, gpu: Gpu, axis: int) -> tuple[Settings, Programs, DeviceMemory]:
    """Return the settings for a model axis, with the memory of programs and of each device.

    The planner chooses settings that are None. max_num_batched_tokens: the smallest with which a prompt is computed
    nearly as fast as with the largest. max_num_seqs: the largest power of two of typical requests that the cache holds.
    """
    settings = Settings(
        max_model_len=_max_model_len(options, model),
        max_num_seqs=options.max_num_seqs or MAX_SEQS,
        max_num_batched_tokens=options.max_num_batched_tokens or MAX_TOKENS,
        block_size=options.block_size,
        dtype=compute_dtype(options.dtype, model.dtype),
        kv_cache_dtype=options.kv_cache_dtype,
        gpu_memory_utilization=options.gpu_memory_utilization,
        max_pixels=_max_pixels(options, model, gpu, axis),
        encoder_cache_tokens=options.encoder_cache_tokens,
    )
    if options.max_num_batched_tokens is None:
        tokens = _smallest_step(_cost(options, gpu, model, settings, axis), at_least=options.max_num_seqs or 1)
        settings = dataclasses.replace(settings, max_num_batched_tokens=tokens)
    if settings.max_num_batched_tokens < (options.max_num_seqs or 1):
        raise ValueError(
            f"--max-num-batched-tokens ({settings.max_num_batched_tokens}) must be at least --max-num-seqs "
            f"({options.max_num_seqs})"
        )
    seqs = options.max_num_seqs or min(MAX_SEQS, settings.max_num_batched_tokens)
    typical = _typical(options, model)
    while True:
        settings = dataclasses.replace(settings, max_num_seqs=seqs)
        programs = estimated_programs(model, settings, axis)
        memory = device_memory(model, settings, total=gpu.memory_bytes, devices=axis, programs=programs)
        enough = _full_requests(memory, settings) >= 1 and _typical_requests(memory, settings, typical) >= seqs
        if enough or seqs == 1 or options.max_num_seqs is not None:
            return settings, programs, memory
        seqs //= 2


def _cost(options: PlanOptions, gpu: Gpu, model: ModelConfig, settings: Settings, axis: int) -> Roofline:
    """Return the roofline of a replica, as simulations use it."""
    return Roofline(
        sizes=ModelSizes.from_config(options.config),
        gpu=gpu,
        devices=axis,
        dtype_bytes=settings.dtype.itemsize,
        kv_bytes_per_value=(model.head_dim + 4) / model.head_dim if settings.kv_cache_dtype == "int8" else None,
        chunk_tokens=settings.max_num_batched_tokens,
    )


def _smallest_step(cost: Roofline, *, at_least: int) -> int:
    """Return the smallest power of two with which a prompt token takes at most a tenth longer than with MAX_TOKENS."""

    def per_token(tokens: int) -> float:
        return dataclasses.replace(cost, chunk_tokens=tokens).prefill_seconds(tokens, 0) / tokens

    tokens = MIN_TOKENS
    while tokens < MAX_TOKENS and (tokens < at_least or per_token(tokens) > 1.1 * per_token(MAX_TOKENS)):
        tokens *= 2
    return max(tokens, at_least)


def _full_requests(memory: DeviceMemory, settings: Settings) -> int:
    return memory.num_blocks // -(-settings.max_model_len // settings.block_size)


def _typical_requests(memory: DeviceMemory, settings: Settings, typical: Typical) -> int:
    return memory.num_blocks // -(-(typical.prompt_tokens + typical.output_tokens) // settings.block_size)


def _notes(options: PlanOptions, data: int, axis: int) -> Iterator[str]:
    idle = options.num - data * axis
    if idle:
        yield f"{idle} of {options.num} GPUs are unused: a mesh of data={data}, model={axis} has {data * axis}"
    if axis > NODE and options.link_bandwidth is None:
        yield (
            f"a model axis of {axis} is larger than a node of {NODE} GPUs, but all-reduces are predicted at NVLink's "
            "speed: set --link-gb-per-second to that of the network"
        )


def _remedies(options: PlanOptions, model: ModelConfig) -> Iterator[Remedy]:
    """Yield changes each of which is enough: more GPUs, less memory, larger GPUs."""
    free = dataclasses.replace(options, data=None, model=None)
    for num in range(options.num + 1, 8 * NODE + 1):
        if (requests := _room(dataclasses.replace(free, num=num), model)) is not None:
            yield Remedy(flags=f"--num {num}", requests=requests)
            break
    yield from _savings(options, model)
    for name, gpu in GPUS.items():
        if gpu.memory_bytes <= GPUS[options.gpu.lower()].memory_bytes:
            continue
        if (requests := _room(dataclasses.replace(free, gpu=name), model)) is not None:
            yield Remedy(flags=f"--gpu {name}", requests=requests)


def _savings(options: PlanOptions, model: ModelConfig) -> Iterator[Remedy]:
    """Yield changes on the same GPUs: int8, a larger share of the memory, or both; with a shorter max_model_len if that
    is needed."""
    changes: list[dict[str, Any]] = [{}]
    if options.kv_cache_dtype == "auto":
        changes.append({"kv_cache_dtype": "int8"})
    if options.gpu_memory_utilization < MAX_UTILIZATION:
        changes += [change | {"gpu_memory_utilization": MAX_UTILIZATION} for change in changes]
    for change in changes:
        changed = dataclasses.replace(options, **change)
        gpu = _gpu(changed)
        _, axis = _mesh(changed, model, gpu)
        settings, _, memory = _settle(changed, model, gpu, axis)
        flags = [f"--{name.replace('_', '-')} {value}" for name, value in change.items()]
        if requests := _full_requests(memory, settings):
            yield Remedy(flags=" ".join(flags), requests=requests)
        elif (length := memory.num_blocks * settings.block_size) >= SHORTEST:
            # The whole cache, which is shorter than a request of max_model_len.
            yield Remedy(flags=" ".join([*flags, f"--max-model-len {length}"]), requests=1)


def _room(options: PlanOptions, model: ModelConfig) -> int | None:
    """Return the number of full-length requests that fit; None if none does."""
    gpu = _gpu(options)
    _, axis = _mesh(options, model, gpu)
    settings, _, memory = _settle(options, model, gpu, axis)
    return _full_requests(memory, settings) or None
