"""Events of the scheduler, for logs and metrics."""

import dataclasses
from typing import Literal

from omni_jax.requests import Sequence

Cause = Literal["budget", "blocks", "class", "turn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """A sequence was paused, resumed or preempted.

    Attributes:
        kind: "pause" if it got no tokens of a step, "resume" if it gets some again, "preempt" if it lost its slot or
            blocks.
        sequence: The sequence.
        cause: "budget" if more urgent segments used the budget, "blocks" if a decoding sequence needed its blocks,
            "class" if a sequence of a more urgent class came, "turn" if it is resumed.
        by: Name of the sequence that caused it, as request[index], if there is one.
        blocks: Number of blocks that it lost.
        swapped: Whether they were swapped out; otherwise they must be recomputed.
    """

    kind: Literal["pause", "resume", "preempt"]
    sequence: Sequence
    cause: Cause
    by: str = ""
    blocks: int = 0
    swapped: bool = False

    @property
    def reason(self) -> str:
        """The cause as a sentence for logs."""
        return {
            "budget": "more urgent segments used the token budget",
            "blocks": f"{self.by} needed its blocks to decode",
            "class": f"{self.by} is of a more urgent class",
            "turn": "the token budget reached it",
        }[self.cause]
