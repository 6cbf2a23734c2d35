"""Segments in the engine: policies and objectives change when work runs, but no outputs."""

import dataclasses
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_jax.requests import InvalidRequest
from omni_jax.requests.segment import Segment
from omni_jax.requests.slo import SLO
from tests import tiny_vl
from tests.engine.test_vision import CASES, golden, vision_request
from tests.engines import greedy, load_tiny, make_engine, request, run

POLICIES = [
    "request",
    "by_modality",
    "by_sentence",
    {"policy": "by_length", "max_length": 5},
    {"policy": "by_region", "regions": {"rows": 2, "cols": 2}},
    {"policy": "hybrid", "max_text": 8, "max_image": 6},
]
SLOS = [SLO(), SLO(ttft_ms=1, tpot_ms=1), SLO(ttft_ms=50, priority=1), SLO(e2e_ms=2000, priority=-3)]


def with_slo(loaded, case, name, slo):
    return dataclasses.replace(vision_request(loaded, case, name=name), slo=slo)


def tokens(answers):
    return {name: answer.tokens for (name, _), answer in answers.items()}


@pytest.mark.parametrize("policy", POLICIES, ids=json.dumps)
def test_every_policy_gives_the_same_tokens(policy):
    loaded = load_tiny("qwen2_vl")
    engine = make_engine(loaded, options={"segment_policy": policy, "scheduling_policy": "slo", "ttft_ms": 100})
    items = [
        dataclasses.replace(vision_request(loaded, name, name=name), slo=SLOS[i % len(SLOS)])
        for i, name in enumerate(CASES)
    ]
    found = tokens(run(engine, *items))
    for name in CASES:
        assert found[name] == golden("qwen2_vl")[name]["tokens"].tolist(), name


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(POLICIES),
    st.lists(st.tuples(st.sampled_from(CASES), st.sampled_from(SLOS)), min_size=1, max_size=6),
    st.sampled_from([16, 24, 64]),
    st.sampled_from([17, 24, 60]),
    st.sampled_from([0.001, 10.0]),
)
def test_policies_objectives_chunks_and_pools_change_no_token(policy, chosen, chunk, blocks, aging):
    """Small pools cause preemption; a short aging time reorders constantly."""
    loaded = load_tiny("qwen2_vl")
    engine = make_engine(
        loaded,
        num_blocks=blocks,
        max_model_len=256,
        max_num_batched_tokens=chunk,
        options={"segment_policy": policy, "scheduling_policy": "slo", "aging_seconds": aging},
    )
    items = [
        dataclasses.replace(vision_request(loaded, name, name=str(i)), slo=slo) for i, (name, slo) in enumerate(chosen)
    ]
    found = tokens(run(engine, *items))
    for i, (name, _) in enumerate(chosen):
        assert found[str(i)] == golden("qwen2_vl")[name]["tokens"].tolist(), name


def test_first_come_first_served_without_chunks_gives_the_same_tokens():
    loaded = load_tiny("qwen2_vl")
    engine = make_engine(loaded, max_num_batched_tokens=64, max_model_len=56, options={"enable_chunked_prefill": False})
    items = [request(f"r{n}", n, greedy(max_tokens=4)) for n in (30, 40, 50, 3)]
    expected = {item.id: tokens(run(make_engine(loaded), item))[item.id] for item in items}
    assert tokens(run(engine, *items)) == expected


def test_given_segments_are_kept_and_get_deadlines():
    loaded = load_tiny("qwen2_vl")
    engine = make_engine(loaded, options={"scheduling_policy": "slo", "ttft_ms": 1000})
    item = vision_request(loaded, "one_image")
    length = len(item.prompt_ids)
    cut = (Segment(start=0, stop=10, modality="text"), Segment(start=10, stop=length, modality="image"))
    found = engine.core._with_deadlines(dataclasses.replace(item, segments=cut, arrival=5.0, slo=SLO(priority=2)))
    assert [(s.start, s.stop, s.priority) for s in found.segments] == [(0, 10, 2), (10, length, 2)]
    assert 5.0 < found.segments[0].deadline < found.segments[1].deadline == 6.0
    assert found.slo.ttft_ms == 1000


def test_an_unknown_policy_is_refused():
    loaded = load_tiny("qwen2_vl")
    with pytest.raises(ValueError, match="by_sentence"):
        make_engine(loaded, options={"segment_policy": "by_moon"})
    engine = make_engine(loaded)
    with pytest.raises(ValueError, match="by_sentence"):
        engine.cut((1, 2, 3), policy="by_moon")
    with pytest.raises(ValueError, match="scheduling_policy"):
        make_engine(loaded, options={"scheduling_policy": "lifo"})


def leaves_a_gap(view):
    return [Segment(start=0, stop=1, modality="text")]


def test_a_custom_policy_that_leaves_a_gap_refuses_only_the_request():
    loaded = load_tiny("qwen2_vl")
    engine = make_engine(loaded, options={"segment_policy": f"{__name__}:leaves_a_gap"})
    with pytest.raises(InvalidRequest, match="in no segment"):
        engine.add(vision_request(loaded, tiny_vl.CASES["text"]))
    assert not engine.has_work
