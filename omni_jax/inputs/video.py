"""Video, from a file's bytes or a list of images to the patches of the vision tower.

Which frames are taken, and the size they get, is the arithmetic of transformers' Qwen2-VL video processor (5.24, with
cap_pixels_per_frame on, as the model's authors do it); that class itself needs torch. Frames are resized by Pillow like
images are, where it would use torchvision: some values differ by a level of 255.
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
    MAX_SOURCE_PIXELS,
    MediaItem,
    VisionSettings,
    as_image,
    check_pixels,
    cut,
    pixel_bounds,
    resized_size,
    to_rgb,
)
from omni_jax.requests import InvalidRequest

MAX_SOURCE_FRAMES = 2**18  # of a video: two hours and a half at 30 a second
MAX_SOURCE_SECONDS = 24 * 3600
MAX_DECODED_PIXELS = 2**37  # the work of one video: 36 minutes of 1080p at 30 frames a second, all of them needed
MAX_VIDEO_TOKENS = 128_000  # transformers' default of that name; the frames share 90 % of so many tokens' pixels

# FFmpeg's demuxer by the first bytes of a file. It is named to FFmpeg, which so never takes the bytes for a playlist
# (HLS, DASH, concat, SDP) and opens what that names. These containers hold all they need.
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

# A title that is no UTF-8 is no reason to refuse a video. av 19 knows that by itself, and takes no such argument.
_METADATA: dict[str, Any] = {} if int(av.__version__.split(".")[0]) >= 19 else {"metadata_errors": "replace"}

# What Image.transpose does to make a frame stand upright, by the container's rotation in degrees (anticlockwise).
_UPRIGHT = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Frames:
    """The frames taken of a video, in order.

    Attributes:
        images: at least one.
        seconds_per_frame: from one of these to the next.
        source_size: (height, width) the video has, where its frames were resized already; else None.
    """

    images: Sequence[Image.Image]
    seconds_per_frame: float
    source_size: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Video:
    """What reading a file through without decoding tells. Arrays have an entry for each packet, in decoding order.

    Attributes:
        pts: int64, when it is shown; None where that is not known of each packet.
        key: decoding can begin here.
        shown: its frame is shown (an edit list may skip some).
        rate: frames a second.
        size: (height, width) by the header.
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
    max_source_pixels: int = MAX_SOURCE_PIXELS,
) -> Frames:
    """Decodes the frames that are wanted of a video, and no more than they need.

    The file is first read through without decoding, which gives the number of frames whatever its header claims, and
    checks all bounds. Then each wanted frame is decoded from the key frame before it and resized at once, so that one
    frame of the video's own size is held at a time.

    Args:
        data: a whole file (MP4, MOV, MKV, WebM, AVI, MPEG, FLV, Ogg, GIF).
        fps: frames to take of a second; settings.fps when neither it nor num_frames is given. See sample_indices.
        num_frames: frames to take of the whole video instead.
        min_pixels, max_pixels: of a resized frame, as in pack_video.
        max_source_pixels: of a frame in the video's own size.

    Raises:
        InvalidRequest: no video, a damaged or truncated one, beyond a bound, or fps and num_frames that cannot be. The
            message is about "the video" and names no part: the caller knows which it was.
    """
    _check_sampling(settings, fps, num_frames)
    low, high = pixel_bounds(min_pixels, max_pixels, least=settings.video_min_pixels, most=settings.video_max_pixels)
    video = _survey(data, max_source_pixels)
    total, by_time = int(video.shown.sum()), video.pts is not None
    while True:
        wanted = sample_indices(total, video.rate, settings, fps=fps, num_frames=num_frames)
        places, taken = set(wanted.tolist()), {}
        seen, source, size = 0, None, None
        with contextlib.closing(_numbered(data, video, wanted, max_source_pixels, by_time=by_time)) as frames:
            for seen, (number, frame) in enumerate(frames, start=1):  # noqa: B007
                if number in places and number not in taken:
                    image = _frame_image(frame, max_source_pixels)
                    source = source or (image.height, image.width)
                    size = size or frame_size(*source, len(wanted), settings, min_pixels=low, max_pixels=high)
                    taken[number] = _resized(image, size, settings)
                    if len(taken) == len(places):
                        break
        if len(taken) == len(places):
            break
        # Packets without a frame of their own: go by what the decoder gives, as transformers does, and by how many.
        if not by_time:
            if not 0 < seen < total:
                raise _invalid("the video is damaged: its frames cannot be decoded")
            total = seen
        by_time = False
    sampled = len(wanted) / total * video.rate
    images = [taken[number] for number in wanted.tolist()]
    return Frames(images=images, seconds_per_frame=1 / sampled, source_size=source)


