"""In which order sequences are served, and how long a step may take: first come, first served; or by class and
deadline. Pure: time comes in with every call."""

import dataclasses
import math
from collections.abc import Iterable

from omni_jax.requests import Sequence
from omni_jax.segments import decode_deadline

Rank = tuple[float, float, tuple[int, int]]  # class, deadline, order of arrival; smaller is served first


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstCome:
    """Arrival order, whatever the class or the deadline."""

    by_deadline = False

    def rank(self, sequence: Sequence, now: float) -> Rank:
        """Where a sequence stands; smaller is served first."""
        return (0, 0.0, sequence.order)

    def standing(self, sequence: Sequence) -> float:
        """Where a sequence stands where two could take something from each other in turn; before ties, see SLOFirst."""
        return 0.0

    def step_seconds(self, decoding: Iterable[Sequence], now: float) -> float:
        """How long the next step may take."""
        return math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class SLOFirst:
    """By class, then by the deadline of the segment that comes next, then by arrival.

    A sequence that has not been served for `aging_seconds` moves up by a class, and by another after as long again. So
    one of class c stands before all of class b that were served within the last aging_seconds once it has waited for
    (c - b + 1) * aging_seconds, whatever their deadlines; it then gets the next slot and blocks that become free, and
    keeps them: nobody starves.

    Attributes:
        aging_seconds: see above.
    """

    aging_seconds: float = 10.0
    by_deadline = True

    def __post_init__(self):
        if not 0 < self.aging_seconds < math.inf:
            raise ValueError(f"aging_seconds must be a positive number, got {self.aging_seconds}")

    def rank(self, sequence: Sequence, now: float) -> Rank:
        """Where a sequence stands; smaller is served first."""
        raised = (now - sequence.served_at) // self.aging_seconds
        return (sequence.priority - raised, deadline(sequence), sequence.order)

    def standing(self, sequence: Sequence) -> float:
        """Where a sequence stands where two could take something from each other in turn: by class, which falls evenly
        with the time since it was served. As time goes by, the order of two that wait stays what it is; by rank,
        whoever has just risen by a class would come first, now one and now the other."""
        return sequence.priority + sequence.served_at / self.aging_seconds

    def step_seconds(self, decoding: Iterable[Sequence], now: float) -> float:
        """How long the next step may take for every decoding sequence to keep its pace: until the first of their next
        tokens is due, and never less than a whole interval. One that is ahead of its pace lends its lead; one that is
        behind is not helped by steps shorter than what it asked for."""
        allowed = math.inf
        for sequence in decoding:
            slo = sequence.request.slo
            if slo is None or slo.tpot_ms is None:
                continue
            interval = slo.tpot_ms / 1000
            if allowed <= interval:
                continue
            left = deadline(sequence) - now
            if left < allowed:
                allowed = left if left > interval else interval
        return allowed


Discipline = FirstCome | SLOFirst


def deadline(sequence: Sequence) -> float:
    """When what a sequence computes next is due: the segment of its prompt it is in, or its next token."""
    request = sequence.request
    if sequence.computed < sequence.num_prompt:  # a step asks this of each sequence: it is written to be quick
        segment = sequence.segment
        return math.inf if segment is None else segment.deadline
    if request.slo is None or sequence.first_token_at is None:
        return math.inf
    tokens_out = len(sequence.known) - sequence.num_prompt + sequence.pending
    return decode_deadline(request.slo, request.arrival, sequence.first_token_at, tokens_out)
