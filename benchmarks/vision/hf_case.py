"""Contender transformers: the image processors of Qwen2-VL, and its vision tower with sdpa attention, in PyTorch."""

import argparse
import io
import os
import time

from benchmarks.vision.preparing import Preparer
from benchmarks.worker import serve

NAMES = {"pil": "transformers (PIL)", "torchvision": "transformers (torchvision)"}


def preparer(directory: str, backend: str, threads: int) -> Preparer:
    """Return a preparer of pixel_values as torch tensors: Pillow decodes, the image processor does the rest."""
    import PIL
    import torch
    import transformers
    from PIL import Image

    torch.set_num_threads(threads)
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}, {threads} threads"
    if backend == "pil":
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil as Processor
    else:
        import torchvision
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor as Processor

        versions += f", torchvision {torchvision.__version__}"
    processor = Processor.from_pretrained(directory)
    std, mean = (torch.tensor(x)[:, None] for x in (processor.image_std, processor.image_mean))

    def decode(data):
        return Image.open(io.BytesIO(data)).convert("RGB")

    def pack(image):
        return processor(images=image, return_tensors="pt")

    def summary(found):
        pixels = found["pixel_values"].reshape(len(found["pixel_values"]), len(std), -1)
        return found["image_grid_thw"][0].tolist(), float(((pixels * std + mean) * 255).mean())

    about = {"name": NAMES[backend], "version": f"{versions}, Pillow {PIL.__version__}"}
    return Preparer(about, decode, pack, summary, in_thread=lambda: torch.set_num_threads(1))


class Tower:
    """A benchmarks.worker.Contender: `model.visual` under inference_mode."""

    def __init__(self, directory: str, threads: int):
        import numpy as np
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._np, self._torch, self._directory = np, torch, directory
        self._version = f"transformers {transformers.__version__}, torch {torch.__version__}, {threads} threads"
        self._visual = (
            transformers.Qwen2VLForConditionalGeneration.from_pretrained(
                directory, dtype=torch.float32, attn_implementation="sdpa"
            )
            .eval()
            .model.visual
        )

    def describe(self):
        return {"name": "transformers", "version": self._version}

    def open(self, files, grids):
        """Load and normalise uint8 patches of each image. Returns {"found": some features of each}."""
        np, torch = self._np, self._torch
        from transformers import AutoConfig
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        processor = Qwen2VLImageProcessorPil.from_pretrained(self._directory)
        frames = AutoConfig.from_pretrained(self._directory).vision_config.temporal_patch_size
        colours = processor.image_mean, processor.image_std
        mean, std = (np.asarray(colour, np.float32)[:, None, None, None] for colour in colours)
        self._images = []
        for file, grid in zip(files, grids, strict=True):
            pixels = (np.load(file) * np.float32(processor.rescale_factor) - mean) / std
            pixels = pixels.repeat(frames, axis=2).reshape(len(pixels), -1)
            self._images.append((torch.from_numpy(pixels), torch.tensor([[1, *grid]])))
        found = []
        for image in self._images:
            features = self._features(image)
            found.append(features[:: max(1, len(features) // 8), :8].tolist())
        return {"found": found}

    def encode(self, which, times):
        """Encode an image by its index, from normalised patches to features."""
        begin = time.perf_counter()
        for _ in range(times):
            self._features(self._images[which])
        return {"seconds": time.perf_counter() - begin}

    def _features(self, image):
        pixels, grid = image
        with self._torch.inference_mode():
            return self._visual(pixels, grid_thw=grid).pooler_output


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="worker of benchmarks.vision")
    parser.add_argument("directory")
    parser.add_argument("--part", choices=("preprocess", "tower"), required=True)
    parser.add_argument("--backend", choices=NAMES, help="backend of the image processor")
    args = parser.parse_args()
    threads = os.cpu_count() or 1
    if args.part == "tower":
        serve("transformers", lambda: Tower(args.directory, threads))
    else:
        serve(NAMES[args.backend], lambda: preparer(args.directory, args.backend, threads))
