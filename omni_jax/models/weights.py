"""Fills a model from a checkpoint: one tensor at a time, and strictly."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from checkpoints.reader import Checkpoint, CheckpointError
from omni_jax.models import vision
from omni_jax.models.config import ModelConfig, VisionConfig
from omni_jax.models.decoder import Decoder, weight_sources

logger = logging.getLogger(__name__)

# Tensors some exporters write that hold nothing a model needs: they follow from the config.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)

# Beginnings of names as transformers 5 writes vision models, and the classic ones that the weight maps use.
RENAMED_PREFIXES = {"model.language_model.": "model.", "model.visual.": "visual."}

Sources = Mapping[str, tuple[tuple[str, ...], bool]]  # see decoder.weight_sources
Report = Callable[[str, int], None]  # (parameter, its bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """A loaded module, split once: a call passes `leaves`, a flat tuple of arrays, and merges inside the compiled
    function.

    Attributes:
        graph: the module's structure, without arrays.
        treedef: of its state.
        leaves: its arrays, in the order `nnx.merge` wants.
    """

    graph: Any
    treedef: Any
    leaves: tuple[jax.Array, ...]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    def abstract(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves)

    def merge(self, leaves) -> Any:
        """The module over `leaves`; to be called while tracing."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tower:
    """A loaded vision tower, in the pieces it is run in.

    Attributes:
        patch: vision.PatchEmbed.
        blocks: vision.Block, one a layer; all have the graph of the first.
        merger: vision.Merger.
    """

    patch: Split
    blocks: tuple[Split, ...]
    merger: Split

    @property
    def nbytes(self) -> int:
        return self.patch.nbytes + self.merger.nbytes + sum(block.nbytes for block in self.blocks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """A loaded model.

    Attributes:
        decoder: the text decoder.
        output_matrix: [vocab, hidden], the array that makes logits; one of the decoder's leaves.
        tower: the vision tower, if the model has one.
    """

    decoder: Split
    output_matrix: jax.Array
    tower: Tower | None = None

    @property
    def nbytes(self) -> int:
        return self.decoder.nbytes + (0 if self.tower is None else self.tower.nbytes)


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: np.dtype,
    *,
    device: Any = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[ModelConfig, Weights]:
    """Streams the checkpoint into device arrays of `dtype`. Returns the config too: a head that is in the checkpoint
    although the config ties it, and differs from the embedding, is used, and the config says so.

    Raises:
        CheckpointError: tensors missing, left over, or of the wrong shape; names and both shapes are in the message.
    """
    stored = _Stored(checkpoint)
    config = _settle_head(stored, config)
    text = weight_sources(config)
    seen = vision.weight_sources(config.vision) if config.vision else {}
    _check(stored, config, [*text.values(), *seen.values()])

    total = sum(stored.parameters(name) for tensors, _ in [*text.values(), *seen.values()] for name in tensors)
    done = 0

    def report(name: str, count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(name, done, total * dtype.itemsize)

    decoder, by_name = _fill(lambda: Decoder(config, dtype), text, stored, dtype, device, report)
    tower = _tower(config.vision, seen, stored, dtype, device, report) if config.vision else None
    output_matrix = by_name["embed"] if config.tie_word_embeddings else by_name["head"]
    return config, Weights(decoder=decoder, output_matrix=output_matrix, tower=tower)


class _Stored:
    """A checkpoint under the classic names of its tensors."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self.names: dict[str, str] = {}
        for name in checkpoint.tensors:
            if name.endswith(IGNORED_SUFFIXES):
                continue
            prefix = next((p for p in RENAMED_PREFIXES if name.startswith(p)), "")
            classic = RENAMED_PREFIXES.get(prefix, "") + name.removeprefix(prefix)
            if classic in self.names:
                raise CheckpointError([f"tensors {self.names[classic]} and {name} are the same parameter"])
            self.names[classic] = name

    def read(self, name: str) -> np.ndarray:
        return self._checkpoint.read(self.names[name])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.tensors[self.names[name]].shape

    def parameters(self, name: str) -> int:
        return int(np.prod(self.shape(name)))


def _fill(
    make: Callable[[], nnx.Module], sources: Sources, stored: _Stored, dtype: np.dtype, device: Any, report: Report
) -> tuple[Split, dict[str, jax.Array]]:
    """A module of arrays from the checkpoint, and the arrays by name."""
    graph, state = nnx.split(nnx.eval_shape(make))
    paths_and_leaves, treedef = jax.tree.flatten_with_path(state)
    by_name = {}
    for path, leaf in paths_and_leaves:
        name = _name(path)
        tensors, transposed = sources[name]
        array = _assemble(stored, name, tensors, transposed, leaf.shape, dtype)
        by_name[name] = jax.device_put(array, device)
        report(name, array.nbytes)
    return Split(graph=graph, treedef=treedef, leaves=tuple(by_name.values())), by_name


def _tower(
    config: VisionConfig, sources: Sources, stored: _Stored, dtype: np.dtype, device: Any, report: Report
) -> Tower:
    def part(prefix: str, make: Callable[[], nnx.Module]) -> Split:
        own = {name.removeprefix(prefix): value for name, value in sources.items() if name.startswith(prefix)}
        return _fill(make, own, stored, dtype, device, report)[0]

    return Tower(
        patch=part("patch_embed.", lambda: vision.PatchEmbed(config, dtype)),
        blocks=tuple(part(f"blocks.{i}.", lambda: vision.Block(config, dtype)) for i in range(config.depth)),
        merger=part("merger.", lambda: vision.Merger(config, dtype)),
    )


def _name(path) -> str:
    """`layers.0.attention.qkv` of a key path into an nnx state."""
    parts = []
    for key in path:
        part = getattr(key, "key", getattr(key, "idx", getattr(key, "name", None)))
        if part not in (None, "value", "raw_value"):
            parts.append(str(part))
    return ".".join(parts)


def _settle_head(stored: _Stored, config: ModelConfig) -> ModelConfig:
    if config.tie_word_embeddings and "lm_head.weight" in stored.names:
        head, embed = stored.read("lm_head.weight"), stored.read("model.embed_tokens.weight")
        if head.shape != embed.shape or not np.array_equal(head, embed):
            logger.warning(
                "config.json ties the output to the embedding, but lm_head.weight differs: using lm_head.weight"
            )
            return dataclasses.replace(config, tie_word_embeddings=False)
    return config


def _check(stored: _Stored, config: ModelConfig, sources: Iterable[tuple[tuple[str, ...], bool]]) -> None:
    wanted = {name for tensors, _ in sources for name in tensors}
    given = set(stored.names)
    if config.tie_word_embeddings:
        given.discard("lm_head.weight")  # equal to the embedding, as _settle_head found
    faults = [f"missing tensor {name}" for name in sorted(wanted - given)]
    if "lm_head.weight" in wanted - given:
        faults.append("config.json has tie_word_embeddings=false: set it to true if the output is the embedding")
    faults += [
        f"tensor {stored.names[name]} {list(stored.shape(name))} is not part of {config.architecture}"
        for name in sorted(given - wanted)
    ]
    if faults:
        raise CheckpointError(faults)


def _assemble(stored: _Stored, name, tensors, transposed, shape, dtype) -> np.ndarray:
    """The stacked, transposed, cast array of one parameter; contiguous, and never the mapped file itself. A convolution
    whose stride is its size is a matrix: [out, everything else]."""
    parts = [stored.read(tensor) for tensor in tensors]
    if len(shape) == 2:
        parts = [part.reshape(len(part), -1) if part.ndim > 2 else part for part in parts]
    stacked_shape = (sum(p.shape[0] for p in parts), *parts[0].shape[1:])
    found = stacked_shape[::-1] if transposed else stacked_shape
    if found != tuple(shape) or any(p.shape[1:] != parts[0].shape[1:] for p in parts):
        given = ", ".join(f"{tensor} {list(part.shape)}" for tensor, part in zip(tensors, parts, strict=True))
        expected = list(shape[::-1] if transposed else shape)
        raise CheckpointError(
            [f"{name}: the config asks for {expected} from {len(parts)} tensor(s), the checkpoint has {given}"]
        )
    out = np.empty(shape, dtype)
    start = 0
    for part in parts:
        stop = start + part.shape[0]
        if transposed:
            out[:, start:stop] = part.T
        else:
            out[start:stop] = part
        start = stop
    return out
