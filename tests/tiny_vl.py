"""Tiny Qwen2-VL and Qwen2.5-VL checkpoints with random weights, and the conversations of their goldens.

Like tests/tiny.py: the same bytes in every environment, and no imports but numpy, safetensors and tokenizers.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer

from tests import tiny

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
LAYOUTS = ("4", "5")  # transformers versions, with different layouts of config.json and tensor names
MEDIA_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")  # 507..511
SYSTEM = "You are a helpful assistant."  # the template's default system message

PATCH, MERGE, FRAMES = 4, 2, 2  # side of a patch in pixels, side of a merge block in patches, frames of a patch
UNIT = PATCH * MERGE  # sides of the images below are multiples of it, so they are not resized
MIN_PIXELS, MAX_PIXELS = 4 * UNIT**2, 128 * UNIT**2
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's, as in Qwen's files

_ARCHITECTURES = {"qwen2_vl": "Qwen2VLForConditionalGeneration", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration"}
_PROCESSORS = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}

_TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    # The last three of the eight frequencies rotate with the column. With the usual bases they would hardly rotate over
    # an image of a few tokens, and an error in the columns would have no effect.
    "rope_theta": 100.0,
    "mrope_section": [2, 3, 3],
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 2,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION = {
    "in_channels": 3,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": FRAMES,
}
_TEXTS = {
    "qwen2_vl": _TEXT | {"tie_word_embeddings": False},
    "qwen2_5_vl": _TEXT | {"tie_word_embeddings": True},
}
# Not listed: hidden_size of Qwen2-VL's tower and out_hidden_size of Qwen2.5-VL's, which are the text's hidden size.
_VISIONS = {
    "qwen2_vl": _VISION | {"depth": 3, "embed_dim": 48, "num_heads": 3, "mlp_ratio": 4, "hidden_act": "quick_gelu"},
    "qwen2_5_vl": _VISION
    | {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 84,
        "num_heads": 2,
        "hidden_act": "silu",
        "window_size": 4 * UNIT,  # windows of 4 x 4 tokens: the images below have full and partial ones
        "fullatt_block_indexes": [1, 3],
        "tokens_per_second": 2,
    },
}

# Like Qwen2-VL's: content is a string or a list of parts, distinguished by type or key; add_vision_id numbers images.
CHAT_TEMPLATE = (
    "{% set seen = namespace(image=0, video=0) %}"
    "{% macro slot(kind, title) %}"
    "{% if add_vision_id %}{{ title }} {{ seen[kind] }}: {% endif %}"
    "<|vision_start|><|{{ kind }}_pad|><|vision_end|>"
    "{% endmacro %}"
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n" + SYSTEM + "<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}"
    "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "{% set seen.image = seen.image + 1 %}{{ slot('image', 'Picture') }}"
    "{% elif part['type'] == 'video' or 'video' in part or 'video_url' in part %}"
    "{% set seen.video = seen.video + 1 %}{{ slot('video', 'Video') }}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageItem:
    """An image, given by its size in pixels and a seed."""

    rows: int
    cols: int
    seed: int

    modality = "image"

    @property
    def grid(self) -> tuple[int, int, int]:
        """(steps, rows, columns) of patches."""
        return 1, self.rows // PATCH, self.cols // PATCH

    def array(self) -> np.ndarray:
        """uint8 [rows, cols, 3]."""
        return image(self.rows, self.cols, self.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoItem:
    """A video, given by the size, number and seed of its sampled frames; fps is the sampling rate."""

    rows: int
    cols: int
    frames: int
    fps: float
    seed: int

    modality = "video"

    @property
    def grid(self) -> tuple[int, int, int]:
        """(steps, rows, columns) of patches; the last frame is repeated to fill the last step."""
        return -(-self.frames // FRAMES), self.rows // PATCH, self.cols // PATCH

    @property
    def seconds_per_grid(self) -> float:
        """Seconds from one step to the next."""
        return FRAMES / self.fps

    def arrays(self) -> list[np.ndarray]:
        """The frames, uint8 [rows, cols, 3] each: an image that moves to the right and down."""
        still = image(self.rows, self.cols, self.seed)
        return [np.roll(still, (k, 3 * k), axis=(0, 1)) for k in range(self.frames)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A conversation before the assistant's answer: turns of (role, parts). A part is a text, an image or a video."""

    turns: tuple[tuple[str, tuple[str | ImageItem | VideoItem, ...]], ...]

    @property
    def items(self) -> tuple[ImageItem | VideoItem, ...]:
        """Images and videos, in the order of the prompt."""
        return tuple(part for _, parts in self.turns for part in parts if not isinstance(part, str))

    def messages(self, part: Callable[[ImageItem | VideoItem], dict] | None = None) -> list[dict]:
        """Chat messages. `part` converts an item to a content part. Default: {"type": "image" or "video"}."""
        part = part or (lambda item: {"type": item.modality})
        return [
            {"role": role, "content": [{"type": "text", "text": p} if isinstance(p, str) else part(p) for p in parts]}
            for role, parts in self.turns
        ]


