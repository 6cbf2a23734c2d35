"""How the time of a step is spent: how many tokens there may be, who gets how many of them, and whether a slice of the
vision tower may run beside it."""

import heapq
import math
from collections.abc import Callable, Iterable

from omni_jax.cost import CostModel, StepShape
from omni_jax.requests import Sequence
from omni_jax.scheduling.buckets import Buckets
from omni_jax.scheduling.discipline import Rank, deadline

Shares = list[tuple[Sequence, int]]
Computable = Callable[[Sequence], int]  # tokens of a sequence that could be computed now
Admit = Callable[[Sequence], bool]  # gives a waiting sequence a slot and blocks; whether it got them


def most_tokens(
    decoding: list[Sequence], *, most: int, seconds: float, buckets: Buckets, cost: CostModel | None
) -> int:
    """Tokens the next step may have: the largest compiled size that keeps who decodes within its objective, and some
    tokens of a prompt in any case.

    Args:
        most: what no step may exceed.
        seconds: how long the step may take.
        cost: without it, a step may be as large as that.
    """
    if cost is None or seconds == math.inf:
        return most
    context = sum(sequence.rows + 1 for sequence in decoding)
    fitting = len(decoding)
    for size in buckets.mixed:
        if size <= len(decoding):
            continue
        tokens = min(size, most)
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
    """One after another gets all it can use, until nothing is left, or until there is no place for the next one."""
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
    """Segment after segment to its end, whichever is the most urgent."""
    shares: dict[Sequence, int] = {}
    heap = [(rank(sequence), i) for i, sequence in enumerate(candidates)]
    heapq.heapify(heap)
    while left > 0 and heap:
        place, i = heapq.heappop(heap)
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
            aged = place[0] - segment.priority
            heapq.heappush(heap, ((aged + following.priority, following.deadline, sequence.order), i))
        elif count < whole:
            heapq.heappush(heap, (place, i))  # output that is computed again follows its prompt
    return list(shares.items())


def slice_fits(
    decoding: Iterable[Sequence], awaiting: Iterable[Sequence], *, until: float, rank: Callable[[Sequence], Rank]
) -> bool:
    """Whether a slice of the vision tower may keep the device until then: not while somebody decodes who stands before
    all that wait for images and would get its next token late. Who decodes faster than its objective soon has the
    lead that a slice takes; and who waits rises by aging, so that no image is put off for ever."""
    late = [sequence for sequence in decoding if deadline(sequence) < until]
    if not late:
        return True
    first = min(map(rank, late))
    return any(rank(sequence) < first for sequence in awaiting)
