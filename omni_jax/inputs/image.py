"""Images: from a file's bytes to the patches of the vision tower.

Sizes and arithmetic are those of transformers' PIL image processor for Qwen2-VL (`Qwen2VLImageProcessorPil`), which
works without torch. There are two differences. Patches stay uint8: the device rescales and normalises them, so that a
quarter of the bytes are transferred. A still image is stored once, not once per frame of a temporal patch.
"""

import dataclasses
import hashlib
import io
import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

# Suppresses transformers' advice to install PyTorch, which this engine does not use.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from checkpoints.values import Values
from omni_jax.inputs.rgb import DAMAGED, first_line, to_rgb
from omni_jax.requests import InvalidRequest, MediaModality

MAX_SOURCE_PIXELS = 2**25  # pixels of an image or frame before it is resized: 100 MB decoded
JPEG_FACTOR = 2  # a JPEG may have this many times the limit on source pixels: 48-megapixel photos of phones
_KEPT_PIXELS = 4  # pixels of a JPEG decoded at half its size, at least, for each one after resizing
MAX_ASPECT_RATIO = 200  # smart_resize's limit

# Formats that Pillow may decode. EPS would start Ghostscript, and decoders of rare formats are rarely tested.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")

_TOO_LARGE = (Image.DecompressionBombError, Image.DecompressionBombWarning)

_MAX_TEXT_CHUNKS = 8  # compressed texts in a PNG; Pillow decompresses up to 1 MB of each


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionSettings:
    """A checkpoint's preprocessing of images and video, within the server's limits.

    Attributes:
        patch_size: side of a patch in pixels.
        temporal_patch_size: number of frames in a patch.
        merge_size: side of a merge block in patches.
        min_pixels, max_pixels: limits on the pixels of a resized image.
        video_min_pixels, video_max_pixels: limits on the pixels of a resized frame.
        fps: default number of frames sampled per second of video.
        min_frames, max_frames: limits on the number of frames sampled from a video.
        mean, std: normalisation by channel, (pixel * rescale_factor - mean) / std; applied on the device.
        rescale_factor: see mean.
        resample: Pillow's resampling filter.
        max_source_pixels: limit on the pixels of an image or frame before it is resized.
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
    max_source_pixels: int = MAX_SOURCE_PIXELS

    @property
    def factor(self) -> int:
        """Side of a merge block in pixels; the sides of resized images are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def largest_pixels(self) -> int:
        """Limit on the pixels of a resized image or frame, whichever is larger."""
        return max(self.max_pixels, self.video_max_pixels)

    @classmethod
    def from_directory(
        cls, path: str | Path, *, max_pixels: int | None = None, max_source_pixels: int = MAX_SOURCE_PIXELS
    ) -> "VisionSettings":
        """Read a checkpoint's preprocessing settings from the same files as transformers.

        These are processor_config.json (transformers 5, nested), otherwise preprocessor_config.json; for video
        video_preprocessor_config.json, otherwise preprocessor_config.json.

        Args:
            path: a model directory.
            max_pixels: the server's limit on the pixels of a resized image or frame; lowers the checkpoint's. None: the
                checkpoint's own.
            max_source_pixels: see the attribute.

        Raises:
            FileNotFoundError: none of these files exists.
            ValueError: a file is malformed, a value is wrong (CheckpointError), or a setting is not supported.
        """
        path = Path(path)
        nested = _read_json(path / "processor_config.json")
        image = nested.object("image_processor", {}) if nested else None
        if not image or not image.content:
            image = _read_json(path / "preprocessor_config.json")
        if image is None:
            raise FileNotFoundError(
                f"no preprocessor_config.json in {path}; a model that reads images needs its preprocessing settings"
            )
        video = nested.object("video_processor", {}) if nested else None
        if not video or not video.content:
            video = _read_json(path / "video_preprocessor_config.json") or image
        processor, video_processor = _processor(image, path), _processor(video, path, video=True)
        for name in ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std", "rescale_factor"):
            if getattr(processor, name) != getattr(video_processor, name):
                raise ValueError(
                    f"{name} is {getattr(processor, name)} for images and {getattr(video_processor, name)} for video "
                    f"in {path}; both use the same vision tower, so the values must be equal"
                )
        limit = (
            max(processor.size.longest_edge, video_processor.size.longest_edge) if max_pixels is None else max_pixels
        )
        settings = cls(
            patch_size=processor.patch_size,
            temporal_patch_size=processor.temporal_patch_size,
            merge_size=processor.merge_size,
            min_pixels=processor.size.shortest_edge,
            max_pixels=min(processor.size.longest_edge, limit),
            video_min_pixels=min(video_processor.size.shortest_edge, limit),
            video_max_pixels=min(video_processor.size.longest_edge, limit),
            fps=float(video.number("fps", 2.0, low=1e-3, high=1e3)),
            min_frames=video.integer("min_frames", 4),
            max_frames=video.integer("max_frames", 768),
            mean=tuple(processor.image_mean),
            std=tuple(processor.image_std),
            rescale_factor=processor.rescale_factor,
            resample=int(Image.Resampling(processor.resample)),
            max_source_pixels=max_source_pixels,
        )
        if settings.max_pixels < max(settings.min_pixels, settings.factor**2):
            raise ValueError(
                f"max_pixels is {limit}, less than the {max(settings.min_pixels, settings.factor**2)} pixels of "
                f"the smallest resized image with the checkpoint in {path}"
            )
        return settings

    @property
    def feature_settings(self) -> tuple:
        """The settings that affect the features of given patches."""
        sizes = (self.patch_size, self.temporal_patch_size, self.merge_size)
        return (*sizes, self.mean, self.std, self.rescale_factor)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MediaItem:
    """An image or a video, ready for the tower.

    Attributes:
        modality: "image" or "video".
        key: digest of everything that its features and positions depend on.
        grid: (temporal steps, rows, columns) of patches.
        patches: uint8 [steps * rows * columns, channels, frames, patch_size, patch_size], step by step, merge block by
            merge block, row by row in each. An image has one frame, a video temporal_patch_size.
        seconds_per_grid: seconds from one temporal step to the next; None for an image.
        num_tokens: number of placeholders in a prompt.
    """

    modality: MediaModality
    key: bytes
    grid: tuple[int, int, int]
    patches: np.ndarray
    seconds_per_grid: float | None
    num_tokens: int

    @classmethod
    def from_patches(
        cls,
        modality: MediaModality,
        patches: np.ndarray,
        grid: tuple[int, int, int],
        settings: VisionSettings,
        *,
        seconds_per_grid: float | None = None,
    ) -> "MediaItem":
        """Create an item from patches, and compute its key and number of tokens."""
        fields = (modality, str(patches.dtype), patches.shape, grid, settings.feature_settings, seconds_per_grid)
        digest = hashlib.sha256(repr(fields).encode() + b"\0")
        digest.update(np.ascontiguousarray(patches).data)
        return cls(
            modality=modality,
            key=digest.digest(),
            grid=grid,
            patches=patches,
            seconds_per_grid=seconds_per_grid,
            num_tokens=math.prod(grid) // settings.merge_size**2,
        )


