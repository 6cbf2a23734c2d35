"""Images, from a file's bytes to the patches of the vision tower.

Sizes and arithmetic are those of transformers' PIL image processor for Qwen2-VL (`Qwen2VLImageProcessorPil`), which
works without torch. Two things are left out of it on purpose: patches stay uint8, because rescaling and normalising is
the device's work and a fourth of the bytes travel there, and a still image is kept once, not once for each frame of
a temporal patch.
"""

import dataclasses
import hashlib
import io
import json
import math
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from PIL import Image

# On import transformers advises to install PyTorch, which this engine never uses.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from omni_jax.requests import InvalidRequest, MediaModality

DEFAULT_MAX_PIXELS = 1_003_520  # 1,280 tokens of 28 x 28 pixels
MAX_SOURCE_PIXELS = 2**25  # of an image or a frame before it is resized; decoded, that is 100 MB
MAX_ASPECT_RATIO = 200  # smart_resize's own bound

# What Pillow may take the bytes for. EPS would start Ghostscript, and rare formats are rarely tested decoders.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")

# Everything Pillow's parsers raise over damaged bytes; they have no common class.
_DAMAGED = (
    *(OSError, SyntaxError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, EOFError),
    *(RuntimeError, MemoryError, struct.error, zlib.error),
)
_TOO_LARGE = (Image.DecompressionBombError, Image.DecompressionBombWarning)

_MAX_TEXT_CHUNKS = 8  # compressed texts in a PNG, each of which Pillow lets grow to 1 MB

