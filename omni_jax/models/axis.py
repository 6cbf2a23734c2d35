"""The devices that share a model, as seen from one of them.

A step runs on all of them at once (`runtime.sharding` spreads it with shard_map): each has its KV heads, its part of
the inner width and of the vocabulary, and whole hidden states. Where parts of a sum have to meet, or the best of each
part of the vocabulary, a ModelAxis says so.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

MODEL = "model"  # name of the mesh axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelAxis:
    """What one device does together with the others. With one device there are none: nothing is added to the program.

    Attributes:
        size: devices.
    """

    size: int = 1

    def sum(self, part: jax.Array) -> jax.Array:
        """The sum of what each device has, on all of them: an all-reduce."""
        return part if self.size == 1 else lax.psum(part, MODEL)

    def gather(self, part: jax.Array) -> jax.Array:
        """What each device has, on all of them: [size, *part.shape]. For a few numbers a row, never for logits."""
        return part[None] if self.size == 1 else lax.all_gather(part, MODEL)

    def first(self, count: int) -> jax.Array | int:
        """Where this device's part begins, of things of which each device has `count`."""
        return 0 if self.size == 1 else lax.axis_index(MODEL) * count

    def local(self, ids: jax.Array, count: int) -> jax.Array:
        """Ids of the whole vocabulary as places in this device's part of `count`; those of other devices become
        `count`, which is out of range. (Never a negative number, which JAX would count from the end.)"""
        if self.size == 1:
            return ids
        place = ids - self.first(count)
        return jnp.where((place >= 0) & (place < count), place, count)


ALONE = ModelAxis()
