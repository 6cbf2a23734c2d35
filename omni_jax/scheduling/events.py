"""What a person who watches the scheduler wants to know."""

import dataclasses
from typing import Literal

from omni_jax.requests import Sequence

Cause = Literal["budget", "blocks", "class", "turn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something happened to a sequence.

    Attributes:
        kind: it lost its turn (pause) or got it back (resume), or it lost its slot or blocks (preempt).
        sequence: whose.
        cause: more urgent segments took the budget; somebody who decodes needed blocks; somebody of a more urgent class
            came; its turn has come.
        by: on whose account, as request[index], where there is one.
        blocks: how many it lost.
        swapped: they went to the host, and come back; else they are computed again.
    """

    kind: Literal["pause", "resume", "preempt"]
    sequence: Sequence
    cause: Cause
    by: str = ""
    blocks: int = 0
    swapped: bool = False

    @property
    def reason(self) -> str:
        """In words."""
        return {
            "budget": "more urgent segments took the budget",
            "blocks": f"its blocks were needed by {self.by}, which decodes",
            "class": f"{self.by} is of a more urgent class",
            "turn": "its turn has come",
        }[self.cause]


def name(sequence: Sequence) -> str:
    """A sequence as logs call it."""
    return f"{sequence.request.id}[{sequence.index}]"
