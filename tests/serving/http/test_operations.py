"""API keys, health, metrics, request ids and small endpoints."""

import asyncio
import re

import pytest

from omni_jax.requests import Request, SamplingParams
from omni_jax.telemetry.figures import BOUNDS
from serving.http.engine_streams import stream_deltas
from serving.http.server import OPEN_PATHS, make_app
from serving.http.settings import SecuritySettings, ServerSettings
from serving.http.state import SERVER
from tests.serving.conftest import serving
from tests.serving.fake_engine import FakeEngine, FakeInfo
from tests.serving.http.test_streaming import wait_until

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


async def metrics(client) -> dict[str, float]:
    """Samples by name and labels."""
    async with client.session.get(client.base + "/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    return samples_of(text)


def samples_of(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"^([^#\s]\S*(?:\{.*\})?) (\S+)$", text, re.M)}


async def test_op_03_all_routes_but_the_open_ones_require_the_key():
    key = "s3cret-kéy"
    async with serving(FakeEngine(), api_key=["other", key]) as client:
        routes = {(r.method, r.resource.canonical) for r in make_app_routes()}
        assert len(routes) >= 9
        wrong = [
            {},
            *({"Authorization": value} for value in ("Bearer wrong", f"Bearer {key[:-1]}", f"Basic {key}", key)),
        ]
        wrong += [{"Authorization": "Bearer"}, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {key}x"}]
        for method, path in [*routes, ("GET", "/nowhere"), ("OPTIONS", "/v1/models"), ("DELETE", "/v1/models")]:
            path = path.replace("{model}", "fake")
            if path in OPEN_PATHS:
                async with client.session.request(method, client.base + path) as response:
                    assert response.status == 200, path
                continue
            for headers in wrong:
                async with client.session.request(method, client.base + path, headers=headers) as response:
                    assert response.status == 401, (method, path, headers)
                    assert response.headers["WWW-Authenticate"] == "Bearer"
                    if method != "HEAD":
                        assert (await response.json())["error"]["type"] == "authentication_error"
            for right in (f"Bearer {key}", f"bearer {key}", f"BEARER  {key}", "Bearer other"):
                async with client.session.request(
                    method, client.base + path, headers={"Authorization": right}
                ) as response:
                    assert response.status != 401, (method, path, right)


def make_app_routes():
    return list(make_app(FakeEngine(), settings=ServerSettings(served_model_name=("fake",))).router.routes())


def test_an_empty_key_is_rejected_at_start_up():
    with pytest.raises(ValueError, match="must not be empty"):
        SecuritySettings(api_key=("",))


async def test_op_02_health_reports_a_dead_engine(client, engine):
    engine.hold_after = 1
    running = asyncio.create_task(client.chat())
    await wait_until(lambda: engine.requests)
    async with client.session.get(client.base + "/health") as response:
        assert response.status == 200
    engine.dead = "the step failed: XlaRuntimeError at /models/fake"
    status, answer = await client.get("/health")
    assert status == 503
    assert "/models" not in str(answer)
    status, answer = await client.chat()
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "/models" not in str(answer)
    await engine.stop(drain_seconds=0)
    assert (await running)[0] == 503
    assert (await metrics(client))['vllm:num_requests_running{model_name="fake"}'] == 0


async def test_probes_of_a_dead_engine_fill_no_log(client, engine, caplog):
    caplog.set_level("INFO", logger="serving.http.server")
    for dead in ("it hangs", "it hangs", "it has ended", None, None, "it hangs"):
        engine.dead = dead
        assert (await client.session.get(client.base + "/health")).status == (503 if dead else 200)
    lines = [record.getMessage() for record in caplog.records]
    bad = "the engine is not healthy: it hangs"
    assert lines == [bad, "the engine is healthy again", bad]


async def test_op_04_metrics_add_up(client, engine):
    engine.hold_after = 2
    gone = asyncio.create_task(client.chat(n=3))
    running = asyncio.create_task(client.chat("a request that stays"))
    await wait_until(lambda: len(engine.requests) == 2)
    assert (await metrics(client))['vllm:num_requests_running{model_name="fake"}'] == 2  # requests, not choices
    gone.cancel()
    await wait_until(lambda: engine.aborted)
    engine.gate.set()
    used = [(await running)[1]["usage"]]
    used.append((await client.complete(["a", "b"], n=2, max_tokens=3))[1]["usage"])
    body = {"prompt": "a", "max_tokens": 99, "stream_options": {"include_usage": True}}
    used.append((await client.chunks("/v1/completions", body))[-1]["usage"])
    assert (await client.chat(n=0))[0] == 400
    samples = await metrics(client)
    label = '{model_name="fake"}'
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert samples[f"vllm:{gauge}{label}"] == 0
    finished = {
        reason: samples[f'vllm:request_success_total{{finished_reason="{reason}",model_name="fake"}}']
        for reason in ("stop", "length", "abort", "error")
    }
    assert finished == {"stop": 2, "length": 4, "abort": 3, "error": 0}
    # Histograms count finished requests only, not the aborted one.
    for name, total in (
        ("request_generation_tokens", sum(usage["completion_tokens"] for usage in used)),
        ("request_prompt_tokens", sum(usage["prompt_tokens"] for usage in used)),
        ("request_params_n", 1 + 2 + 2 + 1),
    ):
        assert samples[f"vllm:{name}_sum{label}"] == total
        assert samples[f"vllm:{name}_count{label}"] == 4
    assert samples[f"vllm:e2e_request_latency_seconds_count{label}"] == 4
    choices = 3 + 1 + 4 + 1
    assert samples[f"vllm:time_to_first_token_seconds_count{label}"] == choices
    generated = samples[f"vllm:generation_tokens_total{label}"]
    assert samples[f"vllm:inter_token_latency_seconds_count{label}"] == generated - choices
    for counter in ("vllm:num_preemptions", "vllm:prompt_tokens", "vllm:corrupted_requests", "omni_jax:padded_tokens"):
        assert samples[f"{counter}_total{label}"] >= 0
    assert samples[f"omni_jax:compiles_after_warmup_total{label}"] == 0
    assert samples['vllm:cache_config_info{block_size="16",model_name="fake",num_gpu_blocks="63"}'] == 1


async def test_a_client_that_leaves_after_the_last_token_is_counted_alike_everywhere(engine):
    """The engine has ended the request, but nobody has read its last tokens."""
    server = make_app(engine, settings=ServerSettings(served_model_name=("fake",)))[SERVER]
    for leave_at in range(12):
        request = Request(id=f"r{leave_at}", prompt_ids=(1, 2), params=SamplingParams(max_tokens=1), arrival=0.0)

        async def serve(request=request):
            async with stream_deltas(server, [request]) as batches:
                return [batch async for batch in batches]

        task = asyncio.create_task(serve())
        for _ in range(leave_at):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    samples = samples_of(server.metrics.exposition().decode())
    ended = {
        reason: samples[f'vllm:request_success_total{{finished_reason="{reason}",model_name="fake"}}']
        for reason in ("stop", "length", "abort", "error")
    }
    assert ended["abort"] > 0
    assert ended["length"] > 1
    assert sum(ended.values()) == len(engine.requests)
    assert ended["length"] == samples['vllm:e2e_request_latency_seconds_count{model_name="fake"}']


async def test_responses_are_counted_by_route_and_status(client, engine):
    await client.chat()
    await client.chat(n=0)
    await client.get("/nothing/" + "x" * 50)
    await client.get("/v1/models/fake")
    await client.get("/v1/completions")
    samples = await metrics(client)
    counted = {key: value for key, value in samples.items() if key.startswith("omni_jax:http_responses_total")}

    def of(endpoint: str, status: int) -> str:
        return f'omni_jax:http_responses_total{{endpoint="{endpoint}",model_name="fake",status="{status}"}}'

    assert counted == {
        of("/v1/chat/completions", 200): 1,
        of("/v1/chat/completions", 400): 1,
        of("other", 404): 1,
        of("other", 405): 1,
        of("/v1/models/{model}", 200): 1,
    }


async def test_metrics_and_stats_report_the_attention_implementation():
    reason = "decode uses XLA, as a kernel failed its self-test: triton: off by 1"
    attention = {"decode": "xla", "mixed": "triton", "write": "triton"}
    async with serving(FakeEngine(info=FakeInfo(attention=attention, attention_fallbacks=(reason,)))) as client:
        samples = await metrics(client)
        assert samples['omni_jax:attention_info{implementation="xla",model_name="fake",op="decode"}'] == 1
        assert samples['omni_jax:attention_info{implementation="triton",model_name="fake",op="write"}'] == 1
        assert samples['omni_jax:attention_fallbacks{model_name="fake"}'] == 1
        _, stats = await client.get("/stats")
        assert stats["attention"] == attention | {"fallbacks": [reason]}


async def test_preemptions_by_way_and_times_of_requests(client, engine):
    recorder = engine.recorder
    recorder.preemptions, recorder.swapped = {"blocks": 5, "class": 2}, {"blocks": 3, "class": 0}
    samples = await metrics(client)

    def preempted(reason: str, way: str) -> float:
        return samples[f'omni_jax:preemptions_total{{model_name="fake",reason="{reason}",way="{way}"}}']

    assert [preempted(reason, way) for reason in ("blocks", "class") for way in ("swap", "recompute")] == [3, 2, 0, 2]
    for name, bounds in BOUNDS.items():
        assert samples[f'vllm:{name}_count{{model_name="fake"}}'] == 0
        assert len([key for key in samples if key.startswith(f"vllm:{name}_bucket")]) == len(bounds) + 1
    assert samples['vllm:request_queue_time_seconds_bucket{le="7680.0",model_name="fake"}'] == 0


async def test_two_apps_have_separate_metrics():
    async with serving(FakeEngine()) as one, serving(FakeEngine()) as other:
        await one.chat()
        name = 'vllm:e2e_request_latency_seconds_count{model_name="fake"}'
        assert ((await metrics(one))[name], (await metrics(other))[name]) == (1, 0)


async def test_api_10_requests_with_equal_ids_are_independent(client, engine):
    engine.hold_after = 2
    headers = {"X-Request-Id": "mine", "Content-Type": "application/json"}
    first = asyncio.create_task(client.chat("one", request_id="same"))
    second = asyncio.create_task(client.post("/v1/chat/completions", HELLO | {"request_id": "same"}, headers=headers))
    await wait_until(lambda: len(engine.requests) == 2)
    assert len({request.id for request in engine.requests}) == 2
    first.cancel()
    await wait_until(lambda: engine.aborted)
    engine.gate.set()
    status, answer = await second
    kept = next(request for request in engine.requests if request.id not in engine.aborted)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, engine.answers(kept, 0))
    assert answer["id"] == "chatcmpl-mine"  # the header comes before the body
    assert kept.id.startswith("chatcmpl-mine-")


