"""The committed goldens belong to the tiny checkpoints as tests/tiny.py writes them now (no torch needed to tell).

That transformers still computes the same from them is checked by `python tests/goldens/make.py --check` where torch is.
"""

import numpy as np
import pytest

from tests import tiny
from tests.goldens import make


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_goldens_were_made_from_these_weights(variant):
    golden = make.load(variant)
    assert str(golden["weights_sha256"]) == make.weights_digest(variant), (
        f"tests/tiny.py or numpy's bit stream changed since {variant}.npz was made: run tests/goldens/make.py again"
    )
    prompts, vocab = len(tiny.PROMPT_LENGTHS), tiny.config(variant)["vocab_size"]
    assert golden["lengths"].tolist() == list(tiny.PROMPT_LENGTHS)
    assert golden["logits"].shape == (prompts, vocab)
    assert golden["tokens"].shape == (prompts, make.GREEDY_TOKENS)
    assert golden["tokens"][:, 0].tolist() == golden["logits"].argmax(-1).tolist()
    assert golden["scored_logprobs"].shape == (golden["scored_length"] - 1,)


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_golden_output_is_varied(variant):
    # A repeated token would hide errors in positions and in the cache.
    tokens = make.load(variant)["tokens"]
    assert min(len(set(row)) for row in tokens.tolist()) >= 16


def test_rope_variants_differ():
    plain, yarn = make.load("llama"), make.load("llama_yarn")
    assert np.abs(plain["logits"] - yarn["logits"]).max() > 0.1


def test_differences_are_found():
    golden = make.load("llama")
    assert make.differences(golden, golden) == []
    changed = golden | {"logits": golden["logits"] + 1e-3, "tokens": golden["tokens"] + 1}
    assert len(make.differences(golden, changed)) == 2
    assert make.differences({k: v for k, v in golden.items() if k != "tokens"}, golden) == [
        "tokens is missing in the committed file"
    ]
