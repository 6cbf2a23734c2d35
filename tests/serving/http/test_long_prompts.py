"""Prompts that are far too long get their error without being encoded, and encoding does not hold the lock."""

import dataclasses
import threading

import pytest

from omni_jax.requests import InvalidRequest
from omni_jax.requests.sampling_params import MAX_STOP_CHARACTERS
from tests.inputs.test_token_bounds import Spy

TEXT = "The capital of France is Paris. " * 2**16  # 2 MB; the context has 256 tokens


@pytest.fixture
def spies(engine):
    """Without `encode`, which would hold the interpreter's lock."""
    tokenizer = engine.tokenizer
    tokenizer._backend, tokenizer._control._encoder = Spy(tokenizer._backend), Spy(tokenizer._control._encoder)
    return tokenizer._backend, tokenizer._control._encoder


CHAT = {"messages": [{"role": "user", "content": TEXT}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": TEXT}, "prompt"),
        ("/v1/completions", {"prompt": ["a", TEXT]}, "prompt"),
        ("/v1/completions", {"prompt": TEXT, "stream": True}, "prompt"),
        ("/v1/completions", {"prompt": TEXT, "echo": True, "max_tokens": 0, "logprobs": 1}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 2**18}, "prompt"),
        ("/v1/chat/completions", CHAT, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]}, None),
        ("/tokenize", {"prompt": TEXT}, "prompt"),
        ("/tokenize", CHAT, "messages"),
    ],
)
async def test_tok_06_a_prompt_far_too_long_is_refused_at_once(client, engine, spies, path, body, param):
    status, answer = await client.post(path, body)
    assert status == 400
    assert "maximum context length" in answer["error"]["message"]
    assert answer["error"]["param"] == (param or "messages")
    assert sum(spy.characters for spy in spies) <= 16 * 256  # a beginning at most
    assert not engine.requests


async def test_tokenize_counts_texts_somewhat_longer_than_the_context(client, engine, spies):
    status, answer = await client.post("/tokenize", {"prompt": "the " * 1024})
    assert status == 200
    assert answer["count"] > engine.info.max_model_len


async def test_a_stop_string_has_a_limit(client):
    status, _ = await client.complete(stop="a" * MAX_STOP_CHARACTERS)
    assert status == 200
    status, answer = await client.complete(stop=["a", "b" * (MAX_STOP_CHARACTERS + 1)])
    assert (status, answer["error"]["param"]) == (400, "stop")
    assert "at most 4096 characters, got 4097" in answer["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_requests_are_checked_and_completed_off_the_event_loop(client, engine, monkeypatch, stream):
    threads = []

    def process(request):
        threads.append(threading.current_thread())
        if len(request.prompt_ids) > 60:
            raise InvalidRequest("a controller raised")
        return dataclasses.replace(request, processed=True)

    monkeypatch.setattr(engine, "process", process)
    status, answer = await client.complete("many words " * 20, stream=stream)
    assert (status, answer["error"]["message"]) == (400, "a controller raised")
    status, _ = await client.complete("few words")
    assert status == 200
    assert engine.requests[-1].processed
    assert len(threads) == 2
    assert threading.current_thread() not in threads
