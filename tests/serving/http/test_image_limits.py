"""Limits on the images and videos of a request. Violations are rejected before any fetch."""

import dataclasses
import json

import pytest

from serving.http.settings import MediaSettings
from tests.serving.conftest import serving
from tests.serving.fake_engine import FakeEngine, FakeInfo, vision_engine
from tests.serving.images import (
    BLUE,
    RED,
    ask,
    assert_rejected,
    body,
    content,
    data_uri,
    image,
    options,
    png,
    seen_media,
    url_part,
    video,
)


@pytest.fixture
def engine() -> FakeEngine:
    return vision_engine()


@pytest.fixture
async def client(engine):
    async with serving(engine, **options()) as client:
        yield client


@pytest.fixture(autouse=True)
async def good_request_still_works(client, engine):
    """After each test, a good request gets the same response as before, and nothing is running."""
    golden = await ask(client, image(RED), "What is it?")
    yield
    assert await ask(client, image(RED), "What is it?") == golden
    assert engine.stats().num_requests_running == 0


async def test_api_13_surrogates_in_urls(client):
    for stream in ("true", "false"):
        for url in (r"http://a/\ud83d", r"data:image/png;base64,\udcf0", r"\udcf0"):
            raw = json.dumps(body(url_part("URL"), stream="STREAM")).replace("URL", url).replace('"STREAM"', stream)
            await assert_rejected(client, raw.encode(), match="surrogate")


async def test_invalid_parts_are_rejected_before_any_fetch(client, engine, host):
    before = len(engine.requests)
    for part in (
        {"type": "image_url"},
        {"type": "image_url", "image_url": None},
        {"type": "image_url", "image_url": 5},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url", "image_url": {"url": None}},
        {"type": "image_url", "image_url": {"url": 5}},
        {"type": "image_url", "image_url": {"url": [host.url("/red.png")]}},
        {"type": "image_url", "image_url": [host.url("/red.png")]},
        {"type": "video_url", "video_url": {"url": {}}},
        {"type": "video", "video": []},
        {"type": "video", "video": [host.url("/red.png"), 5]},
        {"type": "video", "video": [[host.url("/red.png")]]},
        {"type": "image", "image": {"a": 1}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "photo", "photo": host.url("/red.png")},
        {"image_url": {"url": 5}},
    ):
        await assert_rejected(
            client, body("see", url_part(host.url("/blue.png")), part), match="messages[0].content[2]"
        )
    assert host.connections == 0
    assert len(engine.requests) == before


async def test_limits_on_parts_and_frames(engine, host):
    async with serving(engine, **options()) as client:
        sixteen = [image(RED)] * 16
        await ask(client, *sixteen)
        seventeen = body(*sixteen, url_part(host.url("/red.png")))
        message = await assert_rejected(client, seventeen, match="at most 16")
        assert "17 image" in message
        video_part = {"type": "video", "video": [data_uri(png(RED))] * 2}
        await ask(client, video_part, "once")
        turns = [{"role": "user", "content": content(video_part, url_part(host.url("/red.png")))}] * 2
        message = await assert_rejected(client, {"messages": turns}, match="at most 1 ")
        assert "2 video" in message
        frames = {"type": "video", "video": [host.url("/red.png")] * 9}
        await assert_rejected(client, body(frames), match="at most 8")
        await assert_rejected(client, body(url_part("data:video/jpeg;base64," + "," * 8, "video")), match="at most 8")
    async with serving(engine, **options(image=0, video=2)) as client:
        await assert_rejected(client, body(url_part(host.url("/red.png"))), match="at most 0")
        await ask(client, video_part, video_part)
    assert host.connections == 0


