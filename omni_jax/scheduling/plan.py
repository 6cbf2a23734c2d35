"""What the next step computes: plain data of the host."""

import dataclasses

import numpy as np

from omni_jax.cost import StepShape, causal_pairs
from omni_jax.requests import Sequence


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Row:
    """A stretch of one sequence in one step. Nobody changes one; it is not frozen because making a frozen one takes
    twice as long, and a step makes one for each sequence.

    Attributes:
        sequence: whose tokens.
        slot: its row of sampling state on the device.
        start: position of the first token.
        count: tokens.
        feedback: the (only) token was sampled by the step before and is still on the device.
        sample: the stretch reaches the end of what there is, so that a next token is sampled.
        score: prompt positions in the stretch get logprobs.
        admit: the slot is new to the sequence: its sampling state and whole block table are written first.
        moved: compression has put the sequence into other blocks: its whole block table is written anew.
        first_new_block: where in the block table the new blocks stand.
        new_blocks: blocks that the device's block table does not have yet.
        dropped: rows that its cache has lost: the token at position p lies in cache row p - dropped.
        features: (place in the row, rows of the feature array) of each image the stretch touches.
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
    """Rows of one step.

    Attributes:
        rows: at most one a sequence; rows that sample may stand anywhere.
        decode: every row has one token, and none is scored.
        size: the bucket: rows of a decode step, tokens of any other.
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
    """What commit made of one row.

    Attributes:
        row: the row.
        token: the token its sequence has gained, if it sampled one.
        index: the row's place in the plan.
    """

    row: Row
    token: int | None
    index: int
