"""Loading of an engine from a model directory: dtype, limits, size of the KV cache, compiled programs."""

import dataclasses
import logging
import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints.hub import find_model
from checkpoints.reader import Checkpoint
from kernels_pallas.paged_attention import PagedKernels
from kernels_pallas.paged_attention.choose import addressable_pages
from omni_jax import compat
from omni_jax.engine.config import EngineConfig, EngineInfo
from omni_jax.engine.generation_config import default_sampling, eos_token_ids
from omni_jax.engine.kernels import choose_kernels
from omni_jax.engine.tokenizer import read_tokenizer
from omni_jax.engine.vision_limits import encoder_cache_tokens, image_limit
from omni_jax.inputs.image import VisionSettings
from omni_jax.inputs.prompt import VisionInputs
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.memory.encoder_cache import EncoderCache
from omni_jax.models.axis import MODEL
from omni_jax.models.config import ModelConfig, compute_dtype, model_config
from omni_jax.models.weights import Weights, load_weights
from omni_jax.progress import StageReport
from omni_jax.runtime.encoder import EncoderConfig
from omni_jax.runtime.executables import Job, compile_all
from omni_jax.runtime.processes import Follower, Front, Group, join, wait_until_all_compiled
from omni_jax.runtime.runner import Runner, RunnerConfig
from omni_jax.runtime.sharding import bytes_per_device, fit, make_mesh, part_of, replica_meshes, sharding_of
from omni_jax.runtime.state import block_bytes, round_pages
from omni_jax.scheduling.buckets import default_buckets, patch_buckets

logger = logging.getLogger(__name__)


GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """The parts of an engine. `vision` is None for a text-only model, `channel` is None in a single process."""

    info: EngineInfo
    tokenizer: Tokenizer
    vision: VisionInputs | None
    runner: Runner
    runner_config: RunnerConfig
    eos_token_ids: frozenset[int]
    channel: Front | Follower | None = None


