"""How parameters are made of a checkpoint's tensors: the weight map's entries, and the arrays they give."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from checkpoints.reader import CheckpointError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Where one parameter comes from. Tensors are [outputs, inputs], or [outputs] for vectors; a convolution whose
    stride is its size is a matrix too.

    Attributes:
        tensors: names in the checkpoint.
        transposed: the parameter has its inputs first.
        cuts: for each tensor the axes that its outputs are cut into, before all are joined; by default one axis, as it
            is. A first axis that is shorter than the parameter's is repeated, each entry next to itself: KV heads that
            several devices hold.
        axis: which of these axes the tensors are joined along.
    """

    tensors: tuple[str, ...]
    transposed: bool = False
    cuts: tuple[tuple[int, ...], ...] = ()
    axis: int = 0

    def assemble(
        self, name: str, read: Callable[[str], np.ndarray], shape: tuple[int, ...], dtype: np.dtype
    ) -> np.ndarray:
        """The parameter `name` of `shape`, cast; contiguous, and never the mapped file itself.

        Args:
            read: a tensor by name.

        Raises:
            CheckpointError: a tensor has another shape than the parameter asks for; both are in the message.
        """
        axes = len(self.cuts[0]) if self.cuts else 1
        outputs, inputs = (shape[-axes:], shape[:-axes]) if self.transposed else (shape[:axes], shape[axes:])
        out = np.empty(shape, dtype)
        whole = np.moveaxis(out, range(len(inputs)), range(-len(inputs), 0)) if self.transposed else out
        start = 0
        for tensor, cut in zip(self.tensors, self.cuts or (outputs,), strict=True):
            part = read(tensor)
            flat = part.reshape(len(part), -1) if inputs and part.ndim > 2 else part
            expected = [math.prod(cut), *([math.prod(inputs)] if inputs else [])]
            if list(flat.shape) != expected:
                found = f"{tensor} {list(part.shape)}"
                raise CheckpointError(
                    [f"{name}: the config asks for {expected} in {tensor}, the checkpoint has {found}"]
                )
            flat = flat.reshape(*cut, *inputs)
            if cut[0] < outputs[0] and self.axis:
                flat = np.repeat(flat, outputs[0] // cut[0], axis=0)
            stop = start + cut[self.axis]
            whole[(slice(None),) * self.axis + (slice(start, stop),)] = flat
            start = stop
        return out
