"""tiny-vl: a small Qwen2-VL with random weights, written when needed, so that an experiment needs no download.

About 3 million parameters in float32: a step takes a few milliseconds on a CPU, an image some tens. Its output is
meaningless; its step times depend on tokens, images and context as those of a large model do.
"""

import json
import os
import random
import shutil
import zlib
from itertools import islice
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from checkpoints.demo_model import default_cache_dir
from checkpoints.reader import faults
from omni_jax.simulation import texts

_VERSION = "tiny-vl-1"  # counted up when the content changes
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MEDIA = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_TEXT = {
    "vocab_size": 1024,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
_VISION = {
    "depth": 4,
    "embed_dim": 128,
    "num_heads": 4,
    "mlp_ratio": 4,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_chans": 3,
    "spatial_patch_size": 14,
    "hidden_size": _TEXT["hidden_size"],
    "hidden_act": "quick_gelu",
}


def tiny_vl(cache_dir: Path | None = None) -> Path:
    """Return the model's directory, which the first call writes.

    Args:
        cache_dir: parent of the directory; None: checkpoints.demo_model.default_cache_dir().
    """
    directory = (default_cache_dir() if cache_dir is None else cache_dir) / "lab" / _VERSION
    if directory.is_dir() and not faults(directory):
        return directory
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    shutil.rmtree(directory, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write(partial)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return directory


def _write(directory: Path) -> None:
    tokenizer = _tokenizer()
    ids = {token: tokenizer.token_to_id(token) for token in (*_SPECIALS, *_MEDIA)}
    config = _TEXT | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": _VISION,
        "torch_dtype": "float32",
    }
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 1280,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
    }
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", special),
        ("preprocessor_config.json", images),
    ):
        (directory / name).write_text(json.dumps(content, indent=2))
    tokenizer.save(str(directory / "tokenizer.json"))
    save_file(_text_weights() | _tower_weights(), directory / "model.safetensors", metadata={"format": "pt"})


def _tokenizer() -> Tokenizer:
    """Return a byte-level BPE trained on the workloads' texts: three or four letters a token, as with a real model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    lines = [
        *islice(texts.sentences(rng), 2000),
        *(row for _ in range(50) for row in islice(texts.table_rows(rng), 20)),
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=_TEXT["vocab_size"] - len(_SPECIALS) - len(_MEDIA),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*lines, texts.QUESTION], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIALS + _MEDIA])
    return tokenizer


def _draw(name: str, *shape: int, std: float, mean: float = 0.0) -> np.ndarray:
    """Draw a float32 tensor from a normal distribution; the name is the seed."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return generator.standard_normal(shape, np.float32) * np.float32(std) + np.float32(mean)


def _linear(name: str, rows: int, columns: int, *, bias: float = 0.0) -> dict[str, np.ndarray]:
    tensors = {f"{name}.weight": _draw(f"{name}.weight", rows, columns, std=1.2 / np.sqrt(columns))}
    return tensors | ({f"{name}.bias": _draw(f"{name}.bias", rows, std=bias)} if bias else {})


def _text_weights() -> dict[str, np.ndarray]:
    hidden, inner = _TEXT["hidden_size"], _TEXT["intermediate_size"]
    kv = hidden * _TEXT["num_key_value_heads"] // _TEXT["num_attention_heads"]
    tensors = {"model.embed_tokens.weight": _draw("model.embed_tokens.weight", _TEXT["vocab_size"], hidden, std=0.2)}
    for number in range(_TEXT["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = np.ones(hidden, np.float32)
        for name, rows in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv)):
            tensors |= _linear(f"{layer}.self_attn.{name}", rows, hidden, bias=0.3)
        tensors |= _linear(f"{layer}.self_attn.o_proj", hidden, hidden)
        for name in ("gate_proj", "up_proj"):
            tensors |= _linear(f"{layer}.mlp.{name}", inner, hidden)
        tensors |= _linear(f"{layer}.mlp.down_proj", hidden, inner)
    return tensors | {"model.norm.weight": np.ones(hidden, np.float32)}


def _tower_weights() -> dict[str, np.ndarray]:
    width, out = _VISION["embed_dim"], _VISION["hidden_size"]
    inner, merged = width * _VISION["mlp_ratio"], width * _VISION["spatial_merge_size"] ** 2
    patch = (_VISION["in_chans"], _VISION["temporal_patch_size"], _VISION["patch_size"], _VISION["patch_size"])

    def norm(name: str) -> dict[str, np.ndarray]:
        return {f"{name}.weight": np.ones(width, np.float32), f"{name}.bias": np.zeros(width, np.float32)}

    proj = "visual.patch_embed.proj.weight"
    tensors = {proj: _draw(proj, width, *patch, std=1 / np.sqrt(np.prod(patch)))}
    for number in range(_VISION["depth"]):
        block = f"visual.blocks.{number}"
        tensors |= norm(f"{block}.norm1") | norm(f"{block}.norm2")
        tensors |= _linear(f"{block}.attn.qkv", 3 * width, width, bias=0.3)
        tensors |= _linear(f"{block}.attn.proj", width, width, bias=0.3)
        tensors |= _linear(f"{block}.mlp.fc1", inner, width, bias=0.3)
        tensors |= _linear(f"{block}.mlp.fc2", width, inner, bias=0.3)
    tensors |= norm("visual.merger.ln_q")
    tensors |= _linear("visual.merger.mlp.0", merged, merged, bias=0.3)
    return tensors | _linear("visual.merger.mlp.2", out, merged, bias=0.02)
