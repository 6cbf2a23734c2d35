"""The plan of a step: which rows it computes. Plain host data."""

import dataclasses

import numpy as np

from omni_jax.cost.model import StepShape, causal_pairs
from omni_jax.requests import Sequence


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Row:
    """A stretch of one sequence in one step.

    It is never changed; it is not frozen because that doubles the time to make one, and a step makes one per sequence.

    Attributes:
        sequence: The sequence.
        slot: Index of its sampling state on the device.
        start: Index of the first token.
        count: Number of tokens.
        feedback: The only token was sampled by the step before and is still on the device.
        sample: The row ends at the last token, so the next token is sampled.
        score: Logprobs are computed for the prompt tokens in the row.
        admit: The slot is new to the sequence: its sampling state and block table are written first.
        moved: Compression moved the sequence to other blocks: its whole block table is rewritten.
        first_new_block: Index of the first of `new_blocks` in the block table.
        new_blocks: Blocks that are not in the device's block table yet.
        dropped: Number of cache rows that compression dropped: position p is in cache row p - dropped.
        features: (offset in the row, rows of the feature array) of each image in the row.
    """

    sequence: Sequence
    slot: int
    start: int
    count: int
    feedback: bool
    sample: bool
    score: bool
    admit: bool
    first_new_block: int
    new_blocks: tuple[int, ...]
    moved: bool = False
    dropped: int = 0
    features: tuple[tuple[int, np.ndarray], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The rows of one step.

    Attributes:
        rows: At most one per sequence, in any order.
        decode: Each row has one token, and none is scored.
        size: The bucket: number of rows of a decode step, number of tokens of any other.
    """

    rows: tuple[Row, ...]
    decode: bool
    size: int

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def shape(self) -> StepShape:
        """What its cost depends on."""
        return StepShape(
            kind="decode" if self.decode else "mixed",
            size=self.size,
            rows=len(self.rows),
            tokens=self.num_tokens,
            context=sum(row.start + row.count - row.dropped for row in self.rows),
            attended=sum(causal_pairs(row.count, row.start - row.dropped) for row in self.rows),
        )

    @property
    def num_sampled(self) -> int:
        return sum(row.sample for row in self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accepted:
    """A row whose result was committed.

    Attributes:
        row: The row.
        token: The token that its sequence gained, if it sampled one.
        index: Index of the row in the plan.
    """

    row: Row
    token: int | None
    index: int
