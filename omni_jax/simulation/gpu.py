"""A simulated replica on a named GPU, from a model's config.json. Needs neither GPU nor weights."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omni_jax.cost.roofline import ModelSizes, Roofline, gpu_named
from omni_jax.scheduling.buckets import default_buckets
from omni_jax.simulation.replica import ReplicaConfig

if TYPE_CHECKING:  # transformers is not imported for a type
    from omni_jax.inputs.prompt import VisionInputs

LIMITS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 32768, "block_size": 16}
LAYERS_PER_SLICE = 8  # layers of the vision tower per slice, the engine's default on a GPU
OVERHEAD = 256  # overhead of a step in tokens (Buckets.overhead), the engine's default on a GPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuReplica:
    """The arguments of `simulate` for a model on a GPU.

    Attributes:
        config: The engine's defaults for a GPU.
        cost: The GPU's roofline.
        vision: How images become patches; None for a model that reads text only.
    """

    config: ReplicaConfig
    cost: Roofline
    vision: "VisionInputs | None"


def gpu_replica(
    model: Mapping[str, Any],
    gpu: str,
    *,
    devices: int = 1,
    gpu_memory_utilization: float = 0.92,
    max_pixels: int = 1_003_520,
    roofline: Mapping[str, Any] | None = None,
    **settings: Any,
) -> GpuReplica:
    """Describe a replica on one GPU, or on several that share one copy of the model.

    The KV cache gets the memory that weights and features leave; activations are not counted.

    Args:
        model: The model's config.json.
        gpu: Name of a GPU in cost.GPUS.
        devices: Number of GPUs.
        gpu_memory_utilization: Share of the memory to use.
        max_pixels: Maximum number of pixels of a resized image.
        roofline: Replaces assumptions of Roofline.
        settings: Replace defaults of ReplicaConfig.

    Raises:
        ValueError: The GPU is unknown, or its memory does not hold the weights and one sequence.
        UnsupportedModel: The engine does not support the model.
    """
    from omni_jax.models.config import model_config  # imported here because it imports JAX

    sizes, card = ModelSizes.from_config(model), gpu_named(gpu)
    vision = _vision(model_config(model).vision, max_pixels)
    limits: dict[str, Any] = LIMITS | settings
    limits["max_model_len"] = min(limits["max_model_len"], model_config(model).max_position_embeddings)
    limits.setdefault(
        "buckets",
        default_buckets(
            max_num_seqs=limits["max_num_seqs"],
            max_num_batched_tokens=limits["max_num_batched_tokens"],
            overhead=OVERHEAD,
        ),
    )
    if vision is None:
        limits["encoder_cache_tokens"] = 0
    else:
        limits.setdefault("max_patches", max_pixels // vision.settings.patch_size**2)
        limits.setdefault("encoder_slices", -(-vision.config.depth // LAYERS_PER_SLICE) + 1)
    cost = Roofline(
        sizes=sizes,
        gpu=card,
        devices=devices,
        **{"chunk_tokens": limits["max_num_batched_tokens"]} | dict(roofline or {}),
    )
    config = ReplicaConfig(**limits)
    if config.num_blocks is None:
        features = config.encoder_cache_tokens * sizes.hidden_size * cost.dtype_bytes
        memory = card.memory_bytes * devices * gpu_memory_utilization
        left = memory - sizes.parameter_bytes(cost.dtype_bytes) - features
        blocks = int(left // (sizes.kv_bytes_per_token(cost.dtype_bytes) * config.block_size))
        least = -(-config.max_model_len // config.block_size)
        if blocks < least:
            raise ValueError(
                f"{devices} x {card.name} hold {memory / 1e9:.1f} GB at {gpu_memory_utilization:.0%}, and the weights "
                f"take {sizes.parameter_bytes(cost.dtype_bytes) / 1e9:.1f}: the rest holds {max(blocks, 0)} blocks of "
                f"{config.block_size} tokens, but one sequence of {config.max_model_len} needs {least}"
            )
        config = dataclasses.replace(config, num_blocks=min(blocks, config.max_num_seqs * least))
    return GpuReplica(config=config, cost=cost, vision=vision)


def _vision(vision: Any, max_pixels: int) -> "VisionInputs | None":
    """Preprocessing for a models.VisionConfig, with the pixel bounds of Qwen2-VL."""
    if vision is None:
        return None
    from omni_jax.inputs.image import VisionSettings
    from omni_jax.inputs.prompt import VisionInputs

    unit = (vision.patch_size * vision.spatial_merge_size) ** 2
    return VisionInputs(
        config=vision,
        settings=VisionSettings(
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
            min_pixels=4 * unit,
            max_pixels=max_pixels,
            video_min_pixels=4 * unit,
            video_max_pixels=max_pixels,
            fps=2.0,
            min_frames=4,
            max_frames=768,
            mean=(0.0,) * 3,
            std=(1.0,) * 3,
            rescale_factor=1 / 255,
            resample=3,
        ),
    )
