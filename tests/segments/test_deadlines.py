"""Checks of objectives, and deadlines computed from them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_jax.requests import InvalidRequest, MediaSpan
from omni_jax.requests.segment import Segment
from omni_jax.requests.slo import SLO
from omni_jax.segments.deadlines import decode_deadline, with_deadlines


class Cost:
    """Prefill costs `token` seconds per token and `pair` per query-key pair; the encoder costs `patch` per patch."""

    def __init__(self, token=1e-3, pair=0.0, patch=0.0):
        self.token, self.pair, self.patch = token, pair, patch

    def prefill_seconds(self, tokens, context):
        return tokens * self.token + tokens * (2 * context + tokens) * self.pair

    def encode_seconds(self, patches):
        return patches * self.patch


def cover(*lengths, modality="text"):
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [Segment(start=a, stop=b, modality=modality) for a, b in zip([0, *ends], ends, strict=False)]


def span(start, length):
    return MediaSpan(
        key=b"", modality="image", start=start, length=length, grid=(2, 2 * length), patches=np.zeros((1,), np.uint8)
    )


@pytest.mark.parametrize("name", ["ttft_ms", "tpot_ms", "e2e_ms"])
@pytest.mark.parametrize("value", [0, -1, -0.5, math.nan, math.inf, 86_400_001, 10**400, "5", True, [1]])
def test_invalid_objectives_are_rejected(name, value):
    with pytest.raises(
        InvalidRequest, match=f"{name} must be a number of milliseconds above 0 and at most 86400000"
    ) as caught:
        SLO(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("value", [1.0, True, "high", None, 2**31, -(2**31)])
def test_invalid_priorities_are_rejected(value):
    with pytest.raises(InvalidRequest, match="priority must be an integer") as caught:
        SLO(priority=value)
    assert caught.value.param == "priority"


def test_objectives_at_their_bounds_are_accepted():
    SLO(ttft_ms=1e-3, tpot_ms=86_400_000, e2e_ms=5, priority=-(2**31) + 1)


def test_time_is_divided_by_tokens_when_they_cost_the_same():
    found = with_deadlines(cover(10, 30, 60), SLO(ttft_ms=2000), 100.0, Cost())
    assert [s.deadline for s in found] == pytest.approx([100.2, 100.8, 102.0])
    assert [(s.start, s.stop) for s in found] == [(0, 10), (10, 40), (40, 100)]


def test_more_expensive_tokens_get_more_time():
    found = with_deadlines(cover(50, 50), SLO(ttft_ms=1000), 0.0, Cost(token=0.0, pair=1.0))
    assert [s.deadline for s in found] == pytest.approx([0.25, 1.0])


def test_an_image_is_encoded_before_its_first_segment():
    segments = cover(10, 10, 10, 10)
    cost = Cost(token=1.0, patch=1.0)
    found = with_deadlines(segments, SLO(ttft_ms=1000), 0.0, cost, media=[span(10, 5), span(15, 10)])
    # 4 patches per token: 20 and 40, both encoded before the end of the second segment.
    assert [s.deadline for s in found] == pytest.approx([0.1, 0.8, 0.9, 1.0])


@given(
    st.lists(st.integers(1, 2000), min_size=1, max_size=20),
    st.floats(0.001, 86_400_000),
    st.one_of(st.none(), st.floats(0.001, 86_400_000)),
    st.floats(0, 1e7),
    st.floats(0, 1e3),
    st.floats(0, 1),
    st.lists(st.integers(0, 400), max_size=3),
)
def test_deadlines_never_decrease_and_the_last_is_the_objective(lengths, ttft, e2e, arrival, token, pair, starts):
    segments = cover(*lengths)
    media = [span(start, 5) for start in sorted(starts)]
    found = with_deadlines(segments, SLO(ttft_ms=ttft, e2e_ms=e2e), arrival, Cost(token, pair, 0.1), media=media)
    deadlines = [segment.deadline for segment in found]
    assert deadlines == sorted(deadlines)
    assert deadlines[0] >= arrival
    assert deadlines[-1] == arrival + min(ttft, e2e or math.inf) / 1000


@given(st.lists(st.floats(-10, 10), min_size=5, max_size=5))
def test_deadlines_never_decrease_with_an_inconsistent_cost_model(seconds):
    class Inconsistent:
        def prefill_seconds(self, tokens, context):
            return seconds[tokens // 10 - 1]

    deadlines = [s.deadline for s in with_deadlines(cover(*[10] * 5), SLO(ttft_ms=1000), 7.0, Inconsistent())]
    assert deadlines == sorted(deadlines)
    assert deadlines[0] >= 7.0
    assert deadlines[-1] == 8.0


@pytest.mark.parametrize("seconds", [0.0, math.inf, math.nan])
def test_time_is_divided_by_tokens_without_a_prediction(seconds):
    found = with_deadlines(cover(10, 30), SLO(ttft_ms=1000), 0.0, Cost(token=seconds))
    assert [s.deadline for s in found] == pytest.approx([0.25, 1.0])


def test_deadlines_are_infinite_without_an_objective_and_priorities_add_up():
    segments = [*cover(3), Segment(start=3, stop=5, modality="text", priority=4)]
    for slo in (SLO(priority=-2), SLO(tpot_ms=5, priority=-2)):
        found = with_deadlines(segments, slo, 1.0, Cost())
        assert [s.deadline for s in found] == [math.inf] * 2
        assert [s.priority for s in found] == [-2, 2]
    assert [s.priority for s in with_deadlines(segments, SLO(ttft_ms=1, priority=-2), 1.0, Cost())] == [-2, 2]


def test_no_segments():
    assert with_deadlines((), SLO(ttft_ms=5), 0.0, Cost()) == ()


def test_decode_deadlines_advance_by_tpot_from_the_first_token():
    slo = SLO(tpot_ms=50)
    assert decode_deadline(slo, 10.0, 11.0, 1) == pytest.approx(11.05)
    assert decode_deadline(slo, 10.0, 11.0, 20) == pytest.approx(12.0)


def test_decode_deadlines_never_exceed_the_end_to_end_objective():
    assert decode_deadline(SLO(tpot_ms=50, e2e_ms=1500), 10.0, 11.0, 20) == pytest.approx(11.5)
    assert decode_deadline(SLO(e2e_ms=1500), 10.0, 11.0, 1) == pytest.approx(11.5)
    assert decode_deadline(SLO(ttft_ms=5), 10.0, 11.0, 1) == math.inf
