"""Logprobs are strict JSON and finite, and include the chosen token."""

import math

import pytest

from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.requests import TokenLogprob
from serving.http.logprobs import FLOOR, chat_logprobs, completion_logprobs
from tests.inputs import vocabularies
from tests.serving.fake_engine import alternatives


def texts(engine, ids):
    return [engine.tokenizer.token_text(token) for token in ids]


async def test_lp_01_values_that_json_cannot_represent_become_the_floor(client, engine):
    for bad in (-math.inf, math.nan):
        engine.logprob = bad
        # The client fixture parses with a parser that rejects NaN and Infinity.
        status, answer = await client.complete(logprobs=2, echo=True, top_k=1, logit_bias={"5": -100})
        assert status == 200
        of_choice = answer["choices"][0]["logprobs"]
        assert set(of_choice["token_logprobs"][1:]) == {FLOOR}
        status, answer = await client.chat(logprobs=True, top_logprobs=2, prompt_logprobs=1)
        assert {entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]} == {FLOOR}


async def test_lp_02_bytes_of_tokens_are_the_bytes_of_the_text(client, engine):
    status, answer = await client.chat(logprobs=True, top_logprobs=20)
    assert status == 200
    choice = answer["choices"][0]
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == choice["message"]["content"]
    assert any("\ufffd" in entry["token"] for entry in entries), (
        "the text must have tokens that are part of a character"
    )
    for entry in entries:
        assert len(entry["top_logprobs"]) == 20
        for shown in (entry, *entry["top_logprobs"]):
            assert bytes(shown["bytes"]).decode(errors="replace") == shown["token"]
            assert set(shown) - {"top_logprobs"} == {"token", "logprob", "bytes"}


async def test_lp_03_chosen_tokens_and_alternatives(client, engine):
    for fields, shown in (({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 1}, 1), ({"top_logprobs": 20}, 20)):
        status, answer = await client.chat(logprobs=True, **fields)
        assert status == 200
        entries = answer["choices"][0]["logprobs"]["content"]
        assert len(entries) == answer["usage"]["completion_tokens"]
        assert [len(entry["top_logprobs"]) for entry in entries] == [shown] * len(entries)
        assert {entry["logprob"] for entry in entries} == {engine.logprob}
    status, answer = await client.chat(top_logprobs=1)
    assert (status, answer["error"]["param"]) == (400, "top_logprobs")
    status, answer = await client.chat(top_logprobs=1, logprobs=False)
    assert status == 400
    assert (await client.chat())[1]["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_api_03_scoring_without_generating(client, engine, stream):
    prompt = "the word 今天"
    ids = engine.tokenizer.encode(prompt)
    body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1}
    if stream:
        (answer,) = await client.chunks("/v1/completions", body)
    else:
        status, answer = await client.complete(**body)
        assert status == 200
        assert answer["usage"] == {
            "prompt_tokens": len(ids),
            "completion_tokens": 0,
            "total_tokens": len(ids),
            "prompt_tokens_details": {"cached_tokens": 0},
        }
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None] + [engine.logprob] * (len(ids) - 1)
    assert [len(column) for column in logprobs.values()] == [len(ids)] * 4
    assert logprobs["tokens"][:2] == texts(engine, ids[:2])
    assert logprobs["text_offset"][0] == 0
    assert logprobs["top_logprobs"][0] is None


async def test_api_03_echo_without_logprobs(client, engine):
    prompt = "the word"
    for stream in (False, True):
        body = {"prompt": prompt, "echo": True, "max_tokens": 1, "stream": stream}
        if stream:
            text = "".join(c["choices"][0]["text"] for c in await client.chunks("/v1/completions", body))
        else:
            _, answer = await client.complete(**body)
            text, usage = answer["choices"][0]["text"], answer["usage"]
            assert usage["completion_tokens"] == 1
        assert text == prompt + engine.tokenizer.decode(
            engine.tokenizer.encode(engine.answers(engine.requests[0], 0))[:1]
        )
    status, answer = await client.complete(prompt, echo=True, max_tokens=-1)
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    status, answer = await client.complete(prompt, echo=True, max_tokens=0)
    assert (answer["choices"][0]["text"], answer["choices"][0]["logprobs"]) == (prompt, None)
    ids = engine.tokenizer.encode(prompt)
    assert (await client.complete(ids, echo=True, max_tokens=0))[1]["choices"][0]["text"] == prompt


async def test_text_offsets_with_echo(client, engine):
    status, answer = await client.complete(["the word", "hello"], echo=True, logprobs=0, n=2, max_tokens=12)
    assert status == 200
    assert len(answer["choices"]) == 4
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            if not token.startswith("bytes:"):
                assert choice["text"].startswith(token, offset)


async def test_completion_logprobs_name_parts_of_characters_by_their_bytes(client, engine):
    _, answer = await client.complete(logprobs=5, max_tokens=99)
    logprobs = answer["choices"][0]["logprobs"]
    ids = engine.tokenizer.encode(answer["choices"][0]["text"])
    assert len(ids) == len(logprobs["tokens"])
    for position, (token, top) in enumerate(zip(ids, logprobs["top_logprobs"], strict=True)):
        pairs = alternatives(position, 5, token, engine.logprob)
        assert len(top) == len({id_ for id_, _ in pairs} | {token})  # their names are distinct
        assert "\ufffd" not in "".join(top)
        assert logprobs["tokens"][position] in top
    assert any(token.startswith("bytes:\\x") for token in logprobs["tokens"])


