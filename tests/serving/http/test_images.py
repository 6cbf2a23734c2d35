"""Images and videos of a chat, from the HTTP request to the engine request. Bad requests do not reach the engine."""

import asyncio
import base64
import dataclasses
import logging
import threading

import numpy as np
import pytest

from serving.http import prompts
from serving.http.settings import MediaAccessSettings
from tests.serving.conftest import serving
from tests.serving.fake_engine import FakeEngine, vision_engine
from tests.serving.http.test_operations import metrics
from tests.serving.http.test_streaming import wait_until
from tests.serving.images import (
    BLUE,
    CHAT,
    GREEN,
    RED,
    ask,
    assert_rejected,
    body,
    content,
    data_uri,
    image,
    options,
    png,
    prompt_text,
    seen_media,
    url_part,
    video,
)
from tests.serving.listener import redirect, response

IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"


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


# -- good requests ----------------------------------------------------------------------------------------------------


async def test_an_image_reaches_the_engine(client, engine):
    answer = await ask(client, image(GREEN, (40, 24)), "What is it?")
    request = engine.requests[-1]
    (span,) = request.media
    assert (span.grid, span.length, span.modality) == ((6, 10), 15, "image")
    assert (span.patches == np.array(GREEN, np.uint8)[:, None, None, None]).all()
    assert request.positions.shape == (3, len(request.prompt_ids))
    assert answer["usage"]["prompt_tokens"] == len(request.prompt_ids)
    text_only = await ask(client, "What is it?")
    assert answer["usage"]["prompt_tokens"] == text_only["usage"]["prompt_tokens"] + 15 + 2
    assert engine.requests[-1].media == ()


async def test_mm_10_images_are_placed_where_their_parts_are(client, engine):
    red, blue = image(RED), image(BLUE, (16, 40))
    await ask(client, "a", red, "b", blue)
    assert f"a{IMAGE}b{IMAGE}" in prompt_text(engine)
    assert seen_media(engine) == [("image", RED), ("image", BLUE)]
    await ask(client, blue, "a", red, "b")
    assert f"{IMAGE}a{IMAGE}b" in prompt_text(engine)
    assert seen_media(engine) == [("image", BLUE), ("image", RED)]
    await ask(client, red, red, "twice")
    assert seen_media(engine) == [("image", RED)] * 2
    assert len({span.key for span in engine.requests[-1].media}) == 1
    ids = engine.requests[-1].prompt_ids
    await ask(client, image(BLUE), image(RED), "twice")  # other images of the same size give the same prompt
    assert (engine.requests[-1].prompt_ids, seen_media(engine)) == (ids, [("image", BLUE), ("image", RED)])


async def test_mm_10_images_over_several_turns(client, engine):
    turns = [
        {"role": "user", "content": content("one", image(RED))},
        {"role": "assistant", "content": "a red one"},
        {"role": "user", "content": content(image(GREEN), "two", image(BLUE))},
    ]
    assert (await client.post(CHAT, {"messages": turns}))[0] == 200
    assert seen_media(engine) == [("image", RED), ("image", GREEN), ("image", BLUE)]
    text = prompt_text(engine)
    assert text.index("one<|vision") < text.index("a red one") < text.index(f"{IMAGE}two{IMAGE}")


async def test_mm_10_images_that_arrive_out_of_order(client, engine, host):
    early_was_sent = asyncio.Event()

    async def late(writer):
        await early_was_sent.wait()
        writer.write(response(png(RED)))

    async def early(writer):
        writer.write(response(png(BLUE)))
        early_was_sent.set()

    host.answers |= {"/late": late, "/early": early}
    await ask(client, url_part(host.url("/late")), "and", url_part(host.url("/early")))
    assert seen_media(engine) == [("image", RED), ("image", BLUE)]


async def test_a_stream_equals_the_whole_response(client, engine, host):
    whole = await ask(client, url_part(host.url("/red.png")), "What is it?")
    sent = body(url_part(host.url("/red.png")), "What is it?", stream_options={"include_usage": True})
    chunks = await client.chunks(CHAT, sent)
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert len({request.prompt_ids for request in engine.requests[-2:]}) == 1


