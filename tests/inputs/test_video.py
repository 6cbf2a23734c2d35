"""Video: sampled frames against a full decode, patches against transformers, orientation, and invalid files."""

import contextlib
import dataclasses
import io
import math
import re
import socket
import struct
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image

from omni_jax.inputs import video
from omni_jax.inputs.image import Qwen2VLImageProcessorPil, pack_image, smart_resize
from omni_jax.inputs.video import (
    Frames,
    decode_video,
    frame_size,
    needed_packets,
    pack_video,
    sample_indices,
    video_from_frames,
)
from omni_jax.requests import InvalidRequest
from tests.inputs import media
from tests.inputs.media import all_frames, clip, encoded, make_image, memory_growth, noise

SETTINGS = media.settings()


def resized(frame: np.ndarray, like: Image.Image) -> np.ndarray:
    return np.asarray(Image.fromarray(frame).resize(like.size, resample=Image.Resampling.BICUBIC))


def assert_frames(frames: Frames, expected: list[np.ndarray]) -> None:
    assert len(frames.images) == len(expected)
    for image, frame in zip(frames.images, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(image), resized(frame, image))


CLIPS = {
    "h264 in MP4, with B-frames": {"g": "12", "bf": "3"},
    "h264 with open groups": {"x264_params": "keyint=12:min-keyint=12:scenecut=0:open-gop=1:bframes=3", "frames": 60},
    "h264 in MPEG-TS": {"format": "mpegts", "g": "12"},
    "h264 in FLV": {"format": "flv", "g": "12"},
    "a fragmented MP4": {"container": {"movflags": "frag_keyframe+empty_moov"}, "g": "12"},
    "raw timing in AVI": {"format": "avi", "codec": "mpeg4", "g": "12"},
    "h264 with B-frames in AVI": {"format": "avi", "g": "12", "bf": "2"},
    "MPEG-4 in Matroska": {"format": "matroska", "codec": "mpeg4"},
    "VP8 in WebM": {"format": "webm", "codec": "libvpx", "deadline": "realtime", "g": "12"},
    "VP9 in WebM, with frames that are not shown": {"format": "webm", "codec": "libvpx-vp9", "auto_alt_ref": "1"},
    "VP8 in Ogg": {"format": "ogg", "codec": "libvpx", "deadline": "realtime"},
    "one key frame": {"g": "1000"},
    "only key frames": {"g": "1"},
}


@pytest.mark.parametrize("name", CLIPS)
def test_sampled_frames_equal_those_of_a_full_decode(name):
    data = clip(**({"frames": 40} | CLIPS[name]))
    whole = all_frames(data)
    options: dict[str, Any]
    for options in ({"fps": 2}, {"fps": 5.0}, {"num_frames": 4}, {"num_frames": 10}, {"fps": 100}, {}):
        expected = sample_indices(len(whole), 25.0, SETTINGS, **options)
        frames = decode_video(data, SETTINGS, **options)
        assert_frames(frames, [whole[i] for i in expected])
        assert frames.seconds_per_frame == pytest.approx(len(whole) / 25 / len(expected), rel=0.05)
        assert frames.source_size == (48, 64)


def test_only_the_needed_packets_are_decoded(monkeypatch):
    data = clip(120, g="10", bf="2")
    decoded = []
    decode = video._decode

    def count(*args):
        for frame in decode(*args):
            decoded.append(frame.pts)
            yield frame

    monkeypatch.setattr(video, "_decode", count)
    whole = all_frames(data)
    assert_frames(decode_video(data, SETTINGS, num_frames=4), [whole[i] for i in (0, 30, 60, 90)])
    assert len(decoded) < 20


def test_needed_packets_by_hand():
    #           I   P   B | I   B   P | I   P
    pts = np.array([0, 2, 1, 5, 4, 6, 7, 8])
    key = np.array([1, 0, 0, 1, 0, 0, 1, 0], bool)
    for wanted, expected in (
        ([0], [0]),
        ([1], [0, 1]),
        ([2], [0, 1, 2]),
        ([3], [3]),
        ([4], [0, 1, 2, 3, 4]),  # shown before the key frame of its group
        ([5], [3, 4, 5]),
        ([7], [6, 7]),
        ([0, 7], [0, 6, 7]),
    ):
        assert np.flatnonzero(needed_packets(pts, key, np.isin(np.arange(8), wanted))).tolist() == expected
    no_key = needed_packets(np.arange(3), np.zeros(3, bool), np.array([False, True, False]))
    assert no_key.tolist() == [True, True, False]


