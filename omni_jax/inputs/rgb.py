"""Pillow images of any mode as 8-bit RGB.

transformers calls `convert("RGB")`. That is wrong for some images, and this module differs there on purpose: it turns
them upright by their EXIF orientation, puts transparent ones on white, and scales deep grey by the range of its format
instead of clipping it at 255. Pixels without a defined black and white are refused.
"""

import struct
import zlib

import numpy as np
from PIL import Image

from omni_jax.requests import InvalidRequest

# Everything that Pillow's parsers raise for damaged bytes; they have no common base class.
DAMAGED = (
    *(OSError, SyntaxError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, EOFError),
    *(RuntimeError, MemoryError, struct.error, zlib.error),
)

# The transposition that turns an image upright, by EXIF orientation.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 0x0112
_BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339  # tags of TIFF
_WHITE_IS_ZERO, _UNSIGNED = 0, 1  # values of the last two


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to 8-bit RGB: upright by its EXIF orientation, on white where it is transparent.

    Deep grey keeps its upper 8 bits. The given image is not modified. Applying it twice changes nothing.

    Raises:
        InvalidRequest: the mode cannot be converted to RGB: floating point, signed or other integers of unknown range,
            LAB.
    """
    if not image.width or not image.height:
        raise _invalid(f"the image has no pixels: it is {image.width} x {image.height}")
    turn = _UPRIGHT.get(_orientation(image))
    if turn is None and image.mode == "RGB" and "transparency" not in image.info:
        return image
    try:
        result = _on_white(image)
    except DAMAGED as error:
        raise _invalid(f"an image of mode {image.mode} cannot be converted to RGB: {first_line(error)}") from error
    if turn is not None:
        result = result.transpose(turn)
    result.info = {}  # drops the orientation, which is applied now
    return result


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except DAMAGED:
        return 1  # viewers ignore unreadable EXIF data too


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("floating point pixels have no defined range from black to white; use 8 or 16 bits per colour")
    if image.mode.startswith("I"):
        return Image.fromarray(_eight_bits(image)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode == "RGB" and max(key := image.info["transparency"]) > 255:  # 16-bit key; Pillow made the pixels 8-bit
        image = image.copy()
        image.info["transparency"] = tuple(level >> 8 for level in key)
    if image.mode == "La":
        image = image.convert("LA")
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def _eight_bits(image: Image.Image) -> np.ndarray:
    """uint8 [height, width]: the upper 8 bits of integer grey."""
    bits, white_is_zero = _range(image)
    deep = np.asarray(image)
    if bits == 32:
        deep = deep.view(np.uint32)  # mode "I" is int32, also where the file's pixels are unsigned
    grey = (deep >> (bits - 8)).astype(np.uint8)
    if white_is_zero:
        grey = 255 - grey
    if isinstance(key := image.info.get("transparency"), int):
        grey[deep == key] = 255
    return grey


def _range(image: Image.Image) -> tuple[int, bool]:
    """(bits of the whitest or blackest pixel, whether 0 is white) of integer grey.

    Raises:
        ValueError: it is not known, since the image is signed or its mode does not tell.
    """
    tags = getattr(image, "tag_v2", None)  # of a TIFF as it was opened
    if tags is not None:
        bits, form = tags.get(_BITS_PER_SAMPLE, (1,))[0], tags.get(_SAMPLE_FORMAT, (_UNSIGNED,))[0]
        if form != _UNSIGNED:
            raise ValueError(
                f"signed pixels of {bits} bits have no defined range from black to white; use 8 or 16 bits, unsigned"
            )
        return bits, tags.get(_PHOTOMETRIC, _WHITE_IS_ZERO) == _WHITE_IS_ZERO
    if image.mode != "I" or image.format in ("PNG", "PPM"):  # of which Pillow's readers fill 16 bits
        return 16, False
    raise ValueError(
        "pixels of 32 bits have no known range from black to white; convert them to 8 (L) or 16 bits (I;16)"
    )


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")
