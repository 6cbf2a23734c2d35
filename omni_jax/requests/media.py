"""Images and video in a prompt: placeholder tokens, and the patches whose features replace them."""

import dataclasses
from typing import Literal

import numpy as np

MediaModality = Literal["image", "video"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MediaSpan:
    """Placeholder tokens and the patches whose features replace them: one image, or one temporal step of a video.

    A temporal step is as many frames as the tower merges into one patch. The steps of a video do not attend to each
    other in the tower, so each is encoded, cached and released on its own, and a long video needs no more room than
    one step.

    Attributes:
        key: Digest of everything the features depend on, and nothing else. Spans with equal keys share one entry of
            the encoder cache.
        modality: Modality that metrics count it under.
        start: Index of its first placeholder in the prompt.
        length: Number of placeholders: rows * columns / merge_size ** 2.
        grid: (rows, columns) of patches.
        patches: uint8 [rows * columns, channels, frames, patch_size, patch_size], one merge block after another, each
            in row-major order (the order of transformers). frames is 1 for a still image, else temporal_patch_size.
    """

    key: bytes
    modality: MediaModality
    start: int
    length: int
    grid: tuple[int, int]
    patches: np.ndarray

    @property
    def stop(self) -> int:
        """Index after its last placeholder."""
        return self.start + self.length

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]
