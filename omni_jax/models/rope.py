"""Rotary position embedding (Su et al., arXiv 2104.09864), with the scalings of Llama 3 and YaRN (Peng et al., arXiv
2309.00071).

The layout is Hugging Face's: pairs are (0, d/2), (1, d/2 + 1), ..., not neighbours.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotation speeds of one head.

    Attributes:
        frequencies: radians per position of each of the head_dim / 2 pairs.
        factor: factor on cosines and sines (YaRN's attention temperature). Default: 1.
        sections: number of pairs that rotate with the temporal, height and width position of a token (Qwen2-VL's
            M-RoPE, arXiv 2409.12191); None if all rotate with one position.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0
    sections: tuple[int, int, int] | None = None


def rope_from_config(config: Mapping[str, Any], head_dim: int) -> Rope:
    """Parse `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (transformers 4).

    Raises:
        ValueError: the scaling is not supported, or only a part of the head is rotated.
    """
    parameters = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"rope with partial_rotary_factor={parameters['partial_rotary_factor']} is not supported, only 1.0"
        )
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    factor = 1.0
    if kind == "linear":
        frequencies = frequencies / parameters["factor"]
    elif kind == "llama3":
        frequencies = _llama3(frequencies, parameters)
    elif kind == "yarn":
        frequencies, factor = _yarn(frequencies, parameters, theta, head_dim, config)
    elif kind not in ("default", "mrope"):  # "mrope" is the older name for "default" with an mrope_section
        raise ValueError(f"rope_type {kind!r} is not supported; supported: default, linear, llama3, yarn, mrope")
    sections = parameters.get("mrope_section")
    if sections is not None and (len(sections) != 3 or sum(sections) != head_dim // 2):
        raise ValueError(f"mrope_section must be three numbers that sum to {head_dim // 2}, got {sections}")
    return Rope(
        frequencies=tuple(float(f) for f in frequencies),
        factor=float(factor),
        sections=None if sections is None else tuple(sections),
    )


def rotary(
    rope: Rope, positions: Int[Array, "tokens"] | Int[Array, "3 tokens"]
) -> tuple[Float[Array, "tokens 1 half"], Float[Array, "tokens 1 half"]]:
    """Cosines and sines at `positions`; with M-RoPE these are temporal, height and width positions.

    In float32, because bfloat16 rounds position 257 to 256.
    """
    if rope.sections is not None:
        axis = np.repeat(np.arange(3), rope.sections)
        position = positions[axis].T  # [tokens, half]
    else:
        position = positions[:, None]
    angle = position.astype(jnp.float32) * jnp.asarray(rope.frequencies, jnp.float32)[None, :]
    return (jnp.cos(angle) * rope.factor)[:, None, :], (jnp.sin(angle) * rope.factor)[:, None, :]


def rotate(
    x: Float[Array, "tokens heads head_dim"], cos: Float[Array, "tokens 1 half"], sin: Float[Array, "tokens 1 half"]
) -> Float[Array, "tokens heads head_dim"]:
    """Rotate each head by its token's position."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _llama3(frequencies, parameters):
    """Llama 3.1: divide slow frequencies by `factor`, keep fast ones, interpolate between them by wavelength."""
    original = parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = original * frequencies / (2 * math.pi)  # full turns within the original context
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * keep + frequencies / parameters["factor"] * (1 - keep)


def _yarn(frequencies, parameters, theta, head_dim, config):
    """YaRN's "NTK by parts" (section 3.2) and attention factor (section 3.4)."""
    original = parameters.get("original_max_position_embeddings") or config["max_position_embeddings"]
    factor = parameters.get("factor") or config["max_position_embeddings"] / original

    def pair_with(turns):
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(parameters.get("beta_fast") or 32), pair_with(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    slowed = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)

    def magnitude(weight):
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = parameters.get("attention_factor")
    if attention is None:
        mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)
    return frequencies / factor * slowed + frequencies * (1 - slowed), attention
