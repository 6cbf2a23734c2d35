"""Bad requests get a 4xx that names the field, also if streamed, and do not change the next response."""

import asyncio
import gzip
import json

import pytest

from omni_jax.requests import InvalidRequest
from serving.http.fields import HARMLESS, REFUSED
from serving.http.request_models import MAX_MESSAGES, MAX_TOOLS, ChatRequest, CompletionRequest, validate
from tests.serving.conftest import serving
from tests.serving.fake_engine import FakeEngine, FakeInfo

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
async def good_request_still_works(client, engine):
    """After each test, a good request gets the same response as before, and nothing is running."""
    golden = await client.chat("the golden question")
    yield
    status, answer = await client.chat("the golden question")
    assert (status, answer["choices"], answer["usage"]) == (200, golden[1]["choices"], golden[1]["usage"])
    assert engine.stats().num_requests_running == 0


async def assert_rejected(client, path, body, *, param=..., match="", status=400, streamed=True):
    """Checks that the request gets the same JSON error, streamed or not."""
    bodies = [body]
    if streamed and isinstance(body, dict):
        bodies.append(body | {"stream": True})
    for sent in bodies:
        got, answer = await client.post(path, sent)
        assert got == status, answer
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == status
        assert match in error["message"]
        assert len(error["message"]) <= 1000
        assert "Traceback" not in error["message"]
        if param is not ...:
            assert error["param"] == param
    return error


async def test_api_01_empty_prompts(client):
    for prompt in ("", [""], [[]], [], ["a", ""]):
        error = await assert_rejected(client, COMPLETIONS, {"prompt": prompt}, param="prompt", match="empty")
        assert error["type"] == "invalid_request_error"
    await assert_rejected(client, CHAT, {"messages": []}, param="messages")
    await assert_rejected(client, CHAT, {}, param="messages")
    await assert_rejected(client, COMPLETIONS, {}, param="prompt")


async def test_prompts_of_wrong_types(client):
    for prompt in (1, True, {"a": 1}, [1.5], ["a", 1], [[1], "a"], [[1, True]], [None], [[1], [2.5]]):
        await assert_rejected(client, COMPLETIONS, {"prompt": prompt}, param="prompt")
    for prompt in ([512], [-1], [[1], [2**70]]):
        await assert_rejected(client, COMPLETIONS, {"prompt": prompt}, param="prompt", match="vocabulary")
    await assert_rejected(client, COMPLETIONS, {"prompt": ["a"] * 2049}, param="prompt", match="2048")
    await assert_rejected(client, COMPLETIONS, {"prompt": ["a"] * 2000, "n": 128}, param="prompt", match="choices")


async def test_api_02_null_is_absent(client, engine):
    fields = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "logprobs", "logit_bias")
    fields += (
        "stream",
        "stream_options",
        "model",
        "response_format",
        "prompt_logprobs",
        "min_tokens",
        "echo",
        "best_of",
    )
    _, plain = await client.complete()
    params = engine.requests[-1].params
    for field in fields:
        status, answer = await client.complete(**{field: None})
        assert status == 200, answer
        assert (answer["choices"], answer["usage"]) == (plain["choices"], plain["usage"])
        assert engine.requests[-1].params == params
    known = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *REFUSED, *HARMLESS}
    optional = known - {"messages", "prompt"}
    assert {*fields, "tools", "max_completion_tokens", "structured_outputs"} < optional
    for ask, path in ((client.chat, CHAT), (client.complete, COMPLETIONS)):
        _, plain = await ask()
        for field in optional:
            status, answer = await ask(**{field: None})
            assert (status, answer.get("choices")) == (200, plain["choices"]), answer
        status, answer = await ask(**dict.fromkeys(optional))
        assert (status, answer.get("choices")) == (200, plain["choices"]), (path, answer)


async def test_api_04_logit_bias(client, engine):
    for bias in ({"512": 5}, {"-1": 5}, {"abc": 5}, {"3": 1e9}, {"3": "x"}, {"3": True}, {"1.0": 1}, {"٣": 1}, [3]):
        await assert_rejected(
            client, COMPLETIONS, {"prompt": "a", "logit_bias": bias}, param="logit_bias", match="logit_bias"
        )
        await assert_rejected(client, CHAT, {"messages": HELLO, "logit_bias": bias}, param="logit_bias")
    many = {str(i): 1 for i in range(301)}
    await assert_rejected(client, COMPLETIONS, {"prompt": "a", "logit_bias": many}, param="logit_bias", match="300")
    status, _ = await client.complete(logit_bias={"511": -100, "0": 2.5})
    assert status == 200
    assert engine.requests[-1].params.logit_bias == {511: -100.0, 0: 2.5}
    await assert_rejected(client, COMPLETIONS, {"prompt": "a", "stop_token_ids": [512]}, param="stop_token_ids")


