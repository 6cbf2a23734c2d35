"""Model configuration from a Hugging Face config.json, as written by transformers 4 or 5."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints.values import Values
from omni_jax.models.rope import Rope, max_positions, rope_from_config

# Differences from plain Llama that config.json does not state.
ARCHITECTURES: dict[str, dict[str, bool]] = {
    "LlamaForCausalLM": {"qkv_bias": False, "qk_norm": False},
    "Qwen2ForCausalLM": {"qkv_bias": True, "qk_norm": False},
    "Qwen3ForCausalLM": {"qkv_bias": False, "qk_norm": True},
    "Qwen2VLForConditionalGeneration": {"qkv_bias": True, "qk_norm": False},
    "Qwen2_5_VLForConditionalGeneration": {"qkv_bias": True, "qk_norm": False},
}
VISION_ARCHITECTURES = frozenset({"Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"})


DTYPES = ("float32", "bfloat16", "float16", "float64")  # of stored weights
MAX_LAYERS = 1000
MAX_SIDE = 1024  # of patches and merge blocks, and the number of channels


class UnsupportedModel(ValueError):
    """The engine does not support an architecture or option of the checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Sizes and options of a vision tower, and the placement of its features in the text.

    Attributes:
        depth: number of layers.
        hidden_size: width of a patch inside the tower.
        out_hidden_size: width of a feature, equal to the text decoder's hidden size.
        hidden_act: quick_gelu with two matrices (Qwen2-VL), or silu with a gate (Qwen2.5-VL).
        rms_norm: norms are RMSNorm (Qwen2.5-VL) instead of LayerNorm.
        spatial_merge_size: side of a merge block in patches; the patches of a block become one feature.
        temporal_patch_size: number of frames in a patch.
        window_size: side of an attention window in pixels; None if all layers attend to the whole image.
        full_attention_layers: layers that attend to the whole image in a model with windows.
        tokens_per_second: temporal positions per second of video (Qwen2.5-VL); None: one per temporal step (Qwen2-VL).
        image_token_id: placeholder token of an image's features.
        video_token_id: placeholder token of a video's features.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    out_hidden_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    hidden_act: str
    rms_norm: bool
    window_size: int | None
    full_attention_layers: tuple[int, ...]
    tokens_per_second: float | None
    image_token_id: int
    video_token_id: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and options of a text decoder. Field names follow Hugging Face.

    Attributes:
        qkv_bias: the query, key and value projections have biases (Qwen2).
        qk_norm: queries and keys pass an RMSNorm over head_dim before RoPE (Qwen3).
        max_position_embeddings: number of positions, with those that rope scaling adds (rope.max_positions).
        rope: rotary frequencies and the factor on cosines and sines.
        tie_word_embeddings: the embedding is also the output matrix. Weight loading sets it to False if the checkpoint
            has a head that differs from the embedding (weights.py).
        dtype: dtype of the stored weights.
        vision: the vision tower's config; None for a text model.
        kv_repeats: copies of each of the checkpoint's KV heads in num_key_value_heads; above 1 on a mesh with more
            devices than KV heads (runtime.sharding.fit).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Rope
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    dtype: str
    vision: VisionConfig | None = None
    kv_repeats: int = 1


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Parse a config.json.

    Raises:
        UnsupportedModel: the architecture is not in ARCHITECTURES, the config has an unsupported option, or its weights
            are quantised.
        CheckpointError: a value is missing or wrong.
    """
    outer = Values(content=config)
    _refuse_quantised(outer)
    named = config.get("architectures") or []
    architecture = next((name for name in ARCHITECTURES if isinstance(named, list) and name in named), None)
    if architecture is None:
        raise UnsupportedModel(f"config.json names architectures {named}; supported: {sorted(ARCHITECTURES)}")
    _refuse_quantised(outer.object("text_config", {}))
    config = text_config(config)
    values = Values(content=config)
    for key, wanted in (("hidden_act", "silu"), ("mlp_bias", False), ("use_sliding_window", False)):
        if config.get(key, wanted) not in (wanted, None):
            raise UnsupportedModel(f"{architecture} with {key}={config[key]!r} is not supported, only {key}={wanted!r}")
    hidden, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    head_dim = values.integer("head_dim", hidden // heads)
    if head_dim < 1 or head_dim % 2:
        raise UnsupportedModel(
            f"head_dim={head_dim} (hidden_size={hidden}, num_attention_heads={heads}) is not supported: rotary "
            "positions need an even number of dimensions"
        )
    kv_heads = values.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModel(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    switches = dict(ARCHITECTURES[architecture])
    if architecture == "LlamaForCausalLM" and values.boolean("attention_bias", False):
        raise UnsupportedModel(
            "LlamaForCausalLM with attention_bias=true is not supported (it has a bias in the output projection)"
        )
    if architecture == "Qwen3ForCausalLM" and values.boolean("attention_bias", False):
        raise UnsupportedModel("Qwen3ForCausalLM with attention_bias=true is not supported")
    dtype = values.text("dtype", None) or values.text("torch_dtype", "float32")
    if dtype.removeprefix("torch.") not in DTYPES:
        values.refuse("dtype", dtype, f"one of {', '.join(DTYPES)}")
    vocab = values.integer("vocab_size")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=values.integer("intermediate_size"),
        num_hidden_layers=values.integer("num_hidden_layers", high=MAX_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=values.number("rms_norm_eps", 1e-6, low=1e-12, high=1),
        max_position_embeddings=max_positions(config),
        rope=rope_from_config(config, head_dim),
        tie_word_embeddings=values.boolean("tie_word_embeddings", False),
        dtype=dtype.removeprefix("torch."),
        vision=_vision_config(architecture, outer, hidden, vocab) if architecture in VISION_ARCHITECTURES else None,
        **switches,
    )


def _refuse_quantised(values: Values) -> None:
    """Raise UnsupportedModel for a config of quantised weights: int8 numbers would else pass for plain ones."""
    for key in ("quantization_config", "compression_config", "quantization"):  # the last one is MLX's
        if values.content.get(key):
            found = values.content[key]
            method = found.get("quant_method", "not stated") if isinstance(found, Mapping) else found
            raise UnsupportedModel(
                f"{values.file} has a {key} (quant_method {method!r}): quantised weights are not supported, only "
                f"{', '.join(DTYPES)}; use the model's repository without quantisation, or convert its GGUF file"
            )


def compute_dtype(wanted: str, stored: str) -> np.dtype:
    """The dtype of weights, activations and KV cache.

    "auto" is the checkpoint's own dtype (float32 for float64): float16 and bfloat16 are not converted into each other,
    since float16 has three more bits of precision and bfloat16 a larger range.

    Args:
        wanted: "auto", a name of a dtype, or vLLM's aliases "half" (float16) and "float" (float32).
        stored: ModelConfig.dtype.
    """
    names = {"half": "float16", "float": "float32", "float64": "float32"}
    chosen = stored if wanted == "auto" else wanted
    return np.dtype(jnp.dtype(names.get(chosen, chosen)))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of a config.json that describe the text decoder.

    transformers 5 nests them in `text_config`; transformers 4 and Qwen's own repositories do not. The outer dtype and
    tie_word_embeddings apply to nested configs too.
    """
    nested = config.get("text_config")
    if not nested:
        return config
    outer = {key: config[key] for key in ("dtype", "torch_dtype", "tie_word_embeddings") if config.get(key) is not None}
    inner = {key: value for key, value in nested.items() if value is not None}
    merged = dict(inner) | outer
    # Some exporters set tie_word_embeddings outside, others inside, and leave the other at its default.
    merged["tie_word_embeddings"] = outer.get("tie_word_embeddings") or inner.get("tie_word_embeddings") or False
    return merged