# What Image.transpose does to make the image stand upright, by EXIF orientation.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionSettings:
    """How images and video are resized and cut: a checkpoint's preprocessing, within this server's bounds.

    Attributes:
        patch_size: side of a patch in pixels.
        temporal_patch_size: frames of a patch.
        merge_size: patches of a token's side.
        min_pixels, max_pixels: of an image after it is resized.
        video_min_pixels, video_max_pixels: of a frame.
        fps: frames taken of a second of video, unless the request says otherwise.
        min_frames, max_frames: frames taken of a video.
        mean, std: by colour, subtracted from and dividing pixel * rescale_factor. The device does it.
        resample: Pillow's filter.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    video_min_pixels: int
    video_max_pixels: int
    fps: float
    min_frames: int
    max_frames: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float
    resample: int

    @property
    def factor(self) -> int:
        """Side of a token in pixels; sides of resized images are multiples of it."""
        return self.patch_size * self.merge_size

    @classmethod
    def from_directory(cls, path: str | Path, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> "VisionSettings":
        """Reads a checkpoint's preprocessing from the files transformers would read it from.

        These are processor_config.json (transformers 5, nested), else preprocessor_config.json; for video also
        video_preprocessor_config.json, without which video goes by preprocessor_config.json.

        Args:
            path: a model directory.
            max_pixels: this server's bound on a resized image or frame, where the checkpoint's is larger.

        Raises:
            FileNotFoundError: there is none of these files.
            ValueError: files that are not what they should be, or settings this engine does not do.
        """
        path = Path(path)
        nested = _read_json(path / "processor_config.json") or {}
        image = nested.get("image_processor") or _read_json(path / "preprocessor_config.json")
        if image is None:
            raise FileNotFoundError(
                f"no preprocessor_config.json in {path}; a model that reads images needs one to resize them by"
            )
        video = nested.get("video_processor") or _read_json(path / "video_preprocessor_config.json") or image
        processor, video_processor = _processor(image, path), _processor(video, path, video=True)
        for name in ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std", "rescale_factor"):
            if getattr(processor, name) != getattr(video_processor, name):
                raise ValueError(
                    f"{name} is {getattr(processor, name)} for images and {getattr(video_processor, name)} for video "
                    f"in {path}; "
                    "they go through one tower, so they must agree"
                )
        settings = cls(
            patch_size=processor.patch_size,
            temporal_patch_size=processor.temporal_patch_size,
            merge_size=processor.merge_size,
            min_pixels=processor.size.shortest_edge,
            max_pixels=min(processor.size.longest_edge, max_pixels),
            video_min_pixels=min(video_processor.size.shortest_edge, max_pixels),
            video_max_pixels=min(video_processor.size.longest_edge, max_pixels),
            fps=float(video.get("fps") or 2.0),
            min_frames=video.get("min_frames") or 4,
            max_frames=video.get("max_frames") or 768,
            mean=tuple(processor.image_mean),
            std=tuple(processor.image_std),
            rescale_factor=processor.rescale_factor,
            resample=int(Image.Resampling(processor.resample)),
        )
        if settings.max_pixels < max(settings.min_pixels, settings.factor**2):
            raise ValueError(
                f"max_pixels is {max_pixels}, less than the {max(settings.min_pixels, settings.factor**2)} pixels "
                f"the checkpoint in {path} makes of the smallest image"
            )
        return settings

    @property
    def features_depend_on(self) -> tuple:
        """What of this changes the features of given patches."""
        sizes = (self.patch_size, self.temporal_patch_size, self.merge_size)
        return (*sizes, self.mean, self.std, self.rescale_factor)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MediaItem:
    """An image or a video, ready for the tower.

    Attributes:
        modality: "image" or "video".
        key: digest of everything its features and positions depend on.
        grid: (temporal steps, rows, columns) of patches.
        patches: uint8 [steps * rows * columns, channels, frames, patch_size, patch_size], step after step, merge block
            after merge block, row by row in each. One frame for an image, else temporal_patch_size of them.
        seconds_per_grid: from one temporal step to the next; None for an image.
        num_tokens: placeholders it takes in a prompt.
    """

    modality: MediaModality
    key: bytes
    grid: tuple[int, int, int]
    patches: np.ndarray
    seconds_per_grid: float | None
    num_tokens: int

    @classmethod
    def of(
        cls,
        modality: MediaModality,
        patches: np.ndarray,
        grid: tuple[int, int, int],
        settings: VisionSettings,
        *,
        seconds_per_grid: float | None = None,
    ) -> "MediaItem":
        """An item of these patches, with its key and number of tokens."""
        about = (modality, str(patches.dtype), patches.shape, grid, settings.features_depend_on, seconds_per_grid)
        digest = hashlib.sha256(repr(about).encode() + b"\0")
        digest.update(np.ascontiguousarray(patches).data)
        return cls(
            modality=modality,
            key=digest.digest(),
            grid=grid,
            patches=patches,
            seconds_per_grid=seconds_per_grid,
            num_tokens=math.prod(grid) // settings.merge_size**2,
        )


def open_image(data: bytes, *, max_source_pixels: int = MAX_SOURCE_PIXELS) -> Image.Image:
    """Decodes an image; the first frame of an animated one. Its size is checked in the header before any pixel is
    decoded, and its format is what the bytes are, whatever they were called.

    Raises:
        InvalidRequest: no image, one that is damaged or cut short, or too large. The message is about "the image"
            and names no part: the caller knows which it was.
    """
    if not data:
        raise _invalid("the image is empty: 0 bytes")
    try:
        _check_png_texts(data)
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except _TOO_LARGE as error:
        raise _invalid(f"the image has too many pixels, at most {max_source_pixels:,} are decoded: {error}") from None
    except PIL.UnidentifiedImageError:
        raise _invalid(f"the {len(data):,} bytes are no image in a known format ({', '.join(FORMATS)})") from None
    except _DAMAGED as error:
        raise _invalid(f"the image is damaged: {_first_line(error)}") from error
    check_pixels(image.width, image.height, "the image", max_source_pixels)
    try:
        image.load()
    except _TOO_LARGE as error:
        raise _invalid(f"the image has too many pixels, at most {max_source_pixels:,} are decoded: {error}") from None
    except _DAMAGED as error:
        raise _invalid(f"the image is damaged or cut short: {_first_line(error)}") from error
    return image


def check_pixels(width: int, height: int, what: str, most: int) -> None:
    """Raises InvalidRequest for an image or frame without pixels, or with more than `most`."""
    if width < 1 or height < 1:
        raise _invalid(f"{what} has no pixels: it is {width} x {height}")
    if width * height > most:
        raise _invalid(
            f"{what} is {width} x {height} = {width * height:,} pixels; at most {most:,} are decoded: scale it down"
        )


def as_image(source: bytes | Image.Image | np.ndarray) -> Image.Image:
    """An image from what a program holds one in: a file's bytes, a Pillow image, or an array.

    Args:
        source: an array is uint8, [height, width] or [height, width, channels] with 1, 3 or 4 channels.

    Raises:
        InvalidRequest: see open_image; an array of another type or shape.
    """
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, bytes | bytearray | memoryview):
        return open_image(bytes(source))
    if not isinstance(source, np.ndarray):
        raise _invalid(f"an image must be a Pillow image, an array or bytes, got {type(source).__name__}")
    if source.dtype != np.uint8 or source.ndim not in (2, 3) or (source.ndim == 3 and source.shape[2] not in (1, 3, 4)):
        raise _invalid(
            f"an image as an array must be uint8 [height, width] or [height, width, 1, 3 or 4], "
            f"got {source.dtype} {list(source.shape)}"
        )
    return Image.fromarray(np.ascontiguousarray(source[..., 0] if source.shape[2:] == (1,) else source))


def to_rgb(image: Image.Image) -> Image.Image:
    """The image as a person sees it: upright by its EXIF orientation, transparency on white, 8 bits of red, green and
    blue. 16 bits of grey lose the lower 8. Leaves the given one as it was; doing it twice changes nothing more.

    Raises InvalidRequest for a mode that has no colours to show (floating point).
    """
    if not image.width or not image.height:
        raise _invalid(f"the image has no pixels: it is {image.width} x {image.height}")
    turn = _UPRIGHT.get(_orientation(image))
    if turn is None and image.mode == "RGB" and "transparency" not in image.info:
        return image
    try:
        result = _on_white(image)
    except _DAMAGED as error:
        raise _invalid(f"an image of mode {image.mode} cannot be shown in RGB: {_first_line(error)}") from error
    if turn is not None:
        result = result.transpose(turn)
    result.info = {}  # the orientation was in there, and is done
    return result


def _orientation(image: Image.Image) -> int:
    try:
        return image.getexif().get(_ORIENTATION, 1)
    except _DAMAGED:
        return 1  # what cannot be read was never applied by any viewer either


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise ValueError("floating point has no range that would be black to white; send 8 or 16 bits a colour")
    if image.mode.startswith("I"):  # 16-bit grey; "I" has 32 bits, of which Pillow's 16-bit readers fill the lower
        deep = np.asarray(image).clip(0, 65535)
        grey = (deep >> 8).astype(np.uint8)
        if isinstance(key := image.info.get("transparency"), int):
            grey[deep == key] = 255
        return Image.fromarray(grey).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode == "RGB" and max(key := image.info["transparency"]) > 255:  # of 16 bits, which Pillow made 8
        image = image.copy()
        image.info["transparency"] = tuple(level >> 8 for level in key)
    if image.mode == "La":
        image = image.convert("LA")
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def resized_size(
    height: int, width: int, factor: int, *, min_pixels: int, max_pixels: int, most: int, what: str = "the image"
) -> tuple[int, int]:
    """(height, width) after resizing: multiples of `factor`, close to the aspect ratio, between the two bounds.

    It is transformers' smart_resize. That may round beyond max_pixels, where min_pixels is close to it or the image
    is a narrow strip; `most`, which compiled sizes rest on, is never passed: min_pixels gives way first.

    Raises InvalidRequest where no such size exists.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise _invalid(
            f"{what} is {width} x {height} pixels, one side {max(height, width) / min(height, width):.4g} times the "
            f"other; at most {MAX_ASPECT_RATIO} times is possible: crop it"
        )
    for least in (min_pixels, 1):
        new_height, new_width = smart_resize(height, width, factor, min_pixels=least, max_pixels=max_pixels)
        if new_height * new_width <= most:
            return new_height, new_width
    raise _invalid(
        f"{what} is {width} x {height} pixels and at least {new_width} x {new_height} after resizing, as a side has "
        f"{factor} pixels or more; at most {most:,} pixels are possible here: crop it"
    )