async def test_mm_processor_kwargs_change_the_number_of_tokens(client, engine):
    async def tokens(**fields) -> int:
        await ask(client, *fields.pop("parts"), **fields)
        return sum(span.length for span in engine.requests[-1].media)

    large, unit = image(RED, (64, 64)), 64
    assert await tokens(parts=[large]) == 64
    assert await tokens(parts=[large], mm_processor_kwargs={}) == 64
    assert await tokens(parts=[large], mm_processor_kwargs={"max_pixels": 16 * unit}) == 16
    assert await tokens(parts=[image(RED, (8, 8))], mm_processor_kwargs={"min_pixels": 16 * unit}) == 16
    assert await tokens(parts=[large], mm_processor_kwargs={"max_pixels": None, "fps": 3}) == 64
    ten = url_part(data_uri(video([RED] * 20, rate=4), "video/mp4"), "video")
    assert await tokens(parts=[ten]) == 16 * 4  # 5 seconds, 2 frames per second, at most 8 frames
    assert await tokens(parts=[ten], mm_processor_kwargs={"num_frames": 4}) == 16 * 2
    assert await tokens(parts=[ten], mm_processor_kwargs={"fps": 0.8}) == 16 * 2
    assert await tokens(parts=[ten, large], mm_processor_kwargs={"fps": 0.8, "max_pixels": 9 * unit}) == 9 * 2 + 9
    small = large | {"mm_processor_kwargs": {"max_pixels": 4 * unit}}
    assert await tokens(parts=[small, large]) == 4 + 64
    assert await tokens(parts=[small, large], mm_processor_kwargs={"max_pixels": 16 * unit}) == 4 + 16
    assert await tokens(parts=[ten | {"nframes": 4, "max_pixels": 9 * unit}]) == 9 * 2  # as qwen-vl-utils has them
    assert await tokens(parts=[ten | {"fps": 0.8}], mm_processor_kwargs={"fps": 2}) == 16 * 2
    listed = {"type": "video", "video": [data_uri(png(RED, (8, 8)))] * 4, "sample_fps": 4, "min_pixels": 16 * unit}
    assert await tokens(parts=[listed]) == 16 * 2


async def test_pixel_limits_beside_an_image_count(client, engine):
    """qwen-vl-utils' and DashScope's places: beside the source, or in the object with the URL."""
    uri, unit = data_uri(png(RED, (64, 64))), 64
    for part in (
        {"type": "image_url", "image_url": {"url": uri}, "max_pixels": 16 * unit},
        {"type": "image_url", "image_url": {"url": uri, "max_pixels": 16 * unit}},
        {"type": "image", "image": uri, "min_pixels": 4 * unit, "max_pixels": 16 * unit},
        {"type": "image", "image": uri, "max_pixels": unit, "mm_processor_kwargs": {"max_pixels": 16 * unit}},
    ):
        await ask(client, part)
        assert engine.requests[-1].media[0].length == 16
    for name in ("resized_height", "resized_width", "total_pixels", "video_start", "min_frames"):
        for part in (url_part(uri) | {name: 64}, {"type": "image_url", "image_url": {"url": uri, name: 64}}):
            await assert_rejected(client, body(part), match=f"messages[0].content[0].{name} is not supported")
    await assert_rejected(client, body(url_part(uri) | {"max_pixels": 8193}), match="the server's limit is 8,192")
    await assert_rejected(client, body(url_part(uri) | {"max_pixels": "64"}), match="content[0].max_pixels must be")
    await assert_rejected(client, body(url_part(uri) | {"fps": 1}), match="messages[0].content[0] has the unknown")


