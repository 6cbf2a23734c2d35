"""Model of benchmarks.vision: Qwen2-VL at 2B's widths with two layers in the vision tower and two in the text model,
and random weights.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.models import byte_tokenizer, draw, linear, qwen2_weights, written
from checkpoints.demo_model import default_cache_dir

NBYTES = 880_000_000
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MEDIA = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
TEXT = {
    "vocab_size": 32000,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
VISION = {"depth": 2, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4}
MROPE_SECTION = (16, 24, 24)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def locate(directory: Path | None = None) -> Path:
    """Return the model's directory, which the first call writes.

    Args:
        directory: Hugging Face directory of a Qwen2-VL that is used instead.

    Raises:
        OSError: the disk has too little space; the numbers are in the message.
    """
    return directory or written(default_cache_dir() / "benchmarks" / "qwen2-vl-2b-widths-1", NBYTES, write)


def write(
    directory: Path, *, text: dict = TEXT, vision: dict = VISION, mrope_section: tuple[int, ...] = MROPE_SECTION
) -> None:
    """Write config.json in Qwen's flat form, tokenizer, preprocessing settings and weights into an existing folder.

    Args:
        text, vision, mrope_section: sizes, by their names in config.json.
    """
    specials = (*SPECIALS, *MEDIA)
    ids = {token: i for i, token in enumerate(specials)}
    vision = vision | {"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_chans": 3}
    vision |= {"hidden_size": text["hidden_size"], "hidden_act": "quick_gelu", "spatial_patch_size": 14}
    config = text | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": list(mrope_section)},
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": vision,
        "torch_dtype": "float32",
    }
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
    }
    images = {  # as Qwen2-VL's, except max_pixels: the engine's default, so that transformers resizes alike
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 1280,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer),
        ("preprocessor_config.json", images),
    ):
        (directory / name).write_text(json.dumps(content, indent=2))
    byte_tokenizer(*specials).save(str(directory / "tokenizer.json"))
    weights = qwen2_weights(text) | _tower(vision)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _tower(vision: dict) -> dict[str, np.ndarray]:
    """Return random float32 weights of the tower; features have the size of the embeddings."""
    width, out = vision["embed_dim"], vision["hidden_size"]
    ffn, merged = width * vision["mlp_ratio"], width * vision["spatial_merge_size"] ** 2
    patch = (vision["in_chans"], vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])

    def norm(name):
        return {
            f"{name}.weight": draw(f"{name}.weight", width, std=0.2, mean=1.0),
            f"{name}.bias": draw(f"{name}.bias", width, std=0.2),
        }

    proj = "visual.patch_embed.proj.weight"
    tensors = {proj: draw(proj, width, *patch, std=1 / np.sqrt(np.prod(patch)))}
    for i in range(vision["depth"]):
        block = f"visual.blocks.{i}"
        tensors |= norm(f"{block}.norm1") | norm(f"{block}.norm2")
        tensors |= linear(f"{block}.attn.qkv", 3 * width, width, bias=0.3)
        tensors |= linear(f"{block}.attn.proj", width, width, gain=1.0, bias=0.3)
        tensors |= linear(f"{block}.mlp.fc1", ffn, width, bias=0.3)
        tensors |= linear(f"{block}.mlp.fc2", width, ffn, gain=1.0, bias=0.3)
    tensors |= norm("visual.merger.ln_q")
    tensors |= linear("visual.merger.mlp.0", merged, merged, bias=0.3)
    return tensors | linear("visual.merger.mlp.2", out, merged, gain=0.3, bias=0.02)
