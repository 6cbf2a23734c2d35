"""Prompts as Python callers give them."""

import jax.numpy as jnp
import numpy as np
import pytest

from omni_jax.inputs.prompt_list import list_prompts, read_prompt
from omni_jax.requests import InvalidRequest

IDS = [3, 1, 2]


def read_prompts(given):
    return [read_prompt(prompt) for prompt in list_prompts(given)]


@pytest.mark.parametrize(
    "given",
    [
        IDS,
        tuple(IDS),
        range(3),
        np.array(IDS),
        np.array(IDS, np.int32),
        np.array(IDS, np.uint16),
        np.array(IDS, object),
        list(np.array(IDS)),
        tuple(np.array(IDS, np.uint8)),
        jnp.array(IDS),
        list(jnp.array(IDS)),
        [np.array(i) for i in IDS],
        iter(IDS),
        {"prompt_token_ids": np.array(IDS)},
    ],
    ids=lambda given: type(given).__name__,
)
def test_bf_03_integers_of_any_library_are_one_prompt(given):
    expected = [0, 1, 2] if isinstance(given, range) else IDS
    [prompt] = read_prompts(given)
    assert prompt == tuple(expected)
    assert {type(token) for token in prompt} == {int}


def test_bf_03_rows_and_lists_are_several_prompts():
    rows = [(1, 2), (3, 4)]
    for given in (np.array(rows), jnp.array(rows), rows, [np.array(row) for row in rows], map(np.array, rows)):
        assert read_prompts(given) == rows
    assert read_prompts(["a", [1], np.array([2])]) == ["a", (1,), (2,)]
    assert read_prompts(np.array(["a", "b"])) == ["a", "b"]
    assert read_prompts(np.array([[1, 2, 3]])) == [(1, 2, 3)]
    assert read_prompts("a") == read_prompts({"prompt": "a"}) == ["a"]
    assert read_prompts([{"prompt": "a"}, {"prompt_token_ids": [1], "prompt": "b"}]) == ["a", (1,)]
    # vLLM's own objects have all keys.
    assert read_prompts([{"prompt": "a", "prompt_token_ids": None, "cache_salt": None}]) == ["a"]
    assert read_prompts([{"prompt": None, "prompt_token_ids": [1]}]) == [(1,)]
    assert read_prompts([]) == []
    assert read_prompts([[]]) == [()]  # the engine refuses an empty prompt


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.array([1.0, 2.0]), "dtype float64"),
        (np.array([True]), "dtype bool"),
        (np.array(5), r"shape \(\)"),
        (np.zeros((2, 2, 2), int), r"shape \(2, 2, 2\)"),
        (np.array([[1.0]]), "dtype float64"),
        ([1, True], "token 1 of the prompt must be an integer, got bool True"),
        ([True, 1], "token 0 of the prompt"),
        ([1, 2.0], "token 1 of the prompt must be an integer, got float 2.0"),
        ([1.5], "token 0 of the prompt"),
        (list(np.array([1.0])), "token 0 of the prompt"),
        ([np.bool_(True)], "token 0 of"),
        (list(jnp.array([1.0])), "token 0 of the prompt"),
        ([1, "a"], "token 1 of the prompt must be an integer, got str 'a'"),
        (["a", 1], "the prompt must be a text, or token ids"),
        (["a", [1, None]], "token 1 of the prompt"),
        (b"bytes", "got bytes b'bytes'"),
        ([b"bytes"], "the prompt .* got bytes"),
        (5, "prompts must be a text"),
        (None, "prompts must be a text"),
        ({"prompt": "a", "lora": {}}, r"keys \['lora', 'prompt'\]"),
        ({}, r"keys \[\]"),
        ({"prompt": None}, "the prompt must be a text, or token ids.*NoneType"),
        ([{"role": "user", "content": "hello"}], r"LLM\.chat"),
    ],
)
def test_bf_03_anything_else_is_refused_with_its_place(given, message):
    with pytest.raises(InvalidRequest, match=message) as error:
        read_prompts(given)
    assert error.value.param == "prompt"


def test_one_prompt_is_read_as_one():
    assert read_prompt("a") == "a"
    assert read_prompt(np.array(IDS)) == tuple(IDS)
    with pytest.raises(InvalidRequest, match="token 0 of the prompt must be an integer, got str 'a'"):
        read_prompt(["a"])
