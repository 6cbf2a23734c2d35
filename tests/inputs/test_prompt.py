"""Prompts of conversations with media: placeholders, their items, and placeholders in client text."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from omni_jax.inputs.chat import media_parts
from omni_jax.inputs.image import pack_image
from omni_jax.inputs.prompt import VisionInputs, chat_prompt, expand, modalities_of, pack_part
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.inputs.video import pack_video, video_from_frames
from omni_jax.requests import InvalidRequest
from tests.inputs import media, vocabularies
from tests.inputs.media import clip, encoded, make_image

SETTINGS = media.settings()
BOTH = ("image", "video")
IMAGE, VIDEO = {"type": "image_url", "image_url": {"url": "x"}}, {"type": "video_url", "video_url": {"url": "x"}}

# Images of 2 x 2, 2 x 3 and 3 x 2 tokens; a video of 3 temporal steps of 2 x 2.
A, B, C = (pack_image(make_image(*size, seed=i), SETTINGS) for i, size in enumerate([(56, 56), (84, 56), (56, 84)]))
CLIP = pack_video(video_from_frames([make_image(56, 56, seed=i) for i in range(5)], SETTINGS), SETTINGS)


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def user(*parts) -> dict:
    return {"role": "user", "content": list(parts)}


@pytest.fixture
def vision(vision_tokenizer):
    return media.vision_config(vision_tokenizer)


def text_of(tokenizer, prompt) -> str:
    return tokenizer.decode(prompt.ids, skip_special_tokens=False)


def placeholders(count: int, kind: str = "image") -> str:
    return "<|vision_start|>" + f"<|{kind}_pad|>" * count + "<|vision_end|>"


def assert_spans_cover_the_placeholders(prompt, vision) -> None:
    places = [i for i, token in enumerate(prompt.ids) if token in (vision.image_token_id, vision.video_token_id)]
    covered = [i for span in prompt.media for i in range(span.start, span.stop)]
    assert covered == places
    for span in prompt.media:
        expected = vision.image_token_id if span.modality == "image" else vision.video_token_id
        assert {prompt.ids[i] for i in range(span.start, span.stop)} == {expected}
        assert span.length * 4 == span.num_patches == len(span.patches)


# --- placeholders ---------------------------------------------------------------------------------------------------


def test_mm_10_placeholders_replace_the_parts_in_place(vision_tokenizer, vision):
    messages = [user(text("a "), IMAGE, text(" b "), IMAGE, text(" c"))]
    prompt = chat_prompt(vision_tokenizer, vision, messages, [A, B])
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    assert text_of(vision_tokenizer, prompt) == (
        f"{system}<|im_start|>user\na {placeholders(4)} b {placeholders(6)} c<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [(span.grid, span.key) for span in prompt.media] == [((4, 4), A.key), ((4, 6), B.key)]
    assert_spans_cover_the_placeholders(prompt, vision)
    first = chat_prompt(vision_tokenizer, vision, [user(IMAGE, text("a "), IMAGE)], [B, A], add_generation_prompt=False)
    assert (
        text_of(vision_tokenizer, first)
        == f"{system}<|im_start|>user\n{placeholders(6)}a {placeholders(4)}<|im_end|>\n"
    )


def test_mm_10_several_turns_and_the_same_image_twice(vision_tokenizer, vision):
    messages = [
        {"role": "system", "content": "Be brief."},
        user(IMAGE, text("what?")),
        {"role": "assistant", "content": "a cat"},
        user(text("and "), VIDEO, text(" or "), IMAGE),
        {"role": "tool", "content": [text("found "), IMAGE]},
    ]
    prompt = chat_prompt(vision_tokenizer, vision, messages, [A, CLIP, A, C])
    assert [span.key for span in prompt.media if span.modality == "image"] == [A.key, A.key, C.key]
    assert [span.modality for span in prompt.media] == ["image", "video", "video", "video", "image", "image"]
    assert f"and {placeholders(12, 'video')} or {placeholders(4)}<|im_end|>" in text_of(vision_tokenizer, prompt)
    assert f"tool\nfound {placeholders(6)}<|im_end|>" in text_of(vision_tokenizer, prompt)
    assert_spans_cover_the_placeholders(prompt, vision)


def test_mm_10_swapping_images_swaps_the_features_only(vision_tokenizer, vision):
    other = pack_image(make_image(56, 56, seed=5), SETTINGS)
    messages = [user(IMAGE, text(" and "), IMAGE)]
    one, two = (chat_prompt(vision_tokenizer, vision, messages, items) for items in ([A, other], [other, A]))
    assert one.ids == two.ids
    np.testing.assert_array_equal(one.positions, two.positions)
    assert [span.key for span in one.media] == [span.key for span in two.media][::-1]
    np.testing.assert_array_equal(one.media[0].patches, two.media[1].patches)


def test_a_video_has_one_span_per_temporal_step(vision):
    ids = [1, vision.video_token_id, 2]
    prompt = expand(ids, [CLIP], vision)
    assert prompt.ids == (1, *[vision.video_token_id] * 12, 2)
    assert [(span.start, span.length, span.grid) for span in prompt.media] == [
        (1, 4, (4, 4)),
        (5, 4, (4, 4)),
        (9, 4, (4, 4)),
    ]
    assert len({span.key for span in prompt.media} | {CLIP.key}) == 4
    for step, span in enumerate(prompt.media):
        assert span.patches.shape == (16, 3, 2, 14, 14)
        np.testing.assert_array_equal(span.patches, CLIP.patches[16 * step : 16 * step + 16])
    again = expand(ids, [dataclasses.replace(CLIP)], vision)
    assert [span.key for span in again.media] == [span.key for span in prompt.media]


def test_prompts_have_positions(vision_tokenizer, vision):
    prompt = expand([5, vision.image_token_id, 6, vision.video_token_id, 7], [B, CLIP], vision)
    assert prompt.positions is not None
    assert prompt.positions.dtype == np.int32
    assert prompt.positions.shape == (3, len(prompt.ids))
    # 5 | 2 x 3 tokens | 6 | 3 steps of 2 x 2 | 7
    assert prompt.positions[0].tolist() == [0, *[1] * 6, 4, *[5] * 4, *[6] * 4, *[7] * 4, 8]
    timed = media.vision_config(vision_tokenizer, tokens_per_second=2.0)
    prompt = expand([5, vision.video_token_id], [CLIP], timed)
    assert prompt.positions is not None
    assert prompt.positions[0].tolist() == [0, *[1] * 4, *[3] * 4, *[5] * 4]  # CLIP has one step per second


def test_prompts_without_media_are_the_rendered_chat(vision_tokenizer, byte_level, vision):
    messages = [{"role": "user", "content": "Hello"}]
    prompt = chat_prompt(vision_tokenizer, vision, messages, [])
    assert (prompt.media, prompt.positions) == ((), None)
    assert prompt.ids == tuple(vision_tokenizer.render_chat(messages))
    assert chat_prompt(byte_level, None, messages, []).ids == tuple(byte_level.render_chat(messages))
    parts = chat_prompt(vision_tokenizer, vision, [user(text("Hel"), text("lo"))], [])
    assert parts.ids == prompt.ids  # the template joins parts without a separator


# --- placeholders in client text -----------------------------------------------------------------------------------

TYPED = (
    "<|image_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|video_pad|>",
    placeholders(1),
    placeholders(2, "video"),
)


@pytest.mark.parametrize("typed", TYPED)
@pytest.mark.parametrize("order", ["before", "after", "both", "system", "other turn"])
def test_tok_04_placeholders_in_client_text_are_text(vision_tokenizer, vision, typed, order):
    part = text(f"see {typed} here")
    messages = {
        "before": [user(part, IMAGE)],
        "after": [user(IMAGE, part)],
        "both": [user(part, IMAGE, part)],
        "system": [{"role": "system", "content": part["text"]}, user(IMAGE)],
        "other turn": [user(part), {"role": "assistant", "content": part["text"]}, user(IMAGE)],
    }[order]
    prompt = chat_prompt(vision_tokenizer, vision, messages, [B])
    [span] = prompt.media
    start, end = vision_tokenizer.encode("<|vision_start|>"), vision_tokenizer.encode("<|vision_end|>")
    assert [prompt.ids[span.start - 1]] == start
    assert [prompt.ids[span.stop]] == end
    assert [i for i in prompt.ids if i in (*start, *end)] == [*start, *end]
    assert_spans_cover_the_placeholders(prompt, vision)
    assert text_of(vision_tokenizer, prompt).count(f"see {typed} here") == (2 if order in ("both", "other turn") else 1)


@given(st.lists(st.sampled_from([*TYPED, "<|im_end|>", "<|", "pad|>", " a "]), max_size=5).map("".join), st.booleans())
@hypothesis_settings(max_examples=100, deadline=None)
def test_tok_04_any_client_text_stays_text(vision_tokenizer, words, video_first):
    vision = media.vision_config(vision_tokenizer)
    parts, items = [text(words), IMAGE, text(words), VIDEO, text(words)], [A, CLIP]
    if video_first:
        parts, items = [text(words), VIDEO, text(words), IMAGE], [CLIP, A]
    prompt = chat_prompt(vision_tokenizer, vision, [user(*parts)], items)
    assert len(prompt.media) == 4
    assert_spans_cover_the_placeholders(prompt, vision)
    assert text_of(vision_tokenizer, prompt).count(words) >= 2


def test_tok_04_every_field_that_a_template_may_write_stays_text(vision_tokenizer, vision):
    evil = placeholders(1)
    tool = {"type": "function", "function": {"name": evil, "parameters": {evil: evil}}}
    messages = [user(text(evil), IMAGE), {"role": "assistant", "content": evil, "name": evil}]
    prompt = chat_prompt(
        vision_tokenizer,
        vision,
        messages,
        [A],
        tools=[tool],
        template_kwargs={"mood": evil},
        add_generation_prompt=False,
    )
    assert_spans_cover_the_placeholders(prompt, vision)
    assert len(prompt.media) == 1


@pytest.mark.parametrize(
    ("kinds", "items", "message"),
    [
        ("ii", [A], r"2 image placeholder\(s\) \(token \d+\) for 1 image\(s\)"),
        ("i", [A, B], r"1 image placeholder\(s\) \(token \d+\) for 2 image\(s\)"),
        ("", [A], r"0 image placeholder\(s\) \(token \d+\) for 1 image\(s\)"),
        ("i", [], r"1 image placeholder\(s\) \(token \d+\) for 0 image\(s\)"),
        ("v", [A], r"0 image placeholder\(s\) \(token \d+\) for 1 image\(s\)"),
        ("i", [CLIP], r"1 image placeholder\(s\) \(token \d+\) for 0 image\(s\)"),
        ("iv", [A], r"1 video placeholder\(s\) \(token \d+\) for 0 video\(s\)"),
        ("v", [CLIP, CLIP], r"1 video placeholder\(s\) \(token \d+\) for 2 video\(s\)"),
    ],
)
def test_tok_04_too_few_or_too_many_placeholders_are_refused(vision, kinds, items, message):
    tokens = {"i": vision.image_token_id, "v": vision.video_token_id}
    with pytest.raises(InvalidRequest, match=message) as caught:
        expand([1, *(tokens[kind] for kind in kinds), 2], items, vision)
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequest) as caught:
        expand([1, *(tokens[kind] for kind in kinds), 2], items, vision, param="prompt")
    assert caught.value.param == "prompt"


def test_tok_04_a_template_that_writes_another_number_is_refused(tmp_path, vision):
    """So is client text with placeholders that are not special tokens."""
    twice = vocabularies.VISION_CHATML.replace("<|image_pad|>", "<|image_pad|><|image_pad|>")
    path = vocabularies.write_directory(tmp_path, vocabularies.vision(), chat_template=twice)
    with pytest.raises(InvalidRequest, match="2 image placeholder"):
        chat_prompt(Tokenizer.from_directory(path), vision, [user(IMAGE)], [A])
    backend = vocabularies.byte_level()
    backend.add_tokens(list(vocabularies.VISION))
    path = vocabularies.write_directory(tmp_path, backend, chat_template=vocabularies.VISION_CHATML)
    plain = Tokenizer.from_directory(path)
    with pytest.raises(InvalidRequest, match="2 image placeholder"):
        chat_prompt(plain, vision, [user(text("see <|image_pad|>"), IMAGE)], [A])
    assert len(chat_prompt(plain, vision, [user(text("see"), IMAGE)], [A]).media) == 1


def test_images_and_videos_are_matched_separately_in_order(vision):
    ids = [vision.video_token_id, 1, vision.image_token_id, 2, vision.image_token_id]
    prompt = expand(ids, [A, CLIP, B], vision)  # a template that puts videos first
    assert [span.modality for span in prompt.media] == ["video"] * 3 + ["image"] * 2
    assert [span.key for span in prompt.media[3:]] == [A.key, B.key]
    assert_spans_cover_the_placeholders(prompt, vision)


# --- modalities of the model and its template ----------------------------------------------------------------------


def test_template_modalities_follow_the_templates_placeholders(tmp_path, byte_level, sentencepiece, vision_tokenizer):
    assert vision_tokenizer.template_modalities == {"image", "video"}
    for tokenizer in (byte_level, sentencepiece):  # their templates print a list of parts in Python's syntax
        assert not tokenizer.template_modalities
    no_video = vocabularies.VISION_CHATML.replace("part.type == 'video'", "false")
    path = vocabularies.write_directory(tmp_path / "a", vocabularies.vision(), chat_template=no_video)
    assert Tokenizer.from_directory(path).template_modalities == {"image"}
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    path = vocabularies.write_directory(tmp_path / "b", vocabularies.vision(), chat_template=plain)
    assert not Tokenizer.from_directory(path).template_modalities
    path = vocabularies.write_directory(tmp_path / "c", vocabularies.vision(), chat_template=None)
    assert not Tokenizer.from_directory(path).template_modalities


def test_the_error_for_media_blames_a_template_without_placeholders(byte_level, vision):
    assert modalities_of(byte_level, vision) == ()
    assert modalities_of(byte_level, None) == ()
    with pytest.raises(InvalidRequest, match="chat template has no placeholder for image or video parts; start"):
        chat_prompt(byte_level, vision, [user(IMAGE, VIDEO)], [A, CLIP])
    assert chat_prompt(byte_level, vision, [user(text("a"), text("b"))], []).ids == tuple(
        byte_level.render_chat([{"role": "user", "content": "a\nb"}])
    )


def test_vision_inputs_with_different_sizes_are_refused(vision_tokenizer, vision):
    assert VisionInputs(config=vision, settings=SETTINGS).settings is SETTINGS
    for changes in ({"patch_size": 16}, {"temporal_patch_size": 1}, {"spatial_merge_size": 4}):
        with pytest.raises(ValueError, match=r"preprocessor_config.json has .*, but the model's vision_config has"):
            VisionInputs(config=media.vision_config(vision_tokenizer, **changes), settings=SETTINGS)


# --- parts of messages ----------------------------------------------------------------------------------------------


def test_media_parts_are_returned_in_order_with_their_places():
    array = make_image(30, 30)
    options = {"max_pixels": 5000}
    messages = [
        {"role": "system", "content": "Be brief."},
        user(text("a"), {"type": "image_url", "image_url": "http://h/a.png"}, IMAGE | {"detail": "auto"}),
        {"role": "assistant", "content": None},
        user({"type": "video_url", "video_url": {"url": "data:x"}, "mm_processor_kwargs": {"fps": 1}}),
        {"role": "tool", "content": [{"type": "image", "image": array, "mm_processor_kwargs": options}]},
        user(
            {"type": "video", "video": [array, "b.png"]},
            {"type": "video", "video": b"mp4"},
            {"type": "image", "image": b"x"},
        ),
    ]
    parts = media_parts(messages)
    assert [(part.modality, part.where) for part in parts] == [
        ("image", "messages[1].content[1]"),
        ("image", "messages[1].content[2]"),
        ("video", "messages[3].content[0]"),
        ("image", "messages[4].content[0]"),
        ("video", "messages[5].content[0]"),
        ("video", "messages[5].content[1]"),
        ("image", "messages[5].content[2]"),
    ]
    assert [part.source for part in parts] == ["http://h/a.png", "x", "data:x", array, [array, "b.png"], b"mp4", b"x"]
    assert [dict(part.options) for part in parts] == [{}, {}, {"fps": 1}, options, {}, {}, {}]
    assert media_parts([{"role": "user", "content": "text"}]) == []


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url"}, r"content\[1\].image_url must be a URL as a non-empty string, got NoneType"),
        ({"type": "image_url", "image_url": {}}, r"image_url.url must be a URL as a non-empty string, got NoneType"),
        ({"type": "image_url", "image_url": {"url": 3}}, r"image_url.url must be .* got int"),
        ({"type": "image_url", "image_url": ""}, r"image_url must be .* got ''"),
        ({"type": "image_url", "image_url": b"GIF89a"}, r"image_url must be a URL .* got bytes"),
        ({"type": "video_url", "video_url": ["x"]}, r"video_url must be .* got list"),
        ({"type": "image"}, r"content\[1\].image must be a URL, a path, bytes, a Pillow image or an array, got None"),
        ({"type": "image", "image": [b"x"]}, r"content\[1\].image must be .* got list"),
        ({"type": "image", "image": b""}, r"content\[1\].image must be .* got b''"),
        ({"type": "video", "video": []}, r"content\[1\].video must hold at least one frame"),
        ({"type": "video", "video": 3}, r"content\[1\].video must be .*, or a list of frames, got int"),
        ({"type": "video", "video": [b"x", None]}, r"content\[1\].video\[1\] must be .* an array, got NoneType"),
        (IMAGE | {"mm_processor_kwargs": [1]}, r"content\[1\].mm_processor_kwargs must be an object, got list"),
        ({"type": "input_audio", "input_audio": {}}, r"content\[1\] is a part of type 'input_audio'; this model reads"),
        ({"type": ["image"]}, r"is a part of type \['image'\]; this model reads"),
        ({}, r"is a part of type None; this model reads parts of type 'text', 'image_url', 'image', 'video_url', 'vid"),
        ("x", r"content\[1\] is a part of type str; this model reads"),
        ({"type": "text", "text": None}, r"content\[1\].text must be a string, got NoneType"),
    ],
)
def test_invalid_parts_are_named(vision_tokenizer, part, message):
    messages = [user(text("a"), part)]
    for work in (lambda: media_parts(messages), lambda: vision_tokenizer.render_chat(messages, modalities=BOTH)):
        with pytest.raises(InvalidRequest, match=message) as caught:
            work()
        assert caught.value.param == "messages"
        assert len(str(caught.value)) < 300


def test_parts_that_the_model_does_not_read_are_refused(vision_tokenizer, byte_level):
    with pytest.raises(
        InvalidRequest, match="'video_url'; this model reads parts of type 'text', 'image_url', 'image' o"
    ):
        media_parts([user(VIDEO)], modalities=["image"])
    for tokenizer in (byte_level, vision_tokenizer):
        with pytest.raises(
            InvalidRequest, match=r"\[0\] is a part of type 'image_url'; this model reads .* 'text' only"
        ):
            tokenizer.render_chat([user(IMAGE)])


@pytest.mark.parametrize("role", ["system", "assistant", "developer"])
def test_only_user_and_tool_messages_may_have_media(vision_tokenizer, role):
    with pytest.raises(InvalidRequest, match="only messages with the role user or tool may have"):
        media_parts([{"role": role, "content": [IMAGE]}])
    with pytest.raises(InvalidRequest, match="only messages with the role user or tool may have"):
        vision_tokenizer.render_chat([{"role": role, "content": [IMAGE]}], modalities=BOTH)


# --- packing a part -------------------------------------------------------------------------------------------------


def pack(part, source=None):
    [found] = media_parts([user(text("a"), part)])
    return pack_part(found, SETTINGS, source)


def test_a_part_is_packed_by_its_options():
    image, video = make_image(300, 300), clip(20)
    assert pack({"type": "image", "image": image}).key == pack_image(image, SETTINGS).key
    assert pack(IMAGE, encoded(image)).key == pack_image(image, SETTINGS).key
    small = pack(IMAGE | {"mm_processor_kwargs": {"max_pixels": 12544, "min_pixels": None}}, encoded(image))
    assert small.key == pack_image(image, SETTINGS, max_pixels=12544).key
    assert pack(VIDEO, video).grid[0] == 2
    assert pack(VIDEO | {"mm_processor_kwargs": {"num_frames": 10, "max_pixels": 3136}}, video).grid == (5, 4, 4)
    frames = [image] * 3
    listed = {"type": "video", "video": frames, "mm_processor_kwargs": {"fps": 8}}
    assert pack(listed).key == pack_video(video_from_frames(frames, SETTINGS, fps=8), SETTINGS).key
    stack = np.stack([np.asarray(frame) for frame in frames])
    assert pack({"type": "video", "video": stack, "mm_processor_kwargs": {"fps": 8}}).key == pack(listed).key
    assert pack({"type": "video", "video": image}).grid[0] == 1


@pytest.mark.parametrize(
    ("part", "source", "message"),
    [
        (IMAGE, b"junk", r"messages\[0\].content\[1\]: the 4 bytes are not an image in a supported format"),
        (VIDEO, b"junk", r"messages\[0\].content\[1\]: the 4 bytes are not a video in a supported container"),
        (
            {"type": "image", "image": "a.png"},
            None,
            r"content\[1\]: an image must be a Pillow image, an array or bytes",
        ),
        ({"type": "video", "video": ["a.png"]}, None, r"content\[1\]: frame 0: an image must be"),
        (
            IMAGE | {"mm_processor_kwargs": {"fps": 3}},
            b"",
            r"content\[1\]: fps cannot be set here; supported for image",
        ),
        (
            VIDEO | {"mm_processor_kwargs": {"mode": 3}},
            b"",
            r"mode cannot be set here; supported for video: fps, max_pixels, min_pixels",
        ),
        (IMAGE | {"mm_processor_kwargs": {"max_pixels": "9"}}, b"", r"max_pixels must be a whole number, got '9'"),
        (
            IMAGE | {"mm_processor_kwargs": {"max_pixels": 10**7}},
            b"",
            r"content\[1\]: .* 10,000,000, the server's limit",
        ),
        (VIDEO | {"mm_processor_kwargs": {"num_frames": 4}}, [b""], r"content\[1\]: num_frames applies to video files"),
    ],
)
def test_the_error_for_a_part_that_cannot_be_packed_names_it(part, source, message):
    if source == b"":
        source = encoded(make_image(30, 30))
    with pytest.raises(InvalidRequest, match=message) as caught:
        pack(part, source)
    assert caught.value.param == "messages"
