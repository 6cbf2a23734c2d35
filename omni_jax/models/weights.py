"""Fills a decoder from a checkpoint: one tensor at a time, and strictly."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from checkpoints.reader import Checkpoint, CheckpointError
from omni_jax.models.config import ModelConfig
from omni_jax.models.decoder import Decoder, weight_sources

logger = logging.getLogger(__name__)

# Tensors some exporters write that hold nothing a model needs: they follow from the config.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """A loaded decoder, split once: a call passes `leaves`, a flat tuple of arrays, and merges inside the compiled
    function.

    Attributes:
        graph: the module's structure, without arrays.
        leaves: its arrays, in the order `nnx.merge` wants.
        output_matrix: [vocab, hidden], the array that makes logits; one of `leaves`.
        nbytes: bytes of all leaves.
    """

    graph: Any
    treedef: Any
    leaves: tuple[jax.Array, ...]
    output_matrix: jax.Array
    nbytes: int

    def merge(self, leaves) -> Decoder:
        """The module over `leaves`; to be called while tracing."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))


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
    config = _settle_head(checkpoint, config)
    abstract = nnx.eval_shape(lambda: Decoder(config, dtype))
    graph, state = nnx.split(abstract)
    paths_and_leaves, treedef = jax.tree.flatten_with_path(state)
    sources = weight_sources(config)
    _check(checkpoint, config, sources)

    leaves, done, by_name = [], 0, {}
    total = sum(np.prod(leaf.shape) * np.dtype(dtype).itemsize for _, leaf in paths_and_leaves)
    for path, leaf in paths_and_leaves:
        name = _name(path)
        tensors, transposed = sources[name]
        array = _assemble(checkpoint, name, tensors, transposed, leaf.shape, dtype)
        leaves.append(jax.device_put(array, device))
        by_name[name] = leaves[-1]
        done += leaves[-1].nbytes
        if progress:
            progress(name, done, int(total))
    output_matrix = by_name["embed"] if config.tie_word_embeddings else by_name["head"]
    weights = Weights(graph=graph, treedef=treedef, leaves=tuple(leaves), output_matrix=output_matrix, nbytes=done)
    return config, weights


def _name(path) -> str:
    """`layers.0.attention.qkv` of a key path into an nnx state."""
    parts = []
    for key in path:
        part = getattr(key, "key", getattr(key, "idx", getattr(key, "name", None)))
        if part not in (None, "value", "raw_value"):
            parts.append(str(part))
    return ".".join(parts)


def _settle_head(checkpoint: Checkpoint, config: ModelConfig) -> ModelConfig:
    present = "lm_head.weight" in checkpoint.tensors
    if config.tie_word_embeddings and present:
        head, embed = checkpoint.read("lm_head.weight"), checkpoint.read("model.embed_tokens.weight")
        if head.shape != embed.shape or not np.array_equal(head, embed):
            logger.warning(
                "config.json ties the output to the embedding, but lm_head.weight differs: using lm_head.weight"
            )
            return dataclasses.replace(config, tie_word_embeddings=False)
    return config


def _check(checkpoint: Checkpoint, config: ModelConfig, sources) -> None:
    wanted = {name for tensors, _ in sources.values() for name in tensors}
    given = {name for name in checkpoint.tensors if not name.endswith(IGNORED_SUFFIXES)}
    if config.tie_word_embeddings:
        given.discard("lm_head.weight")  # equal to the embedding, as _settle_head found
    faults = [f"missing tensor {name}" for name in sorted(wanted - given)]
    if "lm_head.weight" in wanted - given:
        faults.append("config.json has tie_word_embeddings=false: set it to true if the output is the embedding")
    faults += [
        f"tensor {name} {list(checkpoint.tensors[name].shape)} is not part of {config.architecture}"
        for name in sorted(given - wanted)
    ]
    if faults:
        raise CheckpointError(faults)


def _assemble(checkpoint, name, tensors, transposed, shape, dtype) -> np.ndarray:
    """The stacked, transposed, cast array of one parameter; contiguous, and never the mapped file itself."""
    parts = [checkpoint.read(tensor) for tensor in tensors]
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
