"""Video: from a file's bytes or a list of images to the patches of the vision tower.

Frames are sampled and sized by the arithmetic of transformers' Qwen2-VL video processor (5.24, with
cap_pixels_per_frame on, as the model's authors have it), a class that needs torch. Frames are resized by Pillow, like
images, and not by torchvision: some pixel values differ by 1 of 255.
"""

import contextlib
import dataclasses
import io
import math
import re
import struct
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import av
import numpy as np
from av.error import FFmpegError
from PIL import Image

from omni_jax.inputs.image import (
    MediaItem,
    VisionSettings,
    as_image,
    check_pixels,
    patchify,
    pixel_bounds,
    resized_size,
)
from omni_jax.inputs.rgb import to_rgb
from omni_jax.requests import InvalidRequest

MAX_SOURCE_FRAMES = 2**18  # frames in a video file: two and a half hours at 30 fps
MAX_SOURCE_SECONDS = 24 * 3600
MAX_DECODED_PIXELS = 2**37  # pixels decoded for one video: 36 minutes of 1080p at 30 fps, if every frame is needed
MAX_VIDEO_TOKENS = 128_000  # transformers' default; the frames of a video share 90 % of these tokens' pixels

# FFmpeg's demuxer by the first bytes of a file. FFmpeg is given the demuxer's name, so that it never takes the bytes
# for a playlist (HLS, DASH, concat, SDP) and opens the files in it. These containers refer to no other files.
_DEMUXERS = {
    "mov": rb"....(ftyp|moov|moof|styp|sidx|mdat|free|skip|wide|pnot)",
    "matroska": rb"\x1aE\xdf\xa3",
    "avi": rb"RIFF....AVI",
    "mpegts": rb"G.{187}G",
    "mpeg": rb"\0\0\x01\xba",
    "flv": rb"FLV",
    "ogg": rb"OggS",
    "gif": rb"GIF8[79]a",
}
_CODECS = "h264,hevc,vp8,vp9,libvpx,libvpx-vp9,av1,libdav1d,mpeg4,mpeg2video,mpeg1video,h263,theora,mjpeg,prores,gif"

# Accepts metadata that is not UTF-8, for example a title. av 19 does so by default and has no such argument.
_METADATA: dict[str, Any] = {} if int(av.__version__.split(".")[0]) >= 19 else {"metadata_errors": "replace"}

# The transposition that turns a frame upright, by the container's rotation in degrees (anticlockwise).
_UPRIGHT = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Frames:
    """The frames sampled from a video, in order.

    Attributes:
        images: one or more images.
        seconds_per_frame: seconds from one of these frames to the next.
        source_size: (height, width) of the video before its frames were resized; None if they were not.
    """

    images: Sequence[Image.Image]
    seconds_per_frame: float
    source_size: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Video:
    """Properties of a video file, read without decoding. Arrays have an entry per packet, in decoding order.

    Attributes:
        pts: int64, presentation times; None if they are not known for every packet.
        key: whether decoding can begin at the packet (a key frame).
        shown: whether the packet's frame is shown; an edit list may skip some.
        rate: frames per second.
        size: (height, width) from the header.
    """

    pts: np.ndarray | None
    key: np.ndarray
    shown: np.ndarray
    rate: float
    size: tuple[int, int]


