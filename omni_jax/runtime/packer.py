"""Turns a step plan into the calls of a step: the operation, the executable's key, and its packed input."""

from collections.abc import Iterator

import numpy as np

from omni_jax.runtime.executables import Key
from omni_jax.runtime.functions import VARIANTS, StepSizes
from omni_jax.runtime.packing import Layout, Ring
from omni_jax.scheduling.buckets import Buckets
from omni_jax.scheduling.plan import MediaInputs, SlotWrite, StepPlan

Call = tuple[str, Key, np.ndarray]  # operation, key of the executable, packed input
GREEDY, SAMPLE, FULL = range(len(VARIANTS))


class Packer:
    """Packs plans. Columns of a plan become fields of a buffer by whole-array assignments, because a step has hundreds
    of rows; only the rare things are handled one by one.

    Attributes:
        sizes: Sizes of the executables.
        buckets: Compiled sizes.
    """

    def __init__(self, sizes: StepSizes, buckets: Buckets):
        self.sizes, self.buckets = sizes, buckets
        self._pad_slot = sizes.slots - 1
        self._rings: dict[Key, Ring] = {}
        self._variants = np.zeros(sizes.slots, np.int8)  # by slot, the head that its sequence needs, as VARIANTS' index

    def calls(self, plan: StepPlan) -> Iterator[Call]:
        """The calls of a step, in order. Each is packed when the iterator reaches it, so that the device works on the
        one before."""
        for write in plan.slot_writes:
            yield "admit", ("admit",), self._slot(write)
            if write.known is not None:
                yield "history", ("history",), self._history(write)
        yield self.body(plan)
        if plan.samples.any():
            yield self.head(plan)
        if plan.scores:
            yield self.score(plan)

    def body(self, plan: StepPlan) -> Call:
        key: Key = ("decode" if plan.decode else "mixed", plan.size)
        width = plan.size if plan.decode else self.sizes.rows
        buffer, field = self._take(key, lambda: self.sizes.body_layout(plan.size, width))
        _fill(field["row_slot"], plan.slots, self._pad_slot)
        _fill(field["kv_len"], plan.stops - plan.dropped, 1)
        _fill(field["dropped"], plan.dropped, 0)
        _fill(field["tokens"], plan.tokens, 0)
        ends = np.cumsum(plan.counts)
        query_start = field["query_start"]
        query_start[0] = 0
        if plan.decode:  # padding rows have a token, too
            query_start[1:] = np.arange(1, width + 1)
        else:
            _fill(query_start[1:], ends, plan.num_tokens)
        _fill(field["sample_at"], ends[plan.samples] - 1, 0)
        new_blocks = np.array(plan.new_blocks, np.int32).reshape(-1, 3)
        padding = (self._pad_slot, 0, 0)
        for name, column, pad in zip(("slot", "index", "block"), new_blocks.T, padding, strict=True):
            _fill(field[f"update_{name}"], column, pad)
        if self.sizes.reads_media:
            _pack_media(plan, field["rotary"], field["feature_row"])
        return "body", key, buffer

    def head(self, plan: StepPlan) -> Call:
        samples, suppress, forced = plan.samples, np.zeros(plan.num_rows, np.int32), np.full(plan.num_rows, -1)
        suppress[list(plan.suppressed)] = 1
        for row, token in plan.forced:
            forced[row] = token
        slots = plan.slots[samples]
        variant = VARIANTS[self._variants[slots].max()]
        cover = self.buckets.cover_decode if variant == "greedy" else self.buckets.cover_sampled
        size = cover(len(slots))
        key: Key = ("head", size, variant)
        buffer, field = self._take(key, lambda: self.sizes.head_layout(size))
        _fill(field["slot"], slots, self._pad_slot)
        _fill(field["position"], plan.stops[samples], 0)
        _fill(field["suppress"], suppress[samples], 0)
        _fill(field["forced"], forced[samples], -1)
        return "head", key, buffer

    def score(self, plan: StepPlan) -> Call:
        key: Key = ("score", plan.size)
        buffer, field = self._take(key, lambda: self.sizes.score_layout(plan.size))
        targets, ends = field["targets"], np.cumsum(plan.counts)
        targets[:] = 0
        for score in plan.scores:
            place = ends[score.row] - plan.counts[score.row]
            targets[place : place + len(score.targets)] = score.targets
        return "score", key, buffer

    def _slot(self, write: SlotWrite) -> np.ndarray:
        """A slot's sampling state and its whole block table."""
        self._variants[write.slot] = FULL if write.penalised else GREEDY if write.greedy else SAMPLE
        buffer, field = self.sizes.admit_layout().fresh()
        vocab = self.sizes.vocab_size
        seed = write.seed & (2**64 - 1)
        field["slot"][...] = write.slot
        field["seed"][:] = (seed >> 32, seed & 0xFFFFFFFF)
        field["choice"][...] = write.choice
        field["numbers"][:] = numbers(write)
        field["top_k"][...] = max(write.top_k, 0) if write.top_k < vocab else 0
        _fill(field["bias_ids"], [token for token, _ in write.logit_bias], vocab)
        _fill(field["bias_values"], [bias for _, bias in write.logit_bias], 0.0)
        _fill(field["stop_ids"], write.stop_ids, vocab)
        _fill(field["blocks"], write.blocks, 0)
        return buffer

    def _history(self, write: SlotWrite) -> np.ndarray:
        assert write.known is not None
        buffer, field = self.sizes.history_layout().fresh()
        field["slot"][...] = write.slot
        field["prompt"][...] = write.num_prompt
        field["known"][...] = len(write.known)
        _fill(field["tokens"], write.known, 0)
        return buffer

    def _take(self, key: Key, layout) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        if key not in self._rings:
            made: Layout = layout()
            self._rings[key] = Ring(made)
        return self._rings[key].take()


def numbers(write: SlotWrite) -> tuple[float, ...]:
    """A row of SlotState.numbers, in the order of state.TEMPERATURE and the names after it."""
    return (
        0.0 if write.greedy else write.temperature,  # top_p 0 is greedy, too
        write.top_p,
        write.min_p,
        write.repetition_penalty,
        write.presence_penalty,
        write.frequency_penalty,
    )


def _pack_media(plan: StepPlan, rotary: np.ndarray, feature_row: np.ndarray) -> None:
    """Fill a step's rotary positions [3, tokens] and rows of the feature array [tokens]."""
    media = plan.media or MediaInputs(shifts=np.zeros(plan.num_rows, np.int32), positions=(), features=())
    first = np.cumsum(plan.counts) - plan.counts  # place of each row's first token
    from_place = np.repeat(plan.starts - first + media.shifts, plan.counts)
    rotary[:, : plan.num_tokens] = np.arange(plan.num_tokens) + from_place
    rotary[:, plan.num_tokens :] = 0
    for place, positions in media.positions:
        rotary[:, place : place + positions.shape[1]] = positions
    feature_row[:] = 0
    for place, rows in media.features:
        feature_row[place : place + len(rows)] = rows


def _fill(field: np.ndarray, values, padding) -> None:
    field[: len(values)] = values
    field[len(values) :] = padding
