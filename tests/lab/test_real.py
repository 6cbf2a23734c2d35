"""The real backend, with a tiny compiled model."""

import dataclasses

import pytest

from omni_jax.lab.experiment import workload
from omni_jax.lab.real import RealBackend
from tests.engines import assert_idle, load_tiny, sharing
from tests.lab.made import experiment

MIX = {"scaled": {"text": 0.2, "output": 0.1, "side": 0.1}, "image": {"share": 0.5}}


@pytest.fixture
def backend():
    loaded = load_tiny("qwen2_vl")
    with sharing(loaded):
        yield RealBackend(
            experiment(
                arms=[{"name": "A", "scheduling_policy": "slo", "segment_policy": "hybrid"}],
                model=loaded.info.model_dir,
                mixes={"usual": MIX},
                requests=12,
            )
        )


def test_a_run_has_all_requests_segments_and_tokens(backend):
    spec, (arm,) = backend._experiment, backend._experiment.arms
    arrivals = workload(spec, "usual", 1, rate=100.0)
    ended = []
    run = backend.replay(arm, arrivals, tag="one", done=lambda: ended.append(1))
    assert len(ended) == 12
    assert {row.id for row in run.requests} == {arrival.id for arrival in arrivals}
    by_id = {arrival.id: arrival for arrival in arrivals}
    for row in run.requests:
        arrival = by_id[row.id]
        assert row.arrival == pytest.approx(arrival.at, abs=1e-6)
        assert row.arrival <= row.scheduled_at < row.first_token_at <= row.ended_at
        assert (row.finish_reason, row.output_tokens) == ("length", arrival.output_tokens)
        assert row.prompt_tokens - row.image_tokens == arrival.text_tokens
        assert (row.image_tokens > 0) == (arrival.kind == "image")
        assert row.priority == (1 if arrival.kind == "image" else 0)
    prompts = sum(row.prompt_tokens for row in run.requests)
    assert sum(segment.stop - segment.start for segment in run.segments) == prompts
    assert sum(step.tokens for step in run.steps if step.compute == "prefill") == prompts
    assert any(segment.deadline is not None for segment in run.segments)
    assert run.busy_seconds <= max(row.ended_at for row in run.requests)
    for engine in backend._engines.values():
        assert_idle(engine)


def test_runs_with_different_tags_share_no_image_features(backend):
    (arm,) = backend._experiment.arms
    arrivals = [a for a in workload(backend._experiment, "usual", 1, rate=100.0) if a.kind == "image"]

    def encoded(tag):
        run = backend.replay(arm, arrivals, tag=tag)
        return sum(step.tokens for step in run.steps if step.compute == "encode")

    first = encoded("one")
    assert first > 0
    assert encoded("two") == first
    assert encoded("two") == 0  # the same tag finds them


def test_a_request_that_can_never_run_is_named_before_the_run(backend):
    (arm,) = backend._experiment.arms
    one, *others = workload(backend._experiment, "usual", 1, rate=100.0)
    long = dataclasses.replace(one, text_tokens=2000)
    with pytest.raises(ValueError, match=rf"request {one.id} of the workload can never run.*2\d\d\d"):
        backend.replay(arm, [*others, long])
    for engine in backend._engines.values():
        assert_idle(engine)


def test_requests_that_fail_are_in_the_run_as_failed(backend, monkeypatch, caplog):
    (arm,) = backend._experiment.arms
    engine, arrivals = backend._engine(arm), workload(backend._experiment, "usual", 1, rate=1000.0)[:3]
    monkeypatch.setattr(engine, "step", lambda: engine.fail("the device is lost"))
    run = backend.replay(arm, arrivals, tag="some cell")
    monkeypatch.undo()
    assert {row.id for row in run.requests} == {arrival.id for arrival in arrivals}
    for row in run.requests:
        assert (row.failed, row.finish_reason) == (True, "error")
        assert f"request {row.id} of some cell failed: the device is lost" in caplog.text
    assert_idle(engine)
