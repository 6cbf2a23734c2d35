"""Tiny checkpoints with random weights, as Hugging Face directories: the same bytes in every environment.

The engine's tests and the script that makes the goldens (tests/goldens/make.py) call these functions, so git holds no
weights. This module imports numpy, safetensors and tokenizers only, neither JAX nor torch.
"""

import json
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PROMPT_LENGTHS = (1, 2, 15, 16, 17, 33, 64, 150)  # around one block of 16 tokens, and several blocks
LONG_PROMPTS = {"llama_yarn": (310,)}  # beyond the 256 original positions
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
EOS_IDS = (2, 0)

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 16, "attention_bias": False}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 32,  # not hidden_size / num_attention_heads, as in the real Qwen3
    "attention_bias": False,
    "use_sliding_window": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}

# The changes of each variant to _COMMON.
VARIANTS = {
    "llama": _LLAMA,
    "llama3": _LLAMA | {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True},
    # As Qwen documents it: the stated length is the original one, and the factor extends it.
    "llama_yarn": _LLAMA | {"rope_parameters": _YARN_ROPE, "max_position_embeddings": 256},
    "qwen2": _QWEN2 | {"tie_word_embeddings": True},
    "qwen2_untied": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_tied": _QWEN3 | {"tie_word_embeddings": True},
}

_COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
    "transformers_version": "5.24.0",
}

# Content may be null, in an assistant turn that only calls a tool.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Like Qwen2.5's: text only, with tools and calls.
TOOLS_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}"
    "{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}{%- set function = call.function %}"
    "{{- '\n{\"name\": \"' + function.name + '\", \"arguments\": ' }}{{- function.arguments | tojson }}{{- '}' }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

# Merges build these words letter by letter until the vocabulary is full.
_WORDS = """
the of and to in is that it was for on are as with his they at be this have from or one had by word but not what all
were we when your can said there use an each which she do how their if will up other about out many then them these so
some her would make like him into time has look two more write go see number no way could people my than first water
been call who oil its now find long down day did get come made may part capital France Paris hello world user
assistant system model token answer question
"""


def prompt_lengths(variant: str) -> tuple[int, ...]:
    """Lengths of the prompts of a variant's goldens."""
    return (*PROMPT_LENGTHS, *LONG_PROMPTS.get(variant, ()))


def config(variant: str, **overrides) -> dict:
    """The config.json of a variant, with `overrides` applied."""
    if variant not in VARIANTS:
        raise ValueError(f"unknown tiny variant {variant!r}; available: {', '.join(VARIANTS)}")
    return _COMMON | VARIANTS[variant] | overrides


def write_tiny(directory: Path | str, variant: str, *, seed: int = 0, **config_overrides) -> Path:
    """Write a complete Hugging Face directory (float32); return its path.

    Args:
        directory: created if it does not exist.
        variant: a key of VARIANTS: "llama", "llama3", "llama_yarn", "qwen2", "qwen2_untied", "qwen3", "qwen3_tied".
        seed: seed of the weights.
        config_overrides: changes to config.json; the weights' shapes follow them.
    """
    cfg = config(variant, **config_overrides)
    return write_directory(
        directory,
        config=cfg,
        tokens=tokenizer(cfg["vocab_size"]),
        tensors=weights(cfg, seed=seed),
        max_length=cfg["max_position_embeddings"],
        chat_template=CHAT_TEMPLATE,
    )


