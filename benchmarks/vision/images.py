"""Synthetic images and patches from a seed, so that the repository needs no photos."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

QUALITY = 90  # JPEG quality
PATCH_SHAPE = (3, 1, 14, 14)  # a still image's patch: channels, frames, rows, columns


def photo(width: int, height: int, seed: int) -> Image.Image:
    """Return an image of blotches of all sizes, with less contrast the smaller they are, as in a photo. As JPEG it has
    about 2 bits a pixel, and all parts are equally expensive to decode."""
    draw = np.random.Generator(np.random.PCG64([seed, width, height]))
    total = np.zeros((height, width, 3), np.float32)
    size = 2
    while size < 2 * max(width, height):
        coarse = draw.integers(0, 256, (max(1, size * height // width), size, 3), np.uint8)
        layer = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
        total += (np.asarray(layer, np.float32) - 127.5) / size**0.4
        size *= 2
    return Image.fromarray((127.5 + total).clip(0, 255).astype(np.uint8))


def jpeg(width: int, height: int, seed: int) -> bytes:
    """Return the bytes of a JPEG file."""
    file = io.BytesIO()
    photo(width, height, seed).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def write_jpegs(folder: Path, sizes: list[tuple[int, int]]) -> list[str]:
    """Write a different JPEG file for each (width, height). Returns absolute paths."""
    paths = []
    for seed, (width, height) in enumerate(sizes):
        paths.append(str((folder / f"{seed}-{width}x{height}.jpg").resolve()))
        Path(paths[-1]).write_bytes(jpeg(width, height, seed))
    return paths


def write_patches(folder: Path, grids: list[tuple[int, int]]) -> list[str]:
    """Write a .npy file of random patches for each grid (rows, columns). Returns absolute paths."""
    paths = []
    for seed, (rows, columns) in enumerate(grids):
        draw = np.random.Generator(np.random.PCG64([seed, rows, columns]))
        paths.append(str((folder / f"{seed}-{rows}x{columns}.npy").resolve()))
        np.save(paths[-1], draw.integers(0, 256, (rows * columns, *PATCH_SHAPE), np.uint8))
    return paths