def pixel_bounds(min_pixels: int | None, max_pixels: int | None, *, least: int, most: int) -> tuple[int, int]:
    """The request's bounds on pixels after resizing, or the settings' where it names none.

    Raises InvalidRequest for max_pixels beyond the server's, and for bounds that exclude each other.
    """
    if max_pixels is not None and max_pixels > most:
        raise _invalid(f"max_pixels is {max_pixels:,}, the server's bound is {most:,}")
    if min_pixels is not None and min_pixels > most:
        raise _invalid(f"min_pixels is {min_pixels:,}, the server's bound on max_pixels is {most:,}")
    low = min(least, max_pixels or least) if min_pixels is None else min_pixels
    high = most if max_pixels is None else max_pixels
    if not 1 <= low <= high:
        raise _invalid(f"min_pixels is {low:,} and max_pixels is {high:,}; 1 <= min_pixels <= max_pixels is needed")
    return low, high


def pack_image(
    image: Image.Image, settings: VisionSettings, *, min_pixels: int | None = None, max_pixels: int | None = None
) -> MediaItem:
    """Resizes an image and cuts it into patches.

    Args:
        image: of any mode; see to_rgb.
        min_pixels, max_pixels: replace the settings'; max_pixels may only be smaller.

    Raises:
        InvalidRequest: see to_rgb, pixel_bounds and resized_size.
    """
    low, high = pixel_bounds(min_pixels, max_pixels, least=settings.min_pixels, most=settings.max_pixels)
    image = to_rgb(image)
    height, width = resized_size(
        image.height, image.width, settings.factor, min_pixels=low, max_pixels=high, most=settings.max_pixels
    )
    pixels = np.asarray(image.resize((width, height), resample=settings.resample))
    grid = (1, height // settings.patch_size, width // settings.patch_size)
    return MediaItem.of("image", cut(pixels[None], settings), grid, settings)


def cut(frames: np.ndarray, settings: VisionSettings) -> np.ndarray:
    """Patches of one temporal step, in transformers' order.

    Args:
        frames: uint8 [frames, height, width, channels]; sides are multiples of settings.factor.

    Returns:
        uint8 [rows * columns, channels, frames, patch_size, patch_size].
    """
    count, height, width, channels = frames.shape
    merge, patch = settings.merge_size, settings.patch_size
    blocks = frames.reshape(count, height // settings.factor, merge, patch, width // settings.factor, merge, patch, -1)
    return blocks.transpose(1, 4, 2, 5, 7, 0, 3, 6).reshape(-1, channels, count, patch, patch)


def _check_png_texts(data: bytes) -> None:
    """Refuses a PNG with many compressed texts: Pillow bounds each at 1 MB and all at 64 MB, which is much for a file
    of a few kB."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return
    place, texts = 8, 0
    while place + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        texts += kind in (b"zTXt", b"iTXt", b"iCCP")
        place += 12 + length
    if texts > _MAX_TEXT_CHUNKS:
        raise _invalid(f"the image has {texts} compressed texts in it, at most {_MAX_TEXT_CHUNKS} are read")


def _read_json(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, it holds a {type(content).__name__}")
    return content


def _processor(config: dict[str, Any], path: Path, *, video: bool = False) -> Any:
    """A Qwen2VLImageProcessorPil of these settings; a video processor's have the same names."""
    config = dict(config)
    size = dict(config.get("size") or {})
    for bound, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if bound in size:  # a spelling of 2024
            size.setdefault(edge, size.pop(bound))
    if video:  # the video processor's own defaults
        size = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28} | size
    if size:
        config["size"] = size
    processor: Any = Qwen2VLImageProcessorPil.from_dict(config)
    names = ("patch_size", "temporal_patch_size", "merge_size")
    numbers = {name: getattr(processor, name) for name in names}
    numbers |= {"min_pixels": processor.size.shortest_edge, "max_pixels": processor.size.longest_edge}
    if bad := {name: value for name, value in numbers.items() if type(value) is not int or value < 1}:
        raise ValueError(f"the preprocessing settings in {path} must be positive whole numbers, got {bad}")
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not getattr(processor, name):
            raise ValueError(f"the preprocessing settings in {path} have {name} off, which this engine cannot do")
    return processor


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")
