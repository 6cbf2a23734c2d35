"""The server over the real engine."""

import asyncio
import contextlib
import json

import aiohttp
import openai
import pytest

from omni_jax.engine.async_engine import AsyncEngine
from omni_jax.engine.config import EngineConfig
from tests import tiny
from tests.engines import load_tiny, sharing
from tests.goldens import make
from tests.serving.conftest import Client, serving

pytestmark = pytest.mark.smoke

PROMPT = tiny.prompt(33)
MODEL = "tiny"


@pytest.fixture(scope="module")
def loaded():
    return load_tiny("main")


@contextlib.asynccontextmanager
async def real_server(loaded, **limits):
    with sharing(loaded, **limits) as model_dir:
        engine = AsyncEngine(EngineConfig(model_dir=model_dir))
        await engine.start()
    try:
        async with serving(engine, served_model_name=[MODEL], max_body_size=1 << 16) as client:
            yield engine, client
    finally:
        await engine.stop()


def official(client: Client) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=client.base + "/v1", api_key="none", max_retries=0)


async def idle(engine: AsyncEngine) -> None:
    while (stats := engine.stats()).num_requests_running or stats.num_requests_waiting or stats.kv_cache_usage:
        await asyncio.sleep(0.005)


async def golden_answer(client: Client) -> str:
    """The greedy completion of PROMPT, which the caller compares with that of transformers."""
    fields = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    status, body = await client.complete(PROMPT, **fields)
    assert status == 200, body
    cached = body["usage"].pop("prompt_tokens_details")["cached_tokens"]
    assert body["usage"] == {"prompt_tokens": 33, "completion_tokens": 12, "total_tokens": 45}
    assert 0 <= cached < 33  # at least one token is computed
    return body["choices"][0]["text"]


def golden_text() -> str:
    golden = make.load("llama")
    tokens = golden["tokens"][golden["lengths"].tolist().index(33)][:12].tolist()
    return tiny.tokenizer().decode(tokens, skip_special_tokens=False)


BAD = {
    "empty prompt": ("/v1/completions", {"prompt": ""}, 400),
    "empty messages": ("/v1/chat/completions", {"messages": []}, 400),
    "NaN": ("/v1/completions", b'{"prompt": "a", "temperature": NaN}', 400),
    "infinity by overflow": ("/v1/completions", b'{"prompt": "a", "top_p": 1e400}', 400),
    "out of range": ("/v1/completions", {"prompt": "a", "top_p": 1.5}, 400),
    "unknown model": ("/v1/completions", {"model": "gpt-5", "prompt": "a"}, 404),
    "too long": ("/v1/completions", {"prompt": tiny.prompt(150) * 8}, 400),
    "surrogate": ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', 400),
    "bias outside the vocabulary": ("/v1/completions", {"prompt": "a", "logit_bias": {"512": 1}}, 400),
    "stop id outside the vocabulary": ("/v1/completions", {"prompt": "a", "stop_token_ids": [99999]}, 400),
    "prompt id outside the vocabulary": ("/v1/completions", {"prompt": [600]}, 400),
    "no JSON": ("/v1/chat/completions", b"hello", 400),
    "too large": ("/v1/completions", {"prompt": "a" * (1 << 16)}, 413),
    "too many choices": ("/v1/completions", {"prompt": "a", "n": 10**6}, 400),
}


async def test_bad_requests_do_not_change_the_next_response(loaded):
    expected = golden_text()
    async with real_server(loaded) as (engine, client):
        assert await golden_answer(client) == expected
        for name, (path, body, wanted) in BAD.items():
            for stream in (False, True):
                sent = body | {"stream": stream} if isinstance(body, dict) else body
                status, answer = await client.post(path, sent)
                assert status == wanted, (name, answer)
                assert set(answer["error"]) == {"message", "type", "param", "code"}, name
                assert "Traceback" not in answer["error"]["message"]
            assert await golden_answer(client) == expected, name
        await idle(engine)
        assert engine.stats().compiles_after_warmup == 0


async def test_the_error_of_a_long_prompt_has_both_lengths(loaded):
    async with real_server(loaded) as (_, client):
        _, answer = await client.complete(tiny.prompt(150) * 8)
        assert "1024 tokens" in answer["error"]["message"]
        assert "1200 tokens" in answer["error"]["message"]


async def test_concurrent_streams_equal_whole_responses(loaded):
    """Greedy and sampled chats, with stop strings and several choices, all at the same time."""
    requests = [
        {"seed": i, "temperature": i % 3 * 0.7, "max_tokens": 5 + 3 * i, "n": 1 + i % 2, "stop": ["th", "an"][: i % 3]}
        for i in range(8)
    ]

    async def streamed(client, fields):
        texts, reasons = {}, {}
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello world"}], stream=True, **fields
        )
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
                reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
        return [(texts[i], reasons[i]) for i in sorted(texts)]

    async def whole(client, fields):
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello world"}], **fields
        )
        return [(choice.message.content, choice.finish_reason) for choice in answer.choices]

    async with real_server(loaded) as (engine, client), official(client) as openai_client:
        together = await asyncio.gather(*(streamed(openai_client, fields) for fields in requests))
        one_by_one = [await whole(openai_client, fields) for fields in requests]
        assert together == one_by_one
        await idle(engine)


@pytest.mark.parametrize("stream", [True, False])
async def test_kv_04_a_disconnect_frees_everything(loaded, stream):
    endless = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "temperature": 0, "n": 4, "stream": stream}
    async with real_server(loaded) as (engine, client):

        async def read():
            url = client.base + "/v1/completions"
            async with aiohttp.ClientSession() as session, session.post(url, json=endless) as response:
                await response.read()

        reading = asyncio.create_task(read())
        while engine.stats().generation_tokens < 3:
            await asyncio.sleep(0.005)
        reading.cancel()  # closes the connection
        await asyncio.gather(reading, return_exceptions=True)
        async with asyncio.timeout(30):
            await idle(engine)
        assert engine.stats().requests_finished["abort"] == 4
        assert await golden_answer(client) == golden_text()


