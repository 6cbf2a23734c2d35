"""Real photos with Qwen's real vocabulary, from a file's bytes to the prompt.

Skipped if they cannot be fetched (tests/real_assets.py).
"""

import numpy as np
import pytest
from PIL import Image

from omni_jax.inputs.chat import media_parts
from omni_jax.inputs.image import Qwen2VLImageProcessorPil, open_image, pack_image
from omni_jax.inputs.prompt import chat_prompt, pack_part
from omni_jax.inputs.tokenizer import Tokenizer
from tests import real_assets
from tests.inputs import media, vocabularies
from tests.inputs.test_image import assert_packed_like

SETTINGS = media.settings()


@pytest.fixture(scope="module")
def photos() -> dict[str, bytes]:
    try:
        return {name: file.read_bytes() for name, file in real_assets.photos().items()}
    except real_assets.Unavailable as reason:
        pytest.skip(f"no real photos: {reason}")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Tokenizer:
    try:
        path = real_assets.write_qwen_directory(tmp_path_factory.mktemp("qwen"), vocabularies.VISION_CHATML)
    except real_assets.Unavailable as reason:
        pytest.skip(f"no real vocabulary: {reason}")
    return Tokenizer.from_directory(path)


def test_ids_equal_qwens_published_ids(qwen):
    """Ids of special tokens are from Qwen2-VL's config.json, ids of words from its documentation."""
    assert qwen.vocab_size == 151_657
    for token, i in (("<|endoftext|>", 151643), ("<|im_start|>", 151644), ("<|im_end|>", 151645)):
        assert qwen.encode(token) == [i]
    for token, i in (("vision_start", 151652), ("vision_end", 151653), ("image_pad", 151655), ("video_pad", 151656)):
        assert qwen.encode(f"<|{token}|>") == [i]
    assert qwen.encode("Hello, world!") == [9707, 11, 1879, 0]
    assert qwen.encode("2024年") == [17, 15, 17, 19, 7948]  # one token per digit
    for text in ("今天天气很好，我们去公园。", "Příliš žluťoučký kůň", "👨‍👩‍👧 e\u0301", " \n\n\tx  y "):
        assert qwen.decode(qwen.encode(text)) == text.replace("e\u0301", "é")


def test_patches_of_photos_equal_transformers(photos):
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 1_003_520})
    for name, data in photos.items():
        image = open_image(data)
        item = pack_image(image, SETTINGS)
        if image.mode in ("RGB", "L"):
            assert_packed_like(item, processor(images=[image.convert("RGB")], return_tensors="np"))
        assert item.num_tokens <= 1280, name
    logo = np.asarray(Image.fromarray(pack_image(open_image(photos["logo.png"]), SETTINGS).patches[0, :, 0, 0]))
    assert logo.min() > 250  # its corner is transparent


def test_prompt_of_photos(photos, qwen):
    vision = media.vision_config(qwen)
    assert (vision.image_token_id, vision.video_token_id) == (151655, 151656)
    names = list(photos)
    parts = [{"type": "text", "text": "Which of these shows a cat? <|image_pad|>"}]
    for name in names:
        parts += [{"type": "text", "text": f" {name}: "}, {"type": "image", "image": photos[name]}]
    messages = [{"role": "user", "content": parts}]
    items = [pack_part(part, SETTINGS) for part in media_parts(messages)]
    prompt = chat_prompt(qwen, vision, messages, items)
    sizes = {name: open_image(photos[name]).size for name in names}
    assert sizes["astronaut.png"] == (512, 512)
    assert [span.length for span in prompt.media[:2]] == [18 * 18, 11 * 16]  # 512 x 512 and 451 x 300 pixels
    assert [span.key for span in prompt.media] == [item.key for item in items]
    assert prompt.ids.count(151655) == sum(item.num_tokens for item in items)
    assert prompt.ids.count(151652) == prompt.ids.count(151653) == len(names)
    text = qwen.decode([i for i in prompt.ids if i != 151655], skip_special_tokens=False)
    assert text.endswith("logo.png: <|vision_start|><|vision_end|><|im_end|>\n<|im_start|>assistant\n")
    assert "shows a cat? <|image_pad|> astronaut.png: <|vision_start|><|vision_end|> chelsea.png: " in text
    assert prompt.positions.shape == (3, len(prompt.ids))
    # An image covers as many positions as its longer side has tokens.
    covered = sum(max(item.grid[1:]) // 2 for item in items) + len(prompt.ids) - prompt.ids.count(151655)
    assert prompt.positions.max() + 1 == covered
