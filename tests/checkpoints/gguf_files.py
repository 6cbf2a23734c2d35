"""Tiny GGUF files, laid out like those of llama.cpp's converter."""

import json
from pathlib import Path

import gguf
import numpy as np

from tests import tiny

_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """model.layers.0.mlp.up_proj.weight -> blk.0.ffn_up.weight"""
    stem, suffix = name.rsplit(".", 1)
    if stem in _ENDS:
        return f"{_ENDS[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_BLOCK[rest]}.{suffix}"


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder q or k rows as in files of the architecture llama: row j of a head's first half, then row j of its second
    half. Works row by row, unlike the conversion's reshapes."""
    rows = []
    for head in np.split(weight, heads):
        first, second = np.split(head, 2)
        rows += [row for pair in zip(first, second, strict=True) for row in pair]
    return np.stack(rows)


def write(
    file: Path,
    variant: str,
    *,
    quantise=None,
    pre="gpt-2",
    add=None,
    without=(),
    extra_tensors=None,
    tokens_extra=(),
    config_overrides=None,
) -> dict[str, np.ndarray]:
    """Write a tiny variant; return its weights by Hugging Face name, after quantising and dequantising.

    Args:
        quantise: a gguf.GGMLQuantizationType for all matrices. Default: none.
        pre: tokenizer.ggml.pre.
        add: changed or additional metadata, key -> value (int, float, str or bool).
        without: metadata keys and tensor names to omit.
        extra_tensors: additional tensors by GGUF name.
        tokens_extra: (token, type) pairs to add after the tiny tokenizer's tokens.
        config_overrides: changes to the tiny config.
    """
    config = tiny.config(variant, **(config_overrides or {}))
    weights, arch = tiny.weights(config), config["model_type"]
    writer = gguf.GGUFWriter(file, arch)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    metadata = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_parameters"]["rope_theta"],
        f"{arch}.rope.dimension_count": head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": tiny.CHAT_TEMPLATE,
    }
    for key, value in (metadata | (add or {})).items():
        if key in without:
            continue
        kind = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kind.get(type(value), writer.add_array)(key, value)
    model = json.loads(tiny.tokenizer(config["vocab_size"]).to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [3 if token in tiny.SPECIAL_TOKENS else 1 for token in tokens]
    writer.add_token_list(tokens + [token for token, _ in tokens_extra])
    writer.add_token_types(types + [kind for _, kind in tokens_extra])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])

    stored = {}
    for name, tensor in weights.items():
        data, kind = tensor, None
        if quantise is not None and tensor.ndim == 2:
            data, kind = gguf.quants.quantize(tensor, quantise), quantise
            weights[name] = gguf.quants.dequantize(data, quantise)
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            data = permute(data, heads if "q_proj" in name else kv_heads)
        stored[gguf_name(name)] = (data, kind)
    stored |= {name: (tensor, None) for name, tensor in (extra_tensors or {}).items()}
    for name, (data, kind) in stored.items():
        if name not in without:
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
