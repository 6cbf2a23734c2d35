"""Pieces of benchmarks.vision at toy size, without timing."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from benchmarks.rounds import Series, largest_gap_allowed, largest_slice, percentile
from benchmarks.vision import case as vision_case
from benchmarks.vision import gaps_case
from benchmarks.vision import images as image_files
from benchmarks.vision import model as vision_model
from benchmarks.vision import report as vision_report
from benchmarks.vision.preparing import Preparer
from checkpoints.reader import Checkpoint
from omni_jax.engine.config import EngineConfig
from omni_jax.inputs.image import VisionSettings, open_image, pack_image
from omni_jax.inputs.prompt import chat_prompt
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.models.config import model_config
from tests.engines import load_tiny, sharing

TEXT = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VISION = {"depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    directory = tmp_path_factory.mktemp("toy")
    vision_model.write(directory, text=TEXT, vision=VISION, mrope_section=(2, 3, 3))
    return directory


class TestModel:
    def test_the_engine_loads_it(self, toy):
        """Loading is strict: no tensor is missing, extra or of another shape (Tower loads it below)."""
        config = model_config(Checkpoint(toy).config)
        assert config.vision is not None
        assert (config.vision.depth, config.vision.hidden_size, config.vision.out_hidden_size) == (2, 32, 64)
        assert config.rope.sections == (2, 3, 3)

    def test_its_template_has_a_placeholder_for_an_image(self, toy):
        vision, settings = model_config(Checkpoint(toy).config).vision, VisionSettings.from_directory(toy)
        image = Image.new("RGB", (56, 84))
        item = pack_image(image, settings)
        messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "hello"}]}]
        prompt = chat_prompt(Tokenizer.from_directory(toy), vision, messages, [item])
        assert prompt.ids.count(vision.image_token_id) == item.num_tokens == 6
        assert [span.length for span in prompt.media] == [6]

    def test_has_the_widths_of_qwen2_vl_2b(self):
        assert (vision_model.TEXT["hidden_size"], vision_model.TEXT["intermediate_size"]) == (1536, 8960)
        assert (vision_model.VISION["embed_dim"], vision_model.VISION["num_heads"]) == (1280, 16)
        assert 2 * sum(vision_model.MROPE_SECTION) == 1536 // vision_model.TEXT["num_attention_heads"]


class TestImages:
    def test_files_have_the_given_sizes_and_differ(self, tmp_path):
        one, other = image_files.write_jpegs(tmp_path, [(90, 60), (90, 60)])
        with Image.open(one) as first, Image.open(other) as second:
            assert first.size == second.size == (90, 60)
            assert first.format == "JPEG"
            assert np.asarray(first).std() > 10
            assert not np.array_equal(first, second)

    def test_the_same_seed_gives_the_same_image(self):
        assert image_files.jpeg(40, 60, 7) == image_files.jpeg(40, 60, 7)


class TestPreparing:
    def test_our_preparer_finds_patches_and_runs_in_every_mode(self, toy, tmp_path):
        files = image_files.write_jpegs(tmp_path, [(90, 60), (56, 56)])
        contender = vision_case.preparer(toy)
        found = contender.open(files)["found"]
        assert [grid for grid, _ in found] == [[1, 4, 6], [1, 4, 4]]
        for file, (_, mean) in zip(files, found, strict=True):
            with Image.open(file) as image:
                assert mean == pytest.approx(np.asarray(image).mean(), abs=2)
        for decoded in (False, True):
            for threads in (1, 2):
                assert contender.prepare([0, 1, 0], decoded, threads)["seconds"] > 0

    def test_images_are_decoded_only_if_asked_to(self, tmp_path):
        """Bytes are decoded each time; each thread is initialised once."""
        files = image_files.write_jpegs(tmp_path, [(28, 28), (56, 28)])
        calls = []

        def decode(data):
            calls.append("decode")
            return open_image(data)

        def pack(image):
            calls.append(image.size)
            return image

        contender = Preparer({}, decode, pack, lambda image: ([1], 0.0), in_thread=lambda: calls.append("thread"))
        contender.open(files)
        calls.clear()
        contender.prepare([1, 0, 1], False, 1)
        assert calls == ["decode", (56, 28), "decode", (28, 28), "decode", (56, 28)]
        calls.clear()
        contender.prepare([1, 0], True, 1)
        assert calls == [(56, 28), (28, 28)]
        contender.prepare([0], True, 2)
        assert calls.count("thread") == 2


def test_features_do_not_depend_on_slices(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(vision_case.compat, "use_compilation_cache", lambda folder: None)
    grids = [(4, 6), (8, 8)]
    files = image_files.write_patches(tmp_path, grids)
    whole, sliced = vision_case.Tower(toy, layers_per_slice=2), vision_case.Tower(toy)
    opened = whole.open(files, grids)
    assert opened["buckets"] == [256, 256]
    assert [np.shape(found) for found in opened["found"]] == [(6, 8), (8, 8)]
    assert not np.allclose(opened["found"][0][0], opened["found"][1][0])
    np.testing.assert_allclose(
        np.concatenate(sliced.open(files, grids)["found"]), np.concatenate(opened["found"]), atol=1e-5, rtol=0
    )
    assert sliced.encode(1, 2)["seconds"] > 0


@pytest.fixture(scope="module")
def contender():
    with sharing(load_tiny("qwen2_vl")) as directory:
        made = gaps_case.Gaps(EngineConfig(model_dir=directory))
        yield made
        made.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return image_files.write_jpegs(tmp_path_factory.mktemp("images"), [(64, 80)] * 5)


class TestGaps:
    def test_a_stream_with_and_without_images(self, contender, files):
        contender.open(files)
        slices = contender.alone([0, 1])["slice_seconds"]
        assert [len(of_one) for of_one in slices] == [4, 4]  # patch embedding and three layers, without the merger
        plain = contender.stream(tokens=60, images=[], after=4)
        assert len(plain["gaps"]) >= 59
        assert not any(plain["during"])
        assert plain["slice_seconds"] == ()
        assert len(plain["step_seconds"]) >= 60
        beside = contender.stream(tokens=60, images=[2, 3, 4], after=4)
        assert len(beside["gaps"]) == len(beside["during"]) >= 59
        assert any(beside["during"])
        assert not any(beside["during"][:3])
        assert len(beside["slice_seconds"]) == 12
        assert len(beside["first_token_seconds"]) == 3
        assert beside["compiles_after_warmup"] == 0


class TestStatistics:
    def test_percentiles_by_nearest_rank(self):
        values = list(range(100, 0, -1))
        assert [percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
        assert percentile([3.0], 0.5) == 3.0

    def test_one_slow_image_does_not_raise_the_allowed_gap(self):
        assert largest_slice([(1.0, 2.0), (1.0, 9.0), (2.5, 1.0)]) == 2.5
        assert largest_gap_allowed(step=0.25, longest_slice=2.0) == 3.25


class TestReport:
    def row(self, title, **seconds):
        series = [Series(name=name, amount=1, seconds=(s, s), others=(0.0, 0.0)) for name, s in seconds.items()]
        return {
            "title": title,
            "series": [dataclasses.asdict(s) for s in series],
            "peak_mib": dict.fromkeys(seconds, 1),
        }

    def part(self, *rows):
        contenders = [{"name": s["name"], "version": "1"} for s in rows[0]["series"]]
        return {"contenders": contenders, "missing": [], "rows": list(rows)}

    def document(self, **parts):
        machine = {"cpu": "x", "cores": 2, "vectors": {}, "memory_gib": 1, "python": "3", "load": 0.0}
        return {"machine": machine, "parts": parts}

    def test_the_target_is_relative_to_the_fastest_other(self):
        row = self.row("small", **{"omni-jax": 1.0, "a": 2.0, "b": 0.8})
        [(text, reached)] = vision_report.verdicts(self.document(preprocess=self.part(row)))
        assert "0.80 at small" in text
        assert not reached
        assert "**missed**" in vision_report.markdown(self.document(preprocess=self.part(row)))

    def test_every_row_must_reach_the_target(self):
        good = self.row("small", **{"omni-jax": 1.0, "transformers": 1.1})
        bad = self.row("large", **{"omni-jax": 1.0, "transformers": 0.95})
        assert vision_report.verdicts(self.document(tower=self.part(good)))[0][1]
        [(text, reached)] = vision_report.verdicts(self.document(tower=self.part(good, bad)))
        assert "large" in text
        assert "small" not in text
        assert not reached
        assert vision_report.verdicts(self.document(preprocess=self.part(good, bad)))[0][1]

    def test_without_another_contender_there_is_no_target(self):
        document = self.document(tower=self.part(self.row("small", **{"omni-jax": 1.0})))
        assert vision_report.verdicts(document) == []
        assert "No other contender to compare with" in vision_report.markdown(document)

    @pytest.mark.parametrize(("largest", "reached"), [(3.0, True), (3.2, False)])
    def test_the_target_of_the_largest_gap(self, largest, reached):
        stream = {"gaps": [0.1] * 99, "during": [False] * 99, "step_seconds": [0.1], "slice_seconds": [], "others": 0.0}
        beside = stream | {"gaps": [0.1] * 98 + [largest], "during": [False] * 98 + [True], "slice_seconds": [2.5]}
        beside |= {"first_token_seconds": [1.0], "images_seconds": 2.0, "compiles_after_warmup": 0}
        part = {"contenders": [], "missing": [], "plain": stream, "images": beside, "size": (9, 9)}
        part |= {"step_seconds": 0.1, "slice_seconds": 2.0, "allowed": 3.1, "allowed_beside": 3.85}
        part |= {"alone": {"slice_seconds": [[2.0]]}}
        document = self.document(gaps=part)
        assert [found for _, found in vision_report.verdicts(document)] == [reached]
        assert f"| 1 | {1e3 * largest:.1f} |" in vision_report.markdown(document)
