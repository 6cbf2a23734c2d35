"""The two models of the benchmark, as Hugging Face directories in the cache folder: trained SmolLM2, and a random model
of Qwen2-0.5B's shape, whose weights are drawn by numpy from a seed.
"""

import json
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from checkpoints.demo_model import default_cache_dir, demo_model
from checkpoints.reader import faults

MODELS = ("smollm2", "qwen2-0.5b")
QWEN2_BYTES = 1_976_131_072
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "eos_token_id": 0,
    "bos_token_id": None,
    "dtype": "float32",
}


def locate(model: str, directory: Path | None = None) -> Path:
    """The directory of one of MODELS, made at the first call (SmolLM2 is fetched, see checkpoints.demo_model).

    Args:
        directory: another Hugging Face directory of the same model, to be used instead.

    Raises:
        OSError: there is no room on the disk; the numbers are in the message.
    """
    if directory is not None:
        return directory
    if model == "smollm2":
        return demo_model()
    return _qwen2(default_cache_dir() / "benchmarks" / "qwen2-0.5b-shape-1")


def _qwen2(directory: Path) -> Path:
    if directory.is_dir() and not faults(directory):
        return directory
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory.parent).free
    if free < 1.1 * QWEN2_BYTES:
        raise OSError(f"{directory.parent} has {free:,} bytes free, the Qwen2-0.5B shape takes {QWEN2_BYTES:,}")
    partial.mkdir()
    try:
        (partial / "config.json").write_text(json.dumps(QWEN2, indent=2))
        (partial / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
        )
        _tokenizer().save(str(partial / "tokenizer.json"))
        save_file(_qwen2_weights(), partial / "model.safetensors", metadata={"format": "pt"})
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def _tokenizer() -> Tokenizer:
    """The 256 bytes and an end of text: enough to show any ids below 257, and nothing is measured beyond them."""
    vocab = {token: i for i, token in enumerate(("<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    return tokenizer


def _qwen2_weights() -> dict[str, np.ndarray]:
    """float32, [out, in]. Scaled so that activations stay near 1 and greedy output is not the same token for ever."""
    hidden, ffn, vocab = QWEN2["hidden_size"], QWEN2["intermediate_size"], QWEN2["vocab_size"]
    head_dim = hidden // QWEN2["num_attention_heads"]
    tensors = {}

    def draw(name, *shape, std, mean=0.0):
        generator = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
        tensor = generator.standard_normal(shape, np.float32)
        tensor *= np.float32(std)
        tensor += np.float32(mean)
        tensors[name] = tensor

    def linear(name, rows, columns, bias=False):
        draw(f"{name}.weight", rows, columns, std=1.5 / np.sqrt(columns))
        if bias:
            draw(f"{name}.bias", rows, std=0.5)

    draw("model.embed_tokens.weight", vocab, hidden, std=0.2)
    for i in range(QWEN2["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            draw(f"{layer}.{name}.weight", hidden, std=0.2, mean=1.0)
        linear(f"{layer}.self_attn.q_proj", hidden, hidden, bias=True)
        linear(f"{layer}.self_attn.k_proj", QWEN2["num_key_value_heads"] * head_dim, hidden, bias=True)
        linear(f"{layer}.self_attn.v_proj", QWEN2["num_key_value_heads"] * head_dim, hidden, bias=True)
        linear(f"{layer}.self_attn.o_proj", hidden, hidden)
        linear(f"{layer}.mlp.gate_proj", ffn, hidden)
        linear(f"{layer}.mlp.up_proj", ffn, hidden)
        linear(f"{layer}.mlp.down_proj", hidden, ffn)
    draw("model.norm.weight", hidden, std=0.2, mean=1.0)
    return tensors