async def test_api_03_prompt_logprobs_equal_those_of_transformers(loaded):
    golden = make.load("llama")
    prompt = tiny.prompt(int(golden["scored_length"]))
    async with real_server(loaded) as (_, client):
        status, body = await client.complete(prompt, echo=True, max_tokens=0, logprobs=1)
        assert status == 200
        found = body["choices"][0]["logprobs"]["token_logprobs"]
        assert found[0] is None
        assert found[1:] == pytest.approx(golden["scored_logprobs"].tolist(), abs=1e-4)
        assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {str(tiny.EOS_IDS[0]): 100}, "max_tokens": 1},  # as harnesses score
        {"logit_bias": {"77": 100}, "stop_token_ids": [77]},
        {"logit_bias": {str(tiny.EOS_IDS[0]): 100}, "ignore_eos": True},  # tokens without text
        {"stop": ["e", "a", " ", "th"], "max_tokens": 40},
        {"stop": ["e", "a", " ", "th"], "max_tokens": 40, "include_stop_str_in_output": True},
        {"temperature": 1, "seed": 3},
    ],
    ids=["eos", "stop id", "no text", "stop string", "stop string included", "sampled"],
)
async def test_lp_05_every_generated_token_has_an_entry(loaded, path, stream, fields):
    """By position, harnesses cut prompt from output."""
    body = {"max_tokens": 5, "temperature": 0, "n": 2, **fields}
    if path == "/v1/completions":
        body |= {"prompt": PROMPT, "echo": True, "logprobs": 1}
    else:
        body |= {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, "top_logprobs": 1}
    async with real_server(loaded) as (_, client):
        if stream:
            chunks = await client.chunks(path, body | {"stream_options": {"include_usage": True}})
            usage = chunks.pop()["usage"]
        else:
            status, answer = await client.post(path, body)
            assert status == 200, answer
            usage, chunks = answer["usage"], [answer]
    found = [choice for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    assert usage["completion_tokens"] >= 2
    if path == "/v1/completions":
        text = {i: "".join(choice["text"] for choice in found if choice["index"] == i) for i in (0, 1)}
        columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        for column in columns:
            entries = {i: [e for c in found if c["index"] == i for e in c["logprobs"][column]] for i in (0, 1)}
            assert sum(map(len, entries.values())) == 2 * len(PROMPT) + usage["completion_tokens"]
            for i in (0, 1):
                assert None not in entries[i][len(PROMPT) :]
        for i in (0, 1):
            assert entries[i] == sorted(entries[i])  # text_offset
            assert entries[i][-1] <= len(text[i])
    else:
        entries = [entry for choice in found for entry in choice["logprobs"]["content"]]
        assert len(entries) == usage["completion_tokens"]
        assert all(len(entry["top_logprobs"]) == 1 for entry in entries)


async def test_op_04_metrics_add_up(loaded):
    async with real_server(loaded) as (engine, client):
        answers = await asyncio.gather(*(client.complete(tiny.prompt(n), max_tokens=4, seed=n) for n in range(1, 20)))
        await idle(engine)
        async with client.session.get(client.base + "/metrics") as response:
            lines = (await response.text()).splitlines()
        metrics = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if "{" in line}
        usages = [body["usage"] for _, body in answers]
        assert metrics["vllm:prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
        assert metrics["vllm:generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
        assert metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0
        assert metrics["vllm:kv_cache_usage_perc"] == 0
        assert metrics["omni_jax:compiles_after_warmup_total"] == 0


async def test_pc_06_requests_with_one_salt_share_the_cache(loaded):
    """Of a prompt of 33 tokens, the full blocks of the first 32 are cached until a reset."""
    fields = {"max_tokens": 4, "temperature": 0}

    async def cached(client, **more) -> int:
        status, body = await client.complete(PROMPT, **fields, **more)
        assert status == 200
        assert body["choices"][0]["text"] == golden
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    async with real_server(loaded) as (engine, client):
        golden = (await client.complete(PROMPT, **fields))[1]["choices"][0]["text"]
        full = 32 // engine.info.block_size * engine.info.block_size
        assert full > 0
        assert [await cached(client), await cached(client, cache_salt="a")] == [full, 0]
        assert [await cached(client, cache_salt="b"), await cached(client, cache_salt="a")] == [0, full]
        await idle(engine)
        _, stats = await client.get("/stats")
        pool = stats["pool"]
        assert pool["free"] + pool["cached"] == pool["total"] > pool["cached"] > 0
        assert (pool["active"], pool["unfilled_slots"], sum(pool["active_slots"].values())) == (0, 0, 0)
        assert sum(stats["prefix_cache"]["hits"].values()) == 2 * full
        async with client.session.post(client.base + "/reset_prefix_cache") as response:
            assert response.status == 200
        assert [await cached(client), await cached(client)] == [0, full]
        assert engine.stats().compiles_after_warmup == 0


async def test_api_15_max_model_len_limits_the_context(loaded):
    async with real_server(loaded, max_model_len=64) as (_, client):
        _, models = await client.get("/v1/models")
        assert models["data"][0]["max_model_len"] == 64
        assert (await client.complete(tiny.prompt(33), max_tokens=4))[0] == 200
        status, answer = await client.complete(tiny.prompt(64), max_tokens=4)
        assert status == 400
        assert json.dumps(answer).count("64")
