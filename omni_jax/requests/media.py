"""Images and video in a prompt, as the engine takes them: placeholder tokens, and the patches whose features replace
them."""

import dataclasses
from typing import Literal

import numpy as np

MediaModality = Literal["image", "video"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MediaSpan:
    """A run of placeholder tokens, and the patches whose features stand there: one image, or one temporal step of a
    video (which is as many frames as the tower merges into a patch). Steps of a video do not attend to each other in
    the tower, so each is encoded, cached and passed by itself, and a long video needs no more room than one step.

    Attributes:
        key: digest of everything the features depend on, and of nothing else; equal keys share one entry of the
            encoder cache.
        modality: what it is counted as.
        start: place of its first placeholder in the prompt.
        length: placeholders: rows * columns / merge_size ** 2.
        grid: (rows, columns) of patches.
        patches: uint8 [rows * columns, channels, frames, patch_size, patch_size], merge block after merge block and
            row by row in each (transformers' order). One frame stands for all (a still image), else there are
            temporal_patch_size of them.
    """

    key: bytes
    modality: MediaModality
    start: int
    length: int
    grid: tuple[int, int]
    patches: np.ndarray

    @property
    def stop(self) -> int:
        """Place behind its last placeholder."""
        return self.start + self.length

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]
