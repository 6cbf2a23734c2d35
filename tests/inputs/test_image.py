"""Images: formats and modes, invalid requests, and patches against transformers' processor."""

import io
import json
import re
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from omni_jax.inputs.chat import MediaPart
from omni_jax.inputs.image import (
    MediaItem,
    Qwen2VLImageProcessorPil,
    VisionSettings,
    as_image,
    open_image,
    pack_image,
    resized_size,
    smart_resize,
)
from omni_jax.inputs.prompt import pack_part
from omni_jax.inputs.rgb import to_rgb
from omni_jax.requests import InvalidRequest
from tests.inputs import media
from tests.inputs.media import encoded, make_image, memory_growth

SETTINGS = media.settings()


def processor(**size) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 1_003_520} | size)


def assert_packed_like(item: MediaItem, output, settings=SETTINGS) -> None:
    """Compare the item's patches, normalised as on the device, with transformers' float patches."""
    mean, std = (np.array(values, np.float32).reshape(3, 1, 1, 1) for values in (settings.mean, settings.std))
    patches = (item.patches.astype(np.float32) * np.float32(settings.rescale_factor) - mean) / std
    frames = np.broadcast_to(patches, (len(patches), 3, settings.temporal_patch_size, *patches.shape[3:]))
    np.testing.assert_allclose(frames.reshape(len(patches), -1), output["pixel_values"], atol=1e-6, rtol=0)
    assert item.grid == tuple(output["image_grid_thw"][0])


# Includes MM-04's sizes: tiny, a side below 28 pixels, strips up to 200 : 1.
SIZES = [(1, 1), (27, 257), (332, 27), (690, 15420), (28, 5600), (5600, 28), (56, 56), (57, 55), (28, 28), (100, 75)]
SIZES += [(640, 480), (1003, 1001), (1001, 1003), (1280, 800), (13, 1500), (2000, 1500), (70, 42), (41, 43), (14, 14)]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_mm_04_patches_equal_transformers(width, height):
    image = make_image(width, height, seed=width)
    item = pack_image(image, SETTINGS)
    assert_packed_like(item, processor()(images=[image], return_tensors="np"))
    assert item.patches.dtype == np.uint8
    assert item.patches.shape == (item.grid[1] * item.grid[2], 3, 1, 14, 14)
    assert item.num_tokens == item.grid[1] * item.grid[2] // 4
    assert min(item.grid[1:]) >= 2
    assert item.seconds_per_grid is None
    assert item.modality == "image"


@given(width=st.integers(1, 300), height=st.integers(1, 300), low=st.integers(1, 30000), more=st.integers(0, 60000))
@hypothesis_settings(max_examples=40, deadline=None)
def test_patches_equal_transformers_within_any_bounds(width, height, low, more):
    bounds = {"shortest_edge": low, "longest_edge": low + more + 784}
    image = make_image(width, height)
    changes = {"min_pixels": low, "max_pixels": low + more + 784}
    try:
        expected = processor(**bounds)(images=[image], return_tensors="np")
    except ValueError:  # an aspect ratio beyond 200
        with pytest.raises(InvalidRequest, match="the limit is 200: crop it"):
            pack_image(image, media.settings(**changes))
        return
    item = pack_image(image, SETTINGS, **changes)
    assert_packed_like(item, expected)


@pytest.mark.parametrize(("width", "height"), [(28, 5628), (5628, 28), (1, 201), (4000, 3)])
def test_mm_04_too_narrow_strips_are_refused(width, height):
    with pytest.raises(InvalidRequest, match=f"has {width} x {height} pixels, an aspect ratio of") as caught:
        pack_image(make_image(width, height), SETTINGS)
    assert caught.value.param == "messages"


