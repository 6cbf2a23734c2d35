"""Collective operations of the devices that share one copy of the model.

All devices run a step at once (`runtime.sharding` applies shard_map). Each holds its own KV heads, its part of the
inner width and of the vocabulary, and whole hidden states. ModelAxis combines partial results across the devices.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

MODEL = "model"  # name of the mesh axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelAxis:
    """The mesh axis of the devices that share a model. With one device no operation is added to the program.

    Attributes:
        size: number of devices. Default: 1.
    """

    size: int = 1

    def sum(self, part: jax.Array) -> jax.Array:
        """All-reduce: the sum of `part` over all devices, on each device."""
        return part if self.size == 1 else lax.psum(part, MODEL)

    def gather(self, part: jax.Array) -> jax.Array:
        """All-gather: `part` of every device, [size, *part.shape]. For a few numbers per row, never for logits."""
        return part[None] if self.size == 1 else lax.all_gather(part, MODEL)

    def first(self, count: int) -> jax.Array | int:
        """Index of this device's first item, if each device holds `count` consecutive items."""
        return 0 if self.size == 1 else lax.axis_index(MODEL) * count

    def local(self, ids: jax.Array, count: int) -> jax.Array:
        """Convert ids of the whole vocabulary to indices in this device's part of `count` ids.

        Ids of other devices become `count`, which is out of range; a negative index would count from the end.
        """
        if self.size == 1:
            return ids
        place = ids - self.first(count)
        return jnp.where((place >= 0) & (place < count), place, count)


ONE_DEVICE = ModelAxis()
