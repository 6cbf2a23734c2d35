"""Entries of the weight map: how a parameter is assembled from a checkpoint's tensors."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from checkpoints.reader import CheckpointError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """The source of one parameter.

    Tensors are [outputs, inputs], or [outputs] for vectors. A convolution whose stride is its size counts as a matrix.

    Attributes:
        tensors: names of tensors in the checkpoint.
        transposed: the parameter has its inputs first.
        output_shapes: for each tensor, the shape its outputs are reshaped to before the tensors are concatenated.
            Default: one axis. If the first axis is shorter than the parameter's, each entry is repeated: KV heads that
            several devices hold.
        axis: the axis of `output_shapes` along which the tensors are concatenated.
    """

    tensors: tuple[str, ...]
    transposed: bool = False
    output_shapes: tuple[tuple[int, ...], ...] = ()
    axis: int = 0

    def assemble(
        self, name: str, read: Callable[[str], np.ndarray], shape: tuple[int, ...], dtype: np.dtype
    ) -> np.ndarray:
        """Assemble the parameter `name` into a new contiguous array of `shape` and `dtype`.

        Args:
            read: returns a tensor by name.

        Raises:
            CheckpointError: a tensor does not have the shape that the config implies; the message has both shapes.
        """
        axes = len(self.output_shapes[0]) if self.output_shapes else 1
        outputs, inputs = (shape[-axes:], shape[:-axes]) if self.transposed else (shape[:axes], shape[axes:])
        out = np.empty(shape, dtype)
        whole = np.moveaxis(out, range(len(inputs)), range(-len(inputs), 0)) if self.transposed else out
        start = 0
        for tensor, output_shape in zip(self.tensors, self.output_shapes or (outputs,), strict=True):
            part = read(tensor)
            flat = part.reshape(len(part), -1) if inputs and part.ndim > 2 else part
            expected = [math.prod(output_shape), *([math.prod(inputs)] if inputs else [])]
            if list(flat.shape) != expected:
                found = list(part.shape)
                raise CheckpointError(
                    [f"{name}: tensor {tensor} has shape {found} in the checkpoint, the config implies {expected}"]
                )
            flat = flat.reshape(*output_shape, *inputs)
            if output_shape[0] < outputs[0] and self.axis:
                flat = np.repeat(flat, outputs[0] // output_shape[0], axis=0)
            stop = start + output_shape[self.axis]
            whole[(slice(None),) * self.axis + (slice(start, stop),)] = flat
            start = stop
        return out