def test_frames_are_numbered_by_the_decoder_if_packets_do_not_match_them(monkeypatch):
    """As in files with packets without a frame: times lead to no frame, or there are fewer frames than packets."""
    data = clip(24)
    whole, scan = all_frames(data), video._scan
    expected = [whole[i] for i in sample_indices(24, 25.0, SETTINGS, num_frames=6)]

    def without_times(*args):
        return dataclasses.replace(scan(*args), pts=None)

    def wrong_times(*args):
        scanned = scan(*args)
        assert scanned.pts is not None
        return dataclasses.replace(scanned, pts=scanned.pts + 1)

    def too_many(*args):
        scanned = scan(*args)
        return dataclasses.replace(
            scanned, pts=None, key=np.append(scanned.key, [False] * 8), shown=np.append(scanned.shown, [True] * 8)
        )

    for change in (without_times, wrong_times, too_many):
        monkeypatch.setattr(video, "_scan", change)
        assert_frames(decode_video(data, SETTINGS, num_frames=6), expected)


# --- sampling -------------------------------------------------------------------------------------------------------


@given(
    total=st.integers(1, 5000),
    rate=st.sampled_from([0.5, 1.0, 7.5, 24.0, 25.0, 30000 / 1001, 60.0, 1000.0]),
    fps=st.sampled_from([0.1, 0.5, 1, 2.0, 3.3, 30]),
)
@hypothesis_settings(max_examples=300, deadline=None)
def test_sampling_by_fps_equals_transformers(total, rate, fps):
    """The oracle is Qwen2VLVideoProcessor.sample_frames, step by step; it does not support one frame."""
    indices = sample_indices(total, rate, SETTINGS, fps=fps)
    if total == 1:
        assert indices.tolist() == [0]
        return
    max_frames = math.floor(min(768, total) / 2) * 2
    count = math.floor(min(max(total / rate * fps, 4), max_frames, total) / 2) * 2
    assert indices.tolist() == [int(Fraction(total, count) * i) for i in range(count)]


@pytest.mark.parametrize(
    ("total", "num_frames", "expected"),
    [
        (100, 4, [0, 25, 50, 75]),
        (100, 5, [0, 25, 50, 75]),  # rounded to a multiple of 2, halves to even
        (100, 7, [0, 12, 25, 37, 50, 62, 75, 87]),
        (100, 1, [0, 50]),
        (10, 768, list(range(10))),
        (9, 16, [0, 1, 2, 3, 4, 5, 6, 7]),
        (1, 8, [0]),
        (2, 2, [0, 1]),
    ],
)
def test_sampling_by_num_frames(total, num_frames, expected):
    assert sample_indices(total, 25.0, SETTINGS, num_frames=num_frames).tolist() == expected


