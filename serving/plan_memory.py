"""What one device of a mesh holds: weights, KV cache, features, state, temporaries. Bytes of shapes; no array is made.

The shapes are those of the engine's own modules and pool, so that a plan and a start can only differ in temporaries.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from omni_jax.memory import EncoderCache
from omni_jax.models import ModelConfig, vision
from omni_jax.models.decoder import Decoder
from omni_jax.runtime.state import KVCacheDtype, abstract_slots, block_bytes, round_pages

ENCODER_CACHE_TOKENS = 8192  # the engine's default
REPLICATED = ("norm", "patch_embed", "bias")  # what every device has whole: parts of parameters' names


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
class Temporaries:
    """What executables need while they run.

    Attributes:
        nbytes: of the one that needs most.
        source: whether XLA said so, having compiled it for the GPU, or a formula.
        executable: which one it is.
    """

    nbytes: int
    source: Literal["compiled", "estimated"]
    executable: str


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
        temporaries: see Temporaries.
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
    kv_cache: int
    free: int
    block_bytes: int
    num_blocks: int


def mesh_fault(model: ModelConfig, devices: int) -> str | None:
    """Why a model cannot be split over so many devices, or None."""
    for what, size in (
        ("attention heads", model.num_attention_heads),
        ("intermediate_size", model.intermediate_size),
        ("vocab_size", model.vocab_size),
    ):
        if size % devices:
            return f"{what} ({size}) is no multiple of the mesh's model axis ({devices})"
    kv_heads = model.num_key_value_heads
    if kv_heads % devices and devices % kv_heads:
        return f"KV heads ({kv_heads}) neither divide nor are a multiple of the mesh's model axis ({devices})"
    return None


def device_memory(
    model: ModelConfig, settings: Settings, *, total: int, devices: int, temporaries: Temporaries
) -> DeviceMemory:
    """Of one of `devices` that share the model, each with `total` bytes."""
    allowed = int(total * settings.gpu_memory_utilization)
    weights, tower = weight_bytes(model, settings.dtype, devices)
    features = feature_rows(model, settings) * model.hidden_size * settings.dtype.itemsize
    state = state_bytes(model, settings)
    left = allowed - weights - features - state - temporaries.nbytes
    block = device_block_bytes(model, settings, devices)
    # As the engine does it (engine.loading): down what there is room for, up what is needed at most; one block is
    # where padding is written.
    longest = -(-settings.max_model_len // settings.block_size)
    blocks = min(round_pages(max(0, left) // block), round_pages(settings.max_num_seqs * longest + 1, up=True))
    return DeviceMemory(
        total=total,
        reserved=total - allowed,
        weights=weights,
        tower=tower,
        features=features,
        state=state,
        temporaries=temporaries.nbytes,
        kv_cache=blocks * block,
        free=left - blocks * block,
        block_bytes=block,
        num_blocks=max(0, blocks - 1),
    )


def device_block_bytes(model: ModelConfig, settings: Settings, devices: int) -> int:
    """Of a block on one device. KV heads are split, or replicated where there are fewer of them than devices."""
    heads = max(1, model.num_key_value_heads // devices)
    return block_bytes(
        dataclasses.replace(model, num_key_value_heads=heads),
        block_size=settings.block_size,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
    )


def weight_bytes(model: ModelConfig, dtype: np.dtype, devices: int) -> tuple[int, int]:
    """Of one device's weights, and of those the vision tower's."""
    heads = model.num_attention_heads + 2 * model.num_key_value_heads
    mine = model.num_attention_heads // devices + 2 * max(1, model.num_key_value_heads // devices)
    text = tower = 0
    for name, nbytes in decoder_parameters(model, dtype).items():
        if ".qkv" in name:
            text += nbytes // heads * mine
        else:
            text += nbytes if "norm" in name else nbytes // devices
    for name, nbytes in tower_parameters(model, dtype).items():
        tower += nbytes if any(part in name for part in REPLICATED) else nbytes // devices
    return text + tower, tower


@functools.cache
def decoder_parameters(model: ModelConfig, dtype: np.dtype) -> dict[str, int]:
    """Bytes of the decoder's parameters, by name."""
    return _parameters(lambda: Decoder(model, dtype))


@functools.cache
def tower_parameters(model: ModelConfig, dtype: np.dtype) -> dict[str, int]:
    """The same of the vision tower; empty for a model that has none."""
    if (tower := model.vision) is None:
        return {}
    block = _parameters(lambda: vision.Block(tower, dtype))
    parts = {
        "patch_embed": _parameters(lambda: vision.PatchEmbed(tower, dtype)),
        "merger": _parameters(lambda: vision.Merger(tower, dtype)),
    } | {f"blocks.{i}": block for i in range(tower.depth)}
    return {f"{part}.{name}": nbytes for part, names in parts.items() for name, nbytes in names.items()}


def _parameters(make: Any) -> dict[str, int]:
    state = nnx.to_flat_state(nnx.state(nnx.eval_shape(make)))
    return {".".join(map(str, path)): math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for path, leaf in state}


def feature_rows(model: ModelConfig, settings: Settings) -> int:
    """Of the array of features, that of nobody's included; 0 for a model that reads text only."""
    if (tower := model.vision) is None:
        return 0
    largest = settings.max_pixels // (tower.patch_size * tower.spatial_merge_size) ** 2
    return EncoderCache(settings.encoder_cache_tokens or max(ENCODER_CACHE_TOKENS, largest)).array_rows


def state_bytes(model: ModelConfig, settings: Settings) -> int:
    """Of what the runner keeps by slot (runtime.runner), on each device."""
    slots = settings.max_num_seqs + 1
    table = -(-settings.max_model_len // settings.block_size)
    sampling = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(abstract_slots(slots)))
    return sampling + 4 * slots * (table + 1 + model.vocab_size)


def estimated_temporaries(model: ModelConfig, settings: Settings, devices: int) -> Temporaries:
    """Of the largest step: tokens go through a layer's MLP, whose product XLA sums in float32; or of the head that
    samples with penalties, which has a few copies of float32 logits."""
    tokens, rows, width = settings.max_num_batched_tokens, settings.max_num_seqs, settings.dtype.itemsize
    inner = 2 * model.intermediate_size // devices
    body = tokens * (inner * (4 + width) + model.hidden_size * (2 * width + 4))
    head = 4 * rows * model.vocab_size * 4
    name = f"mixed {tokens}" if body >= head else f"head {rows} full"
    return Temporaries(nbytes=max(body, head), source="estimated", executable=name)
