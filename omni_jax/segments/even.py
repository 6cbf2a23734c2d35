"""Units in pieces as equal as their ends allow."""

import bisect
import itertools
import operator
from collections.abc import Sequence


def even_cuts(ends: Sequence[int], most: int) -> list[int]:
    """Those of the units' ends that end a piece of at most `most`, ascending; the last end is among them.

    There are as few pieces as there can be, and they are as equal as the ends allow: each ends nearest to its share of
    what is left. A unit longer than `most` is a piece by itself. Takes time in proportion to the units.

    Args:
        ends: of units that follow one another from 0, ascending.
        most: largest piece of several units, at least 1.
    """
    cuts: list[int] = []
    first = 0  # unit
    for unit, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        if end - start > most:
            cuts += [*_even([cuts[-1] if cuts else 0, *ends[first:unit]], most), end]
            first = unit + 1
    return cuts + _even([cuts[-1] if cuts else 0, *ends[first:]], most)


def _even(edges: list[int], most: int) -> list[int]:
    """The same between the first edge and the last, for edges no two neighbours of which are further apart."""
    needed = [0] * len(edges)  # fewest pieces from each edge to the last
    reach = len(edges) - 1
    for place in range(len(edges) - 2, -1, -1):
        while edges[reach] - edges[place] > most:
            reach -= 1
        needed[place] = needed[reach] + 1
    cuts: list[int] = []
    here = 0
    while needed[here]:
        share = edges[here] + (edges[-1] - edges[here]) / needed[here]
        low = bisect.bisect_left(needed, 1 - needed[here], key=operator.neg)  # from there on, one piece fewer is needed
        high = bisect.bisect_right(edges, edges[here] + most) - 1
        above = bisect.bisect_left(edges, share, low, high)
        below = max(low, above - 1)
        here = above if edges[above] - share < share - edges[below] else below
        cuts.append(edges[here])
    return cuts
