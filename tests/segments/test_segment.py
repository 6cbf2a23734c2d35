"""Segment, PromptView, and the check that segments cover a prompt."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_jax.requests import InvalidRequest
from omni_jax.requests.segment import Segment
from omni_jax.segments.cover import check_cover
from omni_jax.segments.prompt_view import MediaView
from tests.segments.toy import Control, Image, view_of


def segments(*ranges):
    return [Segment(start=start, stop=stop, modality="text") for start, stop in ranges]


@pytest.mark.parametrize(
    ("ranges", "length", "token", "fault"),
    [
        ([(0, 3), (4, 6)], 6, 3, r"tokens \[3, 4\) are in no segment"),
        ([(1, 6)], 6, 0, r"tokens \[0, 1\) are in no segment"),
        ([(0, 5)], 6, 5, r"tokens \[5, 6\) are in no segment"),
        ([], 6, 0, r"tokens \[0, 6\) are in no segment"),
        ([(0, 3), (2, 6)], 6, 2, r"segment 1, \[2, 6\), overlaps segment 0"),
        ([(0, 3), (0, 3), (3, 6)], 6, 0, "overlaps"),
        ([(0, 2), (2, 4), (1, 2), (4, 6)], 6, 1, r"out of order: it lies before segment 1, \[2, 4\)"),
        ([(3, 6), (0, 3)], 6, 0, "segment 0, .* is out of order: the tokens before it come later"),
        ([(0, 3), (3, 3), (3, 6)], 6, 3, r"segment 1, \[3, 3\), is empty"),
        ([(0, 3), (5, 4)], 6, 5, r"segment 1, \[5, 4\), is empty"),
        ([(0, 3), (3, 8)], 6, 6, "goes beyond the prompt's 6 tokens"),
        ([(0, 6), (6, 7)], 6, 6, "goes beyond"),
        ([(-1, 6)], 6, -1, "begins before the prompt"),
    ],
)
def test_check_cover_reports_the_first_bad_token(ranges, length, token, fault):
    with pytest.raises(InvalidRequest, match=fault) as caught:
        check_cover(segments(*ranges), length)
    assert f"at token {token}:" in str(caught.value)
    assert caught.value.param == "segment_policy"


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_check_cover_accepts_only_covers(lengths, data):
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    good = segments(*zip([0, *ends], ends, strict=False))
    check_cover(good, ends[-1])
    index = data.draw(st.integers(0, len(good) - 1))
    field = data.draw(st.sampled_from(["start", "stop"]))
    shift = data.draw(st.integers(-3, 3).filter(bool))
    bad = list(good)
    bad[index] = dataclasses.replace(bad[index], **{field: getattr(bad[index], field) + shift})
    with pytest.raises(InvalidRequest):
        check_cover(bad, ends[-1])


def test_segment_length():
    assert Segment(start=3, stop=10, modality="table").length == 7


def test_a_media_view_whose_grid_does_not_match_is_rejected():
    with pytest.raises(ValueError, match="has 7 tokens; 2 steps of 2 x 2 are 8"):
        MediaView(start=1, stop=8, modality="video", grid=(2, 2), steps=2)


def test_part_counts_from_its_own_start():
    view = view_of(["ab", Control(), "cd", Image(2, 2), "ef", Image(1, 3), Control(), "g"])
    part = view.part(1, 12)
    assert part.length == 11
    assert part.text(0, 4) == "b<|im_end|>cd"
    assert part.token_texts(8, 10) == ("e", "f")
    assert [(item.start, item.stop) for item in part.media] == [(4, 8)]  # the second image is only partly inside
    assert part.controls == (1,)
    assert part.part(4, 8).media[0].start == 0
