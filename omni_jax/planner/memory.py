"""Memory of one device of a mesh, computed from shapes: weights, KV cache, features, state, temporaries.

Shapes and shardings are the engine's (models.abstract_weights, runtime.sharding, runtime.state), so a plan can differ
from an engine only in the temporaries and results of programs.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from omni_jax.engine.vision_limits import encoder_cache_tokens, tower_results, tower_temporaries
from omni_jax.memory.encoder_cache import EncoderCache
from omni_jax.models.axis import MODEL
from omni_jax.models.config import ModelConfig
from omni_jax.models.weights import Weights, abstract_weights
from omni_jax.runtime.functions import SCORE_CHUNK
from omni_jax.runtime.sharding import DATA, bytes_per_device, fit, sharding_of
from omni_jax.runtime.state import KVCacheDtype, abstract_slots, block_bytes, round_pages
from omni_jax.scheduling.buckets import patch_buckets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the engine, with the names and meanings of EngineConfig."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    dtype: np.dtype
    kv_cache_dtype: KVCacheDtype = "auto"
    gpu_memory_utilization: float = 0.92
    max_pixels: int = 0  # of a model that reads text only
    encoder_cache_tokens: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """Memory of programs on a device besides weights, cache and state.

    Attributes:
        temporaries: bytes of temporaries of the program that needs the most.
        results: bytes of the results of two steps: one is read while the next is computed.
        source: whether XLA reported the bytes after compiling for the GPU, or a formula estimates them.
        largest: name of the program that needs the most temporaries.
    """

    temporaries: int
    results: int
    source: Literal["compiled", "estimated"]
    largest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes on one device. `total` is the sum of reserved, weights, features, state, temporaries, results, kv_cache and
    free.

    Attributes:
        total: memory of the GPU.
        reserved: share that --gpu-memory-utilization leaves unused.
        weights: weights on this device: its shards and what is replicated.
        tower: part of `weights` that belongs to the vision tower.
        features: encoder cache.
        state: block tables, sampling state and token counts, by slot.
        temporaries, results: see Programs.
        kv_cache: KV cache.
        free: unused rest; negative if bytes are missing even without a KV cache.
        block_bytes: one block of the KV cache.
        num_blocks: number of usable blocks; 0 if there is no room.
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
    """Return the memory of one of `devices` that share the model, each with `total` bytes.

    Raises:
        ValueError: the model cannot be split over the devices (runtime.sharding.fit).
    """
    allowed = int(total * settings.gpu_memory_utilization)
    weights = spread_weights(model, settings.dtype, devices)
    held = bytes_per_device(weights.arrays)
    features = feature_rows(model, settings) * model.hidden_size * settings.dtype.itemsize
    state = state_bytes(model, settings, devices)
    left = allowed - held - features - state - programs.temporaries - programs.results
    block = device_block_bytes(model, settings, devices)
    # As in engine.loading: blocks that fit are rounded down, blocks that can be needed are rounded up. Padding is
    # written to one block.
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
    """Return the bytes of a block on one device, which holds its share of the KV heads."""
    whole = block_bytes(
        fit(model, devices),
        block_size=settings.block_size,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
    )
    return whole // devices


@functools.lru_cache(maxsize=64)
def spread_weights(model: ModelConfig, dtype: np.dtype, devices: int) -> Weights:
    """Return the shapes of the weights with their shardings."""
    mesh = AbstractMesh((1, devices), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2)
    sharding: Any = sharding_of(mesh)  # pyright: ignore[reportArgumentType]  # only shapes and rules are used
    return abstract_weights(fit(model, devices), dtype, sharding)


def feature_rows(model: ModelConfig, settings: Settings) -> int:
    """Return the rows of the feature array, row 0 (none) included; 0 for a model without a vision tower."""
    if (tower := model.vision) is None:
        return 0
    return EncoderCache(encoder_cache_tokens(settings.encoder_cache_tokens, settings.max_pixels, tower)).array_rows


def state_bytes(model: ModelConfig, settings: Settings, devices: int) -> int:
    """Return the bytes of the runner's state by slot: block tables, sampling state, and token counts (split)."""
    slots = settings.max_num_seqs + 1
    table = -(-settings.max_model_len // settings.block_size)
    sampling = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(abstract_slots(slots)))
    return sampling + 4 * slots * (table + model.vocab_size // devices)


def estimated_programs(model: ModelConfig, settings: Settings, devices: int) -> Programs:
    """Estimate the memory of programs, from XLA's temporaries for an A100 and an H100 (docs/scale.md).

    A step: gate, up and their product in a layer's MLP, and four times the hidden states. A sampling head: three times
    the logits in float32; scoring prompts: three times those of a chunk. The tower: two copies of its patches at the
    inner width.
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
        needs[f"encode {patches}"] = tower_temporaries(tower, patches, width, devices)
        results = max(results, tower_results(tower, patches, width))
    largest = max(needs, key=lambda name: needs[name])
    return Programs(temporaries=needs[largest], results=2 * results, source="estimated", largest=largest)
