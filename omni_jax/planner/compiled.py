"""Memory of the engine's programs besides weights and cache, from compiling them for a GPU that need not be present."""

import dataclasses
from collections.abc import Callable, Iterator

from kernels_pallas import aot
from kernels_pallas.paged_attention.choose import choose
from omni_jax.models.config import ModelConfig
from omni_jax.models.weights import abstract_weights
from omni_jax.planner.memory import Programs, Settings, feature_rows
from omni_jax.runtime.encoder import EncoderConfig
from omni_jax.runtime.executables import Job
from omni_jax.runtime.runner import Runner, RunnerConfig
from omni_jax.runtime.sharding import fit, sharding_of
from omni_jax.scheduling.buckets import Buckets, patch_buckets

TARGETS = {"a100-40gb": "a100", "a100": "a100", "h100": "h100", "h200": "h200"}  # cost.GPUS -> aot.TARGETS
CAPABILITIES = {"a100": "8.0", "h100": "9.0", "h200": "9.0"}
LAYERS_PER_SLICE = 8  # layers of the vision tower in a slice: the engine's default on a GPU
LAYERS = 2  # compiled layers of the text model; further ones reuse their temporaries
Progress = Callable[[str, int, int], None]

PAGES = 16  # pages of the pool; temporaries do not depend on their number


def compiled_programs(
    model: ModelConfig, settings: Settings, devices: int, gpu: str, *, progress: Progress | None = None
) -> Programs:
    """Compile the programs that can need the most memory, as the engine does to size its cache (engine.loading), and
    return their memory as XLA reports it.

    Args:
        gpu: a key of cost.GPUS.
        progress: called before each program with (program, number of programs done, number of programs).

    Raises:
        aot.ToolMissing: the CUDA plugin is not installed, see aot.available.
    """
    target = TARGETS[gpu.lower()]
    mesh = aot.mesh(target, devices)
    model = fit(dataclasses.replace(model, num_hidden_layers=min(LAYERS, model.num_hidden_layers)), devices)
    kernels, _ = choose(
        platform="gpu",
        device_kind=aot.device_kind(target),
        compute_capability=CAPABILITIES[target],
        head_dim=model.head_dim,
        page_size=settings.block_size,
        heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
    )
    sizes = RunnerConfig(
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        num_pages=PAGES,
        buckets=Buckets(decode=(settings.max_num_seqs,), mixed=(settings.max_num_batched_tokens,)),
        dtype=settings.dtype,
        encoder=_encoder(model, settings),
        kv_cache_dtype=settings.kv_cache_dtype,
        kernels=kernels,
    )
    runner = Runner(model, abstract_weights(model, settings.dtype, sharding_of(mesh)), sizes, mesh)
    found = []
    jobs = list(_largest(runner.jobs()))
    for number, job in enumerate(jobs):
        name = " ".join(map(str, job.key))
        if progress is not None:
            progress(name, number, len(jobs))
        compiled = aot.compile_for(mesh, job.function, job.arguments, donate=job.donate, results=job.results)
        memory = compiled.memory_analysis()
        found.append((memory.temp_size_in_bytes, memory.output_size_in_bytes - memory.alias_size_in_bytes, name))
    temporaries, _, name = max(found)
    return Programs(
        temporaries=temporaries, results=2 * max(new for _, new, _ in found), source="compiled", largest=name
    )


def _largest(jobs: list[Job]) -> Iterator[Job]:
    """Yield the largest bodies, the full head, and the largest programs that score prompts and run the tower. Others
    need less memory."""
    seen = set()
    for job in jobs:  # the largest of each kind comes first
        kind = tuple(part for part in job.key if isinstance(part, str))
        if kind not in seen and (kind[0] in ("mixed", "decode", "score", "encode") or kind == ("head", "full")):
            seen.add(kind)
            yield job


def _encoder(model: ModelConfig, settings: Settings) -> EncoderConfig | None:
    """Return the configuration for the largest image. The scaling of pixels does not affect memory."""
    if model.vision is None:
        return None
    return EncoderConfig(
        feature_rows=feature_rows(model, settings),
        buckets=patch_buckets(settings.max_pixels // model.vision.patch_size**2)[-1:],
        layers_per_slice=LAYERS_PER_SLICE,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        rescale_factor=1 / 255,
    )