async def test_api_06_numbers_must_be_finite(client, engine):
    before = len(engine.requests)
    for field in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        for value in ("NaN", "Infinity", "-Infinity", "1e400", "-1e999"):
            for stream in ("true", "false"):
                raw = f'{{"prompt": "a", "stream": {stream}, "{field}": {value}}}'
                await assert_rejected(client, COMPLETIONS, raw.encode(), match="finite")
    for value in ("NaN", "1e400"):
        await assert_rejected(
            client, COMPLETIONS, f'{{"prompt": "a", "logit_bias": {{"3": {value}}}}}'.encode(), match="finite"
        )
    # The parser rejects them also in fields without a type.
    for value in ("NaN", "-Infinity", "1e400"):
        raw = f'{{"prompt": "a", "user": [{value}], "x": {value}}}'
        await assert_rejected(client, COMPLETIONS, raw.encode(), match="finite")
        raw = f'{{"messages": [{{"role": "user", "content": "a"}}], "chat_template_kwargs": {{"x": {value}}}}}'
        await assert_rejected(client, CHAT, raw.encode(), match="finite")
    assert len(engine.requests) == before


async def test_numbers_out_of_range(client):
    for field, values in {
        "temperature": (-0.1, 2.1, "1", True, 10**299),
        "top_p": (-0.1, 1.1, -1),
        "min_p": (-0.1, 1.5),
        "repetition_penalty": (0, -1, 1e-38, 1e38),
        "presence_penalty": (-2.1, 2.1),
        "frequency_penalty": (-2.1, 2.1),
        "n": (0, -1, 129, 1.5, "2", True),
        "max_tokens": (-1, 257, "5", 1.5, True),
        "min_tokens": (-1, 1.5, "1", True),
        "prompt_logprobs": (-1, 21),
        "stop": ("", [""], [1], 5, {"a": 1}),
        "stop_token_ids": ([-1], ["a"], [True], 7, list(range(33))),
        "stream": ("true", 1),
        "seed": ("1",),
    }.items():
        for value in values:
            streamed = field not in ("stream", "prompt_logprobs")
            await assert_rejected(client, CHAT, {"messages": HELLO, field: value}, param=field, streamed=streamed)
    await assert_rejected(client, CHAT, {"messages": HELLO, "min_tokens": 9, "max_tokens": 8}, param="min_tokens")
    await assert_rejected(client, CHAT, {"messages": HELLO, "max_completion_tokens": -1}, param="max_completion_tokens")


async def test_smp_05_top_p_may_be_anything_from_0_to_1(client, engine):
    for top_p in (0, 0.0, 1e-9, 1, 1e-320):
        assert (await client.complete(top_p=top_p))[0] == 200
        assert (await client.chat(top_p=top_p))[0] == 200
        assert engine.requests[-1].params.top_p == top_p
    for top_p in (-0.1, 1.1):
        await assert_rejected(client, COMPLETIONS, {"prompt": "a", "top_p": top_p}, param="top_p", match="from 0 to 1")


async def test_api_08_seeds(client, engine):
    for seed in (2**63 - 1, -(2**63), -1, 0):
        assert (await client.complete(seed=seed))[0] == 200
        assert engine.requests[-1].params.seed == seed
    for seed in (2**63, 2**64, 1.5, True, -(2**63) - 1):
        await assert_rejected(client, COMPLETIONS, {"prompt": "a", "seed": seed}, param="seed")