def load(
    config: EngineConfig, progress: StageReport | None = None, replica: int = 0, *, isolated: bool = False
) -> Loaded:
    """Load, size and compile a model on the devices of a replica; if `isolated`, on the first devices of this process,
    which sees only those of the replica.

    Raises:
        CheckpointError, UnsupportedModel: the directory cannot be used.
        ValueError: the settings do not fit the model, the devices or the memory.
    """
    report = progress or (lambda *_: None)
    found = find_model(config.model_dir, revision=config.revision, download_dir=config.download_dir)
    config = dataclasses.replace(config, model_dir=found)
    if (cache := config.compilation_cache_dir or _default_cache()) is not None:
        compat.use_compilation_cache(Path(cache))
    compat.count_compilations()
    channel = _join(config)
    rows = 1 if isolated else config.data_parallel_size
    whole = make_mesh(jax.devices(), data=rows, model=config.tensor_parallel_size)
    mesh = replica_meshes(whole)[0 if isolated else replica]
    if channel is not None and mesh.size != len(jax.devices()):
        raise ValueError(
            f"{config.num_processes} processes have {len(jax.devices())} devices, which must all share the model: give "
            f"--tensor-parallel-size {len(jax.devices())}, not {mesh.size}"
        )
    device = next(device for device in mesh.devices.flat if device.process_index == jax.process_index())
    checkpoint = Checkpoint(config.model_dir)
    for name in ("enforce_eager", "trust_remote_code"):
        if getattr(config, name):
            logger.info("%s has no effect; see docs/configuration.md", name)
    stored = model_config(checkpoint.config)
    tokenizer = read_tokenizer(config, stored.vocab_size, has_tower=stored.vision is not None)
    dtype = compute_dtype(config.dtype, stored.dtype)
    vision = _vision(config, stored, dtype, device)
    if vision is not None and channel is not None:
        raise ValueError("models that read images can only run in one process: leave out --num-processes")
    model, weights = load_weights(
        checkpoint,
        fit(model_config(checkpoint.config), mesh.shape[MODEL]),
        dtype,
        sharding_of=sharding_of(mesh),
        progress=lambda name, done, total: report("load", done, total, name),
    )
    logger.info(
        "device %s; %s weights %.2f GB in %s (%s)",
        device.device_kind,
        model.architecture,
        weights.nbytes / 1e9,
        dtype,
        f"--dtype auto: config.json states {model.dtype}" if config.dtype == "auto" else f"--dtype {config.dtype}",
    )

    generation = checkpoint.generation_config
    eos_ids = eos_token_ids(generation, checkpoint.config, tokenizer.eos_token_id, vocab_size=model.vocab_size)
    defaults = default_sampling(generation) if config.generation_config == "auto" else {}
    logger.info("a text ends at the token ids %s; sampling defaults: %s", sorted(eos_ids), defaults or "none")
    encoder = _encoder(config, vision, device) if vision else None
    kernels, fallbacks = choose_kernels(
        config.attention_backend,
        part_of(model, mesh.shape[MODEL]),
        device,
        block_size=_block_size(config, device),
        dtype=dtype,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    runner_config = _size(config, model, weights, mesh, device, dtype, encoder, kernels)
    if channel is not None:
        runner_config = _agree(channel, model, runner_config)
        kernels = runner_config.kernels
    runner = Runner(model, weights, runner_config, mesh)

    compiled, hits, begin = compat.compilations(), compat.cache_hits(), time.perf_counter()

    def on_compiled(executable, done, total):
        name = " ".join(map(str, executable.key))
        logger.debug("ready: %-16s %6.2f s", name, executable.seconds)
        report("compile", done, total, name)

    executables = runner.start(on_compiled, (lambda: None) if channel is None else wait_until_all_compiled)
    seconds, hits = time.perf_counter() - begin, compat.cache_hits() - hits
    logger.info(
        "%d executables ready in %.1f s: %d programs from the compilation cache, %d compiled",
        len(executables),
        seconds,
        hits,
        compat.compilations() - compiled - hits,
    )
    if isinstance(channel, Front):
        runner.broadcast = channel.broadcast
    info = EngineInfo(
        model_dir=str(config.model_dir),
        architecture=model.architecture,
        device=device.device_kind,
        dtype=str(dtype),
        vocab_size=model.vocab_size,
        max_model_len=runner_config.max_model_len,
        max_num_seqs=runner_config.max_num_seqs,
        max_num_batched_tokens=_budget(config, device, runner_config.max_num_seqs),
        default_sampling=defaults,
        num_blocks=runner_config.num_pages,
        block_size=runner_config.block_size,
        kv_cache_bytes=runner_config.num_pages
        * block_bytes(
            model, block_size=runner_config.block_size, dtype=dtype, kv_cache_dtype=runner_config.kv_cache_dtype
        ),
        weight_bytes=weights.nbytes,
        executables=tuple((" ".join(map(str, key)), e.seconds) for key, e in executables.items()),
        compile_seconds=seconds,
        cache_hits=hits,
        encoder_cache_tokens=_cache_tokens(config, vision) if vision else 0,
        max_patches=encoder.buckets[-1] if encoder else 0,
        attention=dataclasses.asdict(kernels),
        attention_fallbacks=fallbacks,
    )
    return Loaded(
        info=info,
        tokenizer=tokenizer,
        vision=vision,
        runner=runner,
        runner_config=runner_config,
        eos_token_ids=eos_ids,
        channel=channel,
    )


def _join(config: EngineConfig) -> Front | Follower | None:
    """Connect to the other processes that share the model, if there are any."""
    if config.num_processes == 1:
        return None
    assert config.coordinator_address is not None
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM away from the server
    return join(
        Group(
            coordinator_address=config.coordinator_address,
            num_processes=config.num_processes,
            process_id=config.process_id,
        )
    )


def _agree(channel: Front | Follower, model: ModelConfig, config: RunnerConfig) -> RunnerConfig:
    """The config with sizes and kernels that suit all processes: the smallest cache, and XLA if kernels differ.

    Raises:
        ValueError: processes were started with different settings or models.
    """
    same = dataclasses.replace(config, kernels=PagedKernels(), num_pages=0, max_model_len=1)
    proposal = {
        "kernels": dataclasses.asdict(config.kernels),
        "num_pages": config.num_pages,
        "max_model_len": config.max_model_len,
        "same": {"model": repr(model), "settings": repr(same)},
    }
    agreed = channel.agree(proposal, _combine)
    return dataclasses.replace(
        config,
        kernels=PagedKernels(**agreed["kernels"]),
        num_pages=agreed["num_pages"],
        max_model_len=agreed["max_model_len"],
    )


def _combine(proposals: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the proposals of all processes, the front's first."""
    first = proposals[0]
    for number, proposal in enumerate(proposals):
        for name, value in first["same"].items():
            if proposal["same"][name] != value:
                raise ValueError(
                    f"process {number} and the front have different {name}: {proposal['same'][name]} and {value}; give "
                    "all processes the same model and flags"
                )
    kernels = {
        op: name if all(proposal["kernels"][op] == name for proposal in proposals) else "xla"
        for op, name in first["kernels"].items()
    }
    if kernels != first["kernels"]:
        logger.warning(
            "attention is slower than it could be: not all processes can use the kernels %s, so they use %s",
            first["kernels"],
            kernels,
        )
    return {
        "kernels": kernels,
        "num_pages": min(proposal["num_pages"] for proposal in proposals),
        "max_model_len": min(proposal["max_model_len"] for proposal in proposals),
    }


def _vision(config: EngineConfig, model: ModelConfig, dtype: np.dtype, device) -> VisionInputs | None:
    """Settings that turn images into patches; None for a text-only model."""
    if model.vision is None:
        return None
    path = Path(config.model_dir)
    own = VisionSettings.from_directory(path)
    if device.platform == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // config.data_parallel_size
    else:
        memory = device.memory_stats()["bytes_limit"]
    limit = image_limit(
        config.max_pixels,
        own.largest_pixels,
        model.vision,
        max_model_len=config.max_model_len or model.max_position_embeddings,
        memory=memory,
        width=dtype.itemsize,
        devices=config.tensor_parallel_size,
    )
    pixels = limit.pixels if config.max_pixels is not None else max(limit.pixels, own.min_pixels, own.factor**2)
    settings = VisionSettings.from_directory(path, max_pixels=pixels, max_source_pixels=config.max_source_pixels)
    logger.info(
        "images: up to %s pixels, %s tokens, after resizing: %s (checkpoint %s; --max-pixels lowers it%s)",
        f"{settings.max_pixels:,}",
        f"{settings.max_pixels // settings.factor**2:,}",
        limit.reason,
        f"{own.max_pixels:,}",
        ", and on a CPU an image of a million pixels takes seconds" if device.platform == "cpu" else "",
    )
    return VisionInputs(config=model.vision, settings=settings)


def _encoder(config: EngineConfig, vision: VisionInputs, device) -> EncoderConfig:
    settings = vision.settings
    return EncoderConfig(
        feature_rows=EncoderCache(_cache_tokens(config, vision)).array_rows,
        buckets=patch_buckets(settings.largest_pixels // settings.patch_size**2),
        layers_per_slice=config.encoder_layers_per_slice or (1 if device.platform == "cpu" else 8),
        mean=settings.mean,
        std=settings.std,
        rescale_factor=settings.rescale_factor,
    )


def _cache_tokens(config: EngineConfig, vision: VisionInputs) -> int:
    return encoder_cache_tokens(config.encoder_cache_tokens, vision.settings.largest_pixels, vision.config)


def _size(config, model, weights, mesh, device, dtype, encoder, kernels) -> RunnerConfig:
    """Limits of the batch and size of the cache. `device` is a device of the mesh in this process."""
    on_cpu = device.platform == "cpu"
    max_num_seqs = config.max_num_seqs or (32 if on_cpu else 256)
    budget = _budget(config, device, max_num_seqs)
    if budget < max_num_seqs:
        raise ValueError(f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({max_num_seqs})")
    block_size = _block_size(config, device)
    wanted = config.max_model_len or model.max_position_embeddings
    if wanted > model.max_position_embeddings:
        raise ValueError(
            f"max_model_len {wanted} is more than the model's {model.max_position_embeddings} positions: lower "
            "--max-model-len, or add a rope_scaling that the model was made for to its config.json"
        )
    buckets = default_buckets(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        smallest_decode=2 if on_cpu and dtype.itemsize == 2 else 1,
        overhead=16 if on_cpu else 256,
    )
    sizes = RunnerConfig(
        max_num_seqs=max_num_seqs,
        max_model_len=wanted,
        block_size=block_size,
        num_pages=0,
        buckets=buckets,
        dtype=dtype,
        encoder=encoder,
        kv_cache_dtype=config.kv_cache_dtype,
        swap=config.swap_space > 0 and config.preemption_mode != "recompute",
        compression=config.enable_adaptive_compression,
        kernels=kernels,
    )
    per_block = block_bytes(model, block_size=block_size, dtype=dtype, kv_cache_dtype=config.kv_cache_dtype)
    per_block //= mesh.shape[MODEL]  # each device holds its KV heads of every block
    memory = config.kv_cache_memory_bytes or _cache_bytes(config, model, weights, sizes, mesh, device)
    longest = -(-wanted // block_size)
    # Round the need up and the room down, so that a cache that is just large enough stays large enough.
    num_pages = min(round_pages(memory // per_block), round_pages(max_num_seqs * longest + 1, up=True))
    page = part_of(model, mesh.shape[MODEL]).num_key_value_heads, block_size, model.head_dim
    num_pages = round_pages(addressable_pages(kernels, num_pages, page, quantised=config.kv_cache_dtype == "int8"))
    held = (num_pages - 1) * block_size
    if held < (config.max_model_len or 1):
        needed = round_pages(longest + 1, up=True) * per_block
        raise ValueError(
            f"a KV cache of {memory:,} bytes holds {max(0, held)} tokens, but max_model_len is {wanted}: give "
            f"--kv-cache-memory-bytes {needed} or more, or lower --max-model-len"
        )
    max_model_len = min(wanted, held)
    if max_model_len < wanted:
        logger.warning(
            "max_model_len is lowered from %d to %d, the number of tokens that the KV cache holds",
            wanted,
            max_model_len,
        )
    logger.info(
        "KV cache: %d blocks of %d tokens = %d tokens, %.2f GB per device, room for %.1f sequences of %d tokens",
        num_pages - 1,
        block_size,
        held,
        num_pages * per_block / 1e9,
        held / max_model_len,
        max_model_len,
    )
    return dataclasses.replace(sizes, num_pages=num_pages, max_model_len=max_model_len)


def _block_size(config: EngineConfig, device) -> int:
    return config.block_size or (32 if device.platform == "cpu" else 16)


def _budget(config: EngineConfig, device, max_num_seqs: int) -> int:
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    return max(512 if device.platform == "cpu" else 8192, max_num_seqs)


def _cache_bytes(config: EngineConfig, model: ModelConfig, weights: Weights, sizes: RunnerConfig, mesh, device) -> int:
    """Bytes per device that are available for the cache."""
    if device.platform == "cpu":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
        # All virtual devices, those of other replicas too, share the host's memory.
        return min(2 * GIB, free // config.data_parallel_size) // config.tensor_parallel_size
    limit = device.memory_stats()["bytes_limit"]
    total = int(limit / config.gpu_memory_utilization)  # the allocator got this share before JAX was imported
    runner = Runner(model, weights, dataclasses.replace(sizes, num_pages=16), mesh)
    needs = {"weights": bytes_per_device(weights.arrays)} | _needs(runner)
    left = limit - sum(needs.values())
    if left <= 0:
        listed = ", ".join(f"{name} {size:,}" for name, size in needs.items())
        raise ValueError(
            f"no room for a KV cache: the engine may use {limit:,} of the device's {total:,} bytes "
            f"(--gpu-memory-utilization {config.gpu_memory_utilization}), and needs {listed}"
        )
    return left


def _needs(runner: Runner) -> dict[str, int]:
    """Bytes per device that an engine needs besides weights and cache.

    The memory of programs does not depend on the number of pages. Only the largest program of each kind is compiled.
    Programs without the cache as an argument are then in the compilation cache for the start.
    """
    jobs = runner.jobs()
    largest: dict[tuple[str, ...], tuple[int, Job]] = {}
    for job in jobs:
        kind = tuple(part for part in job.key if isinstance(part, str))
        size = max((part for part in job.key if isinstance(part, int)), default=0)
        if kind not in largest or size > largest[kind][0]:
            largest[kind] = size, job
    programs = compile_all([job for _, job in largest.values()])
    analyses = [program.compiled.memory_analysis() for program in programs.values()]
    state = [job.arguments[i] for job in jobs if job.key in (("admit",), ("history",)) for i in job.donate]
    needs = {
        "state of sequences": bytes_per_device(state),
        "temporaries of a step": max(each.temp_size_in_bytes for each in analyses),
        # One step is read while the next is computed. Donated arguments need no new memory.
        "results of two steps": 2 * max(each.output_size_in_bytes - each.alias_size_in_bytes for each in analyses),
    }
    if runner.encoder is not None:
        needs["features of images"] = bytes_per_device(runner.encoder.abstract_features)
    return needs


def _default_cache() -> Path | None:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if home.startswith("~"):  # containers run under users that have no home
        logger.warning("no compilation cache: there is no home directory; set --compilation-cache-dir")
        return None
    return Path(home) / "omni-jax" / "xla"
