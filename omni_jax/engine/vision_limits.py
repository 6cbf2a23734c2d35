"""How large images may be, by default and by settings: the engine and the planner share these rules."""

import dataclasses

from omni_jax.models.config import VisionConfig

ENCODER_CACHE_TOKENS = 8192  # default of the encoder cache, if no image takes more
CONTEXT_SHARE = 2  # an image may take 1 / this of max_model_len, so that text and answer have room
MEMORY_SHARE = 8  # the largest call of the tower may take 1 / this of the memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageLimit:
    """A limit on the pixels of a resized image or frame, and what sets it, for people."""

    pixels: int
    reason: str


def image_limit(
    given: int | None, own: int, tower: VisionConfig, *, max_model_len: int, memory: int, width: int, devices: int = 1
) -> ImageLimit:
    """The limit on the pixels of a resized image.

    It is the setting if there is one, and otherwise the checkpoint's own. The latter is lowered to what half of the
    context holds, and halved until the tower's largest call fits into an eighth of the memory.

    Args:
        given: max_pixels of the settings; it only lowers the checkpoint's own.
        own: the checkpoint's own limit (preprocessor_config.json).
        memory: bytes of a device that the engine may use; on a CPU, of the host.
        width: bytes of a value inside the tower.
        devices: devices that share the tower.
    """
    if given is not None and given < own:
        return ImageLimit(pixels=given, reason="--max-pixels")
    limit = ImageLimit(pixels=own, reason="the checkpoint's own limit")
    if given is not None:
        return limit
    token = (tower.patch_size * tower.spatial_merge_size) ** 2
    if own > (most := max(1, max_model_len // CONTEXT_SHARE) * token):
        limit = ImageLimit(pixels=most, reason=f"half of max_model_len, {max_model_len:,} tokens")
    pixels = limit.pixels
    while tower_bytes(tower, pixels // tower.patch_size**2, width, devices) > memory // MEMORY_SHARE and pixels > token:
        pixels //= 2
    if pixels < limit.pixels:
        limit = ImageLimit(pixels=pixels, reason=f"an eighth of the {memory / 1e9:.1f} GB of memory, for the tower")
    return limit


def encoder_cache_tokens(given: int | None, max_pixels: int, tower: VisionConfig) -> int:
    """Tokens whose features stay on the device: the setting, or the default, which holds any image."""
    return given or max(ENCODER_CACHE_TOKENS, max_pixels // (tower.patch_size * tower.spatial_merge_size) ** 2)


def tower_bytes(tower: VisionConfig, patches: int, width: int, devices: int = 1) -> int:
    """Bytes of temporaries and of two results of a call of the tower with `patches` patches, estimated."""
    return tower_temporaries(tower, patches, width, devices) + 2 * tower_results(tower, patches, width)


def tower_temporaries(tower: VisionConfig, patches: int, width: int, devices: int) -> int:
    """Bytes of two copies of the patches at the inner width."""
    inner = tower.intermediate_size // devices * (2 if tower.hidden_act == "silu" else 1)
    return patches * 2 * width * (inner + tower.hidden_size)


def tower_results(tower: VisionConfig, patches: int, width: int) -> int:
    """Bytes of hidden states, of cosines and sines in float32, and of the position of each patch."""
    return patches * (tower.hidden_size * width + 4 * tower.hidden_size // tower.num_heads + 24)