async def test_whole_numbers_may_be_written_with_a_point(client, engine):
    """JSON Schema and other servers make no difference between 4 and 4.0. "4" is text, and true is no number."""
    fields = {"n": 2, "max_tokens": 4, "min_tokens": 1, "seed": 7, "top_k": 5, "priority": 0, "best_of": 2}
    lists = {"stop_token_ids": [4, 5]}
    _, plain = await client.complete([5, 6], **fields, **lists, logprobs=1, prompt_logprobs=1)
    expected = engine.requests[-1].params
    floats = {name: float(value) for name, value in fields.items()} | {"stop_token_ids": [4.0, 5]}
    for prompt in ([5.0, 6], [[5, 6.0]], [5.0, 6.0]):
        status, answer = await client.complete(prompt, **floats, logprobs=1.0, prompt_logprobs=1.0)
        assert (status, answer.get("choices")) == (200, plain["choices"]), answer
        assert engine.requests[-1].params == expected
    assert (await client.chat(**floats, logprobs=True, top_logprobs=2.0, max_completion_tokens=3.0))[0] == 200
    assert (await client.post("/detokenize", {"tokens": [5.0]}))[0] == 200
    for name in fields:
        for value in (4.5, "4", True, [4]):
            await assert_rejected(client, COMPLETIONS, {"prompt": "a", name: value}, param=name)
            await assert_rejected(client, CHAT, {"messages": HELLO, name: value}, param=name)


async def test_a_byte_order_mark_before_the_json_is_skipped(client):
    for path, body in ((COMPLETIONS, b'{"prompt": "a"}'), (CHAT, json.dumps({"messages": HELLO}).encode())):
        assert (await client.post(path, b"\xef\xbb\xbf" + body))[0] == 200
    await assert_rejected(client, COMPLETIONS, b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "a"}', match="JSON")


async def test_api_09_top_k(client, engine):
    for top_k in (9999999, 0, -1, 5):
        assert (await client.complete(top_k=top_k))[0] == 200
        assert engine.requests[-1].params.top_k == top_k
    for top_k in (0.01, -2, "5", True):
        await assert_rejected(client, COMPLETIONS, {"prompt": "a", "top_k": top_k}, param="top_k")


async def test_api_11_requests_that_would_be_too_expensive(client, engine):
    before = len(engine.requests)
    for field, value in (
        ("stop", ["x"] * 500_000),
        ("bad_words", ["x"] * 50_000),
        ("n", 10**6),
        ("best_of", 10**6),
        ("best_of", 2),
        ("max_tokens", 10**12),
        ("stop_token_ids", [1] * 500_000),
        ("logit_bias", {str(i): "x" for i in range(100_000)}),
    ):
        await assert_rejected(client, COMPLETIONS, {"prompt": "a", field: value}, param=field, streamed=False)
    assert len(engine.requests) == before


async def test_api_12_logprobs_are_bounded(client):
    for top in (16384, 21, -1):
        await assert_rejected(
            client, CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": top}, param="top_logprobs"
        )
        await assert_rejected(client, COMPLETIONS, {"prompt": "a", "logprobs": top}, param="logprobs")
        body = {"prompt": "a", "prompt_logprobs": top}
        await assert_rejected(client, COMPLETIONS, body, param="prompt_logprobs", streamed=False)


async def test_api_13_unpaired_surrogates(client):
    text = r"""{"messages": [{"role": "user", "content": "emoji \ud83d"}], "stream": %s}"""
    name = r"""{"messages": [{"role": "user", "content": "a"}], "stream": %s,
        "tools": [{"type": "function", "function": {"name": "\uDCF0"}}]}"""
    key = r"""{"messages": [{"role": "user", "content": "a", "\udcf0": 1}], "stream": %s}"""
    for raw in (text, name, key):
        for stream in ("true", "false"):
            await assert_rejected(client, CHAT, (raw % stream).encode(), match="surrogate")
    await assert_rejected(client, COMPLETIONS, rb'{"prompt": "\udcf0"}', match="surrogate")
    await assert_rejected(client, "/tokenize", rb'{"prompt": "\udcf0"}', match="surrogate")
    await assert_rejected(client, COMPLETIONS, b'{"prompt": "\xed\xa0\xbd"}', match="UTF-8")
    arguments = json.dumps({"a": "x"}).replace("x", r"\ud83d")  # an escape inside an escaped JSON text
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    await assert_rejected(
        client, CHAT, {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}]}, match="surrogate"
    )
    for paired in (rb'{"prompt": "\ud83d\ude00"}', '{"prompt": "😀 \\\\ud83d"}'.encode()):
        assert (await client.post(COMPLETIONS, paired))[0] == 200


