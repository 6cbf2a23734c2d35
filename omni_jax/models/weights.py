"""Strict loading of a checkpoint into a model, one parameter at a time."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from checkpoints.reader import Checkpoint, CheckpointError
from omni_jax.models import vision
from omni_jax.models.config import ModelConfig, VisionConfig
from omni_jax.models.decoder import Decoder, weight_sources
from omni_jax.models.sources import Source

logger = logging.getLogger(__name__)

# Tensors of some exporters that are not loaded: their values follow from the config.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)

# Prefixes of tensors -> the classic ones, which the weight maps use.
RENAMED_PREFIXES = {
    "model.language_model.": "model.",  # transformers 5's vision models
    "model.visual.": "visual.",
    "language_model.model.": "model.",  # vision models of vLLM and of older transformers
    "language_model.lm_head.": "lm_head.",
    "embed_tokens.": "model.embed_tokens.",  # a decoder saved without its head: embedding and reward models
    "layers.": "model.layers.",
    "norm.": "model.norm.",
}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"

FLOATING = frozenset(np.dtype(kind) for kind in ("float64", "float32", "float16", ml_dtypes.bfloat16))
# Ends of the names of tensors that belong to quantised weights: GPTQ, AWQ, compressed-tensors, FP8, bitsandbytes, MLX.
QUANTISED_SUFFIXES = (
    *(".qweight", ".qzeros", ".scales", ".g_idx", ".weight_scale", ".weight_scale_inv", ".input_scale"),
    *(".weight_packed", ".weight_shape", ".weight_zero_point", ".absmax", ".quant_map", ".SCB", ".biases"),
)

# (parameter path, shape) -> sharding; None for the default device. Paths of the decoder's layers begin with
# `layers.{i}.`, those of the tower's with `blocks.{i}.`.
ShardingOf = Callable[[str, tuple[int, ...]], jax.sharding.Sharding | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """A loaded module, split into structure and arrays.

    A call passes the flat tuple `leaves`; the compiled function merges them into a module.

    Attributes:
        graph: the module's structure, without arrays.
        treedef: tree structure of its state.
        leaves: its arrays in the order of `treedef`, or their shapes if a program is only compiled.
    """

    graph: Any
    treedef: Any
    leaves: tuple[Any, ...]

    def abstract(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in self.leaves)

    def merge(self, leaves) -> Any:
        """Rebuild the module from `leaves`, while tracing."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tower:
    """A loaded vision tower, in the parts that run separately.

    Attributes:
        patch: vision.PatchEmbed.
        blocks: vision.Block, one per layer; all have the same graph.
        merger: vision.Merger.
    """

    patch: Split
    blocks: tuple[Split, ...]
    merger: Split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """A loaded model.

    Attributes:
        decoder: the text decoder.
        output_matrix: [vocab, hidden], the matrix of the logits; one of the decoder's leaves.
        tower: the vision tower; None for a text model.
    """

    decoder: Split
    output_matrix: Any
    tower: Tower | None = None

    @property
    def arrays(self) -> tuple[Any, ...]:
        """All arrays of the model, each once."""
        tower = () if self.tower is None else (self.tower.patch, *self.tower.blocks, self.tower.merger)
        return tuple(leaf for part in (self.decoder, *tower) for leaf in part.leaves)

    @property
    def nbytes(self) -> int:
        return sum(array.size * array.dtype.itemsize for array in self.arrays)


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: np.dtype,
    *,
    sharding_of: ShardingOf = lambda *_: None,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[ModelConfig, Weights]:
    """Load a checkpoint into device arrays of `dtype`.

    Parameters are assembled on the host one at a time, and each device gets its part.

    Args:
        sharding_of: sharding of each parameter. Default: the default device.
        progress: called with (parameter path, bytes done, total bytes).

    Returns:
        The config and the weights. If the config ties the head to the embedding, but the checkpoint has a different
        head, the head is used, and the returned config has tie_word_embeddings=False.

    Raises:
        CheckpointError: tensors are missing, unknown, or of the wrong shape; the message has the names and shapes.
    """
    tied = config.tie_word_embeddings
    config, stored, text, visual = _checked(checkpoint, config)
    if (
        config.tie_word_embeddings
        and HEAD in stored.names
        and not np.array_equal(stored.read(HEAD), stored.read(EMBED))
    ):
        config = dataclasses.replace(config, tie_word_embeddings=False)
        text = weight_sources(config)
    if tied and not config.tie_word_embeddings:
        logger.warning("config.json ties the output to the embedding, but lm_head.weight differs: using lm_head.weight")

    total = sum(stored.parameters(name) for source in [*text.values(), *visual.values()] for name in source.tensors)
    done = 0

    def report(name: str, count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(name, done, total * dtype.itemsize)

    def place(name: str, source: Source, shape: tuple[int, ...]) -> jax.Array:
        array = source.assemble(stored.read, shape, dtype)
        sharding = sharding_of(name, shape)
        report(name, sum(stored.parameters(tensor) for tensor in source.tensors) * dtype.itemsize)
        if sharding is None:
            return jax.device_put(array)
        return jax.make_array_from_callback(shape, sharding, lambda index: array[index])

    return config, _weights(config, dtype, text, visual, place)


def check_weights(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Raise CheckpointError unless `load_weights` can load the checkpoint. Reads no weights."""
    _checked(checkpoint, config)


def abstract_weights(config: ModelConfig, dtype: np.dtype, sharding_of: ShardingOf = lambda *_: None) -> Weights:
    """Weights that hold shapes only: for compilation without a checkpoint or devices."""

    def place(name: str, _: Source, shape: tuple[int, ...]) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_of(name, shape))

    text = weight_sources(config)
    visual = vision.weight_sources(config.vision) if config.vision else {}
    return _weights(config, dtype, text, visual, place)


class _Stored:
    """Access to a checkpoint's tensors by their classic names."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self.names: dict[str, str] = {}
        for name in checkpoint.tensors:
            if name.endswith(IGNORED_SUFFIXES):
                continue
            prefix = next((p for p in RENAMED_PREFIXES if name.startswith(p)), "")
            classic = RENAMED_PREFIXES.get(prefix, "") + name.removeprefix(prefix)
            if classic in self.names:
                raise CheckpointError([f"tensors {self.names[classic]} and {name} hold the same parameter"])
            self.names[classic] = name

    def read(self, name: str) -> np.ndarray:
        return self._checkpoint.read(self.names[name])

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.tensors[self.names[name]].shape

    def dtype(self, name: str) -> np.dtype:
        return self._checkpoint.tensors[self.names[name]].dtype

    def parameters(self, name: str) -> int:
        return int(np.prod(self.shape(name)))


Place = Callable[[str, Source, tuple[int, ...]], Any]  # (parameter path, source, shape) -> array, or shape only


def _weights(
    config: ModelConfig, dtype: np.dtype, text: Mapping[str, Source], visual: Mapping[str, Source], place: Place
) -> Weights:
    decoder, by_name = _fill(lambda: Decoder(config, dtype), "", text, place)
    output_matrix = by_name["embed"] if config.tie_word_embeddings else by_name["head"]
    tower = None if config.vision is None else _tower(config.vision, dtype, visual, place)
    return Weights(decoder=decoder, output_matrix=output_matrix, tower=tower)


def _fill(
    make: Callable[[], nnx.Module], prefix: str, sources: Mapping[str, Source], place: Place
) -> tuple[Split, dict[str, Any]]:
    """Create a module with its arrays; return it, and the arrays by parameter path."""
    graph, state = nnx.split(nnx.eval_shape(make))
    paths_and_leaves, treedef = jax.tree.flatten_with_path(state)
    shapes = {prefix + _name(path): tuple(leaf.shape) for path, leaf in paths_and_leaves}
    by_name = {name: place(name, sources[name], shape) for name, shape in shapes.items()}
    return Split(graph=graph, treedef=treedef, leaves=tuple(by_name.values())), by_name


def _tower(config: VisionConfig, dtype: np.dtype, sources: Mapping[str, Source], place: Place) -> Tower:
    def part(prefix: str, make: Callable[[], nnx.Module]) -> Split:
        return _fill(make, prefix, sources, place)[0]

    return Tower(
        patch=part("patch_embed.", lambda: vision.PatchEmbed(config, dtype)),
        blocks=tuple(part(f"blocks.{i}.", lambda: vision.Block(config, dtype)) for i in range(config.depth)),
        merger=part("merger.", lambda: vision.Merger(config, dtype)),
    )


def _name(path) -> str:
    """The parameter path of a key path into an nnx state, for example `layers.0.attention.qkv`."""
    parts = []
    for key in path:
        part = getattr(key, "key", getattr(key, "idx", getattr(key, "name", None)))
        if part not in (None, "value", "raw_value"):
            parts.append(str(part))
    return ".".join(parts)


def _checked(
    checkpoint: Checkpoint, config: ModelConfig
) -> tuple[ModelConfig, _Stored, dict[str, Source], dict[str, Source]]:
    """The config, the tensors by their classic names, and the sources of the decoder's and the tower's parameters.

    Raises:
        CheckpointError: tensors are missing, unknown, quantised or of the wrong shape.
    """
    stored = _Stored(checkpoint)
    if config.tie_word_embeddings and HEAD in stored.names:
        if EMBED not in stored.names:  # some exporters keep the other one of the two names
            stored.names[EMBED] = stored.names.pop(HEAD)
        elif stored.shape(HEAD) != stored.shape(EMBED):
            config = dataclasses.replace(config, tie_word_embeddings=False)
    text = weight_sources(config)
    visual = vision.weight_sources(config.vision) if config.vision else {}
    _check_names(stored, config, [*text.values(), *visual.values()])

    faults: list[str] = []

    def check_shape(name: str, source: Source, shape: tuple[int, ...]) -> None:
        faults.extend(source.faults(name, stored.shape, shape))

    _weights(config, np.dtype(np.float32), text, visual, check_shape)
    if faults:
        raise CheckpointError(faults)
    return config, stored, text, visual


def _check_names(stored: _Stored, config: ModelConfig, sources: Iterable[Source]) -> None:
    expected = {name for source in sources for name in source.tensors}
    given = set(stored.names)
    quantised = [name for name in sorted(given - expected) if name.endswith(QUANTISED_SUFFIXES)]
    quantised += [name for name in sorted(expected & given) if stored.dtype(name) not in FLOATING]
    if quantised:
        name = quantised[0]
        raise CheckpointError(
            f"{len(quantised)} tensors belong to quantised weights, which are not supported; the first: "
            f"{stored.names[name]} ({stored.dtype(name)}), expected {', '.join(sorted(map(str, FLOATING)))}: use the "
            "model's repository without quantisation, or convert its GGUF file"
        )
    if config.tie_word_embeddings:
        given.discard(HEAD)  # equal to the embedding, or used: see load_weights
    faults = [f"missing tensor {name}" for name in sorted(expected - given)]
    if HEAD in expected - given or (EMBED in expected - given and HEAD in given):
        faults.append("config.json has tie_word_embeddings=false: set it to true if the output is the embedding")
    faults += [
        f"tensor {stored.names[name]} {list(stored.shape(name))} is not part of {config.architecture}"
        for name in sorted(given - expected)
    ]
    if faults:
        raise CheckpointError(faults)
