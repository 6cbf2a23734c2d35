"""M-RoPE positions against transformers and against examples by hand."""

import json
from pathlib import Path

import numpy as np
import pytest

from omni_jax.inputs.image import MediaItem
from omni_jax.inputs.positions import mrope_positions
from omni_jax.requests import InvalidRequest, Request, SamplingParams

GOLDENS = json.loads(Path(__file__).with_name("mrope.json").read_text())


def item(grid: tuple[int, int, int], seconds: float | None = None) -> MediaItem:
    return MediaItem(
        modality="image" if seconds is None else "video",
        key=b"",
        grid=grid,
        patches=np.zeros(0, np.uint8),
        seconds_per_grid=seconds,
        num_tokens=grid[0] * grid[1] * grid[2] // 4,
    )


def positions(*parts, tokens_per_second: float | None = None) -> np.ndarray:
    """Positions of a prompt; each part is a number of text tokens or an item."""
    length, placed = 0, []
    for part in parts:
        if isinstance(part, MediaItem):
            placed.append((length, part))
        length += part if isinstance(part, int) else part.num_tokens
    return mrope_positions(length, placed, merge_size=2, tokens_per_second=tokens_per_second)


def parts_of(golden: dict) -> list:
    return [
        part["text"] if "text" in part else item(tuple(part["grid"]), 2 / part["fps"] if "fps" in part else None)
        for part in golden["parts"]
    ]


def split(golden: dict, whole: np.ndarray) -> list[np.ndarray]:
    """Split positions by part."""
    lengths = [part if isinstance(part, int) else part.num_tokens for part in parts_of(golden)]
    return np.split(whole, np.cumsum(lengths)[:-1], axis=1)


@pytest.mark.parametrize("golden", GOLDENS)
def test_positions_equal_transformers(golden):
    """Each part is compared alone. The whole is compared too, unless transformers places text inside a video."""
    ours = positions(*parts_of(golden), tokens_per_second=golden["tokens_per_second"])
    theirs = np.array(golden["positions"])
    assert ours.dtype == np.int32
    overlaps = False
    reached = -1
    for mine, part in zip(split(golden, ours), split(golden, theirs), strict=True):
        np.testing.assert_array_equal(mine - mine.min(), part - part.min())
        overlaps |= part.min() != reached + 1
        reached = max(reached, part.max())
    request = Request(id="r", prompt_ids=(0,) * ours.shape[1], params=SamplingParams(), positions=ours)
    if not overlaps:
        assert ours.tolist() == theirs.tolist()
        assert request.position_delta == golden["delta"]


def test_a_third_of_the_goldens_are_compared_as_a_whole():
    equal = [
        positions(*parts_of(golden), tokens_per_second=golden["tokens_per_second"]).tolist() == golden["positions"]
        for golden in GOLDENS
    ]
    assert sum(equal) > len(equal) / 3


@pytest.mark.parametrize("golden", GOLDENS)
def test_mr_04_each_part_begins_after_the_largest_position_before_it(golden):
    ours = positions(*parts_of(golden), tokens_per_second=golden["tokens_per_second"])
    reached = -1
    for part in split(golden, ours):
        assert part[:, 0].tolist() == [reached + 1] * 3
        reached = part.max()


def test_mr_04_an_image_has_one_temporal_position():
    """Two text tokens, an image of 2 x 3 tokens, two text tokens; tokens_per_second does not matter."""
    for tokens_per_second in (None, 25.0):
        time, row, column = positions(2, item((1, 4, 6)), 2, tokens_per_second=tokens_per_second).tolist()
        assert time == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6]
        assert row == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6]
        assert column == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]


def test_mr_05_temporal_positions_of_a_video_follow_its_seconds():
    """At 25 positions per second and 1 fps, a temporal step of two frames is 50 positions."""
    video = item((3, 4, 4), 2.0)
    time, row, column = positions(1, video, 1, tokens_per_second=25.0).tolist()
    assert time == [0, *[1] * 4, *[51] * 4, *[101] * 4, 102]
    assert row == [0, *[1, 1, 2, 2] * 3, 102]
    assert column == [0, *[1, 2, 1, 2] * 3, 102]
    assert positions(1, video, 1)[0].tolist() == [0, *[1] * 4, *[2] * 4, *[3] * 4, 4]
    slow, fast = (positions(item((8, 2, 2), 2 / fps), tokens_per_second=2.0)[0].tolist() for fps in (1, 30))
    assert slow == [0, 4, 8, 12, 16, 20, 24, 28]
    assert fast == [0, 0, 0, 0, 0, 0, 0, 0]
    third = positions(item((8, 2, 2), 2 / 3), tokens_per_second=2.0)[0].tolist()
    assert third == [0, 1, 2, 4, 5, 6, 8, 9]  # 1.33, 2.67, 4, ...: truncated after the product


def test_mr_01_positions_of_a_prefix_are_a_slice_of_the_whole():
    """So a chunk of a prompt takes its slice: no token's positions depend on later tokens."""
    parts = [7, item((1, 4, 6)), 3, item((4, 4, 4), 1.0), 5]
    whole = positions(*parts, tokens_per_second=2.0)
    for count in range(1, len(parts)):
        part = positions(*parts[:count], tokens_per_second=2.0)
        np.testing.assert_array_equal(part, whole[:, : part.shape[1]])


def test_positions_of_text_count_up():
    np.testing.assert_array_equal(positions(5), np.tile(np.arange(5), (3, 1)))
    assert positions(item((1, 2, 2))).tolist() == [[0], [0], [0]]


def test_positions_beyond_int32_are_refused():
    with pytest.raises(InvalidRequest, match="positions up to 2e"):
        positions(item((3, 2, 2), 1e9), tokens_per_second=1.0)