def write_directory(
    directory: Path | str,
    *,
    config: dict,
    tokens: Tokenizer,
    tensors: dict[str, np.ndarray],
    max_length: int,
    chat_template: str | None,
) -> Path:
    """Write the files that all tiny checkpoints have, as in repositories of the Hugging Face hub.

    The tokenizer's class is the general one: transformers, as an oracle, replaces parts of tokenizer.json for others.

    Args:
        max_length: model_max_length of tokenizer_config.json.
        chat_template: the template in tokenizer_config.json; None: the caller writes one.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    generation = {"bos_token_id": 1, "eos_token_id": list(EOS_IDS), "pad_token_id": 0, "do_sample": False}
    tokenizer_config = {
        "added_tokens_decoder": {str(i): _added(token) for i, token in tokens.get_added_tokens_decoder().items()},
        "additional_special_tokens": [token.content for token in tokens.get_added_tokens_decoder().values()],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", generation)
    write_json(directory / "tokenizer_config.json", tokenizer_config)
    tokens.save(str(directory / "tokenizer.json"))
    model = json.loads(tokens.to_str())["model"]
    added = {token.content: i for i, token in tokens.get_added_tokens_decoder().items()}
    write_json(directory / "vocab.json", {token: i for token, i in model["vocab"].items() if token not in added})
    write_json(directory / "added_tokens.json", added)
    merges = "".join(f"{first} {second}\n" for first, second in model["merges"])
    (directory / "merges.txt").write_text("#version: 0.2\n" + merges, encoding="utf-8")
    names = ("bos_token", "eos_token", "pad_token", "additional_special_tokens")
    write_json(directory / "special_tokens_map.json", {name: tokenizer_config[name] for name in names})
    (directory / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
    (directory / "LICENSE").write_text("Public domain: random numbers.\n")
    (directory / "README.md").write_text(f"---\nlibrary_name: transformers\n---\n\n# Tiny {config['model_type']}\n")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def weights(cfg: dict, *, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights by Hugging Face name, [out, in].

    Each tensor has its own random stream, so it keeps its values when the config changes elsewhere (more layers, an
    untied head). The scales keep activations near 1, make attention focus on few tokens (scores have a deviation of
    about 3), and give logits a deviation of about 4: greedy output is varied and depends on the whole context.
    """
    hidden, ffn = cfg["hidden_size"], cfg["intermediate_size"]
    heads, kv_heads = cfg["num_attention_heads"], cfg["num_key_value_heads"]
    head_dim = cfg.get("head_dim") or hidden // heads
    qk_norm, qkv_bias = cfg["model_type"] == "qwen3", cfg["model_type"] == "qwen2"
    tensors = {}

    def add(name, shape, std, mean=0.0):
        # 12 is the first stream whose goldens have no near tie of two tokens (see make.SMALLEST_GAP) and do not repeat
        # a short cycle.
        tensors[name] = draw(f"{seed + 12}/{name}", shape, std, mean)

    def linear(name, rows, columns, gain=1.0, bias=False):
        add(f"{name}.weight", (rows, columns), gain / np.sqrt(columns))
        if bias:
            add(f"{name}.bias", (rows,), 0.5)

    # A tied head prefers the token just read, so greedy output would soon repeat. Small embeddings have little weight
    # in the residual stream; a larger final norm compensates for them.
    tied = cfg["tie_word_embeddings"]
    add("model.embed_tokens.weight", (cfg["vocab_size"], hidden), 0.2 if tied else 1.0)
    for i in range(cfg["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        add(f"{layer}.input_layernorm.weight", (hidden,), 0.2, mean=1.0)
        linear(f"{layer}.self_attn.q_proj", heads * head_dim, hidden, gain=1.7, bias=qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv_heads * head_dim, hidden, gain=1.7, bias=qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv_heads * head_dim, hidden, gain=2.0, bias=qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, heads * head_dim, gain=2.0)
        if qk_norm:
            add(f"{layer}.self_attn.q_norm.weight", (head_dim,), 0.3, mean=1.7)
            add(f"{layer}.self_attn.k_norm.weight", (head_dim,), 0.3, mean=1.7)
        add(f"{layer}.post_attention_layernorm.weight", (hidden,), 0.2, mean=1.0)
        linear(f"{layer}.mlp.gate_proj", ffn, hidden, gain=1.5)
        linear(f"{layer}.mlp.up_proj", ffn, hidden, gain=1.5)
        linear(f"{layer}.mlp.down_proj", hidden, ffn, gain=1.5)
    add("model.norm.weight", (hidden,), 0.2, mean=2.5 if tied else 1.0)
    if not tied:
        linear("lm_head", cfg["vocab_size"], hidden, gain=4.0)
    return tensors


def prompt(length: int, *, seed: int = 0, vocab_size: int = 512) -> list[int]:
    """Random token ids without special tokens. The goldens use prompt(n) for n in prompt_lengths(variant)."""
    low = len(SPECIAL_TOKENS)
    raw = np.random.PCG64([seed, length, 7]).random_raw(length)
    return [low + int(x) for x in raw % np.uint64(vocab_size - low)]


def tokenizer(vocab_size: int = 512) -> Tokenizer:
    """A byte-level BPE of up to vocab_size tokens: special tokens, 256 bytes, then merges for common English words."""
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    merges = []
    for word in (prefix + word for word in _WORDS.split() for prefix in ("Ġ", "")):
        for end in range(1, len(word)):
            if len(vocab) < vocab_size and word[: end + 1] not in vocab:
                vocab[word[: end + 1]] = len(vocab)
                merges.append((word[:end], word[end]))
    result = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return result


def write_shards(directory: Path | str, shards: int = 3) -> Path:
    """Split a directory's model.safetensors into `shards` files with a model.safetensors.index.json."""
    directory = Path(directory)
    tensors = load_file(directory / "model.safetensors")
    weight_map = {}
    for i, names in enumerate(np.array_split(sorted(tensors), shards)):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({str(name): tensors[name] for name in names}, directory / file, metadata={"format": "pt"})
        weight_map |= {str(name): file for name in names}
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(
        directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )
    (directory / "model.safetensors").unlink()
    return directory


def draw(stream: str, shape: tuple[int, ...], std: float, mean: float) -> np.ndarray:
    """Uniform float32 values with this mean and deviation.

    They come from the bit generator's raw output, the only random stream that numpy keeps across versions (NEP 19).
    """
    raw = np.random.PCG64(zlib.crc32(stream.encode())).random_raw(int(np.prod(shape)))
    unit = (raw >> np.uint64(11)) * 2.0**-53 - 0.5  # in [-1/2, 1/2), deviation 1/sqrt(12)
    return (mean + std * np.sqrt(12.0) * unit).astype(np.float32).reshape(shape)


def _added(token: AddedToken) -> dict:
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {name: getattr(token, name) for name in names}


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
