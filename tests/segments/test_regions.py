"""Regions of images, compared with the region that the centre of each token is in."""

import collections
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_jax.segments.cover import check_cover
from omni_jax.segments.policies import by_region
from tests.segments.toy import Image, view_of

LEFT_RIGHT = {"left": [0, 0, 0.5, 1], "right": [0.5, 0, 1, 1]}


def painted(view, policy):
    """The label of each token."""
    segments = policy(view)
    check_cover(segments, view.length)
    return [segment.label for segment in segments for _ in range(segment.length)]


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 5), st.integers(1, 5))
def test_a_grid_is_as_equal_as_whole_tokens_allow(rows, cols, down, across):
    labels = painted(view_of([Image(rows, cols)]), by_region({"rows": down, "cols": across}))
    table = [labels[row * cols : (row + 1) * cols] for row in range(rows)]
    bands = collections.Counter(labels)
    assert len(bands) == min(rows, down) * min(cols, across)
    heights = [len(list(group)) for _, group in itertools.groupby(table)]
    widths = [len(list(group)) for _, group in itertools.groupby(zip(*table, strict=True))]
    assert len(heights) == min(rows, down)
    assert len(widths) == min(cols, across)
    assert max(heights) - min(heights) <= 1
    assert max(widths) - min(widths) <= 1
    assert sorted(bands.values()) == sorted(height * width for height in heights for width in widths)


def test_a_band_is_one_segment_and_a_column_is_one_per_row():
    view = view_of(["Look: ", Image(8, 6), "Why?"])
    bands = by_region({"rows": 2})(view)
    assert [(s.start, s.stop, s.label) for s in bands[1:-1]] == [
        (6, 30, "image 1 region 1,1"),
        (30, 54, "image 1 region 2,1"),
    ]
    columns = by_region({"cols": 2})(view)[1:-1]
    assert len(columns) == 16
    assert {s.length for s in columns} == {3}
    assert [s.label for s in columns] == ["image 1 region 1,1", "image 1 region 1,2"] * 8
    assert {s.modality for s in columns} == {"image"}


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_a_named_region_contains_the_tokens_whose_centre_is_in_it(rows, cols, data):
    x, y = data.draw(st.floats(0.05, 0.95)), data.draw(st.floats(0.05, 0.95))
    boxes = {"a": [0, 0, x, y], "b": [x, 0.0, 1.0, y], "c": [0, y, x, 1]}
    labels = painted(view_of([Image(rows, cols)]), by_region(boxes))
    for index, label in enumerate(labels):
        centre_x, centre_y = (index % cols + 0.5) / cols, (index // cols + 0.5) / rows
        expected = {(True, True): "a", (False, True): "b", (True, False): "c", (False, False): "rest"}
        assert label == "image 1 " + expected[centre_x < x, centre_y < y]


def test_each_step_of_a_video_has_its_own_regions():
    view = view_of([Image(2, 2, steps=2, modality="video"), Image(2, 1)])
    assert (
        painted(view, by_region({"all": [0, 0, 1, 1]}))
        == ["video 1 step 1 all"] * 4 + ["video 1 step 2 all"] * 4 + ["image 1 all"] * 2
    )
    assert [s.length for s in by_region({"rows": 1})(view)] == [4, 4, 2]


@pytest.mark.parametrize(
    ("regions", "fault"),
    [
        (None, "must be a mapping"),
        ({}, "must be a mapping"),
        ([0, 0, 1, 1], "must be a mapping"),
        ({"rows": 0}, "rows is 0"),
        ({"rows": 2, "cols": -1}, "cols is -1"),
        ({"rows": 2.0}, "rows is 2.0"),
        ({"rows": True}, "rows is True"),
        ({"rows": 65}, "rows is 65"),
        ({"rows": 2, "left": [0, 0, 1, 1]}, "'rows' is 2"),
        ({"left": [0, 0, 0.5]}, "'left' is"),
        ({"left": [0, 0, 1.2, 1]}, "'left' is"),
        ({"left": [0, -0.1, 1, 1]}, "'left' is"),
        ({"left": [0.5, 0, 0.5, 1]}, "'left' is"),
        ({"left": [0, 0, float("nan"), 1]}, "'left' is"),
        ({"left": [0, 0, "1", 1]}, "'left' is"),
        ({"left": [0, 0, 10**400, 1]}, "'left' is"),
        ({"left": 3}, "'left' is 3"),
        ({"rest": [0, 0, 1, 1]}, "cannot be a region's name"),
        ({3: [0, 0, 1, 1]}, "cannot be a region's name"),
        (LEFT_RIGHT | {"middle": [0.4, 0.4, 0.6, 0.6]}, "'left' .* and 'middle' .* overlap"),
        ({f"r{i}": [i / 100, 0, (i + 1) / 100, 1] for i in range(65)}, "got 65"),
    ],
)
def test_invalid_regions_are_rejected_with_what_is_expected(regions, fault):
    with pytest.raises(ValueError, match=fault) as caught:
        by_region(regions)
    assert 'expected a grid {"rows": 2, "cols": 2}' in str(caught.value)
    assert "[x0, y0, x1, y1]" in str(caught.value)


def test_regions_that_adjoin_up_to_rounding_do_not_overlap():
    by_region(LEFT_RIGHT)
    by_region({"a": [0, 0, 0.1 + 0.2, 1], "b": [0.3, 0, 1, 1]})