async def test_videos_as_files_and_as_frames(client, engine, host):
    colors = [RED, RED, GREEN, GREEN, BLUE, BLUE]
    host.answers["/video.mp4"] = response(video(colors))
    for source in (host.url("/video.mp4"), data_uri(video(colors), "video/mp4")):
        await ask(client, url_part(source, "video"), "Who is it?")
        assert f"{VIDEO}Who" in prompt_text(engine)
        steps = np.array([color for _, color in seen_media(engine)])
        assert np.abs(steps - np.array([RED, GREEN, BLUE])).max() < 30  # the codec is lossy
    frames = [png(color, (32, 32)) for color in colors]
    host.answers |= {f"/{i}": response(frame) for i, frame in enumerate(frames)}
    encoded = [base64.b64encode(frame).decode() for frame in frames]
    for part in (
        {"type": "video", "video": [host.url(f"/{i}") for i in range(6)]},
        {"type": "video", "video": [data_uri(frame) for frame in frames]},
        url_part("data:video/jpeg;base64," + ",".join(encoded), "video"),
    ):
        await ask(client, part, "Who is it?")
        assert seen_media(engine) == [("video", RED), ("video", GREEN), ("video", BLUE)]
        assert [span.start for span in engine.requests[-1].media] == [
            engine.requests[-1].media[0].start + 16 * step for step in range(3)
        ]


async def test_tokenize_returns_the_tokens_of_a_chat(client, engine, host):
    sent = body(url_part(host.url("/red.png")), "What is it?")
    status, answer = await client.post("/tokenize", sent)
    assert status == 200, answer
    used = (await client.post(CHAT, sent))[1]["usage"]
    assert answer["count"] == used["prompt_tokens"] == len(answer["tokens"])
    assert tuple(answer["tokens"]) == engine.requests[-1].prompt_ids
    status, answer = await client.post("/tokenize", body(url_part(host.url("/none")), "What is it?"))
    assert (status, "messages[0].content[0]" in answer["error"]["message"]) == (400, True)


async def test_the_log_counts_image_and_video_tokens(client, engine, caplog):
    caplog.set_level(logging.INFO, "serving.http.engine_streams")
    await ask(
        client, image(RED, (40, 24)), url_part(data_uri(video([RED, BLUE])), "video"), "What is it?", max_tokens=5
    )
    request = engine.requests[-1]
    line = caplog.messages[-1]
    text = len(request.prompt_ids) - 15 - 16
    assert f"request {request.id}: prompt {len(request.prompt_ids)} tokens (text {text}, image 15, video 16)" in line
    assert "generated 5, first token 0." in line
    assert line.endswith(" s, length")


async def test_metrics_of_the_encoder(client, engine):
    engine._stats.encoder_patches, engine._stats.encoder_padded_patches, engine._stats.encoder_calls = 10, 6, 2
    engine._stats.encoder_cache_queries, engine._stats.encoder_cache_hits = 5, 3
    engine._stats.encoder_cache_usage, engine._stats.mm_items = 0.25, {"image": 7, "video": 1}
    found = await metrics(client)
    label = '{model_name="fake"}'
    for name, value in {
        "omni_jax:encoder_patches_total": 10,
        "omni_jax:encoder_padded_patches_total": 6,
        "omni_jax:encoder_calls_total": 2,
        "vllm:mm_cache_queries_total": 5,
        "vllm:mm_cache_hits_total": 3,
        "omni_jax:encoder_cache_usage_perc": 0.25,
    }.items():
        assert found[name + label] == value
    assert found['omni_jax:mm_items_total{modality="image",model_name="fake"}'] == 7
    assert found['omni_jax:mm_items_total{modality="video",model_name="fake"}'] == 1


# -- MM-03 ------------------------------------------------------------------------------------------------------------


async def test_mm_03_variants_of_data_uris(client, engine):
    data = png(GREEN)
    plain = base64.b64encode(data).decode()
    await ask(client, url_part(data_uri(data)), "What is it?")
    expected = engine.requests[-1]
    escaped = "".join(f"%{byte:02x}" for byte in data)
    for url in (
        "data:image/png;base64," + plain.rstrip("="),
        "data:image/png;base64," + "\n".join(plain[i : i + 76] for i in range(0, len(plain), 76)) + "\n",
        "data:image/png;base64," + base64.urlsafe_b64encode(data).decode(),
        "data:image/jpg;base64," + plain,
        "data:text/html;base64," + plain,
        "data:;base64," + plain,
        "data:image/png," + escaped,
    ):
        await ask(client, url_part(url), "What is it?")
        assert engine.requests[-1].prompt_ids == expected.prompt_ids
        assert engine.requests[-1].media[0].key == expected.media[0].key


SECRET = base64.b64encode(b"<!DOCTYPE html><p>the secret of the payload</p>").decode()


