"""EOS ids and sampling defaults of a checkpoint, from dictionaries."""

import pytest

from checkpoints.errors import CheckpointError
from omni_jax.engine.generation_config import MAX_EOS_IDS, default_sampling, eos_token_ids
from omni_jax.requests import SamplingParams

pytestmark = pytest.mark.smoke

NESTED = {"text_config": {"eos_token_id": 5}}


@pytest.mark.parametrize(
    ("generation", "config", "of_tokenizer", "expected"),
    [
        ({"eos_token_id": 0}, {"eos_token_id": 0}, 2, {0, 2}),
        ({"eos_token_id": [2, 0, 7]}, {"eos_token_id": 3}, 2, {0, 2, 3, 7}),
        ({}, {"eos_token_id": [1, 4]}, None, {1, 4}),
        ({"eos_token_id": None}, {"eos_token_id": None}, 2, {2}),
        ({"eos_token_id": []}, {}, None, set()),
        ({"eos_token_id": 1}, NESTED, 2, {1, 2, 5}),
        ({}, NESTED | {"eos_token_id": 6}, None, {5, 6}),
    ],
)
def test_tok_07_eos_ids_are_those_of_all_files(generation, config, of_tokenizer, expected):
    assert eos_token_ids(generation, config, of_tokenizer, vocab_size=8) == expected


@pytest.mark.parametrize("value", [-1, 8, 2**40, True, 2.0, "2", [2, -1], [[2]], {"id": 2}])
@pytest.mark.parametrize("where", ["generation_config.json", "config.json", "text_config of config.json"])
def test_tok_07_an_eos_id_outside_the_vocabulary_is_refused(where, value):
    wrong = {"eos_token_id": value}
    generation, config = (
        (wrong, {}) if where.startswith("gen") else ({}, wrong if where == "config.json" else {"text_config": wrong})
    )
    with pytest.raises(CheckpointError, match=f"eos_token_id in {where} must be a token id from 0 to 7 or a list"):
        eos_token_ids(generation, config, 2, vocab_size=8)


def test_a_tokenizer_of_another_model_and_too_many_ids_are_refused():
    with pytest.raises(CheckpointError, match="eos_token has the id 8, but the model has 8 token ids"):
        eos_token_ids({}, {}, 8, vocab_size=8)
    with pytest.raises(CheckpointError, match=f"{MAX_EOS_IDS + 1} ids .* more than {MAX_EOS_IDS}"):
        eos_token_ids({"eos_token_id": list(range(MAX_EOS_IDS + 1))}, {}, None, vocab_size=100)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"max_new_tokens": 2048, "max_length": 20}, {"max_tokens": 2048}),
        ({"max_new_tokens": None, "max_length": 4096}, {}),
        ({"do_sample": False, "temperature": 0.6, "max_new_tokens": 9}, {"temperature": 0.0, "max_tokens": 9}),
        ({"do_sample": None, "top_k": 20}, {"top_k": 20}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
    ],
)
def test_gen_01_max_new_tokens_is_a_default(generation, expected):
    assert default_sampling(generation) == expected


def test_do_sample_false_is_greedy():
    generation = {"do_sample": False, "temperature": 0.6, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.1}
    defaults = default_sampling(generation)
    assert defaults == {"temperature": 0.0, "repetition_penalty": 1.1}
    assert SamplingParams(**defaults).greedy
    assert SamplingParams(**defaults | {"temperature": 0.7}).temperature == 0.7  # a request's own


@pytest.mark.parametrize("value", [0, -5, 9.5, "9", True])
def test_gen_01_a_wrong_max_new_tokens_is_refused(value):
    with pytest.raises(CheckpointError, match=f"generation_config.json: max_new_tokens must be .*, got {value!r}: "):
        default_sampling({"max_new_tokens": value})


@pytest.mark.parametrize(("name", "value"), [("temperature", -1), ("top_p", 2), ("top_k", 1.5), ("min_p", "0.1")])
def test_wrong_sampling_defaults_are_refused_at_the_start(name, value):
    with pytest.raises(CheckpointError, match=f"generation_config.json: {name} must be .*--generation-config vllm"):
        default_sampling({name: value})
    assert default_sampling({name: value, "do_sample": False}) == {"temperature": 0.0}
