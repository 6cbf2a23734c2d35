"""Disciplines: the order of service, and the maximum duration of a step. Pure functions of the time passed in.

The scheduler knows one order of service, by rank: class, deadline, arrival. First come, first served is the discipline
whose ranks differ in the arrival only.
"""

import dataclasses
import math
from collections.abc import Iterable

from omni_jax.requests import Sequence
from omni_jax.segments.deadlines import decode_deadline

Rank = tuple[float, float, tuple[int, int]]  # class, deadline, order of arrival; smaller is served first

TICKS = 64  # parts of aging_seconds in which waiting times are counted


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstCome:
    """Order of arrival: all sequences are of one class, and none has a deadline."""

    def priority(self, sequence: Sequence) -> int:
        """The class of a sequence, without aging; smaller is more urgent."""
        return 0

    def cohort(self, sequence: Sequence) -> int:
        """The cohort of a sequence, see SLOFirst. Here there is one."""
        return 0

    def level(self, cohort: int, now: float) -> int:
        """The class of a cohort at a time."""
        return 0

    def due(self, sequence: Sequence) -> float:
        """The deadline of a sequence, which orders those of a class."""
        return math.inf

    def rank(self, sequence: Sequence, now: float, at: int | None = None) -> Rank:
        """The rank of a sequence, or of its token `at`; smaller is served first."""
        return (0, math.inf, sequence.order)

    def next_rank_at(self, sequence: Sequence, at: int) -> int | None:
        """The first token after token `at` of a sequence that has another rank; None if there is none."""
        return None

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

    def __post_init__(self):
        if not 0 < self.aging_seconds < math.inf:
            raise ValueError(f"aging_seconds must be a positive number of seconds, got {self.aging_seconds}")

    def priority(self, sequence: Sequence) -> int:
        """The class of a sequence, without aging; smaller is more urgent."""
        return sequence.priority

    def cohort(self, sequence: Sequence) -> int:
        """The cohort of a sequence. It does not change while the sequence waits."""
        return TICKS * sequence.priority + self._tick(sequence.served_at)

    def level(self, cohort: int, now: float) -> int:
        """The class of a cohort at a time, aging included: its class - (tick of now - tick of its service) // TICKS."""
        return -((self._tick(now) - cohort) // TICKS)

    def due(self, sequence: Sequence) -> float:
        """The deadline of a sequence, which orders those of a class."""
        return deadline(sequence)

    def rank(self, sequence: Sequence, now: float, at: int | None = None) -> Rank:
        """The rank of a sequence, or of its prompt token `at`; smaller is served first."""
        if at is None or (segment := sequence.segment_at(at)) is None:
            return (self.level(self.cohort(sequence), now), deadline(sequence), sequence.order)
        cohort = TICKS * segment.priority + self._tick(sequence.served_at)
        return (self.level(cohort, now), segment.deadline, sequence.order)

    def next_rank_at(self, sequence: Sequence, at: int) -> int | None:
        """The first token after token `at` of a sequence that has another rank; None if there is none."""
        segment = sequence.segment_at(at)  # output to recompute has the rank of the last segment
        return None if segment is None or segment.stop >= sequence.num_prompt else segment.stop

    def _tick(self, seconds: float) -> int:
        return math.floor(seconds * TICKS / self.aging_seconds)

    def step_seconds(self, decoding: Iterable[Sequence], now: float) -> float:
        """Maximum duration of the next step in seconds, so that every decoding sequence keeps its pace.

        The step may last until the first of their next tokens is due, but at least one whole interval. It may be longer
        if all sequences are ahead of their pace; steps shorter than an interval would not help one that is late. While
        the first token of a sequence is in flight, its second one is due an interval later.
        """
        allowed = math.inf
        for sequence in decoding:
            slo = sequence.request.slo
            if slo is None or slo.tpot_ms is None:
                continue
            interval = slo.tpot_ms / 1000
            if allowed <= interval:
                continue
            first_in_flight = sequence.first_token_at is None and sequence.computed >= sequence.num_prompt
            left = interval if first_in_flight else deadline(sequence) - now
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
    tokens_out = len(sequence.output) + sequence.pending
    return decode_deadline(request.slo, request.arrival, sequence.first_token_at, tokens_out)