def _vision_config(architecture: str, config: Values, text_hidden: int, vocab: int) -> VisionConfig:
    given = config.object("vision_config")
    second = architecture == "Qwen2_5_VLForConditionalGeneration"
    wanted = "silu" if second else "quick_gelu"
    if (act := given.text("hidden_act", wanted)) != wanted:
        raise UnsupportedModel(f"{architecture} with a vision hidden_act of {act!r} is not supported")
    # Qwen2-VL calls the tower's width embed_dim and the text's hidden_size; Qwen2.5-VL hidden_size and out_hidden_size.
    # Default values are those of transformers' configuration classes.
    hidden = given.integer("hidden_size", 3584) if second else given.integer("embed_dim", 1280)
    heads = given.integer("num_heads", 16)
    if hidden % heads or hidden // heads % 4:
        raise UnsupportedModel(
            f"vision tower: width {hidden} over {heads} heads does not give a head size that is a multiple of 4, "
            "which 2-D rotary positions need"
        )
    out = "out_hidden_size" if second else "hidden_size"
    if given.integer(out, 3584) != text_hidden:
        given.refuse(out, given.integer(out, 3584), f"the text model's hidden_size, {text_hidden}")
    depth = given.integer("depth", 32, high=MAX_LAYERS)
    patch = given.integer("patch_size", given.integer("spatial_patch_size", 14, high=MAX_SIDE), high=MAX_SIDE)
    merge = given.integer("spatial_merge_size", 2, high=MAX_SIDE)
    ratio = given.number("mlp_ratio", 4, low=1e-3, high=1e3)
    return VisionConfig(
        depth=depth,
        hidden_size=hidden,
        intermediate_size=given.integer("intermediate_size", 3420) if second else int(hidden * ratio),
        out_hidden_size=text_hidden,
        num_heads=heads,
        in_channels=given.integer("in_channels", given.integer("in_chans", 3, high=MAX_SIDE), high=MAX_SIDE),
        patch_size=patch,
        temporal_patch_size=given.integer("temporal_patch_size", 2, high=MAX_SIDE),
        spatial_merge_size=merge,
        hidden_act=act,
        rms_norm=second,
        window_size=given.integer("window_size", 112, low=patch * merge, high=2**20) if second else None,
        full_attention_layers=given.integers("fullatt_block_indexes", (7, 15, 23, 31)) if second else (),
        tokens_per_second=float(given.number("tokens_per_second", 4, low=1e-3, high=1e6)) if second else None,
        image_token_id=config.integer("image_token_id", 151655, low=0, high=vocab - 1),
        video_token_id=config.integer("video_token_id", 151656, low=0, high=vocab - 1),
    )
