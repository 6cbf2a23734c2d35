"""The token budget of a step: its size, its division among sequences, and whether a slice of the vision tower may run
beside the step."""

import heapq
import math
from collections.abc import Callable, Iterable

from omni_jax.cost import CostModel, StepShape
from omni_jax.requests import Sequence
from omni_jax.scheduling.buckets import Buckets
from omni_jax.scheduling.discipline import Rank, deadline

Shares = list[tuple[Sequence, int]]
Computable = Callable[[Sequence], int]  # number of tokens of a sequence that can be computed now
Admit = Callable[[Sequence], bool]  # tries to give a waiting sequence a slot and blocks; whether it got them


def token_limit(
    decoding: list[Sequence], *, limit: int, seconds: float, buckets: Buckets, cost: CostModel | None
) -> int:
    """Maximum number of tokens of the next step.

    It is the largest compiled size whose predicted time is at most `seconds`, so that the decoding sequences meet their
    objective, but always leaves room for some prompt tokens.

    Args:
        decoding: Sequences with one token in the step.
        limit: Maximum number of tokens of any step.
        seconds: Maximum duration of the step.
        buckets: Compiled sizes.
        cost: Predicts durations; without it the result is `limit`.
    """
    if cost is None or seconds == math.inf:
        return limit
    context = sum(sequence.rows + 1 for sequence in decoding)
    fitting = len(decoding)
    for size in buckets.mixed:
        if size <= len(decoding):
            continue
        tokens = min(size, limit)
        shape = StepShape(
            kind="mixed", size=size, rows=len(decoding) + 1, tokens=tokens, context=context, attended=context
        )
        if fitting > len(decoding) and cost.seconds(shape) > seconds:
            break
        fitting = tokens
    return fitting


def by_arrival(
    candidates: list[Sequence], left: int, *, computable: Computable, admit: Admit, in_chunks: bool
) -> Shares:
    """Give each candidate in turn all the tokens it can use, until none are left or the next one gets no slot."""
    shares = []
    for sequence in candidates:
        if left <= 0 or (not in_chunks and computable(sequence) > left):
            break
        if sequence.slot is None and not admit(sequence):
            break
        shares.append((sequence, min(computable(sequence), left)))
        left -= shares[-1][1]
    return shares


def by_deadline(
    candidates: list[Sequence],
    left: int,
    *,
    computable: Computable,
    admit: Admit,
    rank: Callable[[Sequence], Rank],
) -> Shares:
    """Give tokens to the most urgent segment up to its end, then to the next most urgent one."""
    shares: dict[Sequence, int] = {}
    heap = [(rank(sequence), i) for i, sequence in enumerate(candidates)]
    heapq.heapify(heap)
    while left > 0 and heap:
        ranked, i = heapq.heappop(heap)
        sequence = candidates[i]
        if sequence.slot is None and not admit(sequence):
            continue
        share = shares.get(sequence, 0)
        segment = sequence.segment_at(sequence.computed + share)
        whole = computable(sequence) - share
        count = min(left, whole if segment is None else min(whole, segment.stop - sequence.computed - share))
        shares[sequence] = share + count
        left -= count
        following = sequence.segment_at(sequence.computed + share + count)
        if count < whole and following is not None and segment is not None:
            aged = ranked[0] - segment.priority
            heapq.heappush(heap, ((aged + following.priority, following.deadline, sequence.order), i))
        elif count < whole:
            heapq.heappush(heap, (ranked, i))  # output to recompute follows the prompt
    return list(shares.items())


def slice_fits(
    decoding: Iterable[Sequence], awaiting: Iterable[Sequence], *, until: float, rank: Callable[[Sequence], Rank]
) -> bool:
    """Whether a slice of the vision tower may keep the device busy until `until`.

    It may not while a sequence decodes that ranks before all sequences that wait for images and whose next token would
    be late. A sequence that decodes faster than its objective soon has the lead that a slice takes, and a sequence that
    waits rises by aging, so no image is delayed for ever.
    """
    late = [sequence for sequence in decoding if deadline(sequence) < until]
    if not late:
        return True
    first = min(map(rank, late))
    return any(rank(sequence) < first for sequence in awaiting)