def open_image(
    data: bytes, *, max_source_pixels: int = MAX_SOURCE_PIXELS, resized_pixels: int | None = None
) -> Image.Image:
    """Decode an image, or the first frame of an animated one.

    The format is detected from the bytes. The size is read from the header and checked before pixels are decoded. A
    JPEG may have JPEG_FACTOR times the limit; one above the limit is decoded at half its width and height, in a quarter
    of the memory, if that leaves at least _KEPT_PIXELS times as many pixels as it will be resized to. Reduced once more
    to its final size, it differs little from one that was decoded whole.

    Args:
        resized_pixels: maximum number of pixels after resizing; None if not known: nothing is decoded at half its size.

    Raises:
        InvalidRequest: the bytes are not an image, or it is damaged, truncated or too large. The message refers to "the
            image"; the caller adds the part's place in the request.
    """
    if not data:
        raise _invalid("the image is empty: 0 bytes")
    try:
        _check_png_texts(data)
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except _TOO_LARGE as error:
        raise _invalid(f"the image has too many pixels, the limit is {max_source_pixels:,}: {error}") from None
    except PIL.UnidentifiedImageError:
        formats = ", ".join(FORMATS)
        raise _invalid(f"the {len(data):,} bytes are not an image in a supported format: {formats}") from None
    except DAMAGED as error:
        raise _invalid(f"the image is damaged: {first_line(error)}") from error
    is_jpeg = isinstance(image, JpegImageFile)
    check_pixels(image.width, image.height, "the image", max_source_pixels * (JPEG_FACTOR if is_jpeg else 1))
    try:
        pixels = image.width * image.height
        if is_jpeg and resized_pixels and pixels > max_source_pixels and pixels >= 4 * _KEPT_PIXELS * resized_pixels:
            image.draft(None, (-(-image.width // 2), -(-image.height // 2)))
        image.load()
    except _TOO_LARGE as error:
        raise _invalid(f"the image has too many pixels, the limit is {max_source_pixels:,}: {error}") from None
    except DAMAGED as error:
        raise _invalid(f"the image is damaged or truncated: {first_line(error)}") from error
    return image


def check_pixels(width: int, height: int, what: str, limit: int) -> None:
    """Raise InvalidRequest for an image or frame without pixels or with more than `limit`."""
    if width < 1 or height < 1:
        raise _invalid(f"{what} has no pixels: it is {width} x {height}")
    if width * height > limit:
        raise _invalid(
            f"{what} has {width} x {height} = {width * height:,} pixels, the limit is {limit:,}: scale it down, or "
            "raise --max-source-pixels"
        )


def as_image(
    source: bytes | Image.Image | np.ndarray,
    *,
    max_source_pixels: int = MAX_SOURCE_PIXELS,
    resized_pixels: int | None = None,
) -> Image.Image:
    """Convert a file's bytes, a Pillow image or an array to a Pillow image.

    Args:
        source: arrays are uint8, [height, width] or [height, width, channels] with 1, 3 or 4 channels.
        max_source_pixels, resized_pixels: for a file's bytes, see open_image.

    Raises:
        InvalidRequest: the bytes cannot be decoded (see open_image), or the array has another dtype or shape.
    """
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, bytes | bytearray | memoryview):
        return open_image(bytes(source), max_source_pixels=max_source_pixels, resized_pixels=resized_pixels)
    if not isinstance(source, np.ndarray):
        raise _invalid(f"an image must be a Pillow image, an array or bytes, got {type(source).__name__}")
    if source.dtype != np.uint8 or source.ndim not in (2, 3) or (source.ndim == 3 and source.shape[2] not in (1, 3, 4)):
        raise _invalid(
            f"an image array must be uint8 [height, width] or [height, width, 1, 3 or 4], "
            f"got {source.dtype} {list(source.shape)}"
        )
    return Image.fromarray(np.ascontiguousarray(source[..., 0] if source.shape[2:] == (1,) else source))


def resized_size(
    height: int, width: int, factor: int, *, min_pixels: int, max_pixels: int, limit: int, what: str = "the image"
) -> tuple[int, int]:
    """(height, width) after resizing: multiples of `factor`, close to the aspect ratio, between the two bounds.

    This is transformers' smart_resize, which may round above max_pixels if min_pixels is close to it or the image is a
    narrow strip. The result never exceeds `limit`, which compiled sizes depend on; min_pixels is ignored if it must be.

    Raises:
        InvalidRequest: no such size exists.
    """
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise _invalid(
            f"{what} has {width} x {height} pixels, an aspect ratio of {max(height, width) / min(height, width):.4g}; "
            f"the limit is {MAX_ASPECT_RATIO}: crop it"
        )
    for least in (min_pixels, 1):
        new_height, new_width = smart_resize(height, width, factor, min_pixels=least, max_pixels=max_pixels)
        if new_height * new_width <= limit:
            return new_height, new_width
    raise _invalid(
        f"{what} has {width} x {height} pixels and at least {new_width} x {new_height} after resizing, because its "
        f"sides become multiples of {factor}; the server's limit is {limit:,} pixels: crop it"
    )


def pixel_bounds(
    min_pixels: int | None, max_pixels: int | None, *, default_min: int, server_max: int
) -> tuple[int, int]:
    """The request's bounds on the pixels of a resized image or frame, with the settings' as defaults.

    Raises:
        InvalidRequest: a bound is above the server's limit, or min_pixels is above max_pixels.
    """
    if max_pixels is not None and max_pixels > server_max:
        raise _invalid(f"max_pixels is {max_pixels:,}, the server's limit is {server_max:,}")
    if min_pixels is not None and min_pixels > server_max:
        raise _invalid(f"min_pixels is {min_pixels:,}, the server's limit on max_pixels is {server_max:,}")
    low = min(default_min, max_pixels or default_min) if min_pixels is None else min_pixels
    high = server_max if max_pixels is None else max_pixels
    if not 1 <= low <= high:
        raise _invalid(f"min_pixels is {low:,} and max_pixels is {high:,}; expected 1 <= min_pixels <= max_pixels")
    return low, high


def pack_image(
    image: Image.Image, settings: VisionSettings, *, min_pixels: int | None = None, max_pixels: int | None = None
) -> MediaItem:
    """Resize an image and cut it into patches.

    Args:
        image: an image of any mode; see to_rgb.
        min_pixels, max_pixels: replace the settings' bounds; max_pixels may only lower them.

    Raises:
        InvalidRequest: see to_rgb, pixel_bounds and resized_size.
    """
    low, high = pixel_bounds(min_pixels, max_pixels, default_min=settings.min_pixels, server_max=settings.max_pixels)
    image = to_rgb(image)
    height, width = resized_size(
        image.height, image.width, settings.factor, min_pixels=low, max_pixels=high, limit=settings.max_pixels
    )
    pixels = np.asarray(image.resize((width, height), resample=settings.resample))
    grid = (1, height // settings.patch_size, width // settings.patch_size)
    return MediaItem.from_patches("image", patchify(pixels[None], settings), grid, settings)


def patchify(frames: np.ndarray, settings: VisionSettings) -> np.ndarray:
    """Cut one temporal step into patches, in transformers' order.

    Args:
        frames: uint8 [frames, height, width, channels]; height and width are multiples of settings.factor.

    Returns:
        uint8 [rows * columns, channels, frames, patch_size, patch_size].
    """
    count, height, width, channels = frames.shape
    merge, patch = settings.merge_size, settings.patch_size
    blocks = frames.reshape(count, height // settings.factor, merge, patch, width // settings.factor, merge, patch, -1)
    return blocks.transpose(1, 4, 2, 5, 7, 0, 3, 6).reshape(-1, channels, count, patch, patch)


def _check_png_texts(data: bytes) -> None:
    """Raise InvalidRequest for a PNG with many compressed texts.

    Pillow's limits are 1 MB for each and 64 MB for all of them, too much for a file of a few kB.
    """
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return
    place, texts = 8, 0
    while place + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        texts += kind in (b"zTXt", b"iTXt", b"iCCP")
        place += 12 + length
    if texts > _MAX_TEXT_CHUNKS:
        raise _invalid(f"the image has {texts} compressed text chunks, the limit is {_MAX_TEXT_CHUNKS}")


def _read_json(file: Path) -> Values | None:
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, got a {type(content).__name__}")
    return Values(content=content, file=file.name)


def _checked(values: Values) -> dict[str, Any]:
    """The preprocessing settings that are read, without nulls."""
    size = values.object("size", {})
    for pixels in (values, size):
        for key in ("min_pixels", "max_pixels"):
            pixels.integer(key, None, high=2**40)
    for key in ("shortest_edge", "longest_edge", "height", "width"):
        size.integer(key, None, high=2**40)
    for key in ("patch_size", "temporal_patch_size", "merge_size"):
        values.integer(key, None, high=1024)
    for key in ("do_resize", "do_rescale", "do_normalize"):
        values.boolean(key, None)
    values.integer("resample", None, low=0, high=5)
    values.number("rescale_factor", None, low=1e-6, high=1)
    values.numbers("image_mean", None, low=-1e3, high=1e3, count=3)
    values.numbers("image_std", None, low=1e-6, high=1e3, count=3)
    names = ("size", "min_pixels", "max_pixels", "patch_size", "temporal_patch_size", "merge_size", "do_resize")
    names += ("do_rescale", "do_normalize", "resample", "rescale_factor", "image_mean", "image_std")
    return {name: values.content[name] for name in names if values.content.get(name) is not None}


def _processor(values: Values, path: Path, *, video: bool = False) -> Any:
    """Create a Qwen2VLImageProcessorPil from the settings; those of video processors have the same names."""
    config = _checked(values)
    size = {key: value for key, value in dict(config.get("size") or {}).items() if value is not None}
    for bound, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if bound in size:  # as written in 2024
            size.setdefault(edge, size.pop(bound))
    if video:  # the video processor's own defaults
        size = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28} | size
    if size:
        config["size"] = size
    processor: Any = Qwen2VLImageProcessorPil.from_dict(config)
    if processor.size.shortest_edge is None or processor.size.longest_edge is None:
        values.refuse("size", values.content.get("size"), "limits on pixels: shortest_edge and longest_edge")
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not getattr(processor, name):
            raise ValueError(f"the preprocessing settings in {path} have {name}=false, which is not supported")
    return processor


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")