@given(
    height=st.integers(1, 6000), width=st.integers(1, 6000), low=st.integers(1, 60000), more=st.integers(0, 2_000_000)
)
@hypothesis_settings(max_examples=300, deadline=None)
def test_resized_sizes_never_exceed_the_limit(height, width, low, more):
    limit = max(low + more, 784)
    try:
        new_height, new_width = resized_size(height, width, 28, min_pixels=low, max_pixels=limit, limit=limit)
    except InvalidRequest:
        if max(height, width) <= 200 * min(height, width):  # a strip of the minimum height is too long
            shape = smart_resize(height, width, 28, min_pixels=1, max_pixels=limit)
            assert min(shape) == 28
            assert shape[0] * shape[1] > limit
        return
    assert new_height * new_width <= limit
    assert not new_height % 28
    assert not new_width % 28
    assert min(new_height, new_width) >= 28


def test_a_request_may_lower_the_bounds():
    image = make_image(448, 448)
    assert pack_image(image, SETTINGS, max_pixels=50176).grid == (1, 16, 16)
    assert pack_image(make_image(28, 28), SETTINGS, min_pixels=50176).grid == (1, 16, 16)
    assert pack_image(image, SETTINGS, max_pixels=1000).grid == (1, 2, 2)  # less than the settings' own min_pixels
    for bounds, message in (
        ({"max_pixels": 2_000_000}, "max_pixels is 2,000,000, the server's limit is 1,003,520"),
        ({"min_pixels": 2_000_000}, "min_pixels is 2,000,000, the server's limit on max_pixels is 1,003,520"),
        ({"min_pixels": 5000, "max_pixels": 4000}, "min_pixels is 5,000 and max_pixels is 4,000"),
        ({"min_pixels": 0}, "min_pixels is 0"),
        ({"max_pixels": -5}, "max_pixels is -5"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            pack_image(image, SETTINGS, **bounds)


# --- orientation and colours ---------------------------------------------------------------------------------------


def tagged(image: Image.Image, orientation: int, format: str = "JPEG", **options) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, format, exif=exif, **options)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_mm_01_images_are_turned_upright(orientation, format):
    image = Image.fromarray(np.repeat(np.repeat(media.noise(24, 16), 4, axis=0), 4, axis=1))  # 96 x 64
    options = {"lossless": True} if format == "WEBP" else {}
    data = tagged(image, orientation, format, **options)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    ours = to_rgb(open_image(data))
    assert np.array_equal(np.asarray(ours), np.asarray(upright))
    assert np.array_equal(np.asarray(to_rgb(ours)), np.asarray(upright))  # not turned twice
    item, plain = pack_image(open_image(data), SETTINGS), pack_image(upright, SETTINGS)
    assert item.grid == plain.grid == ((1, 4, 6) if orientation < 5 else (1, 6, 4))
    assert item.key == plain.key
    assert (item.key == pack_image(open_image(encoded(image, format, **options)), SETTINGS).key) == (orientation == 1)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's warnings about the EXIF data
@pytest.mark.parametrize("exif", [b"Exif\0\0junk", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff"])
def test_unreadable_orientation_is_ignored(exif):
    data = encoded(make_image(32, 32), "JPEG", exif=exif)
    assert np.array_equal(np.asarray(to_rgb(open_image(data))), np.asarray(Image.open(io.BytesIO(data))))


def half_transparent() -> Image.Image:
    """Opaque colours on the left; transparent on the right, with black or another colour under it."""
    pixels = np.concatenate([media.noise(40, 40), np.full((40, 40, 1), 255, np.uint8)], axis=-1)
    pixels[:, 20:] = (0, 0, 0, 0)
    pixels[:20, 20:, 1] = 200
    return Image.fromarray(pixels)


def on_white(rgba: Image.Image) -> np.ndarray:
    pixels = np.asarray(rgba).astype(np.float64)
    alpha = pixels[..., 3:] / 255
    return pixels[..., :3] * alpha + 255 * (1 - alpha)


def test_mm_02_transparency_becomes_white():
    rgba = half_transparent()
    for image in (rgba, open_image(encoded(rgba)), open_image(encoded(rgba, "WEBP", lossless=True, exact=True))):
        np.testing.assert_allclose(np.asarray(to_rgb(image)), on_white(rgba), atol=1)
    blended = rgba.copy()
    blended.putalpha(Image.fromarray(media.noise(40, 40, channels=1)[..., 0]))
    for image in (blended, blended.convert("RGBa"), open_image(encoded(blended))):
        np.testing.assert_allclose(np.asarray(to_rgb(image)), on_white(blended), atol=2)
    grey = blended.convert("LA")
    for image in (grey, open_image(encoded(grey)), blended.convert("RGBA").convert("LA").convert("La")):
        np.testing.assert_allclose(np.asarray(to_rgb(image)), on_white(grey.convert("RGBA")), atol=2)


def test_mm_02_a_transparent_colour_becomes_white():
    pixels = np.asarray(half_transparent())[..., :3].copy()
    pixels[:20, 20:] = 0
    expected = np.where((pixels == 0).all(-1, keepdims=True), 255, pixels)
    rgb = Image.fromarray(pixels)
    np.testing.assert_array_equal(to_rgb(open_image(encoded(rgb, transparency=(0, 0, 0)))), expected)
    few = rgb.quantize(16)  # a palette with one transparent entry, or with a transparency table
    index = few.getpixel((30, 30))
    table = bytes(0 if i == index else 255 for i in range(16))
    flat = np.where((np.asarray(few) == index)[..., None], 255, np.asarray(few.convert("RGB")))
    for data in (
        encoded(few, transparency=index),
        encoded(few, transparency=table),
        encoded(few, "GIF", transparency=index),
    ):
        np.testing.assert_array_equal(to_rgb(open_image(data)), flat)
    grey = rgb.convert("L")
    flat = np.where(np.asarray(grey) == 0, 255, np.asarray(grey))
    np.testing.assert_array_equal(np.asarray(to_rgb(open_image(encoded(grey, transparency=0))))[..., 0], flat)


def png(width: int, height: int, depth: int, kind: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of a kind that Pillow cannot write; `rows` include their filter bytes."""
    header = (b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        map(_chunk, [header, *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")])
    )


def _chunk(chunk: tuple[bytes, bytes]) -> bytes:
    kind, content = chunk
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def sixteen_bit(pixels: np.ndarray) -> bytes:
    rows = (pixels.astype(np.uint16) * 257).astype(">u2")
    return b"".join(b"\0" + row.tobytes() for row in rows)


def test_mm_02_sixteen_bit_images_become_eight_bit():
    colours = media.noise(40, 40)
    grey = colours[..., 0]
    np.testing.assert_array_equal(to_rgb(open_image(png(40, 40, 16, 2, sixteen_bit(colours)))), colours)
    np.testing.assert_array_equal(np.asarray(to_rgb(open_image(png(40, 40, 16, 0, sixteen_bit(grey)))))[..., 1], grey)
    level = int(grey[3, 5])
    flat = np.where(grey == level, 255, grey)
    keyed = png(40, 40, 16, 0, sixteen_bit(grey), (b"tRNS", struct.pack(">H", level * 257)))
    np.testing.assert_array_equal(np.asarray(to_rgb(open_image(keyed)))[..., 1], flat)
    key = colours[3, 5]
    flat = np.where((colours == key).all(-1, keepdims=True), 255, colours)
    keyed = png(40, 40, 16, 2, sixteen_bit(colours), (b"tRNS", struct.pack(">HHH", *(key.astype(int) * 257))))
    np.testing.assert_array_equal(to_rgb(open_image(keyed)), flat)
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    for image in (deep, open_image(encoded(deep, "TIFF")), Image.fromarray(np.asarray(deep).astype(">u2"))):
        np.testing.assert_array_equal(np.asarray(to_rgb(image))[..., 2], grey)


def test_mm_02_an_image_is_the_same_in_every_mode():
    grey = np.repeat(media.noise(64, 64, channels=1), 3, axis=2)
    ramp = Image.fromarray(np.repeat(np.arange(64, dtype=np.uint8)[None, :, None].repeat(64, 0) * 4, 3, axis=2))
    for image in (Image.fromarray(grey), ramp):
        expected = np.asarray(image).astype(int)
        for data in (
            *(encoded(image.convert(mode)) for mode in ("RGB", "L", "LA", "RGBA")),
            encoded(image.convert("L").convert("P")),
            encoded(image, "BMP"),
            encoded(image, "TIFF"),
            encoded(image, "WEBP", lossless=True),
            encoded(image.convert("CMYK"), "TIFF"),
        ):
            np.testing.assert_allclose(np.asarray(to_rgb(open_image(data))), expected, atol=2)
    for data in (encoded(ramp.convert("CMYK"), "JPEG", quality=100), encoded(ramp, "JPEG", quality=100)):
        np.testing.assert_allclose(np.asarray(to_rgb(open_image(data))), np.asarray(ramp).astype(int), atol=2)
    bits = Image.fromarray(grey).convert("1")
    np.testing.assert_array_equal(
        np.asarray(to_rgb(open_image(encoded(bits))))[..., 0], np.asarray(bits) * np.uint8(255)
    )


def test_floating_point_and_empty_images_are_refused():
    with pytest.raises(InvalidRequest, match="mode F cannot be converted to RGB: floating point pixels have no"):
        to_rgb(Image.new("F", (32, 32)))
    with pytest.raises(InvalidRequest, match="has no pixels: it is 0 x 5"):
        pack_image(Image.new("RGB", (0, 5)), SETTINGS)


def test_to_rgb_does_not_modify_its_argument():
    image = half_transparent()
    image.info["transparency"] = 3
    before = image.tobytes(), dict(image.info), image.mode
    to_rgb(image)
    assert (image.tobytes(), image.info, image.mode) == before


def test_as_image_takes_arrays_pillow_images_and_bytes():
    array = media.noise(40, 30)
    for source in (array, Image.fromarray(array), encoded(Image.fromarray(array)), array[::-1][::-1]):
        np.testing.assert_array_equal(np.asarray(as_image(source)), array)
    np.testing.assert_array_equal(np.asarray(as_image(array[..., :1])), array[..., 0])
    assert as_image(np.zeros((4, 4, 4), np.uint8)).mode == "RGBA"
    bad: Any
    for bad in (array.astype(np.float32), array[None], array[..., :2], "photo.png", None):
        with pytest.raises(InvalidRequest, match=r"an image (array )?must be"):
            as_image(bad)


# --- invalid files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"<!doctype html><html><body>404</body></html>",
        b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(/etc/passwd) run\n%%EOF\n",
        b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        b"GIF",
        b"\x89PNG",
        b"\0" * 100,
        media.clip(2),
    ],
)
def test_bytes_that_are_not_an_image_are_refused(data):
    with pytest.raises(InvalidRequest, match=r"not an image in a supported format: PNG, JPEG") as caught:
        open_image(data)
    assert len(str(caught.value)) < 300


def test_empty_bytes_are_refused():
    with pytest.raises(InvalidRequest, match="the image is empty"):
        open_image(b"")


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")


@pytest.mark.parametrize("format", FORMATS)
def test_truncated_images_are_refused(format):
    data = encoded(make_image(120, 90), format)
    open_image(data)
    for part in (0.1, 0.5, 0.9):
        with pytest.raises(InvalidRequest, match=r"damaged|not an image in a supported format"):
            open_image(data[: int(len(data) * part)])


def test_images_without_pixels_are_refused():
    for data in (
        png(0, 10, 8, 2, b""),
        png(10, 0, 8, 2, b""),
        b"GIF89a" + struct.pack("<HHBBB", 0, 0, 0, 0, 0) + b"\x2c" + struct.pack("<HHHHB", 0, 0, 0, 0, 0) + b"\x02\0;",
    ):
        with pytest.raises(InvalidRequest, match=r"no pixels|damaged|not an image"):
            open_image(data)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's warnings about damaged files
@given(st.data())
@hypothesis_settings(max_examples=300, deadline=None)
def test_any_damage_is_an_invalid_request_or_harmless(data):
    whole = data.draw(st.sampled_from(SEEDS))
    damaged = bytearray(whole)
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=6)):
        damaged[place] = data.draw(st.sampled_from([0, 1, 127, 128, 255]))
    del damaged[data.draw(st.integers(len(whole) // 2, len(whole))) :]
    try:
        image = open_image(bytes(damaged), max_source_pixels=2**20)
        pack_image(image, media.settings(max_pixels=12544))
    except InvalidRequest:
        pass


# Without TIFF, whose library prints warnings to the terminal.
SEEDS = [tagged(make_image(50, 40), 6, format) for format in ("PNG", "JPEG", "WEBP", "AVIF")]
SEEDS += [encoded(make_image(50, 40).quantize(9), "GIF"), encoded(half_transparent()), encoded(make_image(9, 9), "BMP")]


def bomb(width: int, height: int) -> bytes:
    """A PNG of one colour, compressed row by row: 12,000 x 12,000 pixels are 18 kB, and 432 MB as RGB."""
    compressor, row = zlib.compressobj(9), b"\0" + bytes(-(-width // 8))
    rows = b"".join(compressor.compress(row) for _ in range(height)) + compressor.flush()
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, chunks))


def text_bomb(texts: int) -> bytes:
    text = b"a\0\0" + zlib.compress(bytes(1_000_000), 9)
    return png(8, 8, 8, 0, (b"\0" + bytes(8)) * 8, *([(b"zTXt", text)] * texts))


def webp_canvas() -> bytes:
    """The header of an animated WEBP of 16,384 x 16,384 pixels; creating its decoder allocates two canvases."""
    size = (16383).to_bytes(3, "little")
    frame = (
        b"ANMF" + struct.pack("<I", 16 + 8) + bytes(6) + bytes(6) + bytes(3) + b"\0" + b"VP8L" + struct.pack("<I", 0)
    )
    chunks = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + size + size
    chunks += b"ANIM" + struct.pack("<I", 6) + bytes(6) + frame
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WEBP" + chunks


def animated(format: str, frames: int) -> bytes:
    base = make_image(64, 64).quantize(4)
    others = [make_image(64, 64, seed=1).quantize(4)] * (frames - 1)
    return encoded(base, format, save_all=True, append_images=others, duration=20)


def test_sec_03_small_files_of_large_images_do_not_exhaust_memory(tmp_path):
    """They are refused by their header, or read in no more memory than the image takes."""
    cases = {
        "a PNG of 18 kB": (bomb(12_000, 12_000), "12000 x 12000 = 144,000,000 pixels, the limit is 33,554,432"),
        "a long PNG": (bomb(20_000, 2), "done"),
        "a header only": (png(20_000, 20_000, 8, 2, b""), "pixels"),
        "a header beyond int32": (png(2**31 - 1, 2**31 - 1, 8, 2, b""), "pixels"),
        "texts of 60 MB": (text_bomb(60), "60 compressed text chunks, the limit is 8"),
        "some texts": (text_bomb(8), "done"),
        "a canvas": (webp_canvas(), "pixels|damaged"),
        "a GIF": (animated("GIF", 2000), "done"),
        "an APNG": (animated("PNG", 2000), "done"),
        "a fax": (encoded(Image.new("1", (12_000, 12_000)), "TIFF", compression="group4"), "144,000,000 pixels"),
    }
    results = memory_growth("open_image(data)", [data for data, _ in cases.values()], tmp_path)
    for (name, (data, message)), (outcome, growth) in zip(cases.items(), results, strict=True):
        assert re.search(message, outcome), (name, outcome)
        assert growth < 50, (name, growth)
        assert len(data) < 2_000_000


def test_the_caller_sets_the_limit_on_source_pixels():
    data = encoded(make_image(40, 30))
    assert open_image(data, max_source_pixels=1200).size == (40, 30)
    with pytest.raises(InvalidRequest, match="40 x 30 = 1,200 pixels, the limit is 1,199"):
        open_image(data, max_source_pixels=1199)


@pytest.fixture(scope="module")
def phone_photo() -> bytes:
    """48 megapixels in less than 1 MB."""
    image = make_image(252, 189).resize((8064, 6048), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(image, "JPEG", quality=30, exif=exif)
    assert len(data) < 1_000_000
    return data


def test_mm_13_a_photo_of_48_megapixels_is_decoded_at_half_its_size(phone_photo):
    image = open_image(phone_photo, resized_pixels=SETTINGS.max_pixels)
    assert image.size == (4032, 3024)
    item = pack_image(image, SETTINGS)
    exact = pack_image(open_image(phone_photo), SETTINGS)
    assert item.grid == exact.grid == (1, 82, 60)  # upright
    difference = np.abs(item.patches.astype(int) - exact.patches.astype(int))
    assert difference.max() <= 8
    assert difference.mean() < 0.5
    part = MediaPart(modality="image", source=phone_photo, where="messages[0].content[0]", options={})
    assert pack_part(part, SETTINGS).key == item.key
    # A resized image that is not much smaller than half the photo is made from the whole photo.
    assert open_image(phone_photo, resized_pixels=12_845_056).size == (8064, 6048)


def test_usual_photos_are_decoded_whole_as_transformers_does(phone_photo):
    usual = encoded(make_image(64, 48).resize((2016, 1512)), "JPEG")
    assert open_image(usual, resized_pixels=3136).size == (2016, 1512)
    assert open_image(phone_photo, max_source_pixels=2**26, resized_pixels=3136).size == (8064, 6048)


def test_mm_13_other_formats_of_48_megapixels_need_the_flag():
    data = encoded(Image.new("1", (8064, 6048)))
    with pytest.raises(InvalidRequest, match=r"48,771,072 pixels, the limit .* raise --max-source"):
        open_image(data, resized_pixels=3136)
    assert open_image(data, max_source_pixels=48_771_072).size == (8064, 6048)


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_mm_13_a_bomb_is_refused_by_its_header(format, monkeypatch):
    if format == "PNG":
        data = png(30_000, 30_000, 8, 2, b"")
    else:
        small = encoded(Image.new("RGB", (16, 16)), "JPEG")
        start = small.index(b"\xff\xc0") + 5
        data = small[:start] + struct.pack(">HH", 30_000, 30_000) + small[start + 4 :]
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(InvalidRequest, match="pixels, the limit is"):
        open_image(data, resized_pixels=3136)


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_an_animation_is_read_as_its_first_frame(format):
    first, second = make_image(64, 64), make_image(64, 64, seed=9)
    options = {"lossless": True} if format == "WEBP" else {}
    if format == "GIF":
        first, second = first.quantize(64), second.quantize(64)
    data = encoded(first, format, save_all=True, append_images=[second], **options)
    np.testing.assert_array_equal(np.asarray(to_rgb(open_image(data))), np.asarray(first.convert("RGB")))


# --- keys -----------------------------------------------------------------------------------------------------------


def test_pc_02_equal_bytes_in_another_shape_have_another_key():
    pixels = np.arange(84 * 56 * 3, dtype=np.uint8)
    wide = pack_image(Image.frombytes("RGB", (84, 56), pixels.tobytes()), SETTINGS)
    high = pack_image(Image.frombytes("RGB", (56, 84), pixels.tobytes()), SETTINGS)
    assert wide.key != high.key
    again = pack_image(Image.frombytes("RGB", (84, 56), pixels.tobytes()), SETTINGS)
    assert again.key == wide.key
    assert len(wide.key) == 32


def test_pc_02_the_key_covers_everything_that_features_depend_on():
    patches = np.arange(24 * 3 * 14 * 14, dtype=np.uint8).reshape(24, 3, 1, 14, 14)
    keys = [
        MediaItem.from_patches("image", patches, (1, 4, 6), SETTINGS),
        MediaItem.from_patches("image", patches, (1, 6, 4), SETTINGS),
        MediaItem.from_patches("video", patches, (1, 4, 6), SETTINGS),
        MediaItem.from_patches("video", patches, (1, 4, 6), SETTINGS, seconds_per_grid=1.0),
        MediaItem.from_patches("video", patches, (1, 4, 6), SETTINGS, seconds_per_grid=2.0),
        MediaItem.from_patches("image", patches.view(np.int8), (1, 4, 6), SETTINGS),
        MediaItem.from_patches("image", patches.reshape(12, 3, 2, 14, 14), (1, 4, 6), SETTINGS),
        MediaItem.from_patches("image", patches + np.uint8(1), (1, 4, 6), SETTINGS),
        *(
            MediaItem.from_patches("image", patches, (1, 4, 6), media.settings(**changes))
            for changes in (
                {"mean": (0.5, 0.5, 0.5)},
                {"std": (0.5, 0.5, 0.5)},
                {"rescale_factor": 1.0},
                {"merge_size": 1},
                {"temporal_patch_size": 1},
            )
        ),
    ]
    assert len({item.key for item in keys}) == len(keys)
    other = media.settings(max_pixels=12544, min_pixels=784, max_frames=8)  # do not affect features of given patches
    assert MediaItem.from_patches("image", patches, (1, 4, 6), other).key == keys[0].key
    assert MediaItem.from_patches("image", patches.copy(), (1, 4, 6), SETTINGS).key == keys[0].key


# --- settings of a checkpoint ---------------------------------------------------------------------------------------


def write(directory, **files):
    for name, content in files.items():
        (directory / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def test_settings_of_qwen2_vl_are_read(tmp_path):
    settings = VisionSettings.from_directory(write(tmp_path, preprocessor_config=media.QWEN2_VL))
    assert settings == media.settings(max_pixels=12_845_056, video_max_pixels=12_845_056)  # the checkpoint's own
    assert VisionSettings.from_directory(tmp_path, max_pixels=50176) == media.settings(
        max_pixels=50176, video_max_pixels=50176
    )
    assert VisionSettings.from_directory(tmp_path, max_pixels=10**9).max_pixels == media.QWEN2_VL["max_pixels"]


def test_settings_saved_by_transformers_are_read(tmp_path):
    Qwen2VLImageProcessorPil(size={"shortest_edge": 784, "longest_edge": 78400}, patch_size=7).save_pretrained(tmp_path)
    settings = VisionSettings.from_directory(tmp_path)
    assert (settings.min_pixels, settings.max_pixels, settings.patch_size) == (784, 78400, 7)
    assert (settings.mean, settings.std, settings.resample) == (SETTINGS.mean, SETTINGS.std, 3)


def test_settings_of_video_come_from_their_own_file(tmp_path):
    own = media.QWEN2_VL | {"min_pixels": 100352, "max_pixels": 602112, "fps": 1, "min_frames": 2, "max_frames": 16}
    write(tmp_path, preprocessor_config=media.QWEN2_VL, video_preprocessor_config=own)
    expected = media.settings(
        max_pixels=12_845_056, video_min_pixels=100352, video_max_pixels=602112, fps=1.0, min_frames=2, max_frames=16
    )
    assert VisionSettings.from_directory(tmp_path) == expected
    assert expected.largest_pixels == 12_845_056
    small = VisionSettings.from_directory(tmp_path, max_pixels=12544)
    assert (small.video_min_pixels, small.video_max_pixels) == (12544, 12544)


def test_settings_nested_by_transformers_5_are_read(tmp_path):
    image = {key: value for key, value in media.QWEN2_VL.items() if "pixels" not in key}
    nested = {
        "image_processor": image | {"size": {"shortest_edge": 784, "longest_edge": 78400}},
        "video_processor": image | {"size": {"shortest_edge": 1568, "longest_edge": 39200}},
        "processor_class": "Qwen2VLProcessor",
    }
    write(tmp_path, processor_config=nested, preprocessor_config=media.QWEN2_VL)  # the nested file wins
    expected = media.settings(min_pixels=784, max_pixels=78400, video_min_pixels=1568, video_max_pixels=39200)
    assert VisionSettings.from_directory(tmp_path) == expected
    write(tmp_path, processor_config={"processor_class": "Qwen2VLProcessor"})  # as written by transformers 4
    assert VisionSettings.from_directory(tmp_path, max_pixels=1_003_520) == SETTINGS


def test_sizes_as_written_in_2024_are_read(tmp_path):
    image = {key: value for key, value in media.QWEN2_VL.items() if "pixels" not in key}
    write(tmp_path, preprocessor_config=image | {"size": {"min_pixels": 784, "max_pixels": 78400}})
    settings = VisionSettings.from_directory(tmp_path)
    assert (settings.min_pixels, settings.max_pixels) == (784, 78400)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"preprocessor_config": "{"}, "is not JSON"),
        ({"preprocessor_config": "[]"}, "must hold a JSON object"),
        (
            {"preprocessor_config": media.QWEN2_VL | {"patch_size": 0}},
            "patch_size must be an integer from 1 to 1,024, got 0",
        ),
        (
            {"preprocessor_config": media.QWEN2_VL | {"max_pixels": 1.5}},
            "preprocessor_config.json: max_pixels must be an integer",
        ),
        (
            {"preprocessor_config": media.QWEN2_VL | {"image_std": [0.5, 0, 0.5]}},
            "image_std must be a list of 3 numbers",
        ),
        ({"preprocessor_config": media.QWEN2_VL | {"fps": "2"}}, "fps must be a number from 0.001 to 1,000.0, got '2'"),
        ({"preprocessor_config": media.QWEN2_VL | {"size": 3}}, "size must be an object, got 3"),
        ({"preprocessor_config": media.QWEN2_VL | {"size": {"height": 3}}}, "size must"),
        ({"processor_config": {"image_processor": "x"}}, "processor_config.json: image_processor must be an object"),
        ({"preprocessor_config": media.QWEN2_VL | {"do_normalize": False}}, "do_normalize=false"),
        ({"preprocessor_config": media.QWEN2_VL | {"resample": 77}}, "77"),
        (
            {
                "preprocessor_config": media.QWEN2_VL,
                "video_preprocessor_config": media.QWEN2_VL | {"image_mean": [0.5, 0.5, 0.5]},
            },
            "image_mean is .* for images and .* for video",
        ),
    ],
)
def test_invalid_settings_are_refused(tmp_path, files, message):
    with pytest.raises(ValueError, match=message):
        VisionSettings.from_directory(write(tmp_path, **files))


def test_missing_settings_and_too_low_max_pixels_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no preprocessor_config\.json in"):
        VisionSettings.from_directory(tmp_path)
    with pytest.raises(ValueError, match="max_pixels is 3000, less than the 3136 pixels"):
        VisionSettings.from_directory(write(tmp_path, preprocessor_config=media.QWEN2_VL), max_pixels=3000)


def test_factor_is_the_side_of_a_merge_block():
    assert SETTINGS.factor == 28
