"""Priority, objectives and segment policies of requests, in the engine, /stats and metrics."""

import asyncio
import json
import sys

import pytest

from omni_jax.requests import Request, SamplingParams, Sequence
from omni_jax.requests.slo import SLO
from omni_jax.scheduling.events import Event
from omni_jax.segments.cover import check_cover
from serving.http.settings import MediaAccessSettings
from tests.serving.conftest import serving
from tests.serving.fake_engine import FakeEngine, vision_engine
from tests.serving.http.test_operations import metrics
from tests.serving.http.test_validation import CHAT, COMPLETIONS, HELLO, assert_rejected
from tests.serving.images import RED, body, image

TEXT = "One sentence here. Another one there! And is this the third?"


async def test_priority_and_objectives_reach_the_engine(client, engine):
    fields = {"priority": -3, "ttft_ms": 500, "tpot_ms": 50.5, "e2e_ms": 10_000}
    for ask in (client.chat, client.complete):
        status, answer = await ask(**fields)
        assert status == 200, answer
        assert engine.requests[-1].slo == SLO(**fields)
        await ask(ttft_ms=500)
        assert engine.requests[-1].slo == SLO(ttft_ms=500)
        await ask(priority=None, ttft_ms=None)
        assert engine.requests[-1].slo is None  # the server's defaults apply


async def test_each_prompt_of_a_completion_has_its_segments(client, engine):
    await client.complete(["one", "two and three"], priority=2)
    first, second = engine.requests
    for request in (first, second):
        check_cover(request.segments, len(request.prompt_ids))
        assert request.slo == SLO(priority=2)
    assert len(first.prompt_ids) != len(second.prompt_ids)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, value) for name in ("ttft_ms", "tpot_ms", "e2e_ms") for value in (0, -1, 1e12, True, "5", [1])),
        *(("priority", value) for value in (1.5, "high", True, 2**31, -(2**40))),
    ],
)
async def test_invalid_objectives_are_rejected_by_name(client, engine, path, field, value):
    await assert_rejected(client, path, {"messages": HELLO, "prompt": "hello", field: value}, param=field, match=field)
    assert engine.requests == []


async def test_requests_set_the_segment_policy_if_allowed(engine):
    async with serving(engine, allow_request_segment_policy=True) as client:
        for ask in (client.chat, client.complete):
            assert (await ask(TEXT))[0] == 200
            assert len(engine.requests[-1].segments) == 1
            assert (await ask(TEXT, segment_policy="by_sentence"))[0] == 200
            assert len([s for s in engine.requests[-1].segments if "sentence" in s.label]) >= 3
            policy = {"policy": "by_length", "max_length": 7}
            assert (await ask(TEXT, segment_policy=policy))[0] == 200
            assert max(segment.length for segment in engine.requests[-1].segments) == 7
            assert (await ask(TEXT, segment_policy={"text": policy}))[0] == 200
            assert len(engine.requests[-1].segments) > 3
            check_cover(engine.requests[-1].segments, len(engine.requests[-1].prompt_ids))


