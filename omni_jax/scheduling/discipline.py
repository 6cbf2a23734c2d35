"""Disciplines: the order of service, and the maximum duration of a step. First come, first served; or by class and
deadline. Pure functions of the time passed in."""

import dataclasses
import math
from collections.abc import Iterable

from omni_jax.requests import Sequence
from omni_jax.segments.deadlines import decode_deadline

Rank = tuple[float, float, tuple[int, int]]  # class, deadline, order of arrival; smaller is served first

TICKS = 64  # parts of aging_seconds in which waiting times are counted


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstCome:
    """Order of arrival, regardless of class and deadline."""

    by_deadline = False

    def cohort(self, sequence: Sequence) -> int:
        """The cohort of a sequence, see SLOFirst. Here there is one."""
        return 0

    def level(self, cohort: int, now: float) -> int:
        """The class of a cohort at a time."""
        return 0

    def due(self, sequence: Sequence) -> float:
        """What orders the sequences of a class, before their arrival."""
        return 0.0

    def rank(self, sequence: Sequence, now: float) -> Rank:
        """The rank of a sequence; smaller is served first."""
        return (0, 0.0, sequence.order)

    def step_seconds(self, decoding: Iterable[Sequence], now: float) -> float:
        """Maximum duration of the next step in seconds."""
        return math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class SLOFirst:
    """By class, then by the deadline of the next segment, then by arrival.

    A sequence that was not served for `aging_seconds` rises by one class, and by another after as long again. So once a
    sequence of class c has waited for (c - b + 1) * aging_seconds, it ranks before all sequences of class b that were
    served within the last aging_seconds, whatever their deadlines. It then gets the next free slot and blocks and keeps
    them, so no sequence starves.

    Times are counted in ticks, TICKS of them in aging_seconds, so a sequence may rise one tick early. Sequences form
    cohorts: a class that was served a period later counts as much as a more urgent class that was served now, so
    cohort = TICKS * class + tick of the last service. All sequences of a cohort rise at the same time, and up to TICKS
    neighbouring cohorts have the same class at a time. So a queue by cohorts stays in order while time passes.

    Attributes:
        aging_seconds: Waiting time that raises a sequence by one class.
    """

    aging_seconds: float = 10.0
    by_deadline = True

    def __post_init__(self):
        if not 0 < self.aging_seconds < math.inf:
            raise ValueError(f"aging_seconds must be a positive number of seconds, got {self.aging_seconds}")

    def cohort(self, sequence: Sequence) -> int:
        """The cohort of a sequence. It does not change while the sequence waits."""
        return TICKS * sequence.priority + self._tick(sequence.served_at)

    def level(self, cohort: int, now: float) -> int:
        """The class of a cohort at a time, aging included: its class - (tick of now - tick of its service) // TICKS."""
        return -((self._tick(now) - cohort) // TICKS)

    def due(self, sequence: Sequence) -> float:
        """What orders the sequences of a class, before their arrival."""
        return deadline(sequence)

    def rank(self, sequence: Sequence, now: float) -> Rank:
        """The rank of a sequence; smaller is served first."""
        return (self.level(self.cohort(sequence), now), deadline(sequence), sequence.order)

    def _tick(self, seconds: float) -> int:
        return math.floor(seconds * TICKS / self.aging_seconds)

    def step_seconds(self, decoding: Iterable[Sequence], now: float) -> float:
        """Maximum duration of the next step in seconds, so that every decoding sequence keeps its pace.

        The step may last until the first of their next tokens is due, but at least one whole interval. It may be longer
        if all sequences are ahead of their pace; steps shorter than an interval would not help one that is late.
        """
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
    """When the next tokens of a sequence are due: its current segment's deadline, or its next output token's."""
    request = sequence.request
    if sequence.computed < sequence.num_prompt:  # called for each sequence in each step, so it must be fast
        segment = sequence.segment
        return math.inf if segment is None else segment.deadline
    if request.slo is None or sequence.first_token_at is None:
        return math.inf
    tokens_out = len(sequence.known) - sequence.num_prompt + sequence.pending
    return decode_deadline(request.slo, request.arrival, sequence.first_token_at, tokens_out)