async def test_openais_detail_low_means_512_by_512_pixels(client, engine):
    engine.info = FakeInfo(max_model_len=20_000)
    settings = dataclasses.replace(engine.vision.settings, max_pixels=2**20)
    engine.vision = dataclasses.replace(engine.vision, settings=settings)
    uri = data_uri(png(RED, (1024, 1024)))
    for detail, side in ((None, 1024), ("auto", 1024), ("high", 1024), ("original", 1024), ("low", 512)):
        await ask(client, {"type": "image_url", "image_url": {"url": uri, "detail": detail}})
        assert engine.requests[-1].media[0].length == (side // 8) ** 2, detail
    low = {"type": "image_url", "image_url": {"url": uri, "detail": "low"}}
    await ask(client, low | {"max_pixels": 64 * 64})
    assert engine.requests[-1].media[0].length == 64
    engine.vision = dataclasses.replace(engine.vision, settings=dataclasses.replace(settings, max_pixels=8192))
    await ask(client, low)
    assert engine.requests[-1].media[0].length <= 128
    for bad in ("lowest", 5, []):
        part = {"type": "image_url", "image_url": {"url": uri, "detail": bad}}
        await assert_rejected(client, body(part), match="messages[0].content[0]: detail must be 'auto'")


async def test_invalid_mm_processor_kwargs_are_rejected_before_any_fetch(client, host):
    part = url_part(host.url("/red.png"))
    video_part = url_part(host.url("/video"), "video")
    for given in (
        {"max_pixels": 0},
        {"max_pixels": -1},
        {"max_pixels": 1.5},
        {"max_pixels": "64"},
        {"min_pixels": True},
        {"num_frames": 2.5},
        {"num_frames": 0},
        {"fps": 0},
        {"fps": -1.0},
        {"fps": [1]},
        {"size": {"shortest_edge": 5}},
        {"do_resize": False},
        ["fps"],
        "x",
        5,
    ):
        await assert_rejected(client, body(part, video_part, mm_processor_kwargs=given), match="mm_processor_kwargs")
    for text in ("NaN", "1e999", "-Infinity"):
        raw = json.dumps(body(part, mm_processor_kwargs={"fps": "FPS"})).replace('"FPS"', text)
        await assert_rejected(client, raw.encode(), match="finite")
    await assert_rejected(
        client, body(part, mm_processor_kwargs={"min_pixels": 600, "max_pixels": 500}), match="min_pixels"
    )
    for bad in ({"max_pixels": 0}, {"min_pixels": "x"}, {"fps": 1.0}, 5, "x"):
        await assert_rejected(client, body("see", part | {"mm_processor_kwargs": bad}), match="messages[0].content[1]")
    frames = {"type": "video", "video": [host.url("/red.png")]}
    await assert_rejected(client, body(frames, mm_processor_kwargs={"num_frames": 2}), match="num_frames")
    assert host.connections == 0
    status, _ = await client.post("/v1/completions", {"prompt": "a", "mm_processor_kwargs": {"fps": 1}})
    assert status == 400
    assert (await client.post("/v1/completions", {"prompt": "a", "mm_processor_kwargs": {}}))[0] == 200


async def test_errors_of_mm_processor_kwargs_have_the_value_and_the_limit(client, engine, host):
    settings = engine.vision.settings
    for given, parts, most in (
        ({"max_pixels": 8193}, [url_part(host.url("/a"))], settings.max_pixels),
        ({"max_pixels": 10**12}, [url_part(host.url("/a"), "video")], settings.video_max_pixels),
        ({"min_pixels": 8193}, [url_part(host.url("/a"))], settings.max_pixels),
        ({"num_frames": 9}, [url_part(host.url("/a"), "video")], settings.max_frames),
    ):
        message = (await assert_rejected(client, body(*parts, mm_processor_kwargs=given))).replace(",", "")
        assert message.startswith("messages[0].content[0]: ")
        assert str(next(iter(given.values()))) in message
        assert str(most) in message
    assert host.connections == 0


async def test_a_server_may_refuse_mm_processor_kwargs(engine, host):
    async with serving(engine, **options(allow=False)) as client:
        part = url_part(host.url("/red.png"))
        flag = "--no-allow-mm-processor-kwargs"
        await assert_rejected(client, body(part, mm_processor_kwargs={"max_pixels": 500}), match=flag)
        message = await assert_rejected(
            client, body("see", part | {"mm_processor_kwargs": {"max_pixels": 500}}), match=flag
        )
        assert "messages[0].content[1]" in message
        assert host.connections == 0
        await ask(client, part, mm_processor_kwargs={})
        await ask(client, part, mm_processor_kwargs=None)


async def test_a_text_model_rejects_images_before_any_fetch(host):
    async with serving(FakeEngine(), **options()) as client:
        await assert_rejected(client, body("see", url_part(host.url("/red.png"))), match="messages[0].content[1]")
        assert (await client.chat("hello"))[0] == 200
    assert host.connections == 0


async def test_image_tokens_count_towards_the_context_length():
    engine = vision_engine()
    engine.info = FakeInfo(max_model_len=100)
    async with serving(engine, **options()) as client:
        assert "100 tokens" in await assert_rejected(client, body(image(RED, (96, 64)), image(BLUE, (96, 64))))
        await ask(client, image(RED), "short")


async def test_a_body_with_large_images_is_accepted_by_default(engine):
    large = png(RED) + bytes(12 * 2**20)  # data after the end of a PNG is ignored
    async with serving(engine, media=MediaSettings()) as client:
        await ask(client, url_part(data_uri(large)), "What is it?")
        assert seen_media(engine) == [("image", RED)]
    async with serving(engine, max_body_size=10_000) as client:
        await assert_rejected(client, body(url_part(data_uri(large))), status=413, match="10000")
