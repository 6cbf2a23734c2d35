"""Generated images and videos for tests, and vision settings."""

import io
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

from omni_jax.inputs.image import VisionSettings
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.models.config import VisionConfig

QWEN2_VL = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
}


def settings(**changes) -> VisionSettings:
    """Qwen2-VL's settings, with the server's default limit on pixels."""
    values = {
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 3136,
        "max_pixels": 1_003_520,
        "video_min_pixels": 3136,
        "video_max_pixels": 1_003_520,
        "fps": 2.0,
        "min_frames": 4,
        "max_frames": 768,
        "mean": tuple(QWEN2_VL["image_mean"]),
        "std": tuple(QWEN2_VL["image_std"]),
        "rescale_factor": 1 / 255,
        "resample": 3,
    }
    return VisionSettings(**values | changes)


def vision_config(tokenizer: Tokenizer, **changes) -> VisionConfig:
    """The config of a tiny model that matches `settings`, with the tokenizer's placeholders."""
    image, video = (tokenizer.encode(token)[0] for token in ("<|image_pad|>", "<|video_pad|>"))
    values = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "hidden_act": "quick_gelu",
        "rms_norm": False,
        "window_size": None,
        "full_attention_layers": (0, 1),
        "tokens_per_second": None,
        "image_token_id": image,
        "video_token_id": video,
    }
    return VisionConfig(**values | changes)


def noise(width: int, height: int, *, seed: int = 0, channels: int = 3) -> np.ndarray:
    """uint8 [height, width, channels], smooth enough for lossy codecs, different at each position and seed."""
    y, x = np.mgrid[:height, :width]
    planes = [(x * (3 + c) + y * (7 - c) + seed * 29 + c * 80) % 256 for c in range(channels)]
    return np.stack(planes, axis=-1).astype(np.uint8)


def make_image(width: int, height: int, *, seed: int = 0) -> Image.Image:
    return Image.fromarray(noise(width, height, seed=seed))


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def clip(
    frames: int = 24,
    *,
    format: str = "mp4",
    codec: str = "libx264",
    rate=25,
    size: tuple[int, int] = (64, 48),
    pix_fmt: str = "yuv420p",
    container: dict[str, str] | None = None,
    times=None,
    images=None,
    title: str = "video",
    file: Path | None = None,
    **options: str,
) -> bytes:
    """Encode a video of `frames` different frames of (width, height) `size`, or of `images`.

    Args:
        times: presentation times in milliseconds.
        file: where to write it, for containers that cannot be written to memory.
    """
    stream = io.BytesIO()
    with av.open(file or stream, "w", format=format, container_options=container or {}) as video:
        video.metadata["title"] = title
        track = video.add_stream(codec, rate=rate, options={name.replace("_", "-"): v for name, v in options.items()})
        track.width, track.height, track.pix_fmt = *size, pix_fmt
        for i in range(frames):
            array = noise(*size, seed=i) if images is None else images[i]
            frame = av.VideoFrame.from_ndarray(array, format="rgb24" if array.shape[2] == 3 else "rgba")
            if times is not None:
                frame.pts, frame.time_base = times[i], Fraction(1, 1000)
            for packet in track.encode(frame):
                video.mux(packet)
        for packet in track.encode():
            video.mux(packet)
    return file.read_bytes() if file else stream.getvalue()


def all_frames(data: bytes) -> list[np.ndarray]:
    """Every frame of a video, decoded from beginning to end: the oracle for sampled frames."""
    with av.open(io.BytesIO(data)) as video:
        return [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]


_GROWTH = """
import sys
from omni_jax.inputs.image import open_image
from omni_jax.inputs.video import decode_video, pack_video
from omni_jax.requests import InvalidRequest
from tests.inputs import media

def peak_memory():  # MB; getrusage would include the parent's memory
    return [int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM")][0]

settings = media.settings()
open_image(media.encoded(media.make_image(64, 64)))
decode_video(media.clip(4), settings)
for file in sys.argv[1:]:
    data = open(file, "rb").read()
    before = peak_memory()
    try:
        {code}
        outcome = "done"
    except InvalidRequest as error:
        outcome = str(error)
    print(peak_memory() - before, outcome)
"""


def memory_growth(code: str, files: list[bytes], folder: Path) -> list[tuple[str, float]]:
    """Run code on the `data` of each file (and `settings`) in one subprocess.

    Returns:
        For each file the error message, or "done"; and the growth of the process's peak memory in MB.
    """
    paths = [folder / str(i) for i in range(len(files))]
    for path, data in zip(paths, files, strict=True):
        path.write_bytes(data)
    command = [sys.executable, "-W", "ignore", "-c", _GROWTH.replace("{code}", code), *map(str, paths)]
    output = subprocess.run(command, capture_output=True, timeout=300, check=True).stdout.decode()
    lines = [line.split(" ", 1) for line in output.splitlines()]
    return [(outcome, float(growth)) for growth, outcome in lines]
