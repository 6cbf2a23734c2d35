"""The tiny vision checkpoints, without torch: deterministic, readable by transformers' config, tokenizer and image
processor classes, and with prompts that equal the chat template's output."""

import itertools
import json

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests import tiny_vl

BOTH = pytest.mark.parametrize("family", tiny_vl.FAMILIES)
LAYOUTS = pytest.mark.parametrize("layout", tiny_vl.LAYOUTS)


@BOTH
@LAYOUTS
def test_transformers_reads_config_tokenizer_and_image_processor(tmp_path, family, layout):
    directory = tiny_vl.write_tiny_vl(tmp_path, family, layout=layout)
    config = AutoConfig.from_pretrained(directory)
    text, vision = config.text_config, config.vision_config
    assert (text.hidden_size, text.num_hidden_layers, text.rope_parameters["mrope_section"]) == (64, 2, [2, 3, 3])
    assert text.rope_parameters["rope_theta"] == 100.0
    assert (vision.patch_size, vision.spatial_merge_size, vision.in_channels) == (4, 2, 3)
    assert config.tie_word_embeddings == (family == "qwen2_5_vl")
    if family == "qwen2_5_vl":
        assert (vision.window_size, vision.fullatt_block_indexes, vision.out_hidden_size) == (32, [1, 3], 64)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert len(tokenizer) == text.vocab_size == 512
    ids = tokenizer.convert_tokens_to_ids(list(tiny_vl.MEDIA_TOKENS))
    assert ids == [507, 508, 509, 510, 511]
    assert [config.vision_start_token_id, config.vision_end_token_id] == ids[:2]
    assert [config.image_token_id, config.video_token_id] == ids[3:]
    processor = Qwen2VLImageProcessorPil.from_pretrained(directory)
    assert dict(processor.size) == {"shortest_edge": 256, "longest_edge": 8192}
    assert (processor.patch_size, processor.temporal_patch_size, processor.merge_size) == (4, 2, 2)


@BOTH
def test_layouts_differ_in_names_only(tmp_path, family):
    four = load_file(tiny_vl.write_tiny_vl(tmp_path / "4", family, layout="4") / "model.safetensors")
    five = load_file(tiny_vl.write_tiny_vl(tmp_path / "5", family, layout="5") / "model.safetensors")
    assert {name.split(".")[0] for name in four} <= {"visual", "model", "lm_head"}
    assert len(five) == len(four)
    assert "model.visual.blocks.2.attn.qkv.bias" in five
    assert "model.language_model.layers.1.self_attn.q_proj.bias" in five
    assert ("lm_head.weight" in five) == ("lm_head.weight" in four) == (family == "qwen2_vl")
    for name, tensor in four.items():
        renamed = name.replace("visual.", "model.visual.").replace("model.layers.", "model.language_model.layers.")
        renamed = renamed.replace("model.embed", "model.language_model.embed").replace(
            "model.norm", "model.language_model.norm"
        )
        np.testing.assert_array_equal(five[renamed], tensor)


@BOTH
def test_weights_depend_on_the_seed_only(family):
    a, b, c = (tiny_vl.weights(family, seed=seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert not any(np.array_equal(a[name], c[name]) for name in a)
    assert all(tensor.dtype == np.float32 for tensor in a.values())


def test_overrides_change_shapes_but_no_values(tmp_path):
    directory = tiny_vl.write_tiny_vl(
        tmp_path,
        "qwen2_5_vl",
        num_hidden_layers=1,
        hidden_size=32,
        vocab_size=600,
        vision_config={"depth": 2},
        processor={"max_pixels": 1024},
    )
    tensors, usual = load_file(directory / "model.safetensors"), tiny_vl.weights("qwen2_5_vl")
    assert not any("layers.1." in name or "blocks.2." in name for name in tensors)
    assert tensors["visual.merger.mlp.2.weight"].shape == (32, 128)
    name = "visual.blocks.1.mlp.gate_proj.weight"
    np.testing.assert_array_equal(tensors[name], usual[name])
    cfg = json.loads((directory / "config.json").read_text())
    assert (cfg["image_token_id"], cfg["vision_config"]["depth"], cfg["vision_config"]["out_hidden_size"]) == (
        598,
        2,
        32,
    )
    assert json.loads((directory / "preprocessor_config.json").read_text())["max_pixels"] == 1024
    with pytest.raises(ValueError, match="no tiny checkpoint of 'qwen3_vl' in layout '4'"):
        tiny_vl.config("qwen3_vl")


@pytest.mark.parametrize("name", tiny_vl.CASES)
def test_expanded_ids_equal_the_template_with_repeated_placeholders(tmp_path, name):
    case = tiny_vl.CASES[name]
    directory = tiny_vl.write_tiny_vl(tmp_path, "qwen2_vl")
    hf = AutoTokenizer.from_pretrained(directory)
    text = hf.apply_chat_template(case.messages(), tokenize=False, add_generation_prompt=True)
    items, ids = iter(case.items), []
    for token in hf(text)["input_ids"]:
        ids += [token] * (tiny_vl.num_tokens(next(items)) if token in (510, 511) else 1)
    assert next(items, None) is None
    assert ids == tiny_vl.expanded_ids(case)


def test_template_accepts_strings_and_openai_parts_and_numbers_images(tmp_path):
    hf = AutoTokenizer.from_pretrained(tiny_vl.write_tiny_vl(tmp_path, "qwen2_5_vl", layout="5"))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"video": "y"}, {"type": "image"}]},
    ]
    image, video = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\nPicture 1: {image}a<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n"
        f"<|im_start|>user\nVideo 1: {video}Picture 2: {image}<|im_end|>\n"
    )
    assert hf.apply_chat_template(messages, tokenize=False, add_vision_id=True) == expected
    plain = expected.replace("Picture 1: ", "").replace("Picture 2: ", "").replace("Video 1: ", "")
    assert hf.apply_chat_template(messages, tokenize=False) == plain
    hello = hf.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert hello == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_images_are_not_resized_and_differ(tmp_path):
    processor = Qwen2VLImageProcessorPil.from_pretrained(tiny_vl.write_tiny_vl(tmp_path, "qwen2_vl"))
    items = [item for case in tiny_vl.CASES.values() for item in case.items]
    assert len({item.seed for item in items}) == len(items)
    for item in items:
        array = item.array() if item.modality == "image" else item.arrays()[0]
        assert array.shape == (item.rows, item.cols, 3)
        assert array.dtype == np.uint8
        assert tiny_vl.MIN_PIXELS <= item.rows * item.cols <= tiny_vl.MAX_PIXELS
        _, *grid = processor(Image.fromarray(array))["image_grid_thw"][0]
        assert tuple(grid) == item.grid[1:]
    item = tiny_vl.CASES["video"].items[0]
    frames = item.arrays()
    assert (len(frames), item.grid, item.seconds_per_grid) == (5, (3, 6, 10), 0.8)
    assert all(not np.array_equal(a, b) for a, b in itertools.pairwise(frames))
    # The bytes are the same in every environment: the first row of one image.
    assert tiny_vl.image(8, 8, 0)[0, :, 0].tolist() == [131, 134, 138, 142, 146, 150, 23, 27]
