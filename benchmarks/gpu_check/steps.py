"""Times of whole steps, body and head, of models with random weights, beside their roofline and the cost model.

Steps are dispatched as an engine does, with the host running ahead: it does not wait for the device within a round of
COUNT steps, so the time is the device's, or the host's if that is longer (`host_ms` is the dispatch alone). The
roofline uses the ceilings measured here: the step's bytes at the bandwidth of copying, or its operations at the rate of
a large product, whichever takes longer.
"""

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_check.measure import in_turn
from benchmarks.gpu_check.section import Section
from kernels_pallas.paged_attention import PagedKernels
from kernels_pallas.paged_attention.choose import choose
from kernels_pallas.paged_attention.self_test import CANNOT_RUN
from omni_jax.cost.model import StepShape, causal_pairs
from omni_jax.cost.published import published_config
from omni_jax.cost.roofline import GPUS, Gpu, ModelSizes, Roofline
from omni_jax.models.config import ModelConfig, model_config
from omni_jax.models.weights import Weights, abstract_weights
from omni_jax.runtime.executables import Executable, Key, compile_all
from omni_jax.runtime.runner import Runner, RunnerConfig
from omni_jax.runtime.sharding import make_mesh, sharding_of
from omni_jax.scheduling.buckets import Buckets

CONTEXT = 1024  # context of each row of a decode step
PROMPT = 2048  # tokens of a mixed step, which is one prompt
COUNT = 20  # steps in a round
PAGE = 16
TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "bos_token_id": None,
    "dtype": "float32",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Steps of a model that are compiled and measured together.

    Attributes:
        decode: (number of rows, kernels) of decode steps; None: the kernels that an engine chooses.
        mixed: whether to add a step of one prompt.
        seconds: time that the plan needs.
    """

    decode: tuple[tuple[int, PagedKernels | None], ...]
    mixed: bool = False
    seconds: float


TRITON = PagedKernels(decode="triton", mixed="triton", write="triton")
MOSAIC = dataclasses.replace(TRITON, decode="mosaic")
PLANS = (
    ("Qwen2.5-7B", Plan(decode=((64, None),), seconds=30)),
    ("Qwen2-0.5B", Plan(decode=((64, None), (1, None)), seconds=20)),
    ("Qwen2.5-7B", Plan(decode=((1, None), (256, None)), mixed=True, seconds=35)),
    ("Qwen2-0.5B", Plan(decode=((256, None),), mixed=True, seconds=20)),
    ("Qwen2.5-7B", Plan(decode=((64, PagedKernels()),), seconds=20)),
    ("Qwen2.5-7B", Plan(decode=((64, MOSAIC),), seconds=30)),
)
DRY_PLANS = (("tiny", Plan(decode=((2, None),), mixed=True, seconds=0)),)


def steps(section: Section) -> None:
    """Add a row for each step: milliseconds, the roofline's, their ratio, and the cost model's prediction."""
    for name, plan in DRY_PLANS if section.dry_run else PLANS:
        what = f"{name}: {', '.join(str(rows) for rows, _ in plan.decode)} rows{' and a prompt' if plan.mixed else ''}"
        if not section.has_time(plan.seconds, for_=what):
            continue
        config = TINY if name == "tiny" else published_config(name)
        try:
            _measure(section, name, config, plan)
        except CANNOT_RUN as error:
            section.add(model=name, step=what, error=f"{type(error).__name__}: {str(error)[:500]}")


def _measure(section: Section, name: str, config: Mapping[str, Any], plan: Plan) -> None:
    context, prompt = (24, 16) if section.dry_run else (CONTEXT, PROMPT)
    model, dtype = model_config(config), np.dtype(jnp.bfloat16)
    mesh = make_mesh(jax.devices()[:1])
    weights = random_weights(model, dtype, mesh)
    for kernels in dict.fromkeys(kernels for _, kernels in plan.decode):
        chosen = kernels or _chosen(model, dtype)
        if section.dry_run:  # the kernels that compile fastest
            chosen = PagedKernels(decode="reference", mixed="reference")
        sizes = sorted(rows for rows, wanted in plan.decode if wanted == kernels)
        pages = max(sizes[-1] * -(-context // PAGE), -(-prompt // PAGE))
        runner = Runner(
            model,
            weights,
            RunnerConfig(
                max_num_seqs=sizes[-1],
                max_model_len=max(context, prompt),
                block_size=PAGE,
                num_pages=pages + 1,
                buckets=Buckets(decode=tuple(sizes), mixed=(prompt,)),
                dtype=dtype,
                kernels=chosen,
            ),
            mesh,
        )
        shapes = [_decode_shape(rows, context) for rows in sizes]
        if plan.mixed and kernels is None:
            shapes.append(_mixed_shape(prompt))
        _run(section, name, config, runner, weights, shapes)


def _run(
    section: Section,
    name: str,
    config: Mapping[str, Any],
    runner: Runner,
    weights: Weights,
    shapes: list[StepShape],
) -> None:
    keys: list[Key] = [(shape.kind, shape.size) for shape in shapes]
    keys += [("head", rows, "greedy") for rows in runner.config.buckets.decode]
    jobs = {job.key: job for job in runner.jobs()}
    begin = time.perf_counter()
    programs = compile_all([jobs[key] for key in keys])
    compiled = time.perf_counter() - begin
    state = _State(runner, jobs[keys[0]].arguments, jobs[keys[-1]].arguments)
    count = 2 if section.dry_run else COUNT
    host: dict[Key, float] = {}
    calls = {shape: functools.partial(_steps, state, programs, weights, shape, count, host) for shape in shapes}
    seconds = in_turn(calls, rounds=2 if section.dry_run else 5)
    sizes = ModelSizes.from_config(config)
    for shape in shapes:
        took = seconds[shape] / count
        section.add(
            model=name,
            step=f"{shape.kind} of {shape.rows if shape.kind == 'decode' else shape.tokens}",
            kernels=getattr(runner.config.kernels, shape.kind),
            milliseconds=1e3 * took,
            **_against(section, sizes, shape, took),
            host_ms=1e3 * host[shape.kind, shape.size] / count,
            compile_s=round(compiled, 1),
        )


def _against(section: Section, sizes: ModelSizes, shape: StepShape, took: float) -> dict[str, float | None]:
    """Return the roofline of the measured ceilings, and the prediction for this GPU if cost.GPUS has it."""
    found: dict[str, float | None] = dict.fromkeys(
        ("roofline_ms", "times_roofline", "predicted_ms", "prediction_error")
    )
    if "matmul_flops" in section.ceilings:
        here = Gpu(
            name="measured",
            bf16_flops=section.ceilings["matmul_flops"],
            fp8_flops=None,
            memory_bandwidth=section.ceilings["copy_bytes_per_s"],
            memory_bytes=1,
            link_bandwidth=1.0,
        )
        bound = Roofline(sizes=sizes, gpu=here, mfu=1.0, mbu=1.0, overhead_seconds=0.0).seconds(shape)
        found |= {"roofline_ms": 1e3 * bound, "times_roofline": took / bound}
    kind = "h100" if section.dry_run else section.facts.get("device", "").lower()
    gpu = next((GPUS[key] for key in ("h200", "h100", "a100") if key in kind), None)
    if gpu is not None:
        predicted = Roofline(sizes=sizes, gpu=gpu).seconds(shape)
        found |= {"predicted_ms": 1e3 * predicted, "prediction_error": predicted / took - 1}
    return found


class _State:
    """Arguments of a step besides weights: cache, tables, last tokens. The results of a step replace them."""

    def __init__(self, runner: Runner, body: tuple[Any, ...], head: tuple[Any, ...]):
        zeros = functools.cache(lambda shape, dtype: jax.jit(lambda: jnp.zeros(shape, dtype)))
        _, pool, tables, last_token, _, _ = body
        self.runner = runner
        self.pool, self.last_token, self.slots = (
            jax.tree.map(lambda x: zeros(x.shape, x.dtype)(), tree) for tree in (pool, last_token, head[2])
        )
        slots, width = tables.shape
        pages = np.random.default_rng(0).permutation(runner.config.num_pages - 1) + 1
        self.tables = jax.device_put(np.resize(pages, (slots, width)).astype(np.int32))
        self.packed = functools.cache(self._packed)

    def _packed(self, shape: StepShape) -> tuple[np.ndarray, np.ndarray]:
        """Return the buffers of body and head, with random tokens and all rows at the end of their context."""
        shapes = self.runner.sizes
        rows = shape.size if shape.kind == "decode" else shapes.rows
        buffer, field = shapes.body_layout(shape.size, rows).fresh()
        counts = np.zeros(rows, np.int32)
        counts[: shape.rows] = shape.tokens // shape.rows
        field["query_start"][:] = np.concatenate([[0], np.cumsum(counts)])
        field["kv_len"][:] = 1
        field["kv_len"][: shape.rows] = shape.context // shape.rows
        field["row_slot"][:] = np.arange(rows)
        field["sample_at"][:] = 0
        field["sample_at"][: shape.rows] = field["query_start"][1 : shape.rows + 1] - 1
        for name in ("dropped", "update_slot", "update_index", "update_block"):
            field[name][:] = 0
        field["update_slot"][:] = shapes.slots - 1  # the padding slot, which no row reads
        field["tokens"][:] = np.random.default_rng(1).integers(0, shapes.vocab_size, shape.size)
        head, field = shapes.head_layout(self.head_rows(shape)).fresh()
        field["slot"][:] = np.arange(self.head_rows(shape))
        for name, value in (("position", shape.context // shape.rows), ("suppress", 0), ("forced", -1)):
            field[name][:] = value
        return buffer, head

    def head_rows(self, shape: StepShape) -> int:
        return shape.size if shape.kind == "decode" else self.runner.config.buckets.decode[0]


def _steps(
    state: _State,
    programs: Mapping[Key, Executable],
    weights: Weights,
    shape: StepShape,
    count: int,
    host: dict[Key, float],
) -> jax.Array:
    body, head = programs[shape.kind, shape.size], programs["head", state.head_rows(shape), "greedy"]
    packed, packed_head = state.packed(shape)
    result = None
    begin = time.perf_counter()
    for _ in range(count):
        state.pool, state.tables, hidden, _ = body(
            weights.decoder.leaves, state.pool, state.tables, state.last_token, packed, ()
        )
        state.last_token, _, result = head(
            weights.output_matrix, hidden, state.slots, state.last_token, (), packed_head
        )
    host[shape.kind, shape.size] = time.perf_counter() - begin
    assert result is not None
    return result


def random_weights(model: ModelConfig, dtype: np.dtype, mesh: jax.sharding.Mesh) -> Weights:
    """Return random weights, drawn on the device, small enough that nothing overflows."""
    shapes = abstract_weights(model, dtype, sharding_of(mesh))

    @functools.cache
    def maker(shape: tuple[int, ...]):
        if len(shape) == 1:
            return jax.jit(lambda key: jnp.ones(shape, dtype))
        return jax.jit(lambda key: 0.02 * jax.random.normal(key, shape, dtype))

    leaves = shapes.decoder.leaves
    arrays = tuple(
        jax.device_put(maker(leaf.shape)(jax.random.key(number)), leaf.sharding) for number, leaf in enumerate(leaves)
    )
    output = next(number for number, leaf in enumerate(leaves) if leaf is shapes.output_matrix)
    return Weights(decoder=dataclasses.replace(shapes.decoder, leaves=arrays), output_matrix=arrays[output])


def _chosen(model: ModelConfig, dtype: np.dtype) -> PagedKernels:
    """Choose kernels as an engine does, without the self-test, which the section numerics runs."""
    device = jax.devices()[0]
    return choose(
        platform=device.platform,
        device_kind=device.device_kind,
        compute_capability=getattr(device, "compute_capability", None),
        head_dim=model.head_dim,
        page_size=PAGE,
        heads=model.num_attention_heads,
        kv_heads=model.num_key_value_heads,
        dtype=dtype,
    )[0]


def _decode_shape(rows: int, context: int) -> StepShape:
    total = rows * context
    return StepShape(kind="decode", size=rows, rows=rows, tokens=rows, context=total, attended=total)


def _mixed_shape(tokens: int) -> StepShape:
    pairs = causal_pairs(tokens, 0)
    return StepShape(kind="mixed", size=tokens, rows=1, tokens=tokens, context=tokens, attended=pairs)