async def test_engine_requests_have_the_id_of_the_response(client, engine):
    for ask in (client.chat, client.complete):
        _, answer = await ask(n=2)
        assert [request.id[:-9] for request in engine.requests] == [answer["id"]]
        engine.requests.clear()
    _, answer = await client.complete(["a", "b"])
    assert [request.id[:-9] for request in engine.requests] == [f"{answer['id']}-0", f"{answer['id']}-1"]


async def test_ids_of_responses_contain_the_id_of_the_request(client, caplog):
    """vLLM's rule: chatcmpl- and the header, else the body's request_id; the log has the one inside the other."""
    for path, body, prefix in (
        ("/v1/chat/completions", HELLO, "chatcmpl"),
        ("/v1/completions", {"prompt": "hello"}, "cmpl"),
    ):
        for headers, fields, chosen in (
            ({"X-Request-Id": "of-header"}, {"request_id": "of-body"}, "of-header"),
            ({}, {"request_id": "of-body"}, "of-body"),
            ({}, {}, None),
            ({}, {"request_id": "not\nfit"}, None),
        ):
            caplog.clear()
            with caplog.at_level("INFO"):
                async with client.session.post(client.base + path, json=body | fields, headers=headers) as response:
                    answer, name = await response.json(), response.headers["X-Request-Id"]
            assert chosen in (None, name)
            assert answer["id"] == f"{prefix}-{name}"
            assert answer["id"] in next(r.getMessage() for r in caplog.records if "generated" in r.getMessage())
            streamed = body | fields | {"stream": True}
            async with client.session.post(client.base + path, json=streamed, headers=headers) as response:
                name = response.headers["X-Request-Id"]
                assert f'"id":"{prefix}-{name}"' in await response.text()


