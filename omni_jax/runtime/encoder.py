"""The vision tower, run in slices of layers between steps. It writes features into one array on the device.

A call encodes several images, packed one after another up to a compiled number of patches. Its slices are the patch
embedding, groups of layers (weights are arguments, so one executable serves all slices of a shape), and the merger,
which scatters features into the array that steps read. Every slice takes and returns that array, so that the device
runs slices and steps one after another, on a CPU too.
"""

import collections
import dataclasses
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from omni_jax import compat
from omni_jax.cost.model import StepShape
from omni_jax.models.config import VisionConfig
from omni_jax.models.vision import PatchBatch, attends_fully, rotary_2d
from omni_jax.models.vision_layout import layout
from omni_jax.models.weights import Tower
from omni_jax.requests import MediaSpan
from omni_jax.runtime.executables import Executable, Job, Key, make_job
from omni_jax.runtime.packing import Layout
from omni_jax.runtime.sharding import axis_of, placed, zeros

MAX_SLICE_TIMES = 1024  # latest slices whose time is kept


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes of the feature array and of the encoder's executables.

    Attributes:
        feature_rows: rows of the array, unused rows included (memory.EncoderCache.array_rows).
        buckets: compiled numbers of patches, ascending.
        layers_per_slice: maximum number of layers that run between two steps.
        mean, std, rescale_factor: normalisation of pixels from 0 to 255.
    """

    feature_rows: int
    buckets: tuple[int, ...]
    layers_per_slice: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float


@dataclasses.dataclass(kw_only=True)
class _Call:
    """A call in progress."""

    batch: tuple[MediaSpan, ...]
    size: int
    target: np.ndarray  # row of the feature array for each feature
    next_layer: int
    hidden: jax.Array
    rotary: tuple[jax.Array, jax.Array]
    place: PatchBatch
    dispatched: float


class Encoder:
    """Owns the feature array and the executables of the tower. Runs one call at a time.

    Attributes:
        abstract_features: shape [feature_rows, hidden] and dtype of the array.
        features: the array that steps read; set by `reset`.
        calls, real_patches, padded_patches: counters.
        slice_seconds: times of the latest slices, from dispatch to the next dispatch or the end of the wait.
    """

    features: jax.Array

    def __init__(self, model: VisionConfig, tower: Tower, config: EncoderConfig, dtype: np.dtype, mesh: Mesh):
        self.config = config
        self._model, self._tower, self._mesh, self._axis = model, tower, mesh, axis_of(mesh)
        shape = (config.feature_rows, model.out_hidden_size)
        self.abstract_features = placed(mesh, jax.ShapeDtypeStruct(shape, dtype), "features")
        self._executables: dict[Key, Executable] = {}
        self._call: _Call | None = None
        # Safe to reuse: a call has read it before the next one begins.
        self._pixels = np.zeros(self._pixel_shape(config.buckets[-1]), np.uint8)
        self.calls = self.real_patches = self.padded_patches = 0
        self.slice_seconds: collections.deque[float] = collections.deque(maxlen=MAX_SLICE_TIMES)

    # -- start --------------------------------------------------------------------------------------------------------

    def jobs(self) -> list[Job]:
        """All functions to compile, largest first."""
        features, mesh = self.abstract_features, self._mesh
        jobs = []
        for size in reversed(self.config.buckets):
            pixels = jax.ShapeDtypeStruct(self._pixel_shape(size), jnp.uint8)
            begin, end = self._begin(size), self._end()
            arguments = (self._tower.patch.abstract(), pixels, self._place_layout(size).abstract(), features)
            hidden, rotary, place, _ = jax.eval_shape(begin, *arguments)
            jobs.append(make_job(mesh, ("encode", size), begin, arguments, donate=(3,)))
            for kinds in dict.fromkeys(self._kinds(first) for first in self._first_layers()):
                leaves = self._tower.blocks[0].abstract() * len(kinds)
                arguments = (leaves, hidden, rotary, place, features)
                jobs.append(make_job(mesh, ("encode", size, kinds), self._slice(kinds), arguments, donate=(1, 4)))
            target = jax.ShapeDtypeStruct((size // self._unit,), jnp.int32)
            arguments = (self._tower.merger.abstract(), hidden, features, target)
            jobs.append(make_job(mesh, ("encode", size, "merge"), end, arguments, donate=(2,)))
        return jobs

    def use(self, executables: dict[Key, Executable]) -> None:
        """Set the executables of `jobs`."""
        self._executables = executables

    def reset(self) -> None:
        """Drop the current call and make a new feature array: at the start, and after a call or a step raised."""
        self._call = None
        vars(self).pop("features", None)  # first, because there may be no room for both arrays
        self.features = zeros(self.abstract_features)

    # -- compiled functions -------------------------------------------------------------------------------------------

    def _begin(self, size: int):
        """(leaves, pixels, packed, features) -> (hidden [size, width], rotary, place, features)."""
        packed_as, config = self._place_layout(size), self.config

        def run(leaves, pixels, packed, features):
            place = PatchBatch(**packed_as.unpack(packed))
            embed = self._tower.patch.merge(leaves)
            hidden = embed(pixels, config.mean, config.std, config.rescale_factor)
            return hidden, rotary_2d(self._model, place.positions), place, features

        return run

    def _slice(self, kinds: str):
        """(leaves of len(kinds) layers, hidden, rotary, place, features) -> (hidden, features). Donate hidden and
        features; features is returned unchanged."""
        first = self._tower.blocks[0]

        def run(leaves, hidden, rotary, place, features):
            each = len(leaves) // len(kinds)
            for i, kind in enumerate(kinds):
                block = first.merge(leaves[i * each : (i + 1) * each])
                hidden = block(hidden, *rotary, place, full=kind == "f", axis=self._axis)
            return hidden, features

        return run

    def _end(self):
        """(leaves, hidden, features, target) -> features. Padding is written to row 0, which is never read."""

        def run(leaves, hidden, features, target):
            made = self._tower.merger.merge(leaves)(hidden, self._axis)
            return features.at[target].set(made.astype(features.dtype))

        return run

    def _place_layout(self, size: int) -> Layout:
        names = ["first", "last", *(["window_first", "window_last"] if self._model.window_size is not None else [])]
        return Layout(
            fields={"positions": ((size, 2), jnp.int32)} | dict.fromkeys(names, ((size,), jnp.int32)),
        )

    def _pixel_shape(self, size: int) -> tuple[int, ...]:
        side = self._model.patch_size
        return (size, self._model.in_channels, self._model.temporal_patch_size, side, side)

    @property
    def _unit(self) -> int:
        """Number of patches that are merged into one feature."""
        return self._model.spatial_merge_size**2

    def _first_layers(self) -> range:
        return range(0, self._model.depth, self.config.layers_per_slice)

    def _kinds(self, first: int) -> str:
        """For each layer of the slice that starts at layer `first`: "f" for full attention, "w" for windows."""
        full = attends_fully(self._model)[first : first + self.config.layers_per_slice]
        return "".join("f" if each else "w" for each in full)

    # -- calls --------------------------------------------------------------------------------------------------------

    @property
    def num_slices(self) -> int:
        """Number of slices of a call: those of layers, and the merger."""
        return len(self._first_layers()) + 1

    @property
    def busy(self) -> bool:
        return self._call is not None

    @property
    def is_ready(self) -> bool:
        """Whether the last dispatched slice has finished."""
        return self._call is None or compat.is_ready(self._call.hidden)

    def shape_of(self, batch: Sequence[MediaSpan]) -> StepShape:
        """The shape of a call for `batch`, for the cost model."""
        patches = [span.num_patches for span in batch]
        return StepShape(
            kind="encode",
            size=self._size_for(sum(patches)),
            rows=len(patches),
            tokens=sum(patches),
            context=0,
            attended=sum(count * count for count in patches),
        )

    def _size_for(self, patches: int) -> int:
        return next(size for size in self.config.buckets if size >= patches)

    def begin(self, batch: tuple[MediaSpan, ...], rows: Sequence[np.ndarray]) -> None:
        """Start a call for `batch` and return at once. Features go to `rows` of the array (one array per span)."""
        assert self._call is None
        real = sum(span.num_patches for span in batch)
        size = self._size_for(real)
        placed = layout([span.grid for span in batch], self._model)
        pixels = self._pixels[:size]
        at = 0
        for span in batch:
            # An image has one frame, which is broadcast to all.
            pixels[at : at + span.num_patches] = span.patches
            at += span.num_patches
        if self._model.window_size is not None:
            pixels[:real] = pixels[placed.order]
        packed, field = self._place_layout(size).fresh()
        field["positions"][:real] = placed.positions
        field["first"][:real], field["last"][:real] = placed.first, placed.last
        if self._model.window_size is not None:
            field["window_first"][:real], field["window_last"][:real] = placed.window_first, placed.window_last
        for name in field.keys() - {"positions"}:  # padding attends to nothing; the ranges stay in ascending order
            field[name][real:] = real
        target = np.zeros(size // self._unit, np.int32)
        target[: real // self._unit] = np.concatenate(rows)[placed.feature_of]

        hidden, rotary, place, self.features = self._executables["encode", size](
            self._tower.patch.leaves, pixels, packed, self.features
        )
        self._call = _Call(
            batch=batch,
            size=size,
            target=target,
            next_layer=0,
            hidden=hidden,
            rotary=rotary,
            place=place,
            dispatched=time.monotonic(),
        )
        self.calls += 1
        self.real_patches += real
        self.padded_patches += size - real

    def advance(self) -> tuple[MediaSpan, ...]:
        """Wait for the last slice and dispatch the next one.

        Returns the call's batch with the last slice, as steps dispatched from then on can read its features; otherwise
        nothing.
        """
        call = self._call
        assert call is not None
        jax.block_until_ready(call.hidden)
        now = time.monotonic()
        self.slice_seconds.append(now - call.dispatched)
        call.dispatched = now
        if call.next_layer == self._model.depth:
            self.features = self._executables["encode", call.size, "merge"](
                self._tower.merger.leaves, call.hidden, self.features, call.target
            )
            self._call = None
            return call.batch
        kinds = self._kinds(call.next_layer)
        blocks = self._tower.blocks[call.next_layer : call.next_layer + len(kinds)]
        leaves = tuple(leaf for block in blocks for leaf in block.leaves)
        call.hidden, self.features = self._executables["encode", call.size, kinds](
            leaves, call.hidden, call.rotary, call.place, self.features
        )
        call.next_layer += len(kinds)
        return ()