async def test_regions_of_an_image_are_segments():
    engine = vision_engine()
    policy = {"policy": "by_region", "regions": {"top": [0, 0, 1, 0.5], "bottom": [0, 0.5, 1, 1]}}
    async with serving(engine, allow_request_segment_policy=True) as client:
        status, answer = await client.post(CHAT, body(image(RED), segment_policy=policy))
        assert status == 200, answer
    (request,) = engine.requests
    labels = [segment.label for segment in request.segments if segment.modality == "image"]
    assert [label.rpartition(" ")[2] for label in labels] == ["top", "bottom"]
    span = request.media[0]
    covered = [(s.start, s.stop) for s in request.segments if s.modality == "image"]
    assert (covered[0][0], covered[-1][1]) == (span.start, span.stop)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_segment_policies_are_rejected_unless_allowed(client, engine, path):
    body = {"messages": HELLO, "prompt": "hello", "segment_policy": "request"}
    await assert_rejected(client, path, body, param="segment_policy", match="--allow-request-segment-policy")
    assert engine.requests == []
    assert (await client.chat(segment_policy=None))[0] == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("policy", "match"),
    [
        ("by_page", "by_modality"),  # the error lists the valid ones
        ({"policy": "by_page"}, "by_modality"),
        ({"policy": "by_length"}, "max_length"),
        ({"policy": "by_length", "max_length": -1}, "max_length"),
        ({"policy": "by_length", "size": 5}, "max_length"),
        ({"sound": "request"}, "modalities text, image, video, table"),
        ({"text": {"policy": "by_region"}}, "by_sentence"),
        ({"policy": "by_region", "regions": {"left": [0, 0, 2, 1]}}, '"rows": 2'),
        ({"policy": "by_region", "regions": {f"r{'x' * 200}{n}": 0 for n in range(60)}}, '"rows": 2'),
        ("os:system", "by_modality"),
        ({"policy": "by_region", "regions": "y" * 10_000}, '"rows": 2'),
        ({}, "a name"),
        (5, "name or an object"),
        (["request"], "name or an object"),
        ("x" * 20_000, "16384"),
        ({"policy": "by_region", "regions": {str(n): [0, 0, 1, 1] for n in range(2000)}}, "16384"),
    ],
)
async def test_errors_of_invalid_segment_policies_list_the_valid_ones(engine, path, policy, match):
    async with serving(engine, allow_request_segment_policy=True) as client:
        golden = await client.chat()
        body = {"messages": HELLO, "prompt": "hello", "segment_policy": policy}
        error = await assert_rejected(client, path, body, param="segment_policy", match=match)
        assert "Traceback" not in error["message"]
        assert len(engine.requests) == 1
        assert (await client.chat())[1]["choices"] == golden[1]["choices"]


async def test_requests_cannot_run_custom_functions(engine, tmp_path, monkeypatch):
    (tmp_path / "never_imported.py").write_text("def cut(view): return [(0, view.length)]")
    monkeypatch.syspath_prepend(tmp_path)
    async with serving(engine, allow_request_segment_policy=True) as client:
        for policy in ("never_imported:cut", {"policy": "never_imported:cut"}, {"text": "never_imported:cut"}):
            body = {"messages": HELLO, "segment_policy": policy}
            await assert_rejected(client, CHAT, body, param="segment_policy", match="by_modality")
    assert "never_imported" not in sys.modules


async def test_invalid_objectives_and_policies_are_rejected_before_any_fetch(host):
    engine = vision_engine()
    part = {"type": "image_url", "image_url": {"url": host.url("/red.png")}}
    access = MediaAccessSettings(allow_private_media_addresses=True)
    async with serving(engine, allow_request_segment_policy=True, access=access) as client:
        for wrong in ({"ttft_ms": -1}, {"segment_policy": "by_page"}):
            await assert_rejected(client, CHAT, body(part, **wrong))
        assert host.connections == 0
        assert (await client.post(CHAT, body(part)))[0] == 200
        assert host.paths == ["/red.png"]


@pytest.mark.parametrize(
    ("name", "match"), [("gap", "at token 2"), ("overlap", "at token 2"), ("raises", "AttributeError")]
)
async def test_a_custom_policy_that_fails_is_a_400(engine, name, match):
    engine.segment_policy = f"tests.serving.custom_functions:{name}"
    async with serving(engine, segment_policy=engine.segment_policy) as client:
        for path in (CHAT, COMPLETIONS):
            await assert_rejected(
                client, path, {"messages": HELLO, "prompt": "hello"}, param="segment_policy", match=match
            )
        assert engine.requests == []
        async with client.session.get(client.base + "/health") as response:
            assert response.status == 200


async def test_a_custom_policy_that_fails_for_some_prompts_serves_the_others(engine):
    engine.segment_policy = "tests.serving.custom_functions:sometimes"
    async with serving(engine, segment_policy=engine.segment_policy) as client:
        answers = await asyncio.gather(*(client.complete(text) for text in ("good", "bad one", "fine", "a bad end")))
        assert [status for status, _ in answers] == [200, 400, 200, 400]
        assert (await client.get("/stats"))[1]["segments"]["by_policy"] == {"custom": {"prompts": 2, "segments": 2}}


def running_sequence(name: str, *, slo=None, arrival=0.0) -> Sequence:
    request = Request(id=name, prompt_ids=(1, 2, 3), params=SamplingParams(), arrival=arrival, slo=slo)
    return Sequence(request=request, index=0, order=(0, 0), max_output=9)