CASES = {
    "text": Case(turns=(("user", ("The capital of France is",)),)),
    "one_image": Case(turns=(("user", (ImageItem(rows=40, cols=56, seed=1), "What is this?")),)),
    "four_images": Case(
        turns=(
            (
                "user",
                (
                    ImageItem(rows=16, cols=24, seed=2),
                    ImageItem(rows=32, cols=64, seed=3),
                    ImageItem(rows=72, cols=16, seed=4),
                    ImageItem(rows=48, cols=40, seed=5),
                    "Which of these would you like?",
                ),
            ),
        )
    ),
    "image_text_image": Case(
        turns=(
            (
                "user",
                (ImageItem(rows=24, cols=24, seed=6), " and then ", ImageItem(rows=40, cols=32, seed=7), " were one"),
            ),
        )
    ),
    # 2.5 fps are 0.8 seconds or 1.6 temporal positions per step: 0, 1.6, 3.2, truncated to 0, 1, 3.
    "video": Case(turns=(("user", (VideoItem(rows=24, cols=40, frames=5, fps=2.5, seed=8), "Who is it?")),)),
    "two_turns": Case(
        turns=(
            ("system", ("Write some words.",)),
            ("user", ("What is in it?", ImageItem(rows=32, cols=48, seed=9))),
            ("assistant", ("It is the water.",)),
            ("user", (ImageItem(rows=56, cols=24, seed=10), "And now?")),
        )
    ),
    "video_and_image": Case(
        turns=(
            (
                "user",
                (
                    VideoItem(rows=16, cols=48, frames=3, fps=2.0, seed=11),
                    ImageItem(rows=24, cols=32, seed=12),
                    "Find the first.",
                ),
            ),
        )
    ),
}


def config(family: str, *, layout: str = "4", **overrides) -> dict:
    """The config.json of a family, in the layout of Qwen's own files ("4") or of transformers 5 ("5").

    Args:
        overrides: changes to the text model's keys, by their names in layout 4; vision_config={...} changes keys of the
            tower.
    """
    if family not in FAMILIES or layout not in LAYOUTS:
        raise ValueError(f"no tiny checkpoint of {family!r} in layout {layout!r}; available: {FAMILIES}, {LAYOUTS}")
    text, vision = _sizes(family, overrides)
    theta, section, tied = (text.pop(key) for key in ("rope_theta", "mrope_section", "tie_word_embeddings"))
    vocab = tokenizer(text["vocab_size"])
    whole = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "tie_word_embeddings": tied,
        "vision_start_token_id": vocab.token_to_id("<|vision_start|>"),
        "vision_end_token_id": vocab.token_to_id("<|vision_end|>"),
        "image_token_id": vocab.token_to_id("<|image_pad|>"),
        "video_token_id": vocab.token_to_id("<|video_pad|>"),
    }
    if layout == "4":
        vision["in_chans"] = vision.pop("in_channels")
        vision["spatial_patch_size"] = vision["patch_size"]
        return (
            text
            | whole
            | {
                "rope_theta": theta,
                "rope_scaling": {"type": "mrope", "mrope_section": section},
                "vision_token_id": vocab.token_to_id("<|vision_pad|>"),
                "vision_config": vision,
                "torch_dtype": "float32",
                "transformers_version": "4.49.0",
            }
        )
    text["model_type"] = f"{family}_text"
    text["layer_types"] = ["full_attention"] * text["num_hidden_layers"]
    text["sliding_window"] = None
    rope = {"rope_type": "default", "type": "mrope", "rope_theta": theta, "mrope_section": section}
    text["rope_parameters"] = rope
    vision["model_type"] = f"{family}_vision"
    vision["rope_parameters"] = {"rope_type": "axial", "rope_theta": 10000.0}
    return whole | {
        "text_config": text | {"dtype": "float32"},
        "vision_config": vision | {"dtype": "float32"},
        "dtype": "float32",
        "transformers_version": "5.24.0",
    }