def decode_video(
    data: bytes,
    settings: VisionSettings,
    *,
    fps: float | None = None,
    num_frames: int | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    max_tokens: int | None = None,
) -> Frames:
    """Decode the sampled frames of a video, and only the packets they need.

    A first pass reads the file without decoding: it counts the frames, which the header may misstate, and checks all
    limits. The second pass decodes each sampled frame from the key frame before it and resizes it at once, so that
    memory holds one frame of the original size at a time.

    Args:
        data: a whole file (MP4, MOV, MKV, WebM, AVI, MPEG, FLV, Ogg, GIF).
        fps: frames to sample per second. Default: settings.fps, if num_frames is not given. See sample_indices.
        num_frames: frames to sample from the whole video, instead of fps.
        min_pixels, max_pixels: bounds on a resized frame, as in pack_video.
        max_tokens: limit on the tokens of the video, checked when the first frame is decoded, so that a video that is
            too long takes no memory. None: no limit.

    Raises:
        InvalidRequest: the bytes are not a video, or it is damaged, truncated or beyond a limit, or fps and num_frames
            are invalid. The message refers to "the video"; the caller adds the part's place in the request.
    """
    _check_sampling(settings, fps, num_frames)
    low, high = _frame_bounds(min_pixels, max_pixels, settings)
    max_source_pixels = settings.max_source_pixels
    video = _scan(data, max_source_pixels)
    total, by_time = int(video.shown.sum()), video.pts is not None
    while True:
        wanted = sample_indices(total, video.rate, settings, fps=fps, num_frames=num_frames)
        places, images = set(wanted.tolist()), {}
        decoded, source, size = 0, None, None
        with contextlib.closing(_numbered(data, video, wanted, max_source_pixels, by_time=by_time)) as frames:
            for decoded, (number, frame) in enumerate(frames, start=1):  # noqa: B007
                if number in places and number not in images:
                    image = _frame_image(frame, max_source_pixels)
                    source = source or (image.height, image.width)
                    if size is None:
                        size = frame_size(*source, len(wanted), settings, min_pixels=low, max_pixels=high)
                        _check_tokens(len(wanted), size, settings, max_tokens)
                    images[number] = _resize(image, size, settings)
                    if len(images) == len(places):
                        break
        if len(images) == len(places):
            break
        # Some packets have no frame of their own: number and count the frames that the decoder returns, as transformers
        # does.
        if not by_time:
            if not 0 < decoded < total:
                raise _invalid("the video is damaged: its frames cannot be decoded")
            total = decoded
        by_time = False
    fps_sampled = len(wanted) / total * video.rate
    return Frames(
        images=[images[number] for number in wanted.tolist()], seconds_per_frame=1 / fps_sampled, source_size=source
    )


def video_from_frames(
    images: Sequence,
    settings: VisionSettings,
    *,
    fps: float | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    max_tokens: int | None = None,
) -> Frames:
    """A video from a list of its frames: Pillow images, arrays, or the bytes of image files.

    Each frame is resized as soon as it is decoded, to limit memory: there may be many, and small files may hold large
    images.

    Args:
        fps: frames per second of the list. Default: settings.fps.
        min_pixels, max_pixels: bounds on a resized frame, as in pack_video.
        max_tokens: as in decode_video.

    Raises:
        InvalidRequest: there are no frames, too many, or of different sizes; or as_image or to_rgb refuses one, with
            its index.
    """
    _check_sampling(settings, fps, None)
    if not 1 <= len(images) <= settings.max_frames:
        raise _invalid(f"the video has {len(images)} frames, expected 1 to {settings.max_frames}")
    low, high = _frame_bounds(min_pixels, max_pixels, settings)
    resized: list[Image.Image] = []
    source = size = (0, 0)
    for i, image in enumerate(images):
        try:
            opened = as_image(image, max_source_pixels=settings.max_source_pixels, resized_pixels=high)
            frame = to_rgb(opened)
        except InvalidRequest as error:
            raise _invalid(f"frame {i}: {error}") from error
        if not resized:
            source = (frame.height, frame.width)
            size = frame_size(*source, len(images), settings, min_pixels=low, max_pixels=high)
            _check_tokens(len(images), size, settings, max_tokens)
        if (frame.height, frame.width) != source:
            raise _invalid(
                f"frame {i} has {frame.width} x {frame.height} pixels, but frame 0 has {source[1]} x {source[0]}; all "
                "frames of a video must have the same size"
            )
        resized.append(_resize(frame, size, settings))
    rate = fps or settings.fps
    _check_seconds(len(images), rate)
    return Frames(images=resized, seconds_per_frame=1 / rate, source_size=source)