def fill(recorder) -> None:
    """Two requests with a TTFT of 0.5 s and 3 s and an objective of 1 s, and three events each."""
    for name, first in (("a", 0.5), ("b", 3.0)):
        sequence = running_sequence(name, slo=SLO(ttft_ms=1000, tpot_ms=2000))
        sequence.scheduled_at, sequence.first_token_at = 0.25, first
        sequence.output += [4, 5]
        for kind, cause in (("pause", "budget"), ("preempt", "class"), ("resume", "turn")):
            recorder.event(Event(kind=kind, sequence=sequence, cause=cause, by="c[0]", blocks=2), 0.3)
        sequence.finish_reason = "stop"
        recorder.finished(sequence, first + 1.0)


async def test_stats_of_requests_segments_events_and_policies(engine):
    fill(engine.recorder)
    async with serving(engine, allow_request_segment_policy=True) as client:
        await client.chat(TEXT)
        await client.complete(TEXT, segment_policy={"policy": "by_length", "max_length": 7})
        await client.complete(TEXT, segment_policy={"text": "by_sentence"})
        status, stats = await client.get("/stats")
    assert status == 200
    assert (stats["model"], stats["running"]) == ("fake", 0)
    text = stats["requests"]["by_class"]["text"]
    assert text["ttft_ms"]["mean"] == pytest.approx(1750)
    assert text["slo"]["ttft"] == {"requests": 2, "met": 1, "share": 0.5}
    assert text["queue_ms"] == {"count": 2, "mean": 250, "std": 0, "p50": 250, "p95": 250, "p99": 250}
    assert stats["events"]["preemptions"] == {"blocks": 0, "class": 2}
    assert (stats["events"]["pauses"], stats["events"]["blocks_taken"]) == (2, 4)
    by_policy = stats["segments"]["by_policy"]
    assert by_policy["request"] == {"prompts": 1, "segments": 1}
    assert by_policy["by_length"]["segments"] == len(engine.requests[1].segments) > 2
    assert by_policy["per modality"]["segments"] == len(engine.requests[2].segments) > 2


async def test_stats_of_a_new_server(client):
    status, stats = await client.get("/stats")
    assert (status, stats["requests"]["finished"], stats["segments"]["by_policy"]) == (200, 0, {})


async def test_metrics_have_the_figures_of_stats_and_a_bounded_number_of_series(engine):
    fill(engine.recorder)
    async with serving(engine, allow_request_segment_policy=True) as client:
        for n in range(5):
            await client.complete(TEXT, priority=n, segment_policy={"policy": "by_length", "max_length": 7 + n})
        await metrics(client)  # the first response of its endpoint is a series
        samples = await metrics(client)
        await client.complete(TEXT, priority=1234, segment_policy={"policy": "by_length", "max_length": 50})
        assert set(await metrics(client)) == set(samples)  # values that clients choose add no series

    def value(name, **labels):
        shown = ",".join(f'{key}="{value}"' for key, value in sorted(({"model_name": "fake"} | labels).items()))
        return samples[f"omni_jax:{name}{{{shown}}}"]

    assert value("slo_attainment", **{"class": "text", "objective": "ttft"}) == 0.5
    assert value("slo_attainment", **{"class": "text", "objective": "tpot"}) == 1.0
    assert value("pauses_total") == 2
    assert value("preemptions_total", reason="class", way="recompute") == 2
    assert value("preemptions_total", reason="blocks", way="swap") == 0
    assert value("segments_total", policy="by_length") == sum(len(r.segments) for r in engine.requests[:5])
    stage = {"class": "text", "stage": "decode"}
    assert value("segment_seconds_count", **stage) == 2
    assert value("segment_seconds_sum", **stage) == pytest.approx(2.0)


async def test_stats_require_the_key(engine):
    async with serving(engine, api_key=["k"]) as client:
        assert (await client.get("/stats"))[0] == 401
        status, stats = await client.get("/stats", headers={"Authorization": "Bearer k"})
        assert status == 200
        assert json.dumps(stats)


def test_the_fake_engine_has_the_interface_of_the_real_one():
    from omni_jax.engine.async_engine import AsyncEngine

    assert callable(AsyncEngine.cut)
    assert isinstance(AsyncEngine.recorder, property)
    assert callable(FakeEngine.cut)
