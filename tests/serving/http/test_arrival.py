"""When a request arrived: its head was read, before its body, its images and its tokens were."""

import time

import pytest

from serving.http import prompts
from tests.serving.conftest import serving
from tests.serving.fake_engine import vision_engine
from tests.serving.http.test_operations import metrics
from tests.serving.images import CHAT, RED, ask, body, image


@pytest.mark.parametrize("stream", [False, True])
async def test_latency_counts_the_picture(monkeypatch, stream):
    decoding = []

    def slow(*args, **options):
        decoding.append(time.monotonic())
        item = pack_part(*args, **options)
        while time.monotonic() == decoding[-1]:
            pass
        decoding.append(time.monotonic())
        return item

    pack_part = prompts.pack_part
    monkeypatch.setattr(prompts, "pack_part", slow)
    engine = vision_engine()
    async with serving(engine) as client:
        before = time.monotonic()
        if stream:
            await client.chunks(CHAT, body(image(RED)))
        else:
            await ask(client, image(RED))
        (request,) = engine.requests
        assert before < request.arrival < decoding[0] < decoding[1] < request.queued_at
        samples = await metrics(client)
    label = '{model_name="fake"}'
    assert request.queued_at is not None
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert samples[f"vllm:{name}_count{label}"] == 1
        assert samples[f"vllm:{name}_sum{label}"] > request.queued_at - request.arrival


async def test_latency_counts_a_body_that_trickles(client, engine):
    async def trickle():
        yield b'{"prompt": "hello", '
        async with client.session.get(client.base + "/health"):  # the server has read the head meanwhile
            times.append(time.monotonic())
        yield b'"max_tokens": 2}'

    times = []
    headers = {"Content-Type": "application/json"}
    async with client.session.post(client.base + "/v1/completions", data=trickle(), headers=headers) as response:
        assert response.status == 200
    assert engine.requests[0].arrival < times[0] < engine.requests[0].queued_at