def test_sampling_keeps_the_servers_limits():
    few = media.settings(max_frames=6, min_frames=2)
    assert len(sample_indices(1000, 25.0, few)) == 6
    assert len(sample_indices(1000, 25.0, few, num_frames=6)) == 6
    assert len(sample_indices(25, 25.0, few)) == 2
    with pytest.raises(
        InvalidRequest, match=r"num_frames must be a whole number from 1 to 6 \(server's limit\), got 7"
    ):
        decode_video(clip(8), few, num_frames=7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fps": 2, "num_frames": 4}, "exclude each other"),
        ({"fps": 0}, "fps must be a number greater than 0, got 0"),
        ({"fps": -1.0}, "fps must be"),
        ({"fps": math.inf}, "fps must be"),
        ({"fps": math.nan}, "fps must be"),
        ({"fps": True}, "fps must be"),
        ({"fps": "2"}, "fps must be"),
        ({"num_frames": 0}, r"num_frames must be a whole number from 1 to 768 \(server's limit\), got 0"),
        ({"num_frames": 2.5}, "num_frames must be"),
        ({"num_frames": True}, "num_frames must be"),
        ({"max_pixels": 5_000_000}, "max_pixels is 5,000,000, the server's limit is 1,003,520"),
    ],
)
def test_invalid_sampling_is_refused(options, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        decode_video(clip(4), SETTINGS, **options)
    assert caught.value.param == "messages"


# --- patches --------------------------------------------------------------------------------------------------------


def oracle(images: list[Image.Image], height: int, width: int) -> np.ndarray:
    """float [steps, patches, channels, 2, patch, patch]: transformers' image processor on each frame alone. The patches
    of two frames make a temporal patch."""
    bounds = {"shortest_edge": height * width, "longest_edge": height * width}
    output = Qwen2VLImageProcessorPil(size=bounds)(images=images, return_tensors="np")
    assert all(tuple(grid) == (1, height // 14, width // 14) for grid in output["image_grid_thw"])
    patches = output["pixel_values"].reshape(len(images), -1, 3, 2, 14, 14)[:, :, :, 0]
    return np.stack([patches[0::2], patches[1::2]], axis=3)


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_mr_05_patches_equal_transformers_and_an_odd_last_frame_is_repeated(count):
    images = [make_image(84, 112, seed=i) for i in range(count)]
    settings = media.settings(video_min_pixels=84 * 112, video_max_pixels=84 * 112)
    item = pack_video(video_from_frames(images, settings, fps=4), settings)
    expected = oracle(images + images[-1:] * (count % 2), 112, 84)
    mean, std = (np.array(values, np.float32).reshape(3, 1, 1, 1) for values in (settings.mean, settings.std))
    normal = (item.patches.astype(np.float32) * np.float32(settings.rescale_factor) - mean) / std
    np.testing.assert_allclose(normal.reshape(expected.shape), expected, atol=1e-6, rtol=0)
    assert item.grid == (-(-count // 2), 8, 6)
    assert item.num_tokens == item.grid[0] * 12
    assert item.seconds_per_grid == 0.5
    assert item.modality == "video"
    assert item.patches.dtype == np.uint8


def test_resizing_in_decode_video_and_pack_video_is_equal():
    data = clip(10, size=(300, 200))
    bounds = {"min_pixels": 3136, "max_pixels": 12544}
    frames = decode_video(data, SETTINGS, **bounds)
    assert frames.images[0].width * frames.images[0].height <= 12544
    whole = [Image.fromarray(frame) for frame in all_frames(data)]
    same = Frames(images=[whole[i] for i in (0, 2, 5, 7)], seconds_per_frame=frames.seconds_per_frame)
    ours, theirs = pack_video(frames, SETTINGS, **bounds), pack_video(same, SETTINGS, **bounds)
    assert ours.grid == theirs.grid
    assert ours.key == theirs.key


def test_frame_size_shares_the_pixels_of_a_video():
    """transformers' cap_pixels_per_frame: 90 % of 128,000 tokens for all frames; a token covers two frames."""
    wide = media.settings(video_max_pixels=602112)
    size = {"min_pixels": 100352, "max_pixels": 602112}
    few, many = (frame_size(1080, 1920, n, wide, **size) for n in (20, 768))
    assert few == smart_resize(1080, 1920, 28, min_pixels=100352, max_pixels=602112)
    share = int(128000 * 28 * 28 * 0.9) * 2 // 768
    assert share * 0.8 < many[0] * many[1] <= share
    assert frame_size(100, 100, 700, wide, **size)[0] * 28 >= 100352 // 28


def test_mr_05_the_same_frames_at_another_rate_have_another_key():
    images = [make_image(56, 56, seed=i) for i in range(8)]
    slow, fast = (pack_video(video_from_frames(images, SETTINGS, fps=fps), SETTINGS) for fps in (1, 30))
    assert (slow.seconds_per_grid, fast.seconds_per_grid) == (2.0, pytest.approx(2 / 30))
    np.testing.assert_array_equal(slow.patches, fast.patches)
    assert slow.key != fast.key
    assert pack_video(video_from_frames(images, SETTINGS), SETTINGS).seconds_per_grid == 1.0
    assert pack_video(video_from_frames(images, SETTINGS, fps=1), SETTINGS).key == slow.key


def test_pc_02_a_video_of_two_frames_has_another_key_than_its_images():
    images = [make_image(56, 56, seed=i) for i in range(2)]
    moving = pack_video(video_from_frames(images, SETTINGS), SETTINGS)
    still = pack_video(video_from_frames(images[:1], SETTINGS), SETTINGS)
    keys = {moving.key, still.key, *(pack_image(image, SETTINGS).key for image in images)}
    assert len(keys) == 4


def test_a_single_frame_is_repeated():
    item = pack_video(decode_video(clip(1), SETTINGS), SETTINGS)
    assert item.grid[0] == 1
    np.testing.assert_array_equal(item.patches[:, :, 0], item.patches[:, :, 1])
    assert item.seconds_per_grid is not None
    assert item.seconds_per_grid > 0


def test_video_from_frames_takes_a_list_of_images():
    array = noise(60, 60)
    frames = video_from_frames(
        [array, encoded(Image.fromarray(array)), Image.fromarray(array).convert("RGBA")], SETTINGS
    )
    for image in frames.images:
        np.testing.assert_array_equal(np.asarray(image), np.asarray(frames.images[0]))
    assert frames.source_size == (60, 60)
    assert frames.seconds_per_frame == 0.5
    for images, message in (
        ([], "has 0 frames, expected 1 to 768"),
        ([array] * 769, "has 769 frames"),
        ([array, noise(60, 61)], "frame 1 has 60 x 61 pixels, but frame 0 has 60 x 60"),
        ([array, b"junk"], "frame 1: the 4 bytes are not an image"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            video_from_frames(images, SETTINGS)
    with pytest.raises(InvalidRequest, match="fps must be"):
        video_from_frames([array], SETTINGS, fps=0)
    with pytest.raises(InvalidRequest, match=r"lasts .* seconds, the limit is 86,400"):
        video_from_frames([array], SETTINGS, fps=1e-9)


# --- orientation and colours -----------------------------------------------------------------------------------------


def with_display_matrix(data: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """The video with another display matrix (a, b, c, d) in its track header, as phones write it."""
    changed, place = bytearray(data), data.index(b"tkhd") + 4 + 40
    assert struct.unpack_from(">i", data, place) == (1 << 16,)
    for i, value in zip((0, 1, 3, 4), matrix, strict=True):
        struct.pack_into(">i", changed, place + 4 * i, value << 16)
    return bytes(changed)


@pytest.mark.parametrize(
    ("matrix", "quarters"), [((1, 0, 0, 1), 0), ((0, 1, -1, 0), 3), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)]
)
def test_mm_01_rotated_videos_are_turned_upright(matrix, quarters):
    """A matrix of (0, 1, -1, 0) is a quarter turn clockwise, three quarter turns anticlockwise."""
    plain = clip(6)  # once: x264 with several threads does not give the same bytes twice
    expected = [np.rot90(frame, quarters) for frame in all_frames(plain)]
    frames = decode_video(with_display_matrix(plain, matrix), SETTINGS, num_frames=6)
    assert_frames(frames, expected)
    assert frames.source_size == expected[0].shape[:2]


def test_mm_02_transparency_of_a_video_becomes_white():
    """ProRes 4444 stores alpha, and the colours under it."""
    pixels = np.zeros((112, 112, 4), np.uint8)
    pixels[:, 48:] = (200, 0, 0, 255)
    data = clip(4, format="mov", codec="prores_ks", pix_fmt="yuva444p10le", size=(112, 112), images=[pixels] * 4)
    assert all_frames(data)[0][48, 20].max() < 10
    for image in decode_video(data, SETTINGS).images:
        np.testing.assert_allclose(np.asarray(image)[50, 20], (255, 255, 255), atol=2)
        np.testing.assert_allclose(np.asarray(image)[50, 90], (200, 0, 0), atol=4)


def test_mm_02_transparency_of_a_gif_becomes_white():
    drawn = [Image.new("RGBA", (84, 84)) for _ in range(4)]
    for i, image in enumerate(drawn):
        image.paste((200, 0, 0, 255), (8 * i, 0, 8 * i + 8, 84))
    data = encoded(drawn[0], "GIF", save_all=True, append_images=drawn[1:], duration=100, disposal=2)
    frames = decode_video(data, SETTINGS, num_frames=4)
    for i, image in enumerate(frames.images):
        assert image.getpixel((8 * i + 4, 32)) == (200, 0, 0)
        assert image.getpixel((8 * i + 36, 32)) == (255, 255, 255)


def test_a_wrong_rate_is_replaced_by_the_rate_of_the_times():
    """Browser recordings state 1,000 frames per second, whatever their times are."""
    data = clip(20, format="matroska", codec="mpeg4", rate=1000, times=[100 * i for i in range(20)])
    frames = decode_video(data, SETTINGS, fps=2)
    assert len(frames.images) == 4  # 2 seconds of video
    assert frames.seconds_per_frame == pytest.approx(0.5, rel=0.06)


def test_a_title_that_is_not_utf_8_is_accepted():
    data = clip(4, title="Tonight")
    assert b"Tonight" in data
    decode_video(data.replace(b"Tonight", b"T\xf4nigh\xff"), SETTINGS)


# --- invalid files --------------------------------------------------------------------------------------------------


def refusal(data: bytes, settings=SETTINGS, **options) -> str:
    with pytest.raises(InvalidRequest) as caught:
        decode_video(data, settings, **options)
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 300
    return str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"<!doctype html><html><body>404</body></html>",
        b"RIFF\x24\0\0\0WAVEfmt ",
        encoded(make_image(20, 20)),
        b"\0" * 4000,
        b"ftyp",
    ],
)
def test_bytes_that_are_not_a_video_are_refused(data):
    assert "not a video in a supported container" in refusal(data)


def test_empty_files_and_files_without_images_are_refused():
    assert refusal(b"") == "the video is empty: 0 bytes"
    assert "damaged" in refusal(b"\0\0\0\x18ftypisom\0\0\0\0isomisom")
    stream = io.BytesIO()
    with av.open(stream, "w", format="mp4") as video:
        track = video.add_stream("aac", rate=16000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 16000
        for packet in [*track.encode(sound), *track.encode()]:
            video.mux(packet)
    assert "the file has no video stream" in refusal(stream.getvalue())


def test_truncated_videos_are_refused(tmp_path):
    data = clip(24, container={"movflags": "faststart"}, file=tmp_path / "video.mp4")  # its header comes first
    whole = decode_video(data, SETTINGS)
    for part in (0.3, 0.6, 0.8, 0.95):
        assert re.search("truncated|damaged|not supported", refusal(data[: int(len(data) * part)]))
    late = clip(24)  # its header comes last
    assert "damaged" in refusal(late[: int(len(late) * 0.9)])
    assert len(whole.images) == 4


@given(st.data())
@hypothesis_settings(max_examples=80, deadline=None)
def test_any_damage_is_an_invalid_request_or_harmless(data):
    whole = data.draw(st.sampled_from(SEEDS))
    damaged = bytearray(whole)
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=6)):
        damaged[place] = data.draw(st.sampled_from([0, 1, 127, 128, 255]))
    with contextlib.suppress(InvalidRequest):
        pack_video(decode_video(bytes(damaged), SETTINGS, num_frames=4, max_pixels=3136), SETTINGS, max_pixels=3136)


SEEDS = [clip(6), clip(6, format="avi", codec="mpeg4"), clip(6, format="mpegts"), clip(6, format="matroska")]
SEEDS += [clip(6, format="webm", codec="libvpx"), clip(6, format="flv")]


def test_sec_03_large_frames_are_refused_from_the_header():
    assert "64 x 48 = 3,072 pixels, the limit is 3,000" in refusal(clip(4), media.settings(max_source_pixels=3000))


def test_sec_03_long_videos_are_refused(monkeypatch):
    data = clip(24, g="1000")
    monkeypatch.setattr(video, "MAX_SOURCE_FRAMES", 20)
    assert refusal(data) == "the video has more than 20 frames; split it"
    monkeypatch.setattr(video, "MAX_SOURCE_FRAMES", 2**18)
    monkeypatch.setattr(video, "MAX_DECODED_PIXELS", 10 * 64 * 48)
    assert "the video needs 19 frames of 64 x 48 decoded" in refusal(data, num_frames=4)
    decode_video(clip(24, g="4"), SETTINGS, num_frames=2)  # needs few frames decoded
    monkeypatch.setattr(video, "MAX_SOURCE_SECONDS", 0.5)
    assert "lasts 1 seconds, the limit is 0.5" in refusal(data, num_frames=4)


def test_sec_03_headers_that_claim_too_many_samples_are_refused(tmp_path):
    """FFmpeg would allocate 24 bytes per claimed sample, 1.4 GB here."""
    claims = 60_000_000
    table = bytearray(clip(10, codec="mpeg4", g="1000"))
    struct.pack_into(">II", table, table.index(b"stsz") + 8, 1, claims)
    struct.pack_into(">I", table, table.index(b"stsc") + 16, claims)
    struct.pack_into(">I", table, table.index(b"stts") + 12, claims)
    fragment = bytearray(clip(10, codec="mpeg4", container={"movflags": "frag_keyframe+empty_moov"}))
    place = fragment.index(b"trun")
    struct.pack_into(">II", fragment, place + 4, 1, claims)
    packed = bytearray(clip(10))
    place = packed.index(b"moov")
    packed[place + 4 : place + 24] = b"\0\0\0\x40cmov\0\0\0\x38cmvd\0\0\0\0"
    videos = [bytes(table), bytes(fragment), bytes(packed)]
    results = memory_growth("decode_video(data, settings)", videos, tmp_path)
    for (outcome, growth), expected in zip(
        results, ("60,000,000 samples", "samples in", "compressed header"), strict=True
    ):
        assert expected in outcome
        assert growth < 50


def test_sec_03_decoding_needs_memory_for_the_resized_frames_only(tmp_path):
    """96 frames of 1280 x 720 pixels take 265 MB, one takes 3 MB, and all of them resized take 1 MB."""
    gradient = np.broadcast_to(np.linspace(0, 255, 1280, dtype=np.uint8)[None, :, None], (720, 1280, 3))
    data = clip(96, size=(1280, 720), images=[gradient + np.uint8(i) for i in range(96)], preset="ultrafast")
    code = "pack_video(decode_video(data, settings, fps=100, max_pixels=3136), settings, max_pixels=3136)"
    [(outcome, growth)] = memory_growth(code, [data], tmp_path)
    assert outcome == "done"
    assert growth < 90  # the decoder's own frames, one per thread and reference


def test_sec_01_playlists_are_refused(tmp_path):
    """Nothing that they refer to is opened or connected to."""
    secret = tmp_path / "secret.mp4"
    secret.write_bytes(clip(4))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/a.ts"
        for target in (url, str(secret), f"file://{secret}"):
            for text in (
                f"#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{target}\n#EXT-X-ENDLIST\n",
                f"ffconcat version 1.0\nfile '{target}'\n",
                f"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nt=0 0\nm=video 5004 RTP/AVP 96\na=control:{target}\n",
                f'<?xml version="1.0"?><MPD><Period><BaseURL>{target}</BaseURL></Period></MPD>',
                f"[Reference]\nRef1={target}\n",
            ):
                assert "not a video in a supported container" in refusal(text.encode())
        with pytest.raises(TimeoutError):
            listener.accept()


def test_sec_03_frames_of_a_list_are_kept_resized(monkeypatch):
    """Small files may hold large images, and a list may have many."""
    monkeypatch.setattr(video, "as_image", lambda source, **_: Image.new("RGB", (2000, 1500)))
    frames = video_from_frames([b""] * 4, SETTINGS)
    assert frames.source_size == (1500, 2000)
    assert all(image.width * image.height <= SETTINGS.video_max_pixels for image in frames.images)
    assert pack_video(frames, SETTINGS).grid[0] == 2


def test_a_video_longer_than_the_context_is_refused_at_its_first_frame(monkeypatch):
    """Neither its frames nor its patches are in memory then."""
    decoded = []
    frame_image = video._frame_image
    monkeypatch.setattr(video, "_frame_image", lambda *args: decoded.append(1) or frame_image(*args))
    tokens = pack_video(decode_video(clip(40), SETTINGS, num_frames=20), SETTINGS).num_tokens
    assert len(decoded) == 20
    decode_video(clip(40), SETTINGS, num_frames=20, max_tokens=tokens)
    decoded.clear()
    message = refusal(clip(40), num_frames=20, max_tokens=tokens - 1)
    assert f"the video has {tokens} tokens, 20 frames" in message
    assert f"room for {tokens - 1}: sample fewer frames (fps, num_frames)" in message
    assert len(decoded) == 1
    opened = []
    monkeypatch.setattr(video, "as_image", lambda source, **_: opened.append(1) or Image.new("RGB", (280, 280)))
    with pytest.raises(InvalidRequest, match="the video has 200 tokens, 4 frames of 280 x 280 pixels"):
        video_from_frames([b""] * 4, SETTINGS, max_tokens=199)
    assert len(opened) == 1