def write_tiny_vl(
    directory: Path | str,
    family: str,
    *,
    layout: str = "4",
    seed: int = 0,
    processor: Mapping | None = None,
    **overrides,
) -> Path:
    """Write a complete Hugging Face directory (float32); return its path.

    Args:
        directory: created if it does not exist.
        family: "qwen2_vl" or "qwen2_5_vl".
        layout: "4": a flat config.json and tensors `visual.…`, `model.layers.…`, as published by Qwen, and the chat
            template in chat_template.json (Qwen2.5-VL's tokenizer_config.json has another one, for text and tools).
            "5": a nested config, tensors `model.visual.…`, `model.language_model.…`, and chat_template.jinja.
        seed: seed of the weights.
        processor: changes to preprocessor_config.json.
        overrides: changes to config.json, see `config`; the weights' shapes follow them.
    """
    cfg = config(family, layout=layout, **overrides)
    text, vision = _sizes(family, overrides)
    directory = tiny.write_directory(
        directory,
        config=cfg,
        tokens=tokenizer(text["vocab_size"]),
        tensors=weights(family, layout=layout, seed=seed, **overrides),
        max_length=text["max_position_embeddings"],
        chat_template={"qwen2_vl": CHAT_TEMPLATE, "qwen2_5_vl": tiny.TOOLS_TEMPLATE}[family] if layout == "4" else None,
    )
    if layout == "4":
        tiny.write_json(directory / "chat_template.json", {"chat_template": CHAT_TEMPLATE})
    else:
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": _PROCESSORS[family],
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "image_mean": list(MEAN),
        "image_std": list(STD),
    }
    if layout == "4":
        images |= {"min_pixels": MIN_PIXELS, "max_pixels": MAX_PIXELS}
    else:
        images |= {
            "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
            "do_convert_rgb": True,
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
            "rescale_factor": 1 / 255,
            "resample": 3,
        }
    images |= dict(processor or {})
    tiny.write_json(directory / "preprocessor_config.json", images)
    if layout == "5":
        videos = images | {"video_processor_type": "Qwen2VLVideoProcessor", "do_sample_frames": False}
        del videos["image_processor_type"]
        tiny.write_json(directory / "video_preprocessor_config.json", videos)
    return directory


def weights(family: str, *, layout: str = "4", seed: int = 0, **overrides) -> dict[str, np.ndarray]:
    """float32 weights by Hugging Face name in a layout.

    The text model is as in tests/tiny.py. The tower's scales keep its activations near 1, make its attention focus on
    few patches, and give features of the size of the text's embeddings.
    """
    text, vision = _sizes(family, overrides)
    seed += _FIRST_STREAM[family]
    tensors = tiny.weights(text | {"model_type": "qwen2"}, seed=seed)  # Qwen2's tensors, including biases
    tensors |= _tower(family, text, vision, seed)
    if layout == "4":
        return tensors
    return {_layout_5(name): tensor for name, tensor in tensors.items()}


_FIRST_STREAM = {"qwen2_vl": 0, "qwen2_5_vl": 0}  # see tiny.weights: no near ties, no short cycles


