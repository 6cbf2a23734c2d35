"""What one device of a mesh holds: weights, KV cache, features, state, temporaries. Bytes of shapes; no array is made.

The shapes and how they are shared out are the engine's own (models.abstract_weights, runtime.sharding, runtime.state),
so that a plan and a start can only differ in what programs take.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from omni_jax.memory import EncoderCache
from omni_jax.models import ModelConfig, Weights, abstract_weights
from omni_jax.models.axis import MODEL
from omni_jax.runtime.functions import SCORE_CHUNK
from omni_jax.runtime.sharding import DATA, bytes_per_device, fit, sharding_of
from omni_jax.runtime.state import KVCacheDtype, abstract_slots, block_bytes, round_pages
from omni_jax.scheduling import patch_buckets

ENCODER_CACHE_TOKENS = 8192  # the engine's default


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the engine would be started with: names and meanings are EngineConfig's."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    dtype: np.dtype
    kv_cache_dtype: KVCacheDtype = "auto"
    gpu_memory_utilization: float = 0.92
    max_pixels: int = 1_003_520
    encoder_cache_tokens: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """What programs need on a device besides weights, cache and state.

    Attributes:
        temporaries: bytes, of the one that needs most while it runs.
        results: of two steps: one is read while the next is computed.
        source: whether XLA said so, having compiled them for the GPU, or a formula.
        largest: which program needs most.
    """

    temporaries: int
    results: int
    source: Literal["compiled", "estimated"]
    largest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes of one device. `total` is the sum of the others, but for `tower`, which is part of `weights`.

    Attributes:
        total: of the GPU.
        reserved: what --gpu-memory-utilization leaves to others.
        weights: its share of the weights, and what is replicated.
        tower: of them those of the vision tower.
        features: the encoder cache.
        state: block tables, sampling state and token counts, by slot.
        temporaries, results: see Programs.
        kv_cache: the pool.
        free: what is left; below 0, what is missing before there is any pool.
        block_bytes: of one block of the pool.
        num_blocks: of the pool that can be used; 0 if there is no room.
    """

    total: int
    reserved: int
    weights: int
    tower: int
    features: int
    state: int
    temporaries: int
    results: int
    kv_cache: int
    free: int
    block_bytes: int
    num_blocks: int


def device_memory(
    model: ModelConfig, settings: Settings, *, total: int, devices: int, programs: Programs
) -> DeviceMemory:
    """Of one of `devices` that share the model, each with `total` bytes.

    Raises:
        ValueError: they cannot share it (runtime.sharding.fit).
    """
    allowed = int(total * settings.gpu_memory_utilization)
    weights = spread_weights(model, settings.dtype, devices)
    held = bytes_per_device(weights.arrays)
    features = feature_rows(model, settings) * model.hidden_size * settings.dtype.itemsize
    state = state_bytes(model, settings, devices)
    left = allowed - held - features - state - programs.temporaries - programs.results
    block = device_block_bytes(model, settings, devices)
    # As the engine does it (engine.loading): down what there is room for, up what is needed at most; one block is
    # where padding is written.
    longest = -(-settings.max_model_len // settings.block_size)
    blocks = min(round_pages(max(0, left) // block), round_pages(settings.max_num_seqs * longest + 1, up=True))
    return DeviceMemory(
        total=total,
        reserved=total - allowed,
        weights=held,
        tower=held - bytes_per_device(weights.decoder.leaves),
        features=features,
        state=state,
        temporaries=programs.temporaries,
        results=programs.results,
        kv_cache=blocks * block,
        free=left - blocks * block,
        block_bytes=block,
        num_blocks=max(0, blocks - 1),
    )


def device_block_bytes(model: ModelConfig, settings: Settings, devices: int) -> int:
    """Of a block on one device, which has its KV heads of it."""
    whole = block_bytes(
        fit(model, devices),
        block_size=settings.block_size,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
    )
    return whole // devices


@functools.lru_cache(maxsize=64)
def spread_weights(model: ModelConfig, dtype: np.dtype, devices: int) -> Weights:
    """Shapes of the weights with their shardings."""
    mesh = AbstractMesh((1, devices), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2)
    sharding: Any = sharding_of(mesh)  # pyright: ignore[reportArgumentType]  # only sizes and rules are asked for
    return abstract_weights(fit(model, devices), dtype, sharding)


def feature_rows(model: ModelConfig, settings: Settings) -> int:
    """Of the array of features, that of nobody's included; 0 for a model that reads text only."""
    if (tower := model.vision) is None:
        return 0
    largest = settings.max_pixels // (tower.patch_size * tower.spatial_merge_size) ** 2
    return EncoderCache(settings.encoder_cache_tokens or max(ENCODER_CACHE_TOKENS, largest)).array_rows


def state_bytes(model: ModelConfig, settings: Settings, devices: int) -> int:
    """Of what the runner keeps by slot: block tables, sampling state, and token counts, which are shared out."""
    slots = settings.max_num_seqs + 1
    table = -(-settings.max_model_len // settings.block_size)
    sampling = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(abstract_slots(slots)))
    return sampling + 4 * slots * (table + model.vocab_size // devices)


def estimated_programs(model: ModelConfig, settings: Settings, devices: int) -> Programs:
    """Without compiling: what XLA was seen to keep at once, for an A100 and an H100, rounded up (docs/scale.md).

    A step: gate, up and their product in a layer's MLP, and four times the hidden states. A head that samples: three
    times the logits in float32, and what scores prompts as many times those of a chunk. The tower: two widened copies
    of its patches.
    """
    tokens, rows, width = settings.max_num_batched_tokens, settings.max_num_seqs, settings.dtype.itemsize
    needs = {
        f"mixed {tokens}": tokens * width * (3 * model.intermediate_size // devices + 4 * model.hidden_size),
        f"head {rows} full": 3 * rows * model.vocab_size // devices * 4,
        f"score {tokens}": 3 * min(SCORE_CHUNK, tokens) * model.vocab_size // devices * 4,
    }
    results = (tokens + rows) * model.hidden_size * width
    if (tower := model.vision) is not None:
        patches = patch_buckets(settings.max_pixels // tower.patch_size**2)[-1]
        inner = tower.intermediate_size // devices * (2 if tower.hidden_act == "silu" else 1)
        needs[f"encode {patches}"] = patches * 2 * width * (inner + tower.hidden_size)
        # Hidden states, cosines and sines in float32, and where each patch stands.
        results = max(results, patches * (tower.hidden_size * width + 4 * tower.hidden_size // tower.num_heads + 24))
    largest = max(needs, key=lambda name: needs[name])
    return Programs(temporaries=needs[largest], results=2 * results, source="estimated", largest=largest)