async def test_mm_03_invalid_images_are_rejected_and_not_quoted(client, engine, caplog):
    caplog.set_level(logging.DEBUG)
    before = len(engine.requests)
    for url in (
        "data:image/png;base64,",
        "data:image/png;base64",
        "data:,",
        f"data:image/png;base64,{SECRET}",
        f"data:image/png,{SECRET}",
        f"data:image/png;base64,{SECRET}!",
        f"data:image/png;base64,=={SECRET}",
        "data:image/png;base64," + base64.b64encode(png(RED)[:60]).decode(),
        SECRET * 200,
    ):
        for part in (url_part(url), {"type": "image_url", "image_url": url}):
            message = await assert_rejected(client, body("see", part, "there"), match="messages[0].content[1]")
            assert SECRET[20:40] not in message
            assert "secret" not in message
    assert len(engine.requests) == before
    assert SECRET[20:40] not in caplog.text
    assert "secret" not in caplog.text


# -- MM-09 ------------------------------------------------------------------------------------------------------------


async def test_mm_09_errors_name_the_part_that_cannot_be_fetched(client, engine, host):
    async def broken(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        writer.close()

    host.answers |= {
        "/403": response(b"", status="403 Forbidden"),
        "/html": response(b"<html>not an image</html>", Content_Type="image/png"),
        "/empty": response(b""),
        "/large": response(bytes(100_001)),
        "/broken": broken,
        "/loop": redirect("/loop"),
    }
    before = len(engine.requests)
    for path, reason in {
        "/404": "404",
        "/403": "403",
        "/html": "",
        "/empty": "",
        "/large": "100000 bytes",
        "/broken": "closed the connection early",
        "/loop": "redirect",
    }.items():
        parts = ("one", image(RED), url_part(host.url(path)))
        assert reason in await assert_rejected(client, body(*parts), match="messages[0].content[2]")
    assert len(engine.requests) == before


async def test_mm_09_a_hanging_host_is_a_400_within_the_time_limit(engine, host):
    async def silent(writer):
        await asyncio.sleep(3600)

    host.answers["/silent"] = silent
    async with serving(engine, **options(timeout=0.3)) as client:
        hanging = asyncio.create_task(
            assert_rejected(client, body(url_part(host.url("/silent"))), match="messages[0].content")
        )
        await wait_until(lambda: host.requests)
        for _ in range(5):  # other requests are served meanwhile
            await ask(client, "text")
        assert "0.3 s" in await hanging


async def test_a_failed_fetch_cancels_the_others(client, host):
    disconnected = asyncio.Event()

    async def endless(writer):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
        finally:
            disconnected.set()

    async def missing(writer):
        await wait_until(lambda: "/endless" in host.paths)
        writer.write(response(b"", status="404 Not Found"))

    host.answers |= {"/endless": endless, "/no": missing}
    sent = body(url_part(host.url("/endless")), url_part(host.url("/no")))
    async with asyncio.timeout(20):
        status, answer = await client.post(CHAT, sent)
        assert (status, "messages[0].content[1]" in answer["error"]["message"]) == (400, True)
        await disconnected.wait()


async def test_a_disconnect_cancels_the_fetches(client, engine, host):
    disconnected = asyncio.Event()

    async def endless(writer):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)
        finally:
            disconnected.set()

    host.answers["/endless"] = endless
    before = len(engine.requests)
    asking = asyncio.create_task(client.post(CHAT, body(url_part(host.url("/endless")))))
    await wait_until(lambda: host.requests)
    asking.cancel()
    async with asyncio.timeout(20):
        await disconnected.wait()
    assert len(engine.requests) == before


async def test_concurrent_fetches_of_a_request_are_limited(engine, host):
    now = most = 0

    async def count(writer):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        now -= 1
        writer.write(response(png(RED)))

    host.answers |= {f"/{i}": count for i in range(20)}
    async with serving(engine, **options(image=20)) as client:
        await ask(client, *(url_part(host.url(f"/{i}")) for i in range(20)))
        assert len(engine.requests[-1].media) == 20
        assert 1 < most <= prompts.MAX_FETCHES
        most = 0
        frames = [host.url(f"/{i}") for i in range(8)]
        await ask(client, {"type": "video", "video": frames}, *(url_part(host.url(f"/{i}")) for i in range(8, 20)))
        assert most <= prompts.MAX_FETCHES


