"""Contender omni-jax: preprocessing of images, and the executables of the vision tower."""

import argparse
import time
from pathlib import Path

import jax
import numpy as np
import PIL

from benchmarks.vision.preparing import Preparer
from benchmarks.worker import serve
from checkpoints.demo_model import default_cache_dir
from checkpoints.reader import Checkpoint
from omni_jax import compat
from omni_jax.inputs.image import MediaItem, VisionSettings, open_image, pack_image
from omni_jax.models.config import model_config
from omni_jax.models.weights import load_weights
from omni_jax.requests import MediaSpan
from omni_jax.runtime.encoder import Encoder, EncoderConfig
from omni_jax.runtime.executables import compile_all
from omni_jax.runtime.sharding import make_mesh
from omni_jax.scheduling.buckets import patch_buckets

NAME = "omni-jax"


def preparer(directory: Path) -> Preparer:
    """Return a preparer of uint8 patches and their digest, without rescaling and normalising: the tower's first
    executable does both on the device."""
    settings = VisionSettings.from_directory(directory)

    def summary(item: MediaItem):
        return list(item.grid), float(item.patches.mean())

    about = {"name": NAME, "version": f"Pillow {PIL.__version__}, NumPy {np.__version__}"}
    return Preparer(about, open_image, lambda image: pack_image(image, settings), summary)


class Tower:
    """A benchmarks.worker.Contender: the engine's executables, buckets and slices, without steps between slices."""

    def __init__(self, directory: Path, layers_per_slice: int = 1):
        compat.use_compilation_cache(default_cache_dir() / "xla-benchmarks")
        checkpoint = Checkpoint(directory)
        config, self._weights = load_weights(checkpoint, model_config(checkpoint.config), np.dtype(np.float32))
        assert config.vision is not None
        self._config, self._settings = config.vision, VisionSettings.from_directory(directory)
        self._layers_per_slice = layers_per_slice

    def describe(self):
        return {"name": NAME, "version": f"JAX {jax.__version__}"}

    def open(self, files: list[str], grids: list[tuple[int, int]]):
        """Compile executables for these images, files of uint8 patches. Returns {"found": some features of each}."""
        merge = self._config.spatial_merge_size
        self._spans = [
            MediaSpan(
                key=file.encode(),
                modality="image",
                start=0,
                length=rows * columns // merge**2,
                grid=(rows, columns),
                patches=np.load(file),
            )
            for file, (rows, columns) in zip(files, grids, strict=True)
        ]
        sizes = patch_buckets(self._settings.max_pixels // self._settings.patch_size**2)
        wanted = {next(size for size in sizes if size >= span.num_patches) for span in self._spans}
        self._encoder = Encoder(
            self._config,
            self._weights.tower,
            EncoderConfig(
                feature_rows=1 + max(span.length for span in self._spans),
                buckets=tuple(sorted(wanted)),
                layers_per_slice=self._layers_per_slice,
                mean=self._settings.mean,
                std=self._settings.std,
                rescale_factor=self._settings.rescale_factor,
            ),
            np.dtype(np.float32),
            make_mesh(jax.devices()),
        )
        self._encoder.use(compile_all(self._encoder.jobs()))
        self._encoder.reset()
        found = []
        for i, span in enumerate(self._spans):
            self.encode(i, 1)
            features = np.asarray(self._encoder.features)[1 : span.length + 1]
            found.append(sample(features))
        return {"found": found, "buckets": [next(s for s in sizes if s >= span.num_patches) for span in self._spans]}

    def encode(self, which: int, times: int):
        """Encode an image by its index, from uint8 patches on the host to features on the device."""
        encoder, span = self._encoder, self._spans[which]
        rows = np.arange(1, span.length + 1)
        begin = time.perf_counter()
        for _ in range(times):
            encoder.begin((span,), [rows])
            while encoder.busy:
                encoder.advance()
        jax.block_until_ready(encoder.features)
        return {"seconds": time.perf_counter() - begin}


def sample(features: np.ndarray) -> list[list[float]]:
    """Return a few numbers of [tokens, hidden], to compare contenders."""
    return features[:: max(1, len(features) // 8), :8].tolist()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="worker of benchmarks.vision")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--part", choices=("preprocess", "tower"), required=True)
    args = parser.parse_args()
    make = {"preprocess": preparer, "tower": Tower}[args.part]
    serve(NAME, lambda: make(args.directory))
