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

from checkpoints.values import Values

MAX_POSITIONS = 2**30


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


# Keys of each rope_type besides those that every type may have. Any other key is refused: an option that is not known
# here would change the model if it were ignored.
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "mrope_section", "partial_rotary_factor"}
_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    # `finetuned` only says how the weights were made.
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "attn_factor", "extrapolation_factor"}
    | {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "finetuned"},
}


def rope_from_config(config: Mapping[str, Any], head_dim: int) -> Rope:
    """Parse `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (transformers 4).

    Raises:
        ValueError: the scaling is not supported, one of its values is wrong, or only a part of the head is rotated.
    """
    kind, given = _parameters(config)
    theta = given.number("rope_theta", None, low=2, high=1e15)
    theta = float(theta or Values(content=config).number("rope_theta", 10000.0, low=2, high=1e15))
    partial = given.content.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ValueError(f"rope with partial_rotary_factor={partial} is not supported, only 1.0")
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    attention = 1.0
    if kind != "default":
        original, factor = _original(given, config), _factor(given, config)
        if kind == "linear":
            frequencies = frequencies / factor
        elif kind == "llama3":
            frequencies = _llama3(frequencies, given, original, factor)
        else:
            frequencies = _yarn(frequencies, given, original, factor, theta, head_dim)
            attention = _yarn_attention(given, factor)
    sections = given.integers("mrope_section", None, low=1)
    if sections is not None and (len(sections) != 3 or sum(sections) != head_dim // 2):
        raise ValueError(f"mrope_section must be three numbers that sum to {head_dim // 2}, got {list(sections)}")
    return Rope(
        frequencies=tuple(float(f) for f in frequencies),
        factor=float(attention),
        sections=sections,
    )


def max_positions(config: Mapping[str, Any]) -> int:
    """Number of positions that a model supports, with those that its rope scaling adds.

    `yarn` and `linear` reach `factor` times the original length, as in vLLM: that is
    `original_max_position_embeddings`, or `max_position_embeddings` where a config has no such key. A
    `max_position_embeddings` that is larger already stays. Llama 3's configs state the length after scaling.

    Args:
        config: keys of the text decoder.

    Raises:
        ValueError: as in rope_from_config, for the scaling.
    """
    kind, given = _parameters(config)
    if kind not in ("linear", "yarn"):
        return _stated(config)
    return max(_stated(config), int(_original(given, config) * _factor(given, config)))


def _parameters(config: Mapping[str, Any]) -> tuple[str, Values]:
    """The rope_type, and the parameters of the scaling.

    `rope_scaling` replaces the scaling in `rope_parameters`, as in transformers 5: people add it by hand to extend the
    context of a model.
    """
    values, file = Values(content=config), "rope_parameters"
    given = _without_nulls(values.object("rope_parameters", {}))
    if scaling := _without_nulls(values.object("rope_scaling", {})):
        given = {k: v for k, v in given.items() if k in _COMMON_KEYS - {"rope_type", "type"}} | scaling
        file = "rope_scaling"
    kinds = {str(given[key]) for key in ("rope_type", "type") if key in given} or {"default"}
    if "mrope" in kinds:  # the older name for "default" with an mrope_section
        kinds = kinds - {"mrope"} | {"default"}
    if len(kinds) > 1:
        raise ValueError(f"rope_type is {given['rope_type']!r}, but type is {given['type']!r}: remove one of them")
    [kind] = kinds
    if kind not in _KEYS:
        raise ValueError(f"rope_type {kind!r} is not supported; supported: {', '.join(_KEYS)}, mrope")
    if unknown := sorted(given.keys() - _COMMON_KEYS - _KEYS[kind]):
        raise ValueError(
            f"rope_type {kind!r} with {', '.join(unknown)} is not supported; supported besides rope_theta: "
            f"{', '.join(sorted(_KEYS[kind])) or 'nothing'}"
        )
    return kind, Values(content=given, file=f"config.json: {file}")


def _without_nulls(values: Values) -> dict[str, Any]:
    return {key: value for key, value in values.content.items() if value is not None}


def _stated(config: Mapping[str, Any]) -> int:
    return Values(content=config).integer("max_position_embeddings", 2048, high=MAX_POSITIONS)


def _original(given: Values, config: Mapping[str, Any]) -> int:
    """The number of positions before scaling."""
    name = "original_max_position_embeddings"
    outer = Values(content=config).integer(name, None, high=MAX_POSITIONS)  # its place in some configs of transformers
    return outer or given.integer(name, None, high=MAX_POSITIONS) or _stated(config)


def _factor(given: Values, config: Mapping[str, Any]) -> float:
    implied = _stated(config) / _original(given, config)
    limits = {"low": 1, "high": 2**20}
    return float(given.number("factor", implied, **limits) if implied > 1 else given.number("factor", **limits))


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


def _llama3(frequencies, given: Values, original: int, factor: float):
    """Llama 3.1: divide slow frequencies by `factor`, keep fast ones, interpolate between them by wavelength."""
    low, high = (given.number(key, low=0, high=2**20) for key in ("low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise ValueError(f"low_freq_factor ({low}) must be below high_freq_factor ({high})")
    turns = original * frequencies / (2 * math.pi)  # full turns within the original context
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * keep + frequencies / factor * (1 - keep)


def _yarn(frequencies, given: Values, original: int, factor: float, theta: float, head_dim: int):
    """YaRN's "NTK by parts" (section 3.2)."""
    fast = given.number("beta_fast", 32, low=0, high=2**20) or 32  # 0 is the default, as in transformers
    slow = given.number("beta_slow", 1, low=0, high=2**20) or 1
    if fast < slow:
        raise ValueError(f"beta_fast ({fast}) must be at least beta_slow ({slow})")
    given.number("extrapolation_factor", 1, low=1, high=1)

    def pair_with(turns):
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(fast), pair_with(slow)
    if given.boolean("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    slowed = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return frequencies / factor * slowed + frequencies * (1 - slowed)


def _yarn_attention(given: Values, factor: float) -> float:
    """The factor on cosines and sines (section 3.4: 0.1 ln(factor) + 1).

    `attention_factor` replaces the formula (transformers), `attn_factor` multiplies it (the authors' code, vLLM,
    llama.cpp), `mscale` and `mscale_all_dim` are weights of the logarithm (DeepSeek).
    """
    replacing = given.number("attention_factor", None, low=1e-3, high=1e3)
    multiplying = given.number("attn_factor", None, low=1e-3, high=1e3)
    if replacing is not None and multiplying is not None:
        raise ValueError("yarn has both attention_factor and attn_factor: remove one of them")
    mscale, all_dim = (given.number(key, None, low=0, high=1e3) for key in ("mscale", "mscale_all_dim"))
    if (mscale is None) != (all_dim is None):
        raise ValueError("yarn needs both mscale and mscale_all_dim, or neither")

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    if replacing is not None:
        return float(replacing)
    scale = magnitude(1.0) if mscale is None else magnitude(float(mscale)) / magnitude(float(all_dim))
    return scale * (1.0 if multiplying is None else float(multiplying))
