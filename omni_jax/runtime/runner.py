"""Dispatch of step plans: call the executables, and start to copy the results to the host."""

import collections.abc
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kernels_pallas.paged_attention import PagedKernels
from omni_jax import compat
from omni_jax.models.config import ModelConfig
from omni_jax.models.weights import Weights
from omni_jax.runtime import functions
from omni_jax.runtime.blocks import (
    BlockCopy,
    compaction_jobs,
    compaction_sizes,
    copy_jobs,
    pack_compaction,
    payload_bytes,
    split_blocks,
    split_payloads,
)
from omni_jax.runtime.encoder import Encoder, EncoderConfig
from omni_jax.runtime.executables import Executable, Job, Key, compile_all, make_job
from omni_jax.runtime.functions import VARIANTS
from omni_jax.runtime.packer import Packer
from omni_jax.runtime.sharding import RULES, WHOLE, axis_of, placed, put, zeros
from omni_jax.runtime.state import NEUTRAL, KVCacheDtype, abstract_pool, abstract_slots
from omni_jax.scheduling.buckets import Buckets
from omni_jax.scheduling.plan import StepPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """Sizes of the device state and of the executables.

    Attributes:
        max_num_seqs: number of slots.
        max_model_len: maximum tokens of a sequence; sets the width of the block table.
        block_size: tokens per block.
        num_pages: pages of the pool's arrays; the block pool may use fewer (see state.round_pages).
        buckets: compiled sizes.
        dtype: dtype of weights and activations.
        encoder: sizes of the vision tower's executables; None for a text-only model.
        kv_cache_dtype: see state.abstract_pool.
        swap: whether to compile reads and writes of blocks.
        compression: whether to compile compaction.
        kernels: implementations of attention over the cache.
    """

    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_pages: int
    buckets: Buckets
    dtype: np.dtype
    encoder: EncoderConfig | None = None
    kv_cache_dtype: KVCacheDtype = "auto"
    swap: bool = False
    compression: bool = False
    kernels: PagedKernels = dataclasses.field(default_factory=PagedKernels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """A dispatched step.

    Attributes:
        plan: the dispatched plan.
        sampled: int32 [bucket, 2 + 2 * alternatives], see functions.head; None if no row samples.
        scored: the same for each token of the step; None if no row is scored.
        anchor: a result of the body, which is ready when the body has finished.
        dispatched: time.monotonic() after the calls.
    """

    plan: StepPlan
    sampled: jax.Array | None
    scored: jax.Array | None
    anchor: jax.Array
    dispatched: float

    def is_ready(self) -> bool:
        """Whether the step has finished."""
        return compat.is_ready(self.anchor if self.sampled is None else self.sampled)

    def read(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Wait for the results: `sampled` (one row for each sampling row of the plan, in order) and `scored`."""
        if self.sampled is None:
            jax.block_until_ready(self.anchor)
        sampled = None if self.sampled is None else np.asarray(self.sampled)
        return sampled, None if self.scored is None else np.asarray(self.scored)


class Runner:
    """Owns the executables and the device state of one replica.

    It calls the devices through operations: a name, an executable's key, and buffers. If several processes share the
    replica, each runs the same operations in the same order (runtime.processes).

    Attributes:
        mesh: the devices of the replica.
        broadcast: sends each operation to the other processes before it runs here; None in a single process.
        encoder: runs the vision tower; None for a text-only model.
    """

    def __init__(self, model: ModelConfig, weights: Weights, config: RunnerConfig, mesh: Mesh):
        """`model` and `weights` must be laid out for the mesh (sharding.fit, sharding.sharding_of)."""
        self.config, self.mesh = config, mesh
        self.broadcast: Callable[[str, Key, tuple[np.ndarray, ...]], None] | None = None
        self.sizes = functions.StepSizes(
            rows=config.buckets.rows,
            slots=config.max_num_seqs + 1,
            pages_per_row=-(-config.max_model_len // config.block_size),
            block_size=config.block_size,
            vocab_size=model.vocab_size,
            reads_media=model.vision is not None,
            kernels=config.kernels,
            axis=axis_of(mesh),
        )
        self.encoder = None
        if model.vision is not None:
            assert weights.tower is not None
            assert config.encoder is not None
            self.encoder = Encoder(model.vision, weights.tower, config.encoder, config.dtype, mesh)
        self._model, self._weights = model, weights
        self._packer = Packer(self.sizes, config.buckets)
        self._executables: dict[Key, Executable] = {}

    # -- start --------------------------------------------------------------------------------------------------------

    def jobs(self) -> list[Job]:
        """All functions to compile, largest first."""
        sizes, buckets, mesh = self.sizes, self.config.buckets, self.mesh
        state = self._abstract_state()
        pool, tables, slots, last_token, history = (
            state[k] for k in ("pool", "tables", "slots", "last_token", "history")
        )
        leaves, matrix = self._weights.decoder.abstract(), self._weights.output_matrix
        matrix = jax.ShapeDtypeStruct(matrix.shape, matrix.dtype, sharding=matrix.sharding)
        features = () if self.encoder is None else self.encoder.abstract_features

        def hidden(rows):
            return jax.ShapeDtypeStruct((rows, self._model.hidden_size), self.config.dtype)

        jobs = []
        for kind, kind_buckets in (("mixed", buckets.mixed), ("decode", buckets.decode)):
            for size in reversed(kind_buckets):
                layout = sizes.body_layout(size, size if kind == "decode" else sizes.rows)
                run = functions.body(self._weights.decoder, self._model, sizes, kind == "decode", layout)
                arguments = (leaves, pool, tables, last_token, layout.abstract(), features)
                results = (RULES["pool"], WHOLE, WHOLE, WHOLE)
                jobs.append(make_job(mesh, (kind, size), run, arguments, donate=(1, 2), results=results))
        for tokens in reversed(buckets.mixed):
            arguments = (matrix, hidden(tokens), sizes.score_layout(tokens).abstract())
            jobs.append(make_job(mesh, ("score", tokens), functions.score(sizes, tokens), arguments))
        for variant in VARIANTS:
            for rows in reversed(buckets.decode if variant == "greedy" else buckets.sampled):
                arguments = (
                    *(matrix, hidden(sizes.rows), slots, last_token, history if variant == "full" else ()),
                    sizes.head_layout(rows).abstract(),
                )
                run = functions.head(sizes, variant, rows)
                results = (WHOLE, RULES["history"], WHOLE)
                jobs.append(make_job(mesh, ("head", rows, variant), run, arguments, donate=(3, 4), results=results))
        arguments = (slots, tables, sizes.admit_layout().abstract())
        jobs.append(make_job(mesh, ("admit",), functions.admit(sizes), arguments, donate=(0, 1)))
        arguments, run = (history, sizes.history_layout().abstract()), functions.rebuild_history(sizes)
        jobs.append(make_job(mesh, ("history",), run, arguments, donate=(0,), results=RULES["history"]))
        if self.config.swap:
            jobs += copy_jobs(mesh, pool)
        if self.config.compression:
            jobs += compaction_jobs(mesh, pool, sizes.pages_per_row)
        return jobs if self.encoder is None else jobs + self.encoder.jobs()

    def start(
        self,
        progress: Callable[[Executable, int, int], None] | None = None,
        compiled: Callable[[], None] = lambda: None,
    ) -> dict[Key, Executable]:
        """Compile, allocate the state, and run one step of padding. Returns the executables.

        Args:
            progress: see `compile_all`.
            compiled: called after compilation; waits for other processes.
        """
        self._executables = compile_all(self.jobs(), progress)
        compiled()
        if self.encoder is not None:
            self.encoder.use(self._executables)
        self.reset()
        smallest = self.config.buckets.decode[0]
        self.dispatch(StepPlan.padding(smallest)).read()
        return self._executables

    def reset(self) -> None:
        """Make new device state: at the start, and after a step raised, which loses the donated arrays."""
        self._do("reset", ())

    def _abstract_state(self):
        sizes, config, mesh = self.sizes, self.config, self.mesh

        def ints(*shape):
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        pool = abstract_pool(
            self._model,
            num_pages=config.num_pages,
            block_size=config.block_size,
            dtype=config.dtype,
            platform=mesh.devices.flat[0].platform,
            kv_cache_dtype=config.kv_cache_dtype,
        )
        return {
            "pool": placed(mesh, pool, "pool"),
            "tables": placed(mesh, ints(sizes.slots, sizes.pages_per_row)),
            "slots": placed(mesh, abstract_slots(sizes.slots)),
            "last_token": placed(mesh, ints(sizes.slots)),
            "history": placed(mesh, ints(sizes.slots, sizes.vocab_size), "history"),
        }

    # -- blocks -------------------------------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's payload; see runtime.blocks."""
        return payload_bytes(self._pool)

    def read_blocks(self, blocks: collections.abc.Sequence[int]) -> BlockCopy:
        """Start to copy blocks to the host, in their state after all steps dispatched so far. Returns at once."""
        parts = []
        for count, pages in split_blocks(blocks):
            words = self._executables["read", len(pages)](self._pool, pages)
            words.copy_to_host_async()
            parts.append((words, count))
        return BlockCopy(parts=tuple(parts))

    def write_blocks(self, blocks: collections.abc.Sequence[int], data: np.ndarray) -> None:
        """Start to write uint8 [blocks, block_bytes], before all steps dispatched later. Returns at once. Do not change
        `data` afterwards: JAX may alias it."""
        for pages, words in split_payloads(self._pool, blocks, data):
            self._pool = self._executables["write", len(pages)](self._pool, pages, words)

    def compact(
        self,
        source: collections.abc.Sequence[int],
        rows: int,
        keep: int,
        target: collections.abc.Sequence[int],
        *,
        sinks: int,
        window: int,
    ) -> None:
        """Start to move `keep` of the `rows` cache rows in blocks `source` to the beginning of blocks `target`, after
        all steps dispatched so far and before later ones. Returns at once. Each KV head of each layer selects its own
        rows; see kernels_pallas.kv_compaction. `target` may contain blocks of `source`.

        Raises:
            ValueError: see blocks.pack_compaction.
        """
        size = next(n for n in compaction_sizes(self.sizes.pages_per_row) if n >= len(source))
        block_size = self.config.block_size
        buffer = pack_compaction(size, block_size, source, rows, keep, target, sinks=sinks, window=window)
        self._do("compact", ("compact", size), buffer)

    # -- operations ---------------------------------------------------------------------------------------------------

    def _do(self, operation: str, key: Key, *buffers: np.ndarray) -> Any:
        """Run an operation in all processes."""
        if self.broadcast is not None:
            self.broadcast(operation, key, buffers)
        return self.do(operation, key, *buffers)

    def do(self, operation: str, key: Key, *buffers: np.ndarray) -> Any:
        """Run an operation in this process. Followers call it with what the front broadcasts."""
        return getattr(self, f"_do_{operation}")(key, *buffers)

    def _do_body(self, key: Key, packed: np.ndarray) -> jax.Array:
        features = () if self.encoder is None else self.encoder.features
        self._pool, self._tables, self._hidden, self._all_hidden = self._executables[key](
            self._weights.decoder.leaves, self._pool, self._tables, self._last_token, packed, features
        )
        return self._hidden

    def _do_head(self, key: Key, packed: np.ndarray) -> jax.Array:
        full = key[2] == "full"
        self._last_token, history, result = self._executables[key](
            self._weights.output_matrix,
            self._hidden,
            self._slots,
            self._last_token,
            self._history if full else (),
            packed,
        )
        if full:
            self._history = history
        return result

    def _do_score(self, key: Key, packed: np.ndarray) -> jax.Array:
        return self._executables[key](self._weights.output_matrix, self._all_hidden, packed)

    def _do_admit(self, key: Key, packed: np.ndarray) -> None:
        self._slots, self._tables = self._executables[key](self._slots, self._tables, packed)

    def _do_history(self, key: Key, packed: np.ndarray) -> None:
        self._history = self._executables[key](self._history, packed)

    def _do_compact(self, key: Key, packed: np.ndarray) -> None:
        self._pool = self._executables[key](self._pool, packed)

    def _do_reset(self, _: Key) -> None:
        # Free the old state first: there may be no room for both.
        for name in ("_pool", "_tables", "_slots", "_last_token", "_history", "_hidden", "_all_hidden"):
            setattr(self, name, None)
        if self.encoder is not None:
            self.encoder.reset()
        state = {name: zeros(shapes) for name, shapes in self._abstract_state().items()}
        self._pool, self._tables, self._last_token, self._history = (
            state[name] for name in ("pool", "tables", "last_token", "history")
        )
        slots = state["slots"]
        neutral = np.tile(np.asarray(NEUTRAL, np.float32), (self.sizes.slots, 1))
        self._slots = dataclasses.replace(slots, numbers=put(neutral, slots.numbers.sharding))

    # -- steps --------------------------------------------------------------------------------------------------------

    def dispatch(self, plan: StepPlan) -> StepResult:
        """Start a step and return at once. At most two steps may be in flight; see packing.Ring."""
        results = {operation: self._do(operation, key, buffer) for operation, key, buffer in self._packer.calls(plan)}
        sampled, scored = results.get("head"), results.get("score")
        for result in (sampled, scored):
            if result is not None:
                result.copy_to_host_async()
        dispatched = time.monotonic()
        return StepResult(plan=plan, sampled=sampled, scored=scored, anchor=results["body"], dispatched=dispatched)