def video_of(
    images: Sequence,
    settings: VisionSettings,
    *,
    fps: float | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> Frames:
    """A video from a list of its frames: Pillow images, arrays, or the bytes of image files. Each is resized as soon
    as it is decoded: small files may hold large images, and there may be many.

    Args:
        fps: how many of them are a second; settings.fps when None.
        min_pixels, max_pixels: of a resized frame, as in pack_video.

    Raises:
        InvalidRequest: none, too many or of different sizes; what as_image and to_rgb refuse, with the frame's place.
    """
    _check_sampling(settings, fps, None)
    if not 1 <= len(images) <= settings.max_frames:
        raise _invalid(f"the video has {len(images)} frames; 1 to {settings.max_frames} are possible")
    low, high = pixel_bounds(min_pixels, max_pixels, least=settings.video_min_pixels, most=settings.video_max_pixels)
    resized: list[Image.Image] = []
    source = size = (0, 0)
    for i, image in enumerate(images):
        try:
            frame = to_rgb(as_image(image))
        except InvalidRequest as error:
            raise _invalid(f"frame {i}: {error}") from error
        if not resized:
            source = (frame.height, frame.width)
            size = frame_size(*source, len(images), settings, min_pixels=low, max_pixels=high)
        if (frame.height, frame.width) != source:
            raise _invalid(
                f"frame {i} is {frame.width} x {frame.height} pixels and frame 0 is {source[1]} x {source[0]}; the "
                "frames of a video have one size"
            )
        resized.append(_resized(frame, size, settings))
    rate = fps or settings.fps
    _check_seconds(len(images), rate)
    return Frames(images=resized, seconds_per_frame=1 / rate, source_size=source)


def pack_video(
    frames: Frames, settings: VisionSettings, *, min_pixels: int | None = None, max_pixels: int | None = None
) -> MediaItem:
    """Resizes frames, where that was not done, and cuts them into patches; the last frame is repeated to fill the last
    temporal step.

    Args:
        min_pixels, max_pixels: of a resized frame; replace the settings', and max_pixels may only be smaller. Of frames
            from decode_video or video_of, they must be those given there.

    Raises:
        InvalidRequest: see pixel_bounds and resized_size.
    """
    low, high = pixel_bounds(min_pixels, max_pixels, least=settings.video_min_pixels, most=settings.video_max_pixels)
    images = [to_rgb(image) for image in frames.images]
    source = frames.source_size or (images[0].height, images[0].width)
    size = frame_size(*source, len(images), settings, min_pixels=low, max_pixels=high)
    each = settings.temporal_patch_size
    grid = (-(-len(images) // each), size[0] // settings.patch_size, size[1] // settings.patch_size)
    patches = np.empty((grid[0], grid[1] * grid[2], 3, each, settings.patch_size, settings.patch_size), np.uint8)
    for step in range(grid[0]):
        places = np.minimum(np.arange(step * each, (step + 1) * each), len(images) - 1)
        patches[step] = cut(np.stack([np.asarray(_resized(images[i], size, settings)) for i in places]), settings)
    return MediaItem.of(
        "video",
        patches.reshape(-1, *patches.shape[2:]),
        grid,
        settings,
        seconds_per_grid=each * frames.seconds_per_frame,
    )


def sample_indices(
    total: int, rate: float, settings: VisionSettings, *, fps: float | None = None, num_frames: int | None = None
) -> np.ndarray:
    """Which frames of a video are taken, evenly from its whole length.

    Their number is a multiple of temporal_patch_size (unless the video has fewer frames than that), at most
    settings.max_frames and at most what the video has. By fps it is also at least settings.min_frames.

    Args:
        total: frames in the video.
        rate: frames a second in it.
        fps: frames to take of a second; settings.fps when neither it nor num_frames is given.
        num_frames: frames to take in all, rounded to the nearest multiple.

    Returns:
        int64, increasing.
    """
    step = settings.temporal_patch_size
    most = min(settings.max_frames, total) // step * step
    if num_frames is not None:
        count = min(max(round(num_frames / step), 1) * step, most)
    else:
        count = min(max(total / rate * (fps or settings.fps), settings.min_frames), most)
    count = math.floor(count / step) * step or min(total, step)
    # In whole numbers; transformers' float steps now and then give one more, behind the last frame, and lose it later.
    return np.arange(count) * total // count


def frame_size(
    height: int, width: int, count: int, settings: VisionSettings, *, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """(height, width) of a video's frames after resizing: like an image's, and each has at most its share of the pixels
    a video may have in all, but 5 % more than min_pixels in any case (transformers' cap_pixels_per_frame).

    Raises InvalidRequest; see resized_size.
    """
    in_all = int(MAX_VIDEO_TOKENS * settings.factor**2 * 0.9)
    share = max(min(max_pixels, in_all * settings.temporal_patch_size // count), int(min_pixels * 1.05))
    return resized_size(
        height,
        width,
        settings.factor,
        min_pixels=min_pixels,
        max_pixels=share,
        most=settings.video_max_pixels,
        what="the video",
    )


def needed_packets(pts: np.ndarray, key: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Which packets must be decoded to get the frames of some.

    A frame needs what comes between its key frame and itself in decoding order. One that is shown before its key frame
    may need the whole group before, too.

    Args:
        pts: int64 [packets] in decoding order, all different.
        key: bool [packets].
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


def _check_sampling(settings: VisionSettings, fps: float | None, num_frames: int | None) -> None:
    if fps is not None and num_frames is not None:
        raise _invalid("fps and num_frames exclude each other; give one of them")
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf):
        raise _invalid(f"fps must be a number greater than 0, got {fps!r}")
    if num_frames is not None and (type(num_frames) is not int or not 1 <= num_frames <= settings.max_frames):
        raise _invalid(
            f"num_frames must be a whole number from 1 to the server's {settings.max_frames}, got {num_frames!r}"
        )


def _check_seconds(frames: int, rate: float) -> None:
    if frames / rate > MAX_SOURCE_SECONDS:
        raise _invalid(f"the video lasts {frames / rate:,.0f} seconds; at most {MAX_SOURCE_SECONDS:,} are possible")


@contextlib.contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except InvalidRequest:
        raise
    except FFmpegError as error:
        raise _invalid(f"the video is damaged, or of a kind that is not read here: {error.strerror}") from error
    except (ValueError, MemoryError) as error:
        raise _invalid(f"the video is damaged: {error}") from error


@contextlib.contextmanager
def _opened(data: bytes, max_source_pixels: int) -> Iterator[tuple]:
    """(container, stream) of a video, with nothing reachable for FFmpeg but these bytes."""

    def refuse(url: str, *_: object) -> None:
        raise ValueError(f"the video names another file, {url!r}")

    limits = {"max_pixels": str(max_source_pixels)}
    options = {"codec_whitelist": _CODECS, "protocol_whitelist": "", **limits}
    source, demuxer = io.BytesIO(data), _demuxer(data)
    with (
        _faults(),
        av.open(source, "r", demuxer, options=options, io_open=refuse, **_METADATA) as container,
    ):
        stream: Any = container.streams.best("video")
        if stream is None:
            raise _invalid("the video has no images in it, only sound or text")
        if stream.codec_context is None or not stream.codec_context.width:
            raise _invalid(
                f"the video is coded in a way that is not read here, or its frames have more than "
                f"{max_source_pixels:,} pixels"
            )
        stream.codec_context.options = limits
        yield container, stream


def _demuxer(data: bytes) -> str:
    """The name of FFmpeg's demuxer for a file."""
    for name, begin in _DEMUXERS.items():
        if re.match(begin, data, re.DOTALL):
            if name == "mov":
                _check_box_counts(data)
            return name
    raise _invalid(
        f"the {len(data):,} bytes are no video in a known container (MP4, MOV, MKV, WebM, AVI, MPEG, FLV, Ogg, GIF)"
    )


def _check_box_counts(data: bytes) -> None:
    """Refuses an MP4 that claims more samples than it has bytes: FFmpeg would make a table of 24 bytes for each."""
    place = samples = 0
    while place + 16 <= len(data):
        size, kind, large = struct.unpack_from(">I4sQ", data, place)
        size = large if size == 1 else size
        size = size if size >= 8 else len(data)  # 0 is "to the end"
        if (
            kind != b"mdat"
        ):  # coded frames, in which these words may occur by chance, and FFmpeg does not look for boxes
            boxes = data[place : place + size]
            if (
                b"cmvd" in boxes
            ):  # a compressed header, as QuickTime wrote them in the nineties; who knows what is in it
                raise _invalid("the video has a compressed header, which is not read here; convert it")
            for box in re.finditer(rb"stsz.{8}(....)|trun.{4}(....)", boxes, re.DOTALL):
                samples += int.from_bytes(box[1] or box[2])
        place += size
    if samples > len(data):
        raise _invalid(f"the video is damaged: it claims {samples:,} samples in {len(data):,} bytes")


def _survey(data: bytes, max_source_pixels: int) -> _Video:
    if not data:
        raise _invalid("the video is empty: 0 bytes")
    with _opened(data, max_source_pixels) as (container, stream):
        width, height = stream.codec_context.width, stream.codec_context.height
        check_pixels(width, height, "a frame of the video", max_source_pixels)
        pts, key, shown, duration = [], [], [], 0
        for packet in container.demux(stream):
            if not packet.size:
                continue
            if len(pts) == MAX_SOURCE_FRAMES:
                raise _invalid(f"the video has more than {MAX_SOURCE_FRAMES:,} frames; cut it into pieces")
            pts.append(packet.pts)
            key.append(packet.is_keyframe)
            shown.append(not packet.is_discard)
            duration = packet.duration or duration
        if not any(shown):
            raise _invalid("the video has no frames")
        if container.format.name.startswith("mov") and len(pts) < stream.frames:
            raise _invalid(f"the video is cut short: {len(pts)} of its {stream.frames} frames are there")
        times = None
        if None not in pts and len(set(pts)) == len(pts):
            times = np.array(pts, np.int64)
            if stream.codec_context.has_b_frames and (np.diff(times) > 0).all():
                times = None  # frames change places after decoding, and these times know nothing of it: AVI
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        seconds = 0.0 if times is None else float((int(times.max()) - int(times.min()) + duration) * stream.time_base)
        if seconds > 0 and abs(rate * seconds - len(pts)) > 0.1 * len(pts):
            rate = len(pts) / seconds  # what a browser records often states another rate than its frames have
    rate = rate or 1.0
    frames = sum(shown)
    _check_seconds(frames, rate)
    return _Video(pts=times, key=np.array(key), shown=np.array(shown), rate=rate, size=(height, width))


def _numbered(
    data: bytes, video: _Video, wanted: np.ndarray, max_source_pixels: int, *, by_time: bool
) -> Generator[tuple[int, av.VideoFrame], None, None]:
    """Frames, each with its number among those the video shows; by_time, only those that decoding the wanted ones
    brings about."""
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
    """Frames of the needed packets, in the order they are shown."""
    work = int(needed.sum()) * video.size[0] * video.size[1]
    if work > MAX_DECODED_PIXELS:
        raise _invalid(
            f"{int(needed.sum()):,} frames of {video.size[1]} x {video.size[0]} pixels had to be decoded of the video, "
            f"{work:,} pixels; at most {MAX_DECODED_PIXELS:,} are: make it smaller or shorter"
        )
    last = int(np.flatnonzero(needed)[-1])
    with _opened(data, max_source_pixels) as (container, stream):
        decoder, running = stream.codec_context, False
        packets = (packet for packet in container.demux(stream) if packet.size)
        for packet, is_needed in zip(packets, needed[: last + 1].tolist(), strict=False):
            if is_needed:
                running = True
                yield from decoder.decode(packet)
            elif running:  # a gap: take what the decoder still holds, and begin anew at the next key frame
                running = False
                yield from decoder.decode(None)
                decoder.flush_buffers()
        if running:
            yield from decoder.decode(None)


def _frame_image(frame: av.VideoFrame, max_source_pixels: int) -> Image.Image:
    """A frame in RGB and upright, transparency on white."""
    check_pixels(frame.width, frame.height, "a frame of the video", max_source_pixels)
    with _faults():
        see_through = frame.format.has_palette or any(component.is_alpha for component in frame.format.components)
        image = Image.fromarray(frame.to_ndarray(format="rgba" if see_through else "rgb24"))
        turn = _UPRIGHT.get(round(frame.rotation) % 360)
    image = to_rgb(image)
    return image if turn is None else image.transpose(turn)


def _resized(image: Image.Image, size: tuple[int, int], settings: VisionSettings) -> Image.Image:
    if (image.height, image.width) == size:
        return image
    return image.resize((size[1], size[0]), resample=settings.resample)


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")
