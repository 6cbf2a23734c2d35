"""Vision towers on a mesh of virtual devices. Run by test_sharding.py."""

import functools

import pytest

from tests.engine.test_vision import CASES, vision_request
from tests.engines import Setup, compile_tiny, greedy, make_engine, run
from tests.runtime.text_on_eight_devices import same


@functools.cache
def seeing(family: str, size: int):
    setup = Setup(variant=family, decode=(8,), mixed=(64,), patches=(512,))
    return compile_tiny(setup, tensor_parallel_size=size)


@pytest.mark.parametrize(("family", "size"), [pytest.param("qwen2_vl", 2, marks=pytest.mark.full), ("qwen2_5_vl", 4)])
def test_images_and_video_equal_one_device(family, size):
    """Three heads of a tower do not divide, and stay whole; its inner width is shared out."""
    one, many = seeing(family, 1), seeing(family, size)
    params = greedy(max_tokens=16, logprobs=20)
    found, expected = (
        run(make_engine(loaded), *(vision_request(loaded, name, name=name, params=params) for name in CASES))
        for loaded in (many, one)
    )
    same(found, expected)
