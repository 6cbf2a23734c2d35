"""What a decoder is made of, read from a Hugging Face config.json (transformers 4 and 5 spellings)."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from omni_jax.models.rope import Rope, rope_from_config

# What sets an architecture apart from plain Llama. Everything else is in the config.
ARCHITECTURES: dict[str, dict[str, bool]] = {
    "LlamaForCausalLM": {"qkv_bias": False, "qk_norm": False},
    "Qwen2ForCausalLM": {"qkv_bias": True, "qk_norm": False},
    "Qwen3ForCausalLM": {"qkv_bias": False, "qk_norm": True},
}


class UnsupportedModel(ValueError):
    """The checkpoint asks for something this engine does not compute. Never approximated in silence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a text decoder. Field names follow Hugging Face.

    Attributes:
        qkv_bias: the query, key and value projections have biases (Qwen2; Llama with attention_bias).
        qk_norm: queries and keys pass an RMSNorm over head_dim before RoPE (Qwen3).
        rope: rotary frequencies and the factor on cosines and sines.
        tie_word_embeddings: the output projection is the embedding, as the config says; a checkpoint with a head that
            differs from the embedding overrules it (see weights.py).
        dtype: the dtype the weights are stored in.
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


def model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a config.json.

    Raises:
        UnsupportedModel: the architecture is not registered, or the config switches on something that is not built.
    """
    named = config.get("architectures") or []
    architecture = next((name for name in named if name in ARCHITECTURES), None)
    if architecture is None:
        raise UnsupportedModel(f"config.json names architectures {named}, supported are {sorted(ARCHITECTURES)}")
    for key, wanted in (("hidden_act", "silu"), ("mlp_bias", False), ("use_sliding_window", False)):
        if config.get(key, wanted) not in (wanted, None):
            raise UnsupportedModel(f"{architecture} with {key}={config[key]!r} is not supported, only {wanted!r}")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise UnsupportedModel(f"{heads} attention heads are no multiple of {kv_heads} key-value heads")
    switches = dict(ARCHITECTURES[architecture])
    if architecture == "LlamaForCausalLM" and config.get("attention_bias"):
        raise UnsupportedModel(
            "LlamaForCausalLM with attention_bias=true is not supported (its output projection has one too)"
        )
    if architecture == "Qwen3ForCausalLM" and config.get("attention_bias"):
        raise UnsupportedModel("Qwen3ForCausalLM with attention_bias=true is not supported")
    return ModelConfig(
        architecture=architecture,
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        rope=rope_from_config(config, head_dim),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        **switches,
    )
