"""Streams: their chunks, their end, and disconnects."""

import asyncio
import json

import aiohttp
import pytest

from omni_jax.requests import Delta, TokenLogprob
from serving.http.connections import Connection
from serving.http.engine_streams import merged
from tests.serving.conftest import serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


async def wait_until(condition):
    """Waits until the condition holds, at most 20 seconds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_chat_chunks(client, engine):
    chunks = await client.chunks(CHAT, HELLO | {"n": 2})
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)
    for index in (0, 1):
        first, *middle, last = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert first["finish_reason"] is None
        assert all(set(choice["delta"]) == {"content"} and choice["delta"]["content"] for choice in middle)
        assert all(choice["finish_reason"] is None and "stop_reason" not in choice for choice in middle)
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", None)
        text = "".join(choice["delta"].get("content", "") for choice in (*middle, last))
        assert text == engine.answers(engine.requests[0], index)


async def test_chunks_have_whole_characters_and_are_never_empty(client):
    chunks = await client.chunks(COMPLETIONS, {"prompt": "a", "max_tokens": 99})
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert all(texts)
    assert "\ufffd" not in "".join(texts)


async def test_str_07_an_error_ends_the_stream_with_one_error_event(client, engine):
    engine.fail_after = 3
    for path, body in ((CHAT, HELLO), (COMPLETIONS, {"prompt": "a"}), (COMPLETIONS, {"prompt": ["a", "b"], "n": 2})):
        *chunks, last = await client.events(path, body)
        assert all("choices" in json.loads(chunk) for chunk in chunks)
        error = json.loads(last)["error"]
        assert (error["message"], error["code"], error["type"]) == ("injected fault", 500, "server_error")
        status, answer = await client.post(path, body)
        assert (status, answer["error"]["message"]) == (500, "injected fault")
    assert engine.stats().num_requests_running == 0


async def test_str_07_details_of_a_bug_are_logged_and_not_sent(client, engine, caplog):
    engine.break_after = 2
    for path, body in ((CHAT, HELLO), (COMPLETIONS, {"prompt": "a"})):
        last = json.loads((await client.events(path, body))[-1])["error"]
        assert last["message"].startswith("internal error (request ")
        status, answer = await client.post(path, body)
        assert (status, answer["error"]["code"]) == (500, 500)
        assert "secret" not in json.dumps([last, answer])
    assert "secret" in caplog.text
    assert last["message"].split("request ")[1].rstrip(")") in caplog.text
    engine.break_after = None
    assert (await client.chat())[0] == 200


async def test_str_07_success_ends_with_exactly_one_done(client):
    for path, body in ((CHAT, HELLO), (COMPLETIONS, {"prompt": ["a", "b"], "n": 2})):
        events = await client.events(path, body)
        assert events.count("[DONE]") == 1
        assert events[-1] == "[DONE]"


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO | {"n": 2}), (COMPLETIONS, {"prompt": ["a", "b c"], "n": 2})])
async def test_str_08_usage(client, path, body):
    body = body | {"max_tokens": 99}
    usage = (await client.post(path, body))[1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        chunks = await client.chunks(path, body | options)
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
    *chunks, last = await client.chunks(path, body | {"stream_options": {"include_usage": True}})
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], usage)
    always = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await client.chunks(path, body | {"stream_options": always})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert last["usage"] == usage
    status, answer = await client.post(path, body | {"stream_options": {"include_usage": True}})
    assert (status, answer["error"]["param"]) == (400, "stream_options")
    assert (await client.post(path, body | {"stream_options": {}}))[0] == 200  # asks for nothing, as in vLLM


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("body", [{"prompt": ["a", "b"], "n": 2}, {"prompt": "a"}])
async def test_kv_04_a_disconnect_aborts(client, engine, stream, body):
    engine.hold_after = 1
    headers = {"Content-Type": "application/json"}
    data = json.dumps(body | {"stream": stream}).encode()
    request = asyncio.create_task(client.session.post(client.base + COMPLETIONS, data=data, headers=headers))
    prompts = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
    await wait_until(lambda: len(engine.requests) == prompts)
    if stream:
        (await request).close()
    else:
        request.cancel()
    await wait_until(lambda: len(engine.aborted) == prompts)
    assert sorted(engine.aborted) == sorted(request.id for request in engine.requests)
    assert engine.stats().num_requests_running == 0


async def test_a_client_that_leaves_before_the_head_of_its_stream_causes_no_error(client, engine, monkeypatch, caplog):
    """vllm#9428, ROCm/ATOM#1589: in a crowd, a handler may run on for a while after its client has left."""

    def leave(request, submit=engine.submit):
        connection.transport.abort()
        return submit(request)

    def note(self, noted=Connection.head_was_read):
        nonlocal connection
        connection = self
        noted(self)

    connection: Connection
    monkeypatch.setattr(Connection, "head_was_read", note)
    monkeypatch.setattr(engine, "submit", leave)
    engine.hold_after = 1
    with pytest.raises(aiohttp.ClientError):
        await client.events(COMPLETIONS, {"prompt": "a"})
    await wait_until(lambda: engine.aborted)
    assert engine.stats().num_requests_running == 0
    assert (await client.get("/version"))[0] == 200
    assert "internal error" not in caplog.text


async def test_a_finished_request_is_not_aborted(client, engine):
    await client.chat()
    await client.chunks(CHAT, HELLO)
    await client.complete(["a", "b"])
    assert engine.aborted == []


async def test_a_client_that_reads_nothing_delays_no_other(client, engine):
    engine.answers = lambda request, index: "the word " * 20
    _, writer = await asyncio.open_connection(*client.base.removeprefix("http://").split(":"))
    body = json.dumps({"prompt": ["a"] * 200, "stream": True, "max_tokens": 99}).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    engine.queue = 300
    writer.write(head.encode() + b"\r\n" + body)  # reads nothing
    await wait_until(lambda: len(engine.requests) == 200)
    assert (await client.chat())[0] == 200
    assert (await client.get("/v1/models"))[0] == 200
    writer.close()
    await wait_until(lambda: engine.stats().num_requests_running == 0)


def test_deltas_are_merged_by_choice():
    def delta(index, text, **more):
        logprob = TokenLogprob(token_id=len(text), logprob=-1.0)
        return Delta(request_id="r", index=index, text=text, token_ids=(len(text),), logprobs=(logprob,), **more)

    batch = [(0, delta(0, "a")), (0, delta(1, "bb")), (1, delta(0, "z")), (0, delta(0, "cc", finish_reason="length"))]
    first, second, third = merged(batch)
    assert (first[0], first[1].text, first[1].token_ids, first[1].finish_reason) == (0, "acc", (1, 2), "length")
    assert len(first[1].logprobs) == 2
    assert second == (0, batch[1][1])
    assert third == (1, batch[2][1])


async def test_shutdown_ends_requests_with_an_error(engine):
    engine.hold_after = 1
    async with serving(engine) as client:
        stream = asyncio.create_task(client.events(CHAT, HELLO))
        whole = asyncio.create_task(client.chat())
        await wait_until(lambda: len(engine.requests) == 2)
        await engine.stop(drain_seconds=0)
        error = json.loads((await stream)[-1])["error"]
        assert (error["code"], error["type"]) == (503, "service_unavailable_error")
        status, answer = await whole
        assert (status, answer["error"]["type"]) == (503, "service_unavailable_error")
        assert (await client.chat())[0] == 503