def _tower(family: str, text: dict, vision: dict, seed: int) -> dict[str, np.ndarray]:
    newer = family == "qwen2_5_vl"  # RMSNorm, and a gated MLP
    width = vision["hidden_size" if newer else "embed_dim"]
    ffn = vision["intermediate_size"] if newer else width * vision["mlp_ratio"]
    out = vision.get("out_hidden_size" if newer else "hidden_size")
    merged = width * vision["spatial_merge_size"] ** 2
    tensors = {}

    def add(name, shape, std, mean=0.0):
        tensors[f"visual.{name}"] = tiny.draw(f"{seed}/visual.{name}", shape, std, mean)

    def linear(name, rows, columns, gain=1.0, bias=0.3):
        add(f"{name}.weight", (rows, columns), gain / np.sqrt(columns))
        add(f"{name}.bias", (rows,), bias)

    def norm(name):
        add(f"{name}.weight", (width,), 0.2, mean=1.0)
        if not newer:
            add(f"{name}.bias", (width,), 0.2)

    patch = (vision["in_channels"], vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
    add("patch_embed.proj.weight", (width, *patch), 1 / np.sqrt(np.prod(patch)))
    for i in range(vision["depth"]):
        block = f"blocks.{i}"
        norm(f"{block}.norm1")
        linear(f"{block}.attn.qkv", 3 * width, width, gain=1.7)
        linear(f"{block}.attn.proj", width, width)
        norm(f"{block}.norm2")
        if newer:
            linear(f"{block}.mlp.gate_proj", ffn, width, gain=1.5)
            linear(f"{block}.mlp.up_proj", ffn, width, gain=1.5)
            linear(f"{block}.mlp.down_proj", width, ffn)
        else:
            linear(f"{block}.mlp.fc1", ffn, width, gain=1.5)
            linear(f"{block}.mlp.fc2", width, ffn)
    size = 0.2 if text["tie_word_embeddings"] else 1.0  # deviation of an embedding
    norm("merger.ln_q")
    linear("merger.mlp.0", merged, merged, gain=2.0)
    linear("merger.mlp.2", out, merged, gain=size, bias=0.1 * size)
    return tensors


def _layout_5(name: str) -> str:
    if name.startswith("visual."):
        return f"model.{name}"
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def _sizes(family: str, overrides: Mapping) -> tuple[dict, dict]:
    """Copies of the text and vision settings with `overrides`; features have the text's width."""
    text = _TEXTS[family] | {key: value for key, value in overrides.items() if key != "vision_config"}
    width = {"hidden_size" if family == "qwen2_vl" else "out_hidden_size": text["hidden_size"]}
    return text, _VISIONS[family] | width | dict(overrides.get("vision_config", {}))


def tokenizer(vocab_size: int = 512) -> Tokenizer:
    """tiny.tokenizer with MEDIA_TOKENS as its last five tokens, up to vocab_size in total."""
    result = tiny.tokenizer(vocab_size - len(MEDIA_TOKENS))
    result.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in MEDIA_TOKENS])
    return result


def expanded_ids(case: Case) -> list[int]:
    """The prompt of a case with one placeholder per feature, built without template or processor.

    It ends with the beginning of the assistant turn.
    """
    turns = case.turns if case.turns[0][0] == "system" else (("system", (SYSTEM,)), *case.turns)
    texts = [f"<|im_start|>{role}\n{''.join(map(_part_text, parts))}<|im_end|>\n" for role, parts in turns]
    return tokenizer().encode("".join(texts) + "<|im_start|>assistant\n").ids


def _part_text(part: str | ImageItem | VideoItem) -> str:
    if isinstance(part, str):
        return part
    return f"<|vision_start|>{f'<|{part.modality}_pad|>' * num_tokens(part)}<|vision_end|>"


def num_tokens(item: ImageItem | VideoItem) -> int:
    """Number of placeholders and features of an image or video."""
    return int(np.prod(item.grid)) // MERGE**2


def frames(item: ImageItem | VideoItem) -> list[np.ndarray]:
    """The images of an item: one of an image, all frames of a video."""
    return [item.array()] if isinstance(item, ImageItem) else item.arrays()


def image(rows_px: int, cols_px: int, seed: int) -> np.ndarray:
    """uint8 [rows_px, cols_px, 3]: coloured squares of 6 pixels, which cross patch edges, plus a gradient."""
    shape = (-(-rows_px // 6), -(-cols_px // 6), 3)
    raw = np.random.PCG64([seed, rows_px, cols_px]).random_raw(int(np.prod(shape)))
    squares = (raw % np.uint64(192)).astype(np.int64).reshape(shape).repeat(6, axis=0).repeat(6, axis=1)
    down = 32 * np.arange(rows_px)[:, None, None] // rows_px
    right = 31 * np.arange(cols_px)[None, :, None] // cols_px
    return (squares[:rows_px, :cols_px] + down + right).astype(np.uint8)
