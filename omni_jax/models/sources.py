"""Entries of the weight map: how a parameter is assembled from a checkpoint's tensors."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from checkpoints.errors import CheckpointError


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

    def assemble(self, read: Callable[[str], np.ndarray], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Assemble the parameter into a new contiguous array of `shape` and `dtype`.

        Args:
            read: returns a tensor by name, in whose shape `faults` found nothing.

        Raises:
            CheckpointError: float16 cannot hold a value.
        """
        outputs, inputs = self._axes(shape)
        out = np.empty(shape, dtype)
        whole = np.moveaxis(out, range(len(inputs)), range(-len(inputs), 0)) if self.transposed else out
        start = 0
        for tensor, output_shape in zip(self.tensors, self.output_shapes or (outputs,), strict=True):
            flat = read(tensor).reshape(*output_shape, *inputs)
            if output_shape[0] < outputs[0] and self.axis:
                flat = np.repeat(flat, outputs[0] // output_shape[0], axis=0)
            stop = start + output_shape[self.axis]
            place = (slice(None),) * self.axis + (slice(start, stop),)
            with np.errstate(over="ignore"):
                whole[place] = flat
            if dtype == np.float16 and flat.dtype != dtype and not np.isfinite(whole[place]).all():
                raise CheckpointError(
                    f"tensor {tensor} has values beyond float16's range (65504): use --dtype bfloat16 or float32"
                )
            start = stop
        return out

    def faults(self, name: str, shape_of: Callable[[str], tuple[int, ...]], shape: tuple[int, ...]) -> list[str]:
        """A sentence for each tensor that does not have the shape that the config implies; with both shapes.

        Args:
            name: the parameter.
            shape_of: returns the shape of a tensor by name.
            shape: the shape of the parameter.
        """
        outputs, inputs = self._axes(shape)
        found = []
        for tensor, output_shape in zip(self.tensors, self.output_shapes or (outputs,), strict=True):
            stored = shape_of(tensor)
            flat = (stored[0], math.prod(stored[1:])) if inputs and len(stored) > 2 else stored
            expected = (math.prod(output_shape), *([math.prod(inputs)] if inputs else []))
            if flat != expected:
                found.append(
                    f"{name}: tensor {tensor} has shape {list(stored)} in the checkpoint, the config implies "
                    f"{list(expected)}"
                )
        return found

    def _axes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of outputs and of inputs of a parameter's shape."""
        axes = len(self.output_shapes[0]) if self.output_shapes else 1
        return (shape[-axes:], shape[:-axes]) if self.transposed else (shape[:axes], shape[axes:])
