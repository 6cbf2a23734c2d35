"""The token budget of a step: its size, its division among sequences, and whether a slice of the vision tower may run
beside the step."""

import bisect
import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from omni_jax.cost.model import CostModel, StepShape, causal_pairs
from omni_jax.requests import Sequence
from omni_jax.scheduling.buckets import Buckets
from omni_jax.scheduling.discipline import Discipline, Rank

Shares = list[tuple[Sequence, int]]
Computable = Callable[[Sequence], int]  # number of tokens of a sequence that can be computed now
Admit = Callable[[Sequence], bool]  # tries to give a waiting sequence a slot and blocks; whether it got them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
    """How long the next step may take, so that its decoding sequences meet their objective.

    Attributes:
        cost: Predicts durations.
        seconds: Maximum duration of the step.
        buckets: Compiled sizes.
        rows: Number of decoding sequences, each with one token in the step.
        context: Number of tokens that they attend to.
    """

    cost: CostModel
    seconds: float
    buckets: Buckets
    rows: int
    context: int

    @property
    def at_least(self) -> int:
        """Number of prompt tokens that fit in any case: those that fill the smallest bucket. Without them a prompt
        would wait as long as others decode."""
        return next((size - self.rows for size in self.buckets.mixed if size > self.rows), 0)

    def predicted(self, tokens: int, context: int = 0, pairs: int = 0) -> float:
        """Duration of a step with `tokens` prompt tokens, which read `context` cached tokens in `pairs` query-key
        pairs."""
        shape = StepShape(
            kind="mixed",
            size=self.buckets.cover_mixed(self.rows + tokens),
            rows=self.rows + 1,
            tokens=self.rows + tokens,
            context=self.context + context,
            attended=self.context + pairs,
        )
        return self.cost.seconds(shape)

    def limit(self, tokens: int) -> int:
        """The most of `tokens` prompt tokens that may fit: the largest bucket that does before pairs are counted."""
        sizes = (min(size - self.rows, tokens) for size in self.buckets.mixed if size > self.rows)
        fitting = 0
        for size in sizes:
            if fitting and self.predicted(size) > self.seconds:
                break
            fitting = size
        return fitting


def pace(decoding: list[Sequence], *, seconds: float, buckets: Buckets, cost: CostModel | None) -> Pace | None:
    """The pace that decoding sequences set if they need a step of at most `seconds`; None if any step will do."""
    if cost is None or seconds == math.inf:
        return None
    context = sum(sequence.rows + 1 for sequence in decoding)
    return Pace(cost=cost, seconds=seconds, buckets=buckets, rows=len(decoding), context=context)


def divide(
    candidates: list[Sequence],
    left: int,
    *,
    computable: Computable,
    admit: Admit,
    discipline: Discipline,
    now: float,
    pace: Pace | None,
    in_chunks: bool = True,
) -> Shares:
    """Give tokens to the candidate that ranks first, as far as its tokens have that rank, then to the next one, as long
    as the step keeps the pace of the decoding sequences. If not `in_chunks`, a candidate gets all its tokens or none,
    and none behind it gets any."""
    shares: dict[Sequence, int] = {}
    added = _Added()
    heap = [(discipline.rank(sequence, now), i) for i, sequence in enumerate(candidates)]
    heapq.heapify(heap)
    while left > 0 and heap:
        _, i = heapq.heappop(heap)
        sequence = candidates[i]
        share = shares.get(sequence, 0)
        if not in_chunks and computable(sequence) - share > left:
            break
        if sequence.slot is None and not admit(sequence):
            continue
        start, whole = sequence.computed + share, computable(sequence) - share
        stop = discipline.next_rank_at(sequence, start)
        count = min(left, whole if stop is None else min(whole, stop - start))
        if pace is not None and (most := added.most(count, sequence.rows + share, new=not share, pace=pace)) < count:
            count = left = most  # the step is full
            if not count:
                break
        shares[sequence] = share + count
        added = added.with_tokens(count, sequence.rows + share, new=not share)
        left -= count
        if left > 0 and count < whole:
            heapq.heappush(heap, (discipline.rank(sequence, now, start + count), i))
    return list(shares.items())


class Ahead:
    """The tokens that use the budget before those of a candidate: as in `divide`, each sequence's as far as they rank
    before it."""

    def __init__(self, sequences: Iterable[Sequence], computable: Computable, discipline: Discipline, now: float):
        self._computable, self._discipline, self._now = computable, discipline, now
        self._heap: list[tuple[Rank, Sequence, int, int]] = []  # rank of the next token, its index, number of tokens
        for sequence in sequences:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """Add the tokens of a sequence that can be computed now."""
        rank = self._discipline.rank(sequence, self._now)
        heapq.heappush(self._heap, (rank, sequence, sequence.reached, self._computable(sequence)))

    def leave(self, left: int, rank: Rank) -> int:
        """What is left of a budget for a candidate of this rank, or 0. Tokens count once."""
        while left > 0 and self._heap and self._heap[0][0] < rank:
            _, sequence, start, whole = heapq.heappop(self._heap)
            stop = self._discipline.next_rank_at(sequence, start)
            count = whole if stop is None else min(whole, stop - start)
            left -= count
            if count < whole:
                start += count
                at = self._discipline.rank(sequence, self._now, start)
                heapq.heappush(self._heap, (at, sequence, start, whole - count))
        return left


class _Added(NamedTuple):
    """The prompt tokens that a step has so far, the cached tokens that they read, and their query-key pairs."""

    tokens: int = 0
    context: int = 0
    pairs: int = 0

    def with_tokens(self, count: int, start: int, *, new: bool) -> "_Added":
        """The same with `count` more tokens that follow `start` cached ones; `new` if their row is a new one."""
        read = count + (start if new else 0)
        return _Added(self.tokens + count, self.context + read, self.pairs + causal_pairs(count, start))

    def most(self, count: int, start: int, *, new: bool, pace: Pace) -> int:
        """The most of `count` more tokens with which the step keeps the pace, or as many as fill a smaller bucket where
        that computes more tokens per second."""

        def seconds(more: int) -> float:
            then = self.with_tokens(more, start, new=new)
            return pace.predicted(then.tokens, then.context, then.pairs)

        if seconds(count) <= pace.seconds:
            return count
        fitting = bisect.bisect_left(range(1, count), True, key=lambda more: seconds(more) > pace.seconds)
        least = min(count, pace.at_least - self.tokens)
        if fitting <= least:
            return max(least, 0)
        done = pace.rows + self.tokens
        full = max((size - done for size in pace.buckets.mixed if size < done + fitting), default=0)
        if full > 0 and (self.tokens + full) / seconds(full) > (self.tokens + fitting) / seconds(fitting):
            return full
        return fitting


def slice_fits(
    decoding: Iterable[Sequence], awaiting: Iterable[Sequence], *, until: float, discipline: Discipline, now: float
) -> bool:
    """Whether a slice of the vision tower may keep the device busy until `until`.

    It may not while a sequence decodes that ranks before all sequences that wait for images and whose next token would
    be late. A sequence that decodes faster than its objective soon has the lead that a slice takes, and a sequence that
    waits rises by aging, so no image is delayed for ever.
    """
    late = [sequence for sequence in decoding if discipline.due(sequence) < until]
    if not late:
        return True
    first = min(discipline.rank(sequence, now) for sequence in late)
    return any(discipline.rank(sequence, now) < first for sequence in awaiting)