def pack_video(
    frames: Frames, settings: VisionSettings, *, min_pixels: int | None = None, max_pixels: int | None = None
) -> MediaItem:
    """Resize frames that are not resized yet, and cut them into patches.

    The last frame is repeated to fill the last temporal step.

    Args:
        min_pixels, max_pixels: replace the settings' bounds on a resized frame; max_pixels may only lower them. For
            frames from decode_video or video_from_frames, pass the values given there.

    Raises:
        InvalidRequest: see pixel_bounds and resized_size.
    """
    low, high = _frame_bounds(min_pixels, max_pixels, settings)
    images = [to_rgb(image) for image in frames.images]
    source = frames.source_size or (images[0].height, images[0].width)
    size = frame_size(*source, len(images), settings, min_pixels=low, max_pixels=high)
    each = settings.temporal_patch_size
    grid = (-(-len(images) // each), size[0] // settings.patch_size, size[1] // settings.patch_size)
    patches = np.empty((grid[0], grid[1] * grid[2], 3, each, settings.patch_size, settings.patch_size), np.uint8)
    for step in range(grid[0]):
        places = np.minimum(np.arange(step * each, (step + 1) * each), len(images) - 1)
        frames_of_step = np.stack([np.asarray(_resize(images[i], size, settings)) for i in places])
        patches[step] = patchify(frames_of_step, settings)
    return MediaItem.from_patches(
        "video",
        patches.reshape(-1, *patches.shape[2:]),
        grid,
        settings,
        seconds_per_grid=each * frames.seconds_per_frame,
    )


def sample_indices(
    total: int, rate: float, settings: VisionSettings, *, fps: float | None = None, num_frames: int | None = None
) -> np.ndarray:
    """Indices of the frames to sample, spread evenly over the video.

    Their number is a multiple of temporal_patch_size (unless the video has fewer frames than that), at most
    settings.max_frames and at most `total`. With fps it is also at least settings.min_frames.

    Args:
        total: number of frames in the video.
        rate: frames per second of the video.
        fps: frames to sample per second. Default: settings.fps, if num_frames is not given.
        num_frames: number of frames to sample, rounded to the nearest multiple.

    Returns:
        int64, increasing.
    """
    step = settings.temporal_patch_size
    limit = min(settings.max_frames, total) // step * step
    if num_frames is not None:
        count = min(max(round(num_frames / step), 1) * step, limit)
    else:
        count = min(max(total / rate * (fps or settings.fps), settings.min_frames), limit)
    count = math.floor(count / step) * step or min(total, step)
    # Integer arithmetic. transformers' float steps sometimes give one more index, past the last frame, dropped later.
    return np.arange(count) * total // count


def frame_size(
    height: int, width: int, count: int, settings: VisionSettings, *, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """(height, width) of a video's frames after resizing.

    As for an image, but a frame has at most its share of the total pixels of a video. The share is at least 5 % above
    min_pixels (transformers' cap_pixels_per_frame).

    Raises:
        InvalidRequest: see resized_size.
    """
    total = int(MAX_VIDEO_TOKENS * settings.factor**2 * 0.9)
    share = max(min(max_pixels, total * settings.temporal_patch_size // count), int(min_pixels * 1.05))
    return resized_size(
        height,
        width,
        settings.factor,
        min_pixels=min_pixels,
        max_pixels=share,
        limit=settings.video_max_pixels,
        what="the video",
    )


def needed_packets(pts: np.ndarray, key: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The packets that must be decoded to get the frames of the wanted packets.

    A frame needs the packets from its key frame to itself in decoding order. A frame that is shown before its key frame
    may also need the whole group of packets before that.

    Args:
        pts: int64 [packets], presentation times in decoding order, all different.
        key: bool [packets], key frames.
        wanted: bool [packets].

    Returns:
        bool [packets].
    """
    starts = np.flatnonzero(key | (np.arange(len(key)) == 0))
    needed = np.zeros(len(key), bool)
    for packet in np.flatnonzero(wanted).tolist():
        group = int(np.searchsorted(starts, packet, side="right")) - 1
        start = starts[group]
        if group and pts[packet] < pts[start]:
            start = starts[group - 1]
        needed[start : packet + 1] = True
    return needed


def _frame_bounds(min_pixels: int | None, max_pixels: int | None, settings: VisionSettings) -> tuple[int, int]:
    return pixel_bounds(
        min_pixels, max_pixels, default_min=settings.video_min_pixels, server_max=settings.video_max_pixels
    )


def _check_sampling(settings: VisionSettings, fps: float | None, num_frames: int | None) -> None:
    if fps is not None and num_frames is not None:
        raise _invalid("fps and num_frames exclude each other; set only one of them")
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf):
        raise _invalid(f"fps must be a number greater than 0, got {fps!r}")
    if num_frames is not None and (type(num_frames) is not int or not 1 <= num_frames <= settings.max_frames):
        raise _invalid(
            f"num_frames must be a whole number from 1 to {settings.max_frames} (server's limit), got {num_frames!r}"
        )


def _check_tokens(frames: int, size: tuple[int, int], settings: VisionSettings, limit: int | None) -> None:
    steps = -(-frames // settings.temporal_patch_size)
    tokens = steps * (size[0] // settings.factor) * (size[1] // settings.factor)
    if limit is not None and tokens > limit:
        raise _invalid(
            f"the video has {tokens:,} tokens, {frames} frames of {size[1]} x {size[0]} pixels, and the context has "
            f"room for {limit:,}: sample fewer frames (fps, num_frames), or make them smaller (max_pixels)"
        )


def _check_seconds(frames: int, rate: float) -> None:
    if frames / rate > MAX_SOURCE_SECONDS:
        raise _invalid(f"the video lasts {frames / rate:,.0f} seconds, the limit is {MAX_SOURCE_SECONDS:,}")


@contextlib.contextmanager
def _errors_as_invalid_request() -> Iterator[None]:
    try:
        yield
    except InvalidRequest:
        raise
    except FFmpegError as error:
        raise _invalid(f"the video is damaged or of an unsupported kind: {error.strerror}") from error
    except (ValueError, MemoryError) as error:
        raise _invalid(f"the video is damaged: {error}") from error


@contextlib.contextmanager
def _open(data: bytes, max_source_pixels: int) -> Iterator[tuple]:
    """Yield (container, stream) of a video; FFmpeg can read these bytes only, no other file."""

    def refuse(url: str, *_: object) -> None:
        raise ValueError(f"the video refers to another file, {url!r}")

    limits = {"max_pixels": str(max_source_pixels)}
    options = {"codec_whitelist": _CODECS, "protocol_whitelist": "", **limits}
    source, demuxer = io.BytesIO(data), _demuxer(data)
    with (
        _errors_as_invalid_request(),
        av.open(source, "r", demuxer, options=options, io_open=refuse, **_METADATA) as container,
    ):
        stream: Any = container.streams.best("video")
        if stream is None:
            raise _invalid("the file has no video stream")
        if stream.codec_context is None or not stream.codec_context.width:
            raise _invalid(
                f"the video's codec is not supported, or its frames have more than {max_source_pixels:,} pixels"
            )
        stream.codec_context.options = limits
        yield container, stream


def _demuxer(data: bytes) -> str:
    """The name of FFmpeg's demuxer for a file."""
    for name, signature in _DEMUXERS.items():
        if re.match(signature, data, re.DOTALL):
            if name == "mov":
                _check_box_counts(data)
            return name
    raise _invalid(
        f"the {len(data):,} bytes are not a video in a supported container: MP4, MOV, MKV, WebM, AVI, MPEG, FLV, Ogg, "
        "GIF"
    )


def _check_box_counts(data: bytes) -> None:
    """Raise InvalidRequest for an MP4 that claims more samples than it has bytes.

    FFmpeg would allocate a table of 24 bytes per sample.
    """
    place = samples = 0
    while place + 16 <= len(data):
        size, kind, large = struct.unpack_from(">I4sQ", data, place)
        size = large if size == 1 else size
        size = size if size >= 8 else len(data)  # size 0: the box extends to the end
        if kind != b"mdat":  # mdat holds coded frames and no boxes; these names may occur in it by chance
            boxes = data[place : place + size]
            if b"cmvd" in boxes:  # a compressed header, from QuickTime in the 1990s; its contents cannot be checked
                raise _invalid("the video has a compressed header, which is not supported; convert it")
            for box in re.finditer(rb"stsz.{8}(....)|trun.{4}(....)", boxes, re.DOTALL):
                samples += int.from_bytes(box[1] or box[2])
        place += size
    if samples > len(data):
        raise _invalid(f"the video is damaged: it claims {samples:,} samples in {len(data):,} bytes")


def _scan(data: bytes, max_source_pixels: int) -> _Video:
    """Read a file's packets without decoding them, and check its limits."""
    if not data:
        raise _invalid("the video is empty: 0 bytes")
    with _open(data, max_source_pixels) as (container, stream):
        width, height = stream.codec_context.width, stream.codec_context.height
        check_pixels(width, height, "a frame of the video", max_source_pixels)
        pts, key, shown, duration = [], [], [], 0
        for packet in container.demux(stream):
            if not packet.size:
                continue
            if len(pts) == MAX_SOURCE_FRAMES:
                raise _invalid(f"the video has more than {MAX_SOURCE_FRAMES:,} frames; split it")
            pts.append(packet.pts)
            key.append(packet.is_keyframe)
            shown.append(not packet.is_discard)
            duration = packet.duration or duration
        if not any(shown):
            raise _invalid("the video has no frames")
        if container.format.name.startswith("mov") and len(pts) < stream.frames:
            raise _invalid(f"the video is truncated: it has {len(pts)} of its {stream.frames} frames")
        times = None
        if None not in pts and len(set(pts)) == len(pts):
            times = np.array(pts, np.int64)
            if stream.codec_context.has_b_frames and (np.diff(times) > 0).all():
                times = None  # AVI: frames are reordered after decoding, but these times are in decoding order
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        seconds = 0.0 if times is None else float((int(times.max()) - int(times.min()) + duration) * stream.time_base)
        if seconds > 0 and abs(rate * seconds - len(pts)) > 0.1 * len(pts):
            rate = len(pts) / seconds  # browser recordings often state a wrong rate
    rate = rate or 1.0
    frames = sum(shown)
    _check_seconds(frames, rate)
    return _Video(pts=times, key=np.array(key), shown=np.array(shown), rate=rate, size=(height, width))


def _numbered(
    data: bytes, video: _Video, wanted: np.ndarray, max_source_pixels: int, *, by_time: bool
) -> Generator[tuple[int, av.VideoFrame], None, None]:
    """Yield (index among the shown frames, frame).

    With by_time, packets that the wanted frames do not need are skipped; otherwise all packets are decoded.
    """
    if not by_time or video.pts is None:
        yield from enumerate(_decode(data, video, np.ones(len(video.key), bool), max_source_pixels))
        return
    shown = np.sort(video.pts[video.shown])
    is_wanted = np.isin(video.pts, shown[wanted]) & video.shown
    needed = needed_packets(video.pts, video.key, is_wanted)
    for frame in _decode(data, video, needed, max_source_pixels):
        number = int(np.searchsorted(shown, frame.pts)) if frame.pts is not None else len(shown)
        if number < len(shown) and shown[number] == frame.pts:
            yield number, frame


def _decode(data: bytes, video: _Video, needed: np.ndarray, max_source_pixels: int) -> Iterator[av.VideoFrame]:
    """Decode the needed packets; yield their frames in presentation order."""
    work = int(needed.sum()) * video.size[0] * video.size[1]
    if work > MAX_DECODED_PIXELS:
        raise _invalid(
            f"the video needs {int(needed.sum()):,} frames of {video.size[1]} x {video.size[0]} decoded, {work:,} "
            f"pixels; the limit is {MAX_DECODED_PIXELS:,}: make it smaller or shorter"
        )
    last = int(np.flatnonzero(needed)[-1])
    with _open(data, max_source_pixels) as (container, stream):
        decoder, running = stream.codec_context, False
        packets = (packet for packet in container.demux(stream) if packet.size)
        for packet, is_needed in zip(packets, needed[: last + 1].tolist(), strict=False):
            if is_needed:
                running = True
                yield from decoder.decode(packet)
            elif running:  # a gap: flush the decoder and start again at the next key frame
                running = False
                yield from decoder.decode(None)
                decoder.flush_buffers()
        if running:
            yield from decoder.decode(None)


def _frame_image(frame: av.VideoFrame, max_source_pixels: int) -> Image.Image:
    """Convert a frame to RGB: upright, on white where it is transparent."""
    check_pixels(frame.width, frame.height, "a frame of the video", max_source_pixels)
    with _errors_as_invalid_request():
        transparent = frame.format.has_palette or any(component.is_alpha for component in frame.format.components)
        image = Image.fromarray(frame.to_ndarray(format="rgba" if transparent else "rgb24"))
        turn = _UPRIGHT.get(round(frame.rotation) % 360)
    image = to_rgb(image)
    return image if turn is None else image.transpose(turn)


def _resize(image: Image.Image, size: tuple[int, int], settings: VisionSettings) -> Image.Image:
    if (image.height, image.width) == size:
        return image
    return image.resize((size[1], size[0]), resample=settings.resample)


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")