async def test_request_ids_are_returned_in_the_header(client):
    async def header(given: str | None, **body) -> str:
        headers = {} if given is None else {"X-Request-Id": given}
        async with client.session.post(
            client.base + "/v1/chat/completions", json=HELLO | body, headers=headers
        ) as response:
            return response.headers["X-Request-Id"]

    assert await header("my-id.7") == "my-id.7"
    assert await header("my-id.7", stream=True) == "my-id.7"
    assert await header("my-id.7", n=0) == "my-id.7"
    assert await header(None, request_id="of-the-body") == "of-the-body"
    for invalid in (None, "x" * 129, "with space", "ünfit"):
        assert re.fullmatch("[0-9a-f]{32}", await header(invalid))
    assert re.fullmatch("[0-9a-f]{32}", await header(None, request_id="line\nbreak: 1"))


async def test_the_model_may_be_named_by_its_path(client, engine):
    for name in ("/models/fake", "/models/fake/", "/models/./fake"):
        for ask in (client.chat, client.complete):
            status, answer = await ask(model=name)
            assert (status, answer["model"]) == (200, name)
    for name in ("/models", "/models/fake/config.json", "models/fake", "", "/models/fake\0", "/" * 5000 + "x"):
        status, answer = await client.chat(model=name)
        assert (status, answer["error"]["param"]) == (404, "model"), name
    assert [card["id"] for card in (await client.get("/v1/models"))[1]["data"]] == ["fake", "org/fake-2"]