async def test_api_14_prompts_that_nearly_fill_the_context(client, engine):
    size = engine.info.max_model_len
    ids = [5] * (size + 1)
    for length, wanted, allowed in (
        (size - 1, 1, 1),
        (size - 1, None, 1),
        (size - 1, 0, 0),
        (size, 0, 0),
        (size - 3, 100, 3),  # cut to the rest of the context
    ):
        status, answer = await client.complete(ids[:length], max_tokens=wanted)
        assert status == 200, answer
        assert engine.requests[-1].params.max_tokens == allowed
        assert answer["usage"]["completion_tokens"] == allowed
    for length, wanted, shown in (
        (size, 1, "1 token"),
        (size, None, "at least one output token"),
        (size + 1, 0, "0 tokens"),
    ):
        error = await assert_rejected(
            client, COMPLETIONS, {"prompt": ids[:length], "max_tokens": wanted}, param="prompt"
        )
        assert f"length is {size} tokens" in error["message"]
        assert f"the prompt has {length} tokens" in error["message"]
        assert shown in error["message"]
    await assert_rejected(
        client, CHAT, {"messages": [{"role": "user", "content": "the " * 300}]}, param="messages", match="256"
    )


async def test_api_15_errors_have_the_engines_context_length():
    engine = FakeEngine(info=FakeInfo(max_model_len=48))  # limited by the KV cache
    async with serving(engine) as client:
        assert (await client.get("/v1/models"))[1]["data"][0]["max_model_len"] == 48
        assert (await client.complete([5] * 47, max_tokens=1))[0] == 200
        await assert_rejected(client, COMPLETIONS, {"prompt": [5] * 60}, param="prompt", match="48")


async def test_api_16_assistant_turns_without_content(client, engine):
    call = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": '{"a": 1}'}}
    rendered = set()
    for content in ({"content": None}, {}, {"content": ""}, {"content": []}):
        messages = [*HELLO, {"role": "assistant", "tool_calls": [call], **content}]
        messages.append({"role": "tool", "tool_call_id": "1", "content": "18"})
        status, answer = await client.post(CHAT, {"messages": messages})
        assert status == 200, answer
        rendered.add(engine.requests[-1].prompt_ids)
    assert len(rendered) == 1
    assert "call ls" in engine.tokenizer.decode(rendered.pop())


async def test_api_17_tool_calls_in_the_conversation(client, engine):
    def conversation(arguments, content="18"):
        call = {"id": "1", "type": "function", "function": {"name": "ls", "arguments": arguments}}
        tool = {"role": "tool", "tool_call_id": "1", "content": content}
        return {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, tool]}

    rendered = set()
    for arguments in ("null", "", "{}"):
        assert (await client.post(CHAT, conversation(arguments)))[0] == 200
        rendered.add(engine.requests[-1].prompt_ids)
    assert (await client.post(CHAT, conversation("{}", [{"type": "text", "text": "18"}])))[0] == 200
    assert rendered == {engine.requests[-1].prompt_ids}
    for arguments in ("[1]", "{bad"):
        await assert_rejected(client, CHAT, conversation(arguments), param="messages")