@pytest.fixture
def sentencepiece(tmp_path) -> Tokenizer:
    return Tokenizer.from_directory(
        vocabularies.write_directory(tmp_path, vocabularies.sentencepiece(), eos_token="</s>", bos_token="<s>")
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
async def test_tok_08_names_of_tokens_joined_are_the_text(client, engine, sentencepiece, stream, echo):
    engine.tokenizer = sentencepiece
    engine.answers = lambda request, index: "Paris and"
    for prompt in ("the capital", sentencepiece.encode("the capital")):
        body = {"prompt": prompt, "echo": echo, "logprobs": 1, "n": 2}
        if stream:
            choices = [c for chunk in await client.chunks("/v1/completions", body) for c in chunk["choices"]]
        else:
            choices = (await client.complete(**body))[1]["choices"]
        for index in (0, 1):
            own = [choice for choice in choices if choice["index"] == index]
            names = [name for choice in own for name in choice["logprobs"]["tokens"]]
            text = "".join(choice["text"] for choice in own)
            assert text == "the capital" * echo + " Paris and"
            assert "".join(names) == "<s>" * echo + text


@pytest.mark.parametrize("stream", [False, True])
async def test_tok_08_an_echoed_prompt_leaves_a_joined_character_to_the_output(client, engine, stream):
    engine.answers = lambda request, index: "天" if index else "x"
    begun = [next(i for i in range(512) if engine.tokenizer.token_bytes(i) == bytes([byte])) for byte in b"x\xe5\xa4"]
    ids = {"天": [next(i for i in range(512) if engine.tokenizer.token_bytes(i) == b"\xa9")]}
    encode = engine.tokenizer.encode
    engine.tokenizer.encode = lambda text, **options: ids.get(text) or encode(text, **options)
    body = {"prompt": begun, "echo": True, "n": 2}
    if stream:
        choices = [c for chunk in await client.chunks("/v1/completions", body) for c in chunk["choices"]]
    else:
        choices = (await client.complete(**body))[1]["choices"]
    texts = ["".join(choice["text"] for choice in choices if choice["index"] == index) for index in (0, 1)]
    assert texts == ["x\ufffdx", "x天"]


async def test_a_hidden_token_has_a_name_and_no_bytes(engine):
    eos = engine.tokenizer.eos_token_id or 0
    entry = TokenLogprob(token_id=eos, logprob=-1.0, top=((eos, -1.0),), hidden=True)
    [found] = chat_logprobs(engine.tokenizer, [entry]).content
    name = engine.tokenizer.token_text(eos)
    assert (found.token, found.bytes) == (name, [])
    assert bytes(found.top_logprobs[0].bytes).decode() == name


async def test_prompt_logprobs(client, engine):
    ids = engine.tokenizer.encode("the word")
    for k in (0, 2):
        _, answer = await client.complete(["the word", "hello"], prompt_logprobs=k, n=2)
        for choice in answer["choices"][:2]:
            shown = choice["prompt_logprobs"]
            assert shown[0] is None
            for position, entry in enumerate(shown[1:], 1):
                wanted = dict(alternatives(position, k, ids[position], engine.logprob)) | {
                    ids[position]: engine.logprob
                }
                assert {int(token): value["logprob"] for token, value in entry.items()} == wanted
                for token, value in entry.items():
                    assert value["decoded_token"] == engine.tokenizer.token_text(int(token))
    _, answer = await client.complete("the word", prompt_logprobs=3, logprobs=1, echo=True, max_tokens=0)
    assert engine.requests[-1].params.prompt_logprobs == 3
    assert all(len(top) <= 2 for top in answer["choices"][0]["logprobs"]["top_logprobs"][1:])
    _, answer = await client.chat(prompt_logprobs=1)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in (await client.chat())[1]


def test_lp_03_alternatives_of_equal_text_are_all_shown(tmp_path):
    """vllm-project/vllm#44319, sgl-project/sglang#32290: at the start of a text, "▁the" and "the" are both "the"."""
    backend = vocabularies.sentencepiece()
    vocab = backend.get_vocab()
    tokenizer = Tokenizer.from_directory(vocabularies.write_directory(tmp_path, backend))
    first, second, third = vocab["▁t"], vocab["t"], vocab["▁th"]
    top = ((first, -0.5), (second, -1.5), (third, -2.0))

    def shown(chosen, **fields):
        item = TokenLogprob(token_id=chosen, logprob=dict(top)[chosen], top=top, **fields)
        return completion_logprobs(tokenizer, [item], top=3).top_logprobs[0]

    assert shown(first, removed_spaces=1) == {"t": -0.5, f"token_id:{second}": -1.5, "th": -2.0}
    assert shown(second, removed_spaces=1) == {"t": -1.5, " t": -0.5, "th": -2.0}
    assert shown(first) == {" t": -0.5, "t": -1.5, " th": -2.0}
