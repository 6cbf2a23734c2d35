"""Proofs of whole steps: the engine's body, head and vision tower, compiled with shapes for weights.

On one GPU: keys and values are written in place, nothing as large as a layer's pool is copied, temporaries stay below a
bound for any number of pages, and every layer calls its kernels. On a mesh also: the collectives, and the bytes on each
device.
"""

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from benchmarks.gpu_proof.finding import Finding, Proof, collective_faults, program_faults
from kernels_pallas import aot
from kernels_pallas.paged_attention import PagedKernels
from omni_jax.cost.published import published_config
from omni_jax.models.config import ModelConfig, model_config
from omni_jax.models.weights import abstract_weights
from omni_jax.runtime.encoder import EncoderConfig
from omni_jax.runtime.executables import Job, Key
from omni_jax.runtime.functions import SCORE_CHUNK
from omni_jax.runtime.runner import Runner, RunnerConfig
from omni_jax.runtime.sharding import bytes_per_device, fit, sharding_of
from omni_jax.runtime.state import KVCacheDtype
from omni_jax.scheduling.buckets import Buckets

ROWS, TOKENS, CONTEXT, BLOCK_SIZE = 32, 512, 4096, 16
PAGES = 1 << 16  # pages of the pool: so many that a copy of one layer's keys exceeds every bound below
PATCHES = 1024  # patches in a call of the vision tower
MIB = 1 << 20
TRITON = PagedKernels(decode="triton", mixed="triton", write="triton")
MOSAIC = dataclasses.replace(TRITON, decode="mosaic")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model on GPUs.

    Attributes:
        published: name of its config.json in omni_jax.cost.
        layers: number of layers to keep; None: all.
        devices: number of GPUs that share it.
        kernels: kernels of the steps.
        vision: whether to keep the vision tower.
        kv_cache_dtype: see RunnerConfig.
        bounds: maximum MiB of temporaries on a device of a decode step, a mixed step, a head, the tower.
    """

    published: str
    layers: int | None = None
    devices: int = 1
    kernels: PagedKernels = TRITON
    vision: bool = False
    kv_cache_dtype: KVCacheDtype = "auto"
    bounds: tuple[int, int, int, int]


MODELS = {
    "h100/qwen2-0.5b": Model(published="Qwen2-0.5B", bounds=(16, 64, 128, 0)),
    "h100/qwen2-0.5b-mosaic": Model(published="Qwen2-0.5B", kernels=MOSAIC, bounds=(16, 64, 128, 0)),
    "h100/qwen2-0.5b-tp2": Model(published="Qwen2-0.5B", devices=2, bounds=(16, 64, 128, 0)),
    # 58 MiB of the bound: XLA copies a layer's `down` to pad its 3,696 rows before it splits the product.
    "h100/72b-2-layers-tp8": Model(published="Qwen2-VL-72B", layers=2, devices=8, bounds=(80, 64, 128, 0)),
    "a100/qwen2-0.5b": Model(published="Qwen2-0.5B", bounds=(16, 64, 128, 0)),
    "h100/qwen2-0.5b-int8": Model(published="Qwen2-0.5B", kv_cache_dtype="int8", bounds=(16, 64, 128, 0)),
    "h100/qwen2-0.5b-xla": Model(published="Qwen2-0.5B", kernels=PagedKernels(), bounds=(64, 512, 128, 0)),
    "a100/qwen2-vl-7b": Model(published="Qwen2-VL-7B", vision=True, bounds=(64, 256, 128, 512)),
    "h100/qwen2-vl-7b": Model(published="Qwen2-VL-7B", vision=True, bounds=(64, 256, 128, 512)),
    "h200/qwen2-vl-7b": Model(published="Qwen2-VL-7B", vision=True, bounds=(64, 256, 128, 512)),
    "h100/qwen2-vl-7b-tp2": Model(published="Qwen2-VL-7B", vision=True, devices=2, bounds=(64, 256, 128, 512)),
}
BODIES = ("decode", "mixed")
HEADS = ("head-greedy", "head-sample", "head-full", "score")
QUICK = {
    "h100/qwen2-0.5b": (*BODIES, "head-greedy", "head-full"),
    "h100/qwen2-0.5b-mosaic": ("decode",),
    "h100/qwen2-0.5b-tp2": (*BODIES, "head-greedy"),
    "h100/72b-2-layers-tp8": (*BODIES, "head-greedy"),
}


def proofs() -> Iterator[Proof]:
    """Yield all proofs, those of the wide matrix included."""
    for model_name, model in MODELS.items():
        target = model_name.partition("/")[0]
        for part in (*BODIES, *HEADS, *(["tower"] if model.vision else [])):
            if model.kernels == MOSAIC and part != "decode":
                continue
            prove = prove_body if part in BODIES else prove_tower if part == "tower" else prove_head
            name = f"{part}/{model_name}"
            yield Proof(
                name=name,
                target=target,
                quick=part in QUICK.get(model_name, ()),
                run=functools.partial(prove, name, target, model),
            )


def prove_body(proof: str, target: str, model: Model) -> list[Finding]:
    """Check the body of a decode or mixed step."""
    begin = time.perf_counter()
    kind = proof.partition("/")[0]
    size = ROWS if kind == "decode" else TOKENS
    runner, config = make_runner(target, model)
    compiled, job = compile_job(runner, (kind, size))
    memory, layers = compiled.memory_analysis(), config.num_hidden_layers
    calls, exchanged = aot.pallas_calls(compiled), aot.collectives(compiled)
    pool = jax.tree.leaves(job.arguments[1])
    # The body does not read an untied output matrix.
    unread = 0 if config.tie_word_embeddings else 2 * config.vocab_size * config.hidden_size // model.devices
    faults = program_faults(
        arguments=memory.argument_size_in_bytes,
        planned=bytes_per_device(job.arguments) - unread,
        aliased=memory.alias_size_in_bytes,
        donated=bytes_per_device([job.arguments[i] for i in job.donate]),
        pool_copies=sum(
            aot.copies_of(compiled, shape) for shape in {array.sharding.shard_shape(array.shape) for array in pool}
        ),
        temporaries=memory.temp_size_in_bytes,
        bound=model.bounds[BODIES.index(kind)] * MIB,
        calls=calls,
        layers=layers,
        expected=_expected_calls(kind, model.kernels),
    )
    # Two all-reduces a layer and one for the embeddings, of hidden states only.
    sums = 2 * layers + 1 if model.devices > 1 else 0
    faults += collective_faults(exchanged, sums=sums, largest=size * config.hidden_size)
    found = [
        f"{memory.alias_size_in_bytes / MIB:.0f} MiB in place",
        f"{memory.temp_size_in_bytes / MIB:.1f} MiB temporary",
        f"{memory.argument_size_in_bytes / MIB:.0f} MiB of arguments",
        *(f"{count} {name}" for name, count in sorted(calls.items())),
        *_exchanged(exchanged),
    ]
    return [_finding(proof, target, job, found, begin, faults)]


def prove_head(proof: str, target: str, model: Model) -> list[Finding]:
    """Check a head, or the program that scores prompts."""
    begin = time.perf_counter()
    kind, _, variant = proof.partition("/")[0].partition("-")
    runner, _ = make_runner(target, model)
    compiled, job = compile_job(runner, (kind, ROWS, variant) if variant else (kind, TOKENS))
    memory, exchanged = compiled.memory_analysis(), aot.collectives(compiled)
    faults = program_faults(
        aliased=memory.alias_size_in_bytes,
        donated=bytes_per_device([job.arguments[i] for i in job.donate]),
        temporaries=memory.temp_size_in_bytes,
        bound=model.bounds[2] * MIB,
    )
    # Each device sends a few numbers a row, and no logits.
    rows = SCORE_CHUNK if kind == "score" else ROWS
    faults += collective_faults(exchanged, sums=None, largest=rows * model.devices * runner.sizes.alternatives)
    found = [f"{memory.temp_size_in_bytes / MIB:.1f} MiB temporary", *_exchanged(exchanged)]
    return [_finding(proof, target, job, found, begin, faults)]


def prove_tower(proof: str, target: str, model: Model) -> list[Finding]:
    """Check the programs of the vision tower."""
    findings = []
    runner, _ = make_runner(target, model)
    assert runner.encoder is not None
    for job in runner.encoder.jobs():
        begin = time.perf_counter()
        compiled, _ = compile_job(runner, job.key)
        memory = compiled.memory_analysis()
        faults = program_faults(
            aliased=memory.alias_size_in_bytes,
            donated=bytes_per_device([job.arguments[i] for i in job.donate]),
            temporaries=memory.temp_size_in_bytes,
            bound=model.bounds[3] * MIB,
        )
        found = [f"{memory.temp_size_in_bytes / MIB:.1f} MiB temporary", *_exchanged(aot.collectives(compiled))]
        findings.append(_finding(proof, target, job, found, begin, faults))
    return findings


def make_runner(target: str, model: Model) -> tuple[Runner, ModelConfig]:
    """Return a runner that only compiles, and its model as split over the devices."""
    mesh = aot.mesh(target, model.devices)
    config = model_config(published_config(model.published))
    config = dataclasses.replace(
        config,
        num_hidden_layers=model.layers or config.num_hidden_layers,
        vision=config.vision if model.vision else None,
    )
    config, dtype = fit(config, model.devices), np.dtype("bfloat16")
    # The scaling of pixels does not change a program.
    encoder = EncoderConfig(
        feature_rows=4096,
        buckets=(PATCHES,),
        layers_per_slice=8,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        rescale_factor=1 / 255,
    )
    sizes = RunnerConfig(
        max_num_seqs=ROWS,
        max_model_len=CONTEXT,
        block_size=BLOCK_SIZE,
        num_pages=PAGES,
        buckets=Buckets(decode=(ROWS,), mixed=(TOKENS,)),
        dtype=dtype,
        encoder=encoder if model.vision else None,
        kv_cache_dtype=model.kv_cache_dtype,
        kernels=model.kernels,
    )
    return Runner(config, abstract_weights(config, dtype, sharding_of(mesh)), sizes, mesh), config


def compile_job(runner: Runner, key: Key, *, donate: tuple[int, ...] | None = None) -> tuple[Any, Job]:
    """Compile the job of a key. Returns the executable and the job; `donate` overrides the job's."""
    job = next(job for job in runner.jobs() if job.key == key)
    donate = job.donate if donate is None else donate
    return aot.compile_for(runner.mesh, job.function, job.arguments, donate=donate, results=job.results), job


def _expected_calls(kind: str, kernels: PagedKernels) -> tuple[str, ...]:
    """Return the words that must each be in the name of a called kernel."""
    attention = kernels.decode if kind == "decode" else kernels.mixed
    names = {"triton": f"paged_{kind}", "mosaic": "mosaic"}
    return (*([names[attention]] if attention in names else []), *(["write"] if kernels.write == "triton" else []))


def _exchanged(exchanged: list[aot.Collective]) -> list[str]:
    return [f"{count} {kind}" for kind, count in sorted(Counter(each.kind for each in exchanged).items())]


def _finding(proof: str, target: str, job: Job, found: list[str], begin: float, faults: tuple[str, ...]) -> Finding:
    return Finding(
        proof=proof,
        what=f"{proof.rpartition('/')[2]}: {' '.join(map(str, job.key))}",
        target=target,
        found=", ".join(found),
        seconds=time.perf_counter() - begin,
        faults=faults,
    )