async def test_models_version_health(client):
    status, answer = await client.get("/v1/models")
    assert (status, answer["object"]) == (200, "list")
    assert answer["data"][0] | {"created": 0} == {
        "id": "fake",
        "object": "model",
        "created": 0,
        "owned_by": "omni-jax",
        "root": "fake",
        "parent": None,
        "max_model_len": 256,
        "permission": [],
    }
    assert re.match(r"\d+\.\d+", (await client.get("/version"))[1]["version"])


async def test_responses_have_the_requested_model_name(client):
    for name in ("fake", "org/fake-2"):
        assert (await client.chat(model=name))[1]["model"] == name
        assert (await client.complete(model=name))[1]["model"] == name
    assert (await client.chat())[1]["model"] == "fake"


async def test_tokenize_and_detokenize(client, engine):
    text = "the <|im_end|> ďábel"
    ids = engine.tokenizer.encode(text)
    status, answer = await client.post("/tokenize", {"prompt": text})
    assert (status, answer) == (200, {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None})
    assert (await client.post("/detokenize", {"tokens": ids}))[1] == {"prompt": text}
    _, answer = await client.post("/tokenize", {"prompt": "the word", "return_token_strs": True})
    assert "".join(answer["token_strs"]) == "the word"
    _, answer = await client.post("/tokenize", HELLO)
    assert answer["tokens"] == engine.tokenizer.render_chat(HELLO["messages"])
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {"tokens": [512]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {"tokens": [True]}),
    ):
        assert (await client.post(path, body))[0] == 400, (path, body)
    assert (await client.post("/detokenize", {"tokens": []}))[1] == {"prompt": ""}


async def test_requests_override_the_models_sampling_defaults():
    defaults = {"temperature": 0.5, "top_k": 7, "top_p": 0.8}
    engine = FakeEngine(info=FakeInfo(default_sampling=defaults))
    async with serving(engine) as client:
        await client.chat(temperature=0, top_p=None)
        params = engine.requests[-1].params
        assert (params.temperature, params.top_k, params.top_p) == (0, 7, 0.8)
        assert params.max_tokens == 256 - len(engine.requests[-1].prompt_ids)  # the rest of the context
        await client.complete()
        assert engine.requests[-1].params.max_tokens == 16


async def test_gen_01_max_new_tokens_of_the_checkpoint_is_a_default_and_no_limit():
    engine = FakeEngine(info=FakeInfo(default_sampling={"max_tokens": 20}))
    async with serving(engine) as client:
        for send in (client.chat, client.complete):
            for given, expected in (
                ({}, 20),
                ({"max_tokens": None}, 20),
                ({"max_tokens": 5}, 5),
                ({"max_tokens": 90}, 90),
            ):
                assert (await send(**given))[0] == 200
                assert engine.requests[-1].params.max_tokens == expected, (send, given)
        await client.chat(max_completion_tokens=7)
        assert engine.requests[-1].params.max_tokens == 7
        await client.complete(prompt=[5] * 250)  # the context is 256
        assert engine.requests[-1].params.max_tokens == 6
    async with serving(FakeEngine(info=FakeInfo(default_sampling={"max_tokens": 10_000}))) as client:
        assert (await client.chat())[0] == 200


async def test_sampling_fields_reach_the_engine(client, engine):
    given = {
        "n": 2,
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "seed": 7,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": [4, 5],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    for stop, expected in (("a", ("a",)), (["a", "bc"], ("a", "bc")), ([], ())):
        assert (await client.chat(**given, stop=stop, logit_bias={"3": 1}))[0] == 200
        params = engine.requests[-1].params
        assert {name: getattr(params, name) for name in given} == given | {"stop_token_ids": (4, 5)}
        assert (params.stop, params.logit_bias) == (expected, {3: 1.0})
    await client.chat(max_tokens=5, max_completion_tokens=6)
    assert engine.requests[-1].params.max_tokens == 6


async def test_a_model_without_a_chat_template_rejects_chats():
    async with serving(FakeEngine(template=None)) as client:
        status, answer = await client.chat()
        assert (status, "chat template" in answer["error"]["message"]) == (400, True)
        assert (await client.complete())[0] == 200