async def test_text_does_not_wait_for_image_decoding(client, engine, monkeypatch):
    free, busy, packed = threading.Event(), threading.Event(), prompts.pack_part

    def slow(*arguments, **options):
        busy.set()
        assert free.wait(20)
        return packed(*arguments, **options)

    monkeypatch.setattr(prompts, "pack_part", slow)
    waiting = [asyncio.create_task(ask(client, image(RED), "What is it?")) for _ in range(20)]
    await wait_until(busy.is_set)
    for _ in range(5):
        await ask(client, "text")
    assert not any(task.done() for task in waiting)
    free.set()
    await asyncio.gather(*waiting)


# -- SEC-01, SEC-02 ---------------------------------------------------------------------------------------------------


async def test_sec_01_private_addresses_are_rejected_by_default(engine, host):
    before = len(engine.requests)
    async with serving(engine) as client:
        for url in (
            host.url("/red.png"),
            host.url("/red.png", "localhost"),
            host.url("/red.png", "2130706433"),
            host.url("/red.png", "[::ffff:127.0.0.1]"),
            host.url("/red.png", "0.0.0.0"),
            host.url("/red.png", "user@127.0.0.1"),
            f"gopher://127.0.0.1:{host.port}/red.png",
            f"ftp://127.0.0.1:{host.port}/red.png",
        ):
            await assert_rejected(client, body("see", url_part(url)), match="messages[0].content[1]")
            await assert_rejected(client, body("see", url_part(url, "video")), match="messages[0].content[1]")
            await assert_rejected(client, body({"type": "video", "video": [data_uri(png(RED)), url]}), match="frame 1")
    assert host.connections == 0
    assert len(engine.requests) == before


async def test_sec_02_local_files(engine, tmp_path):
    allowed = tmp_path / "images"
    allowed.mkdir()
    (allowed / "red.png").write_bytes(png(RED))
    (tmp_path / "blue.png").write_bytes(png(BLUE))
    (allowed / "link").symlink_to(tmp_path / "blue.png")
    sources = [f"file://{allowed}/red.png", str(allowed / "red.png")]
    async with serving(engine) as client:
        for source in sources:
            await assert_rejected(client, body(url_part(source)), match="messages[0].content[0]: local files")
    access = MediaAccessSettings(allowed_local_media_path=allowed)
    async with serving(engine, access=access) as client:
        for source in sources:
            await ask(client, url_part(source), "What is it?")
            assert seen_media(engine) == [("image", RED)]
        before = len(engine.requests)
        messages = set()
        for source in ("/etc/passwd", f"{allowed}/link", f"file://{allowed}/%2e%2e/blue.png", f"{allowed}/nothing"):
            messages.add(await assert_rejected(client, body(url_part(source)), match="local file"))
        assert len(messages) == 1
        assert len(engine.requests) == before


async def test_a_full_queue_refuses_before_media_are_fetched(engine, client, host):
    engine.queue, engine.hold_after = 1, 1
    running = asyncio.create_task(ask(client, "hold"))
    before = len(engine.requests)
    await wait_until(lambda: len(engine.requests) > before)
    tokenized = engine.tokenizer.render_chat
    engine.tokenizer.render_chat = lambda *_, **__: pytest.fail("tokenised")
    await assert_rejected(client, body(url_part(host.url("/red.png"))), status=503, match="queue is full")
    assert host.connections == 0
    await assert_rejected(client, body(url_part("gopher://a"), n=0), match="n")  # invalid requests are a 400 as ever
    engine.tokenizer.render_chat = tokenized
    engine.gate.set()
    await running

    engine.gate.clear()

    async def fill(writer):  # the queue fills while the image is fetched
        filling.append(asyncio.create_task(ask(client, "hold")))
        await wait_until(lambda: len(engine.requests) > before + 1)
        writer.write(host.answers["/red.png"])

    filling: list[asyncio.Task] = []
    host.answers["/fill"] = fill
    status, answer = await client.post(CHAT, body(url_part(host.url("/fill"))))
    assert (status, answer["error"]["type"]) == (503, "service_unavailable_error")
    engine.gate.set()
    await asyncio.gather(*filling)


async def test_a_video_longer_than_the_context_is_refused_before_it_is_packed(client, engine, monkeypatch):
    monkeypatch.setattr("omni_jax.inputs.prompt.pack_video", lambda *_, **__: pytest.fail("packed"))
    before, engine.info = engine.info, dataclasses.replace(engine.info, max_model_len=63)
    clip = url_part(data_uri(video([RED] * 20, rate=4), "video/mp4"), "video")  # 16 tokens for each of 4 steps
    await assert_rejected(client, body(clip), match="messages[0].content[0]: the video has 64 tokens, 8 frames")
    engine.info = before
