"""Models of benchmarks.cpu, as Hugging Face directories in the cache folder: SmolLM2, and random weights of
Qwen2-0.5B's shape.
"""

import json
import os
import shutil
import zlib
from collections.abc import Callable
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
    """Return the directory of one of MODELS, which the first call writes or downloads (see checkpoints.demo_model).

    Args:
        directory: Hugging Face directory of the model that is used instead.

    Raises:
        OSError: the disk has too little space; the numbers are in the message.
    """
    if directory is not None:
        return directory
    if model == "smollm2":
        return demo_model()
    return written(default_cache_dir() / "benchmarks" / "qwen2-0.5b-shape-1", QWEN2_BYTES, _write_qwen2)


def written(directory: Path, nbytes: int, write: Callable[[Path], None]) -> Path:
    """Return `directory`; if it holds no complete model, replace it by one that `write` fills.

    Args:
        nbytes: approximate bytes of the weights.

    Raises:
        OSError: the disk has too little space.
    """
    if directory.is_dir() and not faults(directory):
        return directory
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory.parent).free
    if free < 1.1 * nbytes:
        raise OSError(f"{directory.parent} has {free:,} bytes free, but the model {directory.name} needs {nbytes:,}")
    partial.mkdir()
    try:
        write(partial)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def _write_qwen2(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(QWEN2, indent=2))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    byte_tokenizer("<|endoftext|>").save(str(directory / "tokenizer.json"))
    save_file(qwen2_weights(QWEN2), directory / "model.safetensors", metadata={"format": "pt"})


def byte_tokenizer(*specials: str) -> Tokenizer:
    """Return a tokenizer of special tokens followed by the 256 bytes, without merges."""
    vocab = {token: i for i, token in enumerate((*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def draw(name: str, *shape: int, std: float, mean: float = 0.0) -> np.ndarray:
    """Draw a float32 tensor from a normal distribution; the name is the seed."""
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    tensor = generator.standard_normal(shape, np.float32)
    tensor *= np.float32(std)
    tensor += np.float32(mean)
    return tensor


def linear(name: str, rows: int, columns: int, *, gain: float = 1.5, bias: float = 0.0) -> dict[str, np.ndarray]:
    """Draw a matrix [out, in] whose outputs stay near 1, and a bias with this standard deviation unless it is 0."""
    tensors = {f"{name}.weight": draw(f"{name}.weight", rows, columns, std=gain / np.sqrt(columns))}
    return tensors | ({f"{name}.bias": draw(f"{name}.bias", rows, std=bias)} if bias else {})


def qwen2_weights(config: dict) -> dict[str, np.ndarray]:
    """Return random float32 weights of Qwen2 with a tied head, scaled so that greedy output varies."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    kv_size = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    tensors = {"model.embed_tokens.weight": draw("model.embed_tokens.weight", config["vocab_size"], hidden, std=0.2)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name in (f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight"):
            tensors[name] = draw(name, hidden, std=0.2, mean=1.0)
        tensors |= linear(f"{layer}.self_attn.q_proj", hidden, hidden, bias=0.5)
        tensors |= linear(f"{layer}.self_attn.k_proj", kv_size, hidden, bias=0.5)
        tensors |= linear(f"{layer}.self_attn.v_proj", kv_size, hidden, bias=0.5)
        tensors |= linear(f"{layer}.self_attn.o_proj", hidden, hidden)
        tensors |= linear(f"{layer}.mlp.gate_proj", ffn, hidden)
        tensors |= linear(f"{layer}.mlp.up_proj", ffn, hidden)
        tensors |= linear(f"{layer}.mlp.down_proj", hidden, ffn)
    tensors["model.norm.weight"] = draw("model.norm.weight", hidden, std=0.2, mean=1.0)
    return tensors
