"""The plan of a step: which rows it computes, and what the device must be told before. Plain data: numbers, strings,
tuples and arrays, so that it can be recorded, and read by a process that has no queues."""

import dataclasses
from typing import NamedTuple

import numpy as np

from omni_jax.cost.model import StepShape


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SlotWrite:
    """What to write into a slot before the step: its sampling state and its whole block table.

    Attributes:
        slot: The slot.
        new: The slot is new to its sequence. Otherwise compression moved the sequence to other blocks.
        blocks: Its blocks, in order.
        seed, choice: The random key: the request's seed and the index of the continuation.
        greedy: The most likely token is taken.
        penalised: Logits are changed before sampling.
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: See SamplingParams.
        logit_bias: (token id, bias) pairs.
        stop_ids: The token ids that are suppressed while the plan says so; see StepPlan.suppressed.
        num_prompt: Number of prompt tokens.
        known: All its token ids if it is new and penalised; otherwise none are needed.
    """

    slot: int
    new: bool
    blocks: tuple[int, ...]
    seed: int = 0
    choice: int = 0
    greedy: bool = True
    penalised: bool = False
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_ids: tuple[int, ...] = ()
    num_prompt: int = 0
    known: np.ndarray | None = None


class NewBlock(NamedTuple):
    """An entry to add to a slot's block table."""

    slot: int
    index: int
    block: int


class Score(NamedTuple):
    """A row whose tokens' next tokens get logprobs. `targets` are those next tokens, as far as the prompt has them."""

    row: int
    targets: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MediaInputs:
    """What a model that reads images needs besides the tokens. A place is an index in `StepPlan.tokens`.

    Attributes:
        shifts: Column: a token's rotary position minus its index in the sequence, where `positions` has none.
        positions: (place of the first token, int32 [3, tokens]): rotary positions (time, height, width) of prompts.
        features: (place of the first token, rows of the feature array): one for each image in a row.
    """

    shifts: np.ndarray
    positions: tuple[tuple[int, np.ndarray], ...]
    features: tuple[tuple[int, np.ndarray], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """The rows of one step: a row is a stretch of one sequence, and each sequence has at most one.

    A *column* has one entry for each row. What only few rows need is in tuples beside the columns; they name a row by
    its index.

    Attributes:
        number: Number of the plan in its scheduler.
        decode: Each row has one token, and none is scored.
        size: The bucket: number of rows of a decode step, number of tokens of any other.
        request_ids: Column: id of the request.
        orders: Column: (arrival number of the request, index of the continuation), which names the sequence.
        slots: Column: index of the sequence's state on the device.
        starts: Column: index of the row's first token in its sequence.
        counts: Column: number of tokens.
        dropped: Column: number of cache rows that compression dropped: token i is in cache row i - dropped.
        samples: Column: the row ends at the last token, so the next token is sampled.
        tokens: Token ids of the first row, then of the second, and so on. The token that the step before sampled in
            slot s is still on the device, and stands here as -s - 1.
        slot_writes: State to write into slots before anything else.
        new_blocks: Blocks that are not in the device's block table yet, except those in `slot_writes`.
        suppressed: Rows whose sampled token must not be a stop id, because of min_tokens.
        forced: (row, the token to take instead of a sampled one).
        scores: Rows of which prompt logprobs are computed.
        media: For a model that reads images.
    """

    number: int
    decode: bool
    size: int
    request_ids: tuple[str, ...]
    orders: tuple[tuple[int, int], ...]
    slots: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    dropped: np.ndarray
    samples: np.ndarray
    tokens: np.ndarray
    slot_writes: tuple[SlotWrite, ...] = ()
    new_blocks: tuple[NewBlock, ...] = ()
    suppressed: tuple[int, ...] = ()
    forced: tuple[tuple[int, int], ...] = ()
    scores: tuple[Score, ...] = ()
    media: MediaInputs | None = None

    @classmethod
    def padding(cls, size: int) -> "StepPlan":
        """A decode step without rows."""
        none = np.zeros(0, np.int32)
        return cls(
            number=0,
            decode=True,
            size=size,
            request_ids=(),
            orders=(),
            slots=none,
            starts=none,
            counts=none,
            dropped=none,
            samples=none > 0,
            tokens=none,
        )

    @property
    def num_rows(self) -> int:
        return len(self.request_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_sampled(self) -> int:
        return int(self.samples.sum())

    @property
    def stops(self) -> np.ndarray:
        """Column: the index after the row's last token in its sequence."""
        return self.starts + self.counts

    @property
    def shape(self) -> StepShape:
        """What its cost depends on."""
        counts = self.counts.astype(np.int64)
        before = self.starts - self.dropped
        return StepShape(
            kind="decode" if self.decode else "mixed",
            size=self.size,
            rows=self.num_rows,
            tokens=self.num_tokens,
            context=int((before + counts).sum()),
            attended=int((counts * before + counts * (counts + 1) // 2).sum()),  # cost.model.causal_pairs
        )

    @property
    def rows(self) -> tuple["Row", ...]:
        """The rows one by one, made at each call: for those who look at few steps, or have time."""
        writes = {write.slot: write for write in self.slot_writes}
        scores = {score.row: score.targets for score in self.scores}
        columns = (self.slots, self.starts, self.counts, self.dropped, self.samples)
        rows, place = [], 0
        for index, values in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            slot, start, count, dropped, sample = values
            rows.append(
                Row(
                    request_id=self.request_ids[index],
                    order=self.orders[index],
                    slot=slot,
                    start=start,
                    count=count,
                    dropped=dropped,
                    sample=sample,
                    place=place,
                    tokens=self.tokens[place : place + count],
                    write=writes.get(slot),
                    targets=scores.get(index),
                )
            )
            place += count
        return tuple(rows)


class Row(NamedTuple):
    """A row of a StepPlan; see there.

    Attributes:
        place: Index of its first token in the step's tokens.
        write: What is written into its slot.
        targets: The tokens whose logprobs are computed; None if the row is not scored.
    """

    request_id: str
    order: tuple[int, int]
    slot: int
    start: int
    count: int
    dropped: int
    sample: bool
    place: int
    tokens: np.ndarray
    write: SlotWrite | None
    targets: tuple[int, ...] | None

    @property
    def name(self) -> str:
        """Name for logs: request id[index of the continuation]."""
        return f"{self.request_id}[{self.order[1]}]"

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def feedback(self) -> bool:
        """Its only token was sampled by the step before and is still on the device."""
        return bool(self.tokens[0] < 0)

    @property
    def admit(self) -> bool:
        """The slot is new to the sequence."""
        return self.write is not None and self.write.new
