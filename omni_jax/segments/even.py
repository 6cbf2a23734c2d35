"""Division of consecutive units into pieces of nearly equal length."""

import bisect
import itertools
import operator
from collections.abc import Sequence


def even_cuts(ends: Sequence[int], max_length: int) -> list[int]:
    """Choose the unit ends at which pieces of at most `max_length` end, ascending; the last end is always included.

    The number of pieces is the smallest possible, and they are as equal as the ends allow: each ends at the unit end
    nearest to its share of the remainder. A unit longer than `max_length` is a piece of its own. Takes linear time.

    Args:
        ends: Ends of consecutive units that begin at 0, ascending.
        max_length: Maximum length of a piece of several units, at least 1.
    """
    cuts: list[int] = []
    first = 0  # unit
    for unit, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        if end - start > max_length:
            cuts += [*_even([cuts[-1] if cuts else 0, *ends[first:unit]], max_length), end]
            first = unit + 1
    return cuts + _even([cuts[-1] if cuts else 0, *ends[first:]], max_length)


def _even(edges: list[int], max_length: int) -> list[int]:
    """The cuts between the first edge and the last, for edges at most `max_length` apart."""
    needed = [0] * len(edges)  # smallest number of pieces from each edge to the last
    reach = len(edges) - 1
    for index in range(len(edges) - 2, -1, -1):
        while edges[reach] - edges[index] > max_length:
            reach -= 1
        needed[index] = needed[reach] + 1
    cuts: list[int] = []
    here = 0
    while needed[here]:
        share = edges[here] + (edges[-1] - edges[here]) / needed[here]
        low = bisect.bisect_left(needed, 1 - needed[here], key=operator.neg)  # from here on, one piece fewer is needed
        high = bisect.bisect_right(edges, edges[here] + max_length) - 1
        above = bisect.bisect_left(edges, share, low, high)
        below = max(low, above - 1)
        here = above if edges[above] - share < share - edges[below] else below
        cuts.append(edges[here])
    return cuts
