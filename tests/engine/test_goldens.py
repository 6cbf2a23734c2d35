"""The engine gives the tokens and log-probabilities of transformers, alone, batched and in chunks."""

import numpy as np
import pytest

from tests import tiny
from tests.engines import greedy, load_tiny, make_engine, request, run
from tests.goldens import make

pytestmark = pytest.mark.smoke

TOLERANCE = 1e-4


def golden_tokens(variant):
    golden = make.load(variant)
    return dict(zip(golden["lengths"].tolist(), golden["tokens"].tolist(), strict=True))


def check_batched(setup, variant):
    """Prompts of all lengths at once; the one of 150 tokens is longer than a step and runs in chunks."""
    golden = golden_tokens(variant)
    engine = make_engine(load_tiny(setup))
    answers = run(engine, *(request(str(length), length) for length in golden))
    for length, tokens in golden.items():
        answer = answers[str(length), 0]
        assert answer.tokens == tokens, f"prompt of {length}"
        stream = engine.tokenizer.stream(prompt=tiny.prompt(length))  # a prompt may end within a character
        assert answer.text == "".join([*map(stream.push, tokens), stream.close()])
        assert answer.finish_reason == "length"


def check_scored(setup, variant):
    golden = make.load(variant)
    length = int(golden["scored_length"])
    engine = make_engine(load_tiny(setup))
    answer = run(engine, request("a", length, greedy(prompt_logprobs=0, max_tokens=0)))["a", 0]
    assert answer.tokens == []
    assert answer.prompt_logprobs is not None
    first, *rest = answer.prompt_logprobs
    assert first is None
    assert [entry.token_id for entry in rest] == tiny.prompt(length)[1:]
    found = np.array([entry.logprob for entry in rest])
    np.testing.assert_allclose(found, golden["scored_logprobs"], atol=TOLERANCE, rtol=0)


def test_batched_greedy_tokens_equal_transformers():
    check_batched("main", "llama")


def test_scored_logprobs_equal_transformers():
    check_scored("main", "llama")


@pytest.mark.parametrize("length", tiny.PROMPT_LENGTHS)
def test_greedy_tokens_of_a_single_prompt_equal_transformers(length):
    answers = run(make_engine(load_tiny("main")), request("a", length))
    assert answers["a", 0].tokens == golden_tokens("llama")[length]


def test_logprobs_of_generated_tokens_equal_transformers():
    golden = make.load("llama")
    engine = make_engine(load_tiny("main"))
    params = greedy(max_tokens=1, logprobs=20)
    answers = run(engine, *(request(str(n), n, params) for n in golden["lengths"].tolist()))
    for length, logits in zip(golden["lengths"].tolist(), golden["logits"].astype(np.float64), strict=True):
        [entry] = answers[str(length), 0].logprobs
        expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        order = np.argsort(-expected)[:20]
        assert entry.token_id == order[0]
        assert [token for token, _ in entry.top] == order.tolist()
        np.testing.assert_allclose([value for _, value in entry.top], expected[order], atol=TOLERANCE, rtol=0)
        assert entry.logprob == entry.top[0][1]


def test_generation_after_a_scored_prompt_equals_transformers():
    """Some prompts end at a block's edge: the next token needs a block before the scores are read."""
    golden = golden_tokens("llama")
    params = greedy(prompt_logprobs=0)
    for lengths in [(length,) for length in golden] + [tuple(golden)]:
        answers = run(make_engine(load_tiny("main")), *(request(str(length), length, params) for length in lengths))
        for length in lengths:
            assert answers[str(length), 0].tokens == golden[length], f"prompt of {length} among {lengths}"
            assert len(answers[str(length), 0].prompt_logprobs) == length


@pytest.mark.parametrize("variant", [name for name in tiny.VARIANTS if name != "llama"])
def test_other_decoders_equal_transformers(variant):
    check_batched(variant, variant)
    check_scored(variant, variant)
