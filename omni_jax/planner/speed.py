"""Predicted speed of a plan, from the roofline that simulations use."""

import dataclasses
from typing import Literal

from omni_jax.cost.model import StepShape, causal_pairs
from omni_jax.cost.roofline import ACTIVATION_BYTES, Roofline
from omni_jax.planner.memory import DeviceMemory, Settings

IMAGE_PIXELS = 1_003_520  # the engine resizes larger images to this size
ROWS = (1, 8, 32, 64, 128, 256)
PROMPTS = (128, 512, 2048, 8192, 32768)

Bound = Literal["compute", "memory"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Typical:
    """Lengths of a typical request."""

    prompt_tokens: int
    output_tokens: int

    def __post_init__(self):
        if min(self.prompt_tokens, self.output_tokens) < 1:
            raise ValueError(
                f"a request needs at least 1 prompt token and 1 output token, got {self.prompt_tokens} and "
                f"{self.output_tokens}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """A step of `rows` sequences with `context` cached tokens each."""

    rows: int
    context: int
    seconds: float
    bound: Bound


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill:
    """A prompt of `tokens` on an idle engine: seconds to its first token."""

    tokens: int
    seconds: float
    bound: Bound


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduce:
    """An all-reduce; a step has two in each layer."""

    what: str
    nbytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeBound:
    """The smallest number of rows, of `context` tokens each, with which a decode step is compute-bound; None: it never
    is."""

    context: int
    rows: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """Predicted speed of a plan.

    Attributes:
        decode, prefill, all_reduce, compute_bound: times of steps and their parts.
        all_reduces_per_step: number of all-reduces in a step of the text model.
        typical: request that the following attributes are about.
        running: number of such requests that run at once on a replica.
        ttft_seconds: time to the first token, on an idle engine.
        full_step_seconds: time of a step of max_num_batched_tokens at the beginning of a prompt.
        longest_step_seconds: time of such a step at the end of a prompt of max_model_len, which reads all keys and
            values before it: the longest that prompts of other requests delay a stream.
        tpot_seconds: time from token to token, with `running` sequences half-way through their output.
        output_tokens_per_second: output of all replicas at full load: each request costs its prefill and its share of
            the decode steps.
        requests_per_second: throughput of all replicas at full load.
        image_seconds: time of an image of IMAGE_PIXELS in the vision tower; None for a model without one.
    """

    decode: tuple[DecodeStep, ...]
    prefill: tuple[Prefill, ...]
    all_reduce: tuple[AllReduce, ...]
    all_reduces_per_step: int
    compute_bound: tuple[ComputeBound, ...]
    typical: Typical
    running: int
    ttft_seconds: float
    full_step_seconds: float
    longest_step_seconds: float
    tpot_seconds: float
    output_tokens_per_second: float
    requests_per_second: float
    image_seconds: float | None


def make_speed(cost: Roofline, settings: Settings, memory: DeviceMemory, typical: Typical, data: int) -> Speed:
    """Predict the step times of a replica and the throughput of `data` replicas."""
    longest, prompt, output = settings.max_model_len, typical.prompt_tokens, typical.output_tokens
    blocks = -(-(prompt + output) // settings.block_size)
    running = min(settings.max_num_seqs, memory.num_blocks // blocks)
    held = memory.num_blocks * settings.block_size
    rows = sorted({n for n in ROWS if n < settings.max_num_seqs} | {settings.max_num_seqs})
    contexts = sorted({min(n, longest) for n in (prompt, 8192, longest)})
    prompts = sorted({n for n in PROMPTS if n < longest} | {longest})
    step = min(settings.max_num_batched_tokens, longest)
    ttft = cost.prefill_seconds(prompt, 0)
    tpot = cost.decode_seconds(running, running * (prompt + output // 2))
    # `running` requests are prefilled one after another, and decode together.
    seconds = running * ttft + output * tpot
    return Speed(
        decode=tuple(_decode(cost, n, context) for context in contexts for n in rows if n * context <= held),
        prefill=tuple(_prefill(cost, n) for n in prompts),
        all_reduce=tuple(_all_reduces(cost, settings)),
        all_reduces_per_step=0 if cost.devices == 1 else 2 * cost.sizes.layers,
        compute_bound=tuple(ComputeBound(context=n, rows=cost.compute_bound_rows(n)) for n in (1, *contexts)),
        typical=typical,
        running=running,
        ttft_seconds=ttft,
        full_step_seconds=cost.prefill_seconds(step, 0),
        longest_step_seconds=cost.prefill_seconds(step, longest - step),
        tpot_seconds=tpot,
        output_tokens_per_second=data * running * output / seconds,
        requests_per_second=data * running / seconds,
        image_seconds=_image(cost, settings),
    )


def _decode(cost: Roofline, rows: int, context: int) -> DecodeStep:
    shape = StepShape(kind="decode", size=rows, rows=rows, tokens=rows, context=rows * context, attended=rows * context)
    return DecodeStep(rows=rows, context=context, seconds=cost.seconds(shape), bound=_bound(cost, shape))


def _prefill(cost: Roofline, tokens: int) -> Prefill:
    first = min(tokens, cost.chunk_tokens)
    shape = StepShape(kind="mixed", size=first, rows=1, tokens=first, context=first, attended=causal_pairs(first, 0))
    return Prefill(tokens=tokens, seconds=cost.prefill_seconds(tokens, 0), bound=_bound(cost, shape))


def _bound(cost: Roofline, shape: StepShape) -> Bound:
    compute, memory, _ = cost.times(shape)
    return "compute" if compute > memory else "memory"


def _all_reduces(cost: Roofline, settings: Settings) -> list[AllReduce]:
    if cost.devices == 1:
        return []
    row = cost.sizes.hidden_size * max(ACTIVATION_BYTES, settings.dtype.itemsize)
    return [
        AllReduce(what=f"{n:,} {unit}", nbytes=n * row, seconds=cost.all_reduce_seconds(n * row))
        for n, unit in ((settings.max_num_seqs, "rows"), (settings.max_num_batched_tokens, "tokens"))
    ]


def _image(cost: Roofline, settings: Settings) -> float | None:
    if cost.sizes.vision is None:
        return None
    return cost.encode_seconds(min(IMAGE_PIXELS, settings.max_pixels) // cost.sizes.vision.patch_pixels)
