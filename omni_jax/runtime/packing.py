"""Packed inputs: one int32 buffer per call instead of many small arrays, because each transfer has a fixed cost.

A layout defines the place of each field. The host fills views of a numpy buffer; the compiled function slices the same
fields out of the array. Floats are passed as their bits.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

RING = 3  # buffers per layout: one for each of two steps in flight, and one to fill


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Fields of a packed buffer, in order: name -> (shape, dtype of 32 bits)."""

    fields: Mapping[str, tuple[tuple[int, ...], Any]]

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape, _ in self.fields.values())

    def fresh(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A new buffer and its fields, for inputs that are written rarely or several times per step."""
        buffer = np.zeros(self.size, np.int32)
        return buffer, self.views(buffer)

    def abstract(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.size,), jnp.int32)

    def unpack(self, packed: jax.Array) -> dict[str, jax.Array]:
        """The fields, while tracing."""
        out, start = {}, 0
        for name, (shape, dtype) in self.fields.items():
            stop = start + math.prod(shape)
            out[name] = jax.lax.bitcast_convert_type(packed[start:stop], dtype).reshape(shape)
            start = stop
        return out

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """The fields as writable views of a buffer on the host."""
        out, start = {}, 0
        for name, (shape, dtype) in self.fields.items():
            stop = start + math.prod(shape)
            out[name] = buffer[start:stop].view(dtype).reshape(shape)
            start = stop
        return out


class Ring:
    """Buffers of one layout, used in turn.

    JAX may alias a numpy buffer instead of copying it (on a CPU it does if the buffer is aligned to 64 bytes), so a
    buffer must not be refilled while a step that uses it may still run. The engine reads the result of step k before it
    packs step k+2, and a step takes at most one buffer of a ring, so the oldest of three is free.
    """

    def __init__(self, layout: Layout, buffers: int = RING):
        self._buffers = [layout.fresh() for _ in range(buffers)]
        self._next = 0

    def take(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The next buffer and its fields, which still hold their previous values."""
        taken = self._next
        self._next = (taken + 1) % len(self._buffers)
        return self._buffers[taken]
