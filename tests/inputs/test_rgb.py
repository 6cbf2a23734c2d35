"""Images of more than 8 bits, and of every mode of Pillow: scaled by the range of their format, or refused by name."""

import io
import struct

import numpy as np
import pytest
from PIL import Image

from omni_jax.inputs.image import open_image
from omni_jax.inputs.rgb import to_rgb
from omni_jax.requests import InvalidRequest
from tests.inputs.media import encoded, make_image

RAMP = np.arange(256, dtype=np.uint8)[None].repeat(32, 0)


def tiff(pixels: np.ndarray, *, bits: int, white_is_zero: bool = False, signed: bool = False, form: int = 0) -> bytes:
    """A TIFF of grey pixels of a kind that Pillow cannot write, uncompressed."""
    rows = pixels.tobytes()
    height, width = pixels.shape[0], pixels.size // pixels.shape[0]
    if bits == 12:  # two pixels in three bytes
        pairs = pixels.reshape(height, -1, 2).astype(int)
        packed = np.stack([pairs[..., 0] >> 4, (pairs[..., 0] & 15) << 4 | pairs[..., 1] >> 8, pairs[..., 1] & 255], -1)
        rows = packed.astype(np.uint8).tobytes()
    fields = [(256, width), (257, height), (258, bits), (259, 1), (262, 0 if white_is_zero else 1), (273, 0), (277, 1)]
    fields += [(278, height), (279, len(rows)), (339, form or (2 if signed else 1))]
    start = 8 + 2 + 12 * len(fields) + 4
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, start if tag == 273 else value) for tag, value in fields)
    return b"II*\0" + struct.pack("<IH", 8, len(fields)) + entries + bytes(4) + rows


def levels(image: Image.Image) -> np.ndarray:
    """The grey levels of an image without colour."""
    rgb = np.asarray(to_rgb(image))
    assert (rgb == rgb[..., :1]).all()
    return rgb[..., 0]


@pytest.mark.parametrize("white_is_zero", [False, True])
@pytest.mark.parametrize("bits", [8, 12, 16, 32])
def test_deep_tiffs_are_scaled_by_their_range(bits, white_is_zero):
    if white_is_zero and bits in (12, 32):
        pytest.skip("Pillow does not read it")
    dtype = {8: np.uint8, 32: np.uint32}.get(bits, np.uint16)
    deep = (RAMP.astype(np.uint64) * ((1 << bits) - 1) // 255).astype(dtype)
    found = levels(open_image(tiff(deep, bits=bits, white_is_zero=white_is_zero)))
    np.testing.assert_array_equal(found, 255 - RAMP if white_is_zero else RAMP)


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "tiff_adobe_deflate"])
def test_white_may_be_zero_in_compressed_tiffs(compression):
    for image in (Image.fromarray(RAMP), Image.fromarray(RAMP.astype(np.uint16) * 257)):
        plain = encoded(image, "TIFF", compression=compression)
        np.testing.assert_array_equal(levels(open_image(plain)), RAMP)
        inverted = open_image(encoded(image, "TIFF", compression=compression, tiffinfo={262: 0}))
        # Pillow inverts 8-bit pixels when it writes them, and 16-bit ones never.
        np.testing.assert_array_equal(levels(inverted), RAMP if image.mode == "L" else 255 - RAMP)


def test_pixels_without_a_known_range_are_refused_by_name():
    grey = Image.fromarray(RAMP)
    signed = tiff((RAMP.astype(np.int32) * 257 - 32768).astype(np.int16), bits=16, signed=True)
    for image, reason in (
        (open_image(signed), "signed pixels of 16 bits have no defined range"),
        (open_image(encoded(Image.fromarray(RAMP.astype(np.int32)), "TIFF")), "signed pixels of 32 bits"),
        (open_image(tiff(RAMP.astype(np.float32), bits=32, form=3)), "floating point pixels"),
        (grey.convert("I"), r"pixels of 32 bits have no known range .* convert them to 8 \(L\) or 16 bits"),
        (grey.convert("F"), "floating point pixels"),
        (Image.fromarray(RAMP.astype(np.int16)), "pixels of 32 bits"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            to_rgb(image)


def test_every_mode_is_converted_or_refused_and_the_argument_stays_as_it_was():
    image = make_image(48, 40)
    pixels = np.asarray(image).astype(int)
    opaque = image.copy()
    opaque.putalpha(255)
    for mode, tolerance in (("RGBA", 0), ("RGBa", 0), ("RGBX", 0), ("CMYK", 1), ("YCbCr", 3), ("HSV", 8), ("P", 255)):
        given = opaque.convert(mode) if mode in ("RGBA", "RGBa") else image.convert(mode)
        before = given.tobytes()
        assert np.abs(np.asarray(to_rgb(given)).astype(int) - pixels).max() <= tolerance, mode
        assert (given.mode, given.tobytes()) == (mode, before)
    grey = image.convert("L")
    for mode in ("L", "LA", "La", "PA", "I;16"):
        given = grey.convert("LA").convert("La") if mode == "La" else grey.convert(mode)
        if mode == "I;16":
            given = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
        assert given.mode == mode
        np.testing.assert_array_equal(levels(given), np.asarray(grey), err_msg=mode)
    assert set(np.unique(np.asarray(to_rgb(grey.convert("1"))))) == {0, 255}


def test_the_range_of_a_portable_greymap_is_16_bits():
    """Pillow reads it into mode I and scales it to 16 bits."""
    rows = (RAMP.astype(">u2") * 257).tobytes()
    image = Image.open(io.BytesIO(b"P5 256 32 65535\n" + rows))
    np.testing.assert_array_equal(levels(image), RAMP)
