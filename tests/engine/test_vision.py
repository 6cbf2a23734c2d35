"""Images and video in the engine give the tokens of transformers, alone, batched, chunked and preempted."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from omni_jax import LLM
from omni_jax.inputs.image import pack_image
from omni_jax.inputs.prompt import chat_prompt
from omni_jax.inputs.video import Frames, pack_video
from omni_jax.models.config import model_config
from omni_jax.requests import InvalidRequest, Request
from tests import tiny_vl
from tests.engines import SETUPS, alone, compile_tiny, greedy, load_tiny, make_engine, request, run, sharing
from tests.goldens import make_vl

pytestmark = pytest.mark.smoke

TOLERANCE = 1e-4
CASES = list(tiny_vl.CASES)


@functools.cache
def golden(family):
    return make_vl.load_vl(family)


def packed(item, settings):
    if isinstance(item, tiny_vl.ImageItem):
        return pack_image(Image.fromarray(item.array()), settings)
    images = [Image.fromarray(frame) for frame in item.arrays()]
    return pack_video(Frames(images=images, seconds_per_frame=1 / item.fps), settings)


def content_part(item):
    """The content part of a message for an image or video."""
    if isinstance(item, tiny_vl.ImageItem):
        return {"type": "image", "image": item.array()}
    return {"type": "video", "video": item.arrays()}


def vision_request(loaded, case, *, name=None, params=None) -> Request:
    """The request for the name of one of tiny_vl.CASES, or for a Case."""
    case = tiny_vl.CASES[case] if isinstance(case, str) else case
    vision = loaded.vision
    items = [packed(item, vision.settings) for item in case.items]
    prompt = chat_prompt(loaded.tokenizer, vision.config, case.messages(content_part), items)
    params = params or greedy(max_tokens=32)
    return Request(id=name or "a", prompt_ids=prompt.ids, media=prompt.media, positions=prompt.positions, params=params)


def nnx_decoder(loaded):
    decoder = loaded.runner._weights.decoder
    return decoder.merge(decoder.leaves)


def image_case(*images, text="What is this?"):
    return tiny_vl.Case(turns=(("user", (*images, text)),))


@pytest.mark.parametrize("family", tiny_vl.FAMILIES)
class TestEqualsTransformers:
    def test_prompts_and_positions(self, family):
        for name, expected in golden(family).items():
            found = vision_request(load_tiny(family), name)
            assert found.prompt_ids == tuple(expected["ids"].tolist()), name
            if found.positions is None:
                assert not found.media
                np.testing.assert_array_equal(
                    expected["positions"], np.arange(len(found.prompt_ids))[None].repeat(3, 0)
                )
            else:
                np.testing.assert_array_equal(found.positions, expected["positions"], err_msg=name)
            assert found.position_delta == expected["delta"], name

    def test_tower(self, family):
        """All images of a case are packed into one call."""
        loaded = load_tiny(family)
        for name, expected in golden(family).items():
            engine = make_engine(loaded)
            item = vision_request(loaded, name)
            engine.add(item)
            while engine.has_work and engine.stats().encoder_cache_usage == 0 and item.media:
                engine.step()
            cache, encoder = engine.core.features.cache, loaded.runner.encoder
            rows = {span.key: cache.rows(span.key) for span in item.media}
            while engine.has_work:
                engine.step()
            features = np.asarray(encoder.features)
            found = [features[rows[span.key]] for span in item.media]
            if found:
                np.testing.assert_allclose(np.concatenate(found), expected["features"], atol=TOLERANCE, rtol=TOLERANCE)

    def test_merged_embeddings(self, family):
        """Inputs of the first layer at and next to both ends of each run of placeholders."""
        loaded = load_tiny(family)
        decoder = nnx_decoder(loaded)
        for name, expected in golden(family).items():
            ids, at = expected["ids"].astype(np.int32), expected["embed_rows"]
            features = np.concatenate([np.zeros((1, 64), np.float32), expected["features"].reshape(-1, 64)])
            is_media = np.isin(ids, (loaded.vision.config.image_token_id, loaded.vision.config.video_token_id))
            rows = np.where(is_media, np.cumsum(is_media), 0).astype(np.int32)
            found = decoder.embed_tokens(jnp.asarray(ids), jnp.asarray(features), jnp.asarray(rows))
            np.testing.assert_allclose(np.asarray(found)[at], expected["embeds"], atol=TOLERANCE, rtol=0, err_msg=name)

    def test_batched_tokens(self, family):
        loaded = load_tiny(family)
        answers = run(make_engine(loaded), *(vision_request(loaded, name, name=name) for name in CASES))
        for name in CASES:
            assert answers[name, 0].tokens == golden(family)[name]["tokens"].tolist(), name

    def test_logprobs_after_the_prompt(self, family):
        loaded = load_tiny(family)
        params = greedy(max_tokens=1, logprobs=20)
        answers = run(make_engine(loaded), *(vision_request(loaded, name, name=name, params=params) for name in CASES))
        for name in CASES:
            logits = golden(family)[name]["logits"].astype(np.float64)
            expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            [entry] = answers[name, 0].logprobs
            order = np.argsort(-expected)[:20]
            assert [token for token, _ in entry.top] == order.tolist(), name
            np.testing.assert_allclose([value for _, value in entry.top], expected[order], atol=TOLERANCE, rtol=0)

    def test_the_layout_of_transformers_5(self, family, tmp_path):
        """The same tensors with other names, and a nested config.json."""
        from checkpoints.reader import Checkpoint
        from omni_jax.models.weights import load_weights

        configs, leaves = [], []
        for layout in tiny_vl.LAYOUTS:
            checkpoint = Checkpoint(tiny_vl.write_tiny_vl(tmp_path / layout, family, layout=layout))
            config, weights = load_weights(checkpoint, model_config(checkpoint.config), np.dtype(np.float32))
            configs.append(config)
            tower = weights.tower
            leaves.append([*weights.decoder.leaves, *tower.patch.leaves, *tower.blocks[1].leaves, *tower.merger.leaves])
        assert configs[0] == configs[1]
        for one, other in zip(*leaves, strict=True):
            np.testing.assert_array_equal(one, other)


class TestSchedules:
    """In float32, greedy tokens equal the goldens however work is scheduled."""

    family = "qwen2_vl"

    def check(self, answers, names):
        for name in names:
            assert answers[name, 0].tokens == golden(self.family)[name]["tokens"].tolist(), name

    @pytest.mark.parametrize("name", CASES)
    def test_alone(self, name):
        loaded = load_tiny(self.family)
        self.check(run(make_engine(loaded), vision_request(loaded, name, name=name)), [name])

    def test_among_text_requests(self):
        loaded = load_tiny(self.family)
        texts = [request(f"text{n}", n) for n in (1, 17, 150)]
        expected = {item.id: alone(loaded, item).tokens for item in texts}
        images = [vision_request(loaded, name, name=name) for name in CASES]
        answers = run(make_engine(loaded), texts[0], *images[:3], texts[1], *images[3:], texts[2])
        self.check(answers, CASES)
        for name, tokens in expected.items():
            assert answers[name, 0].tokens == tokens

    def test_mr_01_sch_02_chunks_of_16_that_cross_edges_of_images(self):
        loaded = load_tiny(self.family)
        engine = make_engine(loaded, max_num_batched_tokens=16)
        self.check(run(engine, *(vision_request(loaded, name, name=name) for name in CASES)), CASES)
        assert engine.stats().encoder_cache_hits == 0

    def test_pre_03_preempted_and_resumed(self):
        """Features, positions and position deltas survive preemption."""
        loaded = load_tiny(self.family)
        engine = make_engine(loaded, num_blocks=17, max_model_len=256)
        names = [name for name in CASES if name != "four_images"]
        answers = run(engine, *(vision_request(loaded, name, name=name) for name in names))
        assert engine.stats().num_preemptions > 0
        self.check(answers, names)

    def test_with_room_for_one_image_at_a_time(self):
        loaded = load_tiny(self.family)
        engine = make_engine(loaded, encoder_cache_tokens=48)
        self.check(run(engine, *(vision_request(loaded, name, name=name) for name in CASES)), CASES)

    def test_a_failed_step_while_images_are_encoded(self, monkeypatch):
        loaded = load_tiny(self.family)
        engine = make_engine(loaded)
        real, calls = loaded.runner.encoder.advance, []

        def failing():
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("injected")
            return real()

        monkeypatch.setattr(loaded.runner.encoder, "advance", failing)
        self.check(run(engine, *(vision_request(loaded, name, name=name) for name in CASES)), CASES)
        assert len(calls) > 3


@pytest.mark.parametrize("layers", [3, 9])
def test_more_layers_per_slice_give_the_same_tokens(layers):
    """With both kinds of attention in a slice, a shorter last slice, and all layers in one slice."""
    loaded = compile_tiny(SETUPS["qwen2_5_vl"], encoder_layers_per_slice=layers)
    answers = run(make_engine(loaded), *(vision_request(loaded, name, name=name) for name in CASES))
    for name in CASES:
        assert answers[name, 0].tokens == golden("qwen2_5_vl")[name]["tokens"].tolist(), name


def test_images_of_a_hundred_sizes_compile_nothing():
    """Images are neither resized to a compiled size, nor do they need new ones."""
    loaded = load_tiny("qwen2_vl")
    engine = make_engine(loaded)
    sizes = [(rows, cols) for rows in range(16, 136, 8) for cols in range(16, 80, 8) if rows * cols <= 8192][:100]
    assert len(sizes) == 100
    before = engine.stats()
    cases = [image_case(tiny_vl.ImageItem(rows=rows, cols=cols, seed=rows)) for rows, cols in sizes]
    params = greedy(max_tokens=2)
    run(engine, *(vision_request(loaded, case, name=str(i), params=params) for i, case in enumerate(cases)))
    after = engine.stats()
    assert after.compiles_after_warmup == before.compiles_after_warmup
    assert after.encoder_patches - before.encoder_patches == sum(rows * cols // 16 for rows, cols in sizes)
    assert after.encoder_padded_patches > before.encoder_padded_patches
    assert after.mm_items == {"image": 100, "video": 0}


def test_an_image_in_several_requests_is_encoded_once():
    loaded = load_tiny("qwen2_vl")
    engine = make_engine(loaded)
    before = engine.stats().encoder_patches
    answers = run(engine, *(vision_request(loaded, "one_image", name=str(i)) for i in range(5)))
    assert len({tuple(answer.tokens) for answer in answers.values()}) == 1
    assert engine.stats().encoder_patches - before == 10 * 14
    assert engine.stats().encoder_cache_hits == 4


def test_mm_10_the_order_of_images_matters():
    loaded = load_tiny("qwen2_vl")
    one, other = tiny_vl.ImageItem(rows=24, cols=24, seed=1), tiny_vl.ImageItem(rows=24, cols=24, seed=2)
    forward, backward = (vision_request(loaded, image_case(*pair)) for pair in ((one, other), (other, one)))
    assert forward.prompt_ids == backward.prompt_ids
    assert [span.key for span in forward.media] == [span.key for span in backward.media][::-1]
    assert alone(loaded, forward).tokens != alone(loaded, backward).tokens


class TestRefused:
    @pytest.fixture
    def loaded(self):
        return load_tiny("qwen2_vl")

    def refused(self, engine, item, match):
        with pytest.raises(InvalidRequest, match=match):
            engine.add(item)
        assert not engine.has_work

    def test_mm_07_an_image_larger_than_the_encoder_cache(self, loaded):
        large = image_case(tiny_vl.ImageItem(rows=80, cols=96, seed=1))
        engine = make_engine(loaded, encoder_cache_tokens=64)
        message = "120 tokens is larger than the encoder cache, which holds 64"
        self.refused(engine, vision_request(loaded, large), message)
        found = run(engine, vision_request(loaded, "one_image"))["a", 0].tokens
        assert found == golden("qwen2_vl")["one_image"]["tokens"].tolist()

    def test_more_patches_than_are_compiled(self, loaded):
        item = vision_request(loaded, "one_image")
        span = dataclasses.replace(item.media[0], grid=(10, 104))
        self.refused(make_engine(loaded), dataclasses.replace(item, media=(span,)), "1040 patches .* limit of 512")

    @pytest.mark.parametrize(
        "token", [tiny_vl.tokenizer().token_to_id(f"<|{kind}_pad|>") for kind in ("image", "video")]
    )
    def test_tok_04_a_placeholder_without_an_image(self, loaded, token):
        engine = make_engine(loaded)
        self.refused(engine, request("a", [5, token, 6]), "placeholder")
        item = vision_request(loaded, "one_image")
        self.refused(
            engine, dataclasses.replace(item, prompt_ids=(*item.prompt_ids, token), positions=None), "placeholder"
        )
        self.refused(engine, dataclasses.replace(item, media=()), "placeholder")

    def test_a_span_that_does_not_match_its_placeholders(self, loaded):
        item = vision_request(loaded, "one_image")
        moved = dataclasses.replace(item.media[0], start=item.media[0].start + 1)
        self.refused(make_engine(loaded), dataclasses.replace(item, media=(moved,)), "replace exactly 35 placeholder")

    def test_images_for_a_text_only_model(self, loaded):
        text = load_tiny("main")
        item = vision_request(loaded, "one_image")
        self.refused(make_engine(text), dataclasses.replace(item, prompt_ids=(3,) * len(item.prompt_ids)), "text only")


def test_an_abort_during_encoding_frees_its_features():
    loaded = load_tiny("qwen2_vl")
    engine = make_engine(loaded)
    engine.add(vision_request(loaded, "four_images", name="gone"))
    for _ in range(3):
        engine.step()
    engine.abort("gone")
    answers = run(engine, vision_request(loaded, "one_image"))
    assert answers["a", 0].tokens == golden("qwen2_vl")["one_image"]["tokens"].tolist()


def test_llm_accepts_pillow_images_arrays_files_and_frames(tmp_path):
    loaded = load_tiny("qwen2_vl")
    image = tiny_vl.CASES["one_image"].items[0]
    path = tmp_path / "image.png"
    Image.fromarray(image.array()).save(path)
    sources = [Image.fromarray(image.array()), image.array(), path, str(path), path.read_bytes()]
    with sharing(loaded) as model_dir:
        llm = LLM(model_dir)
    params = greedy(max_tokens=32)
    for source in sources:
        messages = tiny_vl.CASES["one_image"].messages(lambda item, source=source: {"type": "image", "image": source})
        [output] = llm.chat(messages, params)
        assert list(output.outputs[0].token_ids) == golden("qwen2_vl")["one_image"]["tokens"].tolist()
    video = tiny_vl.CASES["video"].items[0]
    frames = [Image.fromarray(frame) for frame in video.arrays()]
    messages = tiny_vl.CASES["video"].messages(lambda item: {"type": "video", "video": frames})
    [output] = llm.chat(messages, params)
    assert list(output.outputs[0].token_ids) == golden("qwen2_vl")["video"]["tokens"].tolist()
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\].*does not fetch URLs"):
        llm.chat([{"role": "user", "content": [{"type": "image", "image": "https://example.com/a.png"}]}], params)
