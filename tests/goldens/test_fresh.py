"""The committed goldens match the tiny checkpoints of tests/tiny.py and tests/tiny_vl.py. Needs no torch.

`make goldens-check` compares them with transformers' results if their inputs have changed since it last did.
"""

import json

import numpy as np
import pytest

from tests import tiny, tiny_vl
from tests.goldens import inputs, make, make_vl


def test_goldens_were_checked_with_todays_inputs():
    assert inputs.is_checked(), "run `make goldens-check`, and commit tests/goldens/checked.json if it passes"


@pytest.mark.parametrize("name", [*tiny.VARIANTS, *tiny_vl.FAMILIES])
def test_goldens_were_made_with_the_pinned_versions(name):
    made_with = json.loads(str(make.load(name)["versions"]))
    pinned = inputs.versions()
    assert pinned.keys() == {"torch", "transformers"}
    assert {package: made_with[package].partition("+")[0] for package in pinned} == pinned


def test_changed_inputs_are_noticed(monkeypatch):
    monkeypatch.setattr(tiny, "PROMPT_LENGTHS", (*tiny.PROMPT_LENGTHS[:-1], 3))
    assert not inputs.is_checked()
    monkeypatch.undo()
    monkeypatch.setattr(inputs, "versions", lambda: {"torch": "2.14.0"})
    assert not inputs.is_checked()


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_goldens_were_made_from_these_weights(variant):
    golden = make.load(variant)
    assert str(golden["weights_sha256"]) == make.weights_digest(variant), (
        f"tests/tiny.py or numpy's bit stream has changed since {variant}.npz was made: run tests/goldens/make.py"
    )
    prompts, vocab = len(tiny.prompt_lengths(variant)), tiny.config(variant)["vocab_size"]
    assert golden["lengths"].tolist() == list(tiny.prompt_lengths(variant))
    assert golden["logits"].shape == (prompts, vocab)
    assert golden["tokens"].shape == (prompts, make.GREEDY_TOKENS)
    assert golden["tokens"][:, 0].tolist() == golden["logits"].argmax(-1).tolist()
    assert golden["scored_logprobs"].shape == (golden["scored_length"] - 1,)


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_golden_output_is_varied(variant):
    # Repeated tokens would hide errors in positions and in the cache.
    tokens = make.load(variant)["tokens"]
    assert min(len(set(row)) for row in tokens.tolist()) >= 16


def test_rope_variants_differ():
    plain, yarn = make.load("llama"), make.load("llama_yarn")
    assert np.abs(plain["logits"] - yarn["logits"][: len(plain["logits"])]).max() > 0.1


FAMILIES = pytest.mark.parametrize("family", tiny_vl.FAMILIES)


@FAMILIES
def test_vision_goldens_were_made_from_these_weights_and_images(family):
    assert str(make.load(family)["weights_sha256"]) == make_vl.weights_digest(family), (
        f"tests/tiny_vl.py or numpy's bit stream has changed since {family}.npz was made: run make_vl.py"
    )
    assert (make.HERE / f"{family}.npz").stat().st_size < 300_000


@FAMILIES
def test_vision_goldens_are_complete(family):
    goldens, table = make_vl.load_vl(family), tiny_vl.weights(family)["model.embed_tokens.weight"]
    assert goldens.keys() == tiny_vl.CASES.keys()
    for name, golden in goldens.items():
        case, ids = tiny_vl.CASES[name], golden["ids"]
        assert ids.tolist() == tiny_vl.expanded_ids(case)
        assert [tuple(grid) for grid in golden["grids"].tolist()] == [item.grid for item in case.items]
        placeholders = np.flatnonzero(ids >= 510)
        assert golden["features"].shape == (len(placeholders), table.shape[1])
        whole = table[ids]
        whole[placeholders] = golden["features"]
        np.testing.assert_array_equal(golden["embeds"], whole[golden["embed_rows"]])
        assert len(golden["embed_rows"]) == 4 * len(case.items)
        assert golden["logits"].shape == table.shape[:1]
        assert golden["tokens"].shape == (make_vl.GREEDY_TOKENS,)
        assert golden["tokens"][0] == golden["logits"].argmax()
        assert golden["positions"].shape == (3, len(ids))
        assert golden["delta"] == golden["positions"].max() + 1 - len(ids)


@FAMILIES
def test_vision_output_is_varied(family):
    goldens = make_vl.load_vl(family)
    assert min(len(set(golden["tokens"].tolist())) for golden in goldens.values()) >= 16
    for golden in goldens.values():
        assert len(np.unique(golden["features"], axis=0)) == len(golden["features"])


@FAMILIES
def test_text_continues_after_the_largest_position_of_an_image_or_video(family):
    # transformers 4 and 5.24 differ for videos with more temporal positions than rows and columns: version 5.24
    # continues after the larger side (see README.md). The goldens have no such video.
    for golden in make_vl.load_vl(family).values():
        positions, media = golden["positions"], golden["ids"] >= 510
        for i in np.flatnonzero(media[:-1] & ~media[1:]):
            assert (positions[:, i + 1] == positions[:, : i + 1].max() + 1).all()


def test_temporal_positions_are_truncated_after_the_product():
    # Steps of 0.8 seconds at 2 positions per second: 0, 1.6, 3.2. Qwen2-VL counts steps.
    for family, times in (("qwen2_vl", [0, 1, 2]), ("qwen2_5_vl", [0, 1, 3])):
        golden = make_vl.load_vl(family)["video"]
        time, row, column = golden["positions"][:, golden["ids"] == 511]
        first = row.min()
        assert (time - first).tolist() == [t for t in times for _ in range(15)]
        assert (row - first).tolist() == [r for _ in times for r in range(3) for _ in range(5)]
        assert (column - first).tolist() == list(range(5)) * 9


def test_differences_are_found():
    golden = make.load("llama")
    assert make.differences(golden, golden) == []
    changed = golden | {"logits": golden["logits"] + 1e-3, "tokens": golden["tokens"] + 1}
    assert len(make.differences(golden, changed)) == 2
    assert make.differences({k: v for k, v in golden.items() if k != "tokens"}, golden) == [
        "tokens is missing in the committed file"
    ]