async def test_invalid_messages(client):
    for messages in (
        "hello",
        [1],
        [{"content": "a"}],
        [{"role": "", "content": "a"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
    ):
        await assert_rejected(client, CHAT, {"messages": messages}, param="messages")
    await assert_rejected(client, CHAT, {"messages": HELLO, "tool_choice": "auto"}, param="tool_choice")
    await assert_rejected(client, CHAT, {"messages": HELLO, "echo": True}, param="echo")
    both = {"add_generation_prompt": True, "continue_final_message": True}
    await assert_rejected(client, CHAT, {"messages": HELLO, **both}, param="continue_final_message")


async def test_str_07_the_error_of_a_bad_streaming_request_is_json(client):
    await assert_rejected(client, CHAT, {"messages": HELLO, "n": 0}, param="n")
    await assert_rejected(client, COMPLETIONS, {"prompt": "a", "n": 0}, param="n")
    body = {"prompt": "a", "stream": True, "prompt_logprobs": 1}
    await assert_rejected(client, COMPLETIONS, body, param="prompt_logprobs", match="stream")


async def test_bodies_that_are_not_json_objects(client):
    for raw in (b"", b"{", b"[]", b'"a"', b"null", b"\xff", b"\xef\xbb\xbf", b"{'a': 1}", b'{"a": 1,}', b"\x00"):
        await assert_rejected(client, COMPLETIONS, raw)
    await assert_rejected(client, COMPLETIONS, b'{"prompt": "a", "prompt": "b"}', match="twice")
    await assert_rejected(client, COMPLETIONS, b'{"prompt": ' + b"[" * 100_000, match="")
    await assert_rejected(client, COMPLETIONS, b'{"prompt": "a", "x": ' + b"[" * 65 + b"]" * 65 + b"}", match="nested")
    await assert_rejected(
        client, COMPLETIONS, b'{"prompt": "a", "x": ' + b'{"a":' * 900 + b"1" + b"}" * 901, match="nested"
    )
    await assert_rejected(client, COMPLETIONS, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", match="digits")
    deep_enough = b'{"prompt": "a", "x": ' + b"[" * 60 + b"]" * 60 + b"}"
    assert (await client.post(COMPLETIONS, deep_enough))[0] == 200


async def test_content_types(client):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        status, answer = await client.post(COMPLETIONS, {"prompt": "a"}, headers={"Content-Type": kind})
        assert (status, kind in answer["error"]["message"]) == (400, True)
    kind = "application/json; charset=utf-8"
    assert (await client.post(COMPLETIONS, {"prompt": "a"}, headers={"Content-Type": kind}))[0] == 200


async def test_unknown_models_and_routes(client):
    for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        error = await assert_rejected(client, path, body | {"model": "gpt"}, param="model", match="'fake'", status=404)
        assert error["type"] == "not_found_error"
        await assert_rejected(client, path, body | {"model": 5}, param="model")
    assert (await client.get("/v1/models/gpt"))[0] == 404
    assert (await client.get("/v1/chat"))[1]["error"]["code"] == 404
    status, answer = await client.get(CHAT)
    assert (status, answer["error"]["code"]) == (405, 405)
    async with client.session.get(client.base + CHAT) as response:
        assert response.headers["Allow"] == "POST"


async def test_the_length_of_errors_is_bounded(client):
    for field in ("model", "n", "seed", "logit_bias", "temperature", "response_format", "tool_choice"):
        for value in ("x" * 1_000_000, {"x" * 100_000: ["y" * 100_000] * 9}, "\u0000\u202e" * 50_000):
            status, answer = await client.chat(**{field: value})
            assert status in (400, 404)
            assert len(json.dumps(answer)) < 2000, field
    status, answer = await client.get("/" + "x" * 3000)
    assert len(json.dumps(answer)) < 2000


async def test_bodies_over_the_size_limit():
    async with serving(FakeEngine(), max_body_size=1000) as client:
        assert (await client.complete("the " * 200, max_tokens=1))[0] == 200
        error = await assert_rejected(client, COMPLETIONS, {"prompt": "x" * 1000}, status=413, match="1000")
        assert error["type"] == "invalid_request_error"

        async def endless():  # without Content-Length, so that the size is counted on arrival
            for _ in range(5):
                yield b"x" * 300

        headers = {"Content-Type": "application/json"}
        async with client.session.post(client.base + COMPLETIONS, data=endless(), headers=headers) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (413, 413)
        squeezed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        bomb = gzip.compress(b'{"prompt": "' + b"x" * 10**6 + b'"}')
        bomb_status, _ = await client.post(COMPLETIONS, bomb, headers=squeezed)
        assert bomb_status in (400, 413)
        assert (await client.complete())[0] == 200


async def test_a_full_queue_is_a_503(client, engine):
    engine.queue, engine.hold_after = 2, 1
    running = [asyncio.create_task(client.complete()) for _ in range(2)]
    while len(engine.requests) < 3:  # one was sent by the fixture
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    error = await assert_rejected(client, COMPLETIONS, {"prompt": "a"}, status=503, match="queue is full")
    assert error["type"] == "service_unavailable_error"
    engine.gate.set()
    assert [status for status, _ in await asyncio.gather(*running)] == [200, 200]
    engine.queue = 64


async def test_the_prompts_of_a_request_enter_the_queue_together(client, engine):
    """vllm-project/vllm#53936: or a list longer than the queue would get 503 and Retry-After for ever."""
    engine.queue = 2
    status, answer = await client.complete(["a", "b", "c"], n=2)
    assert (status, len(answer["choices"]), engine.aborted) == (200, 6, [])


@pytest.mark.parametrize(("field", "limit"), [("messages", MAX_MESSAGES), ("tools", MAX_TOOLS)])
def test_tok_06_long_lists_are_refused_before_their_items_are_validated(field, limit):
    body = {"messages": [{"role": "user", "content": "Hello"}], field: [None] * (limit + 1)}
    with pytest.raises(InvalidRequest, match=f"{field}: must have at most {limit} items, got {limit + 1}") as error:
        validate(ChatRequest, body)
    assert error.value.param == field
