"""Step times of this machine, learnt from the steps it runs.

    seconds = base[kind, size] + per_context[kind] * context + per_pair[kind] * attended

A table of one base for each executable, and for each kind two slopes that its executables share. Everything is fitted
from the middle of what was measured, so that a step which the garbage collector or another process held up moves
nothing, however long it took. Nor does the step after it, which seems to have taken no time when its predecessor was
read late. A change that lasts is followed within three quarters of RECENT steps of an executable.

- Slopes: by least squares over points that differ in context, each executable about its own mean, in relative terms,
  none below 0. A point is the middle one of the latest PER_POINT steps in an octave of context and of pairs: a rare
  long context counts as much as the many short ones, and is not forgotten over them. Where contexts hardly differ,
  slopes stay near 0 and the base holds the cost.
- Base: the mean of the middle half of the latest RECENT steps, less what the slopes explain. The first step of an
  executable sets it.
- Bases of a kind do not fall with size: where measured ones do, neighbours are pooled by isotonic regression (pool
  adjacent violators), weighted by how many recent steps each has, so that what was measured once gives way.
- Executables without a step: linear between measured neighbours of their kind; outside of them the nearest one times
  the ratio of the prior, which is linear in size. A kind without any takes the prior, scaled as the other kinds' are.
"""

import bisect
import collections
import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from omni_jax.cost.model import Kind, StepShape, causal_pairs

RECENT = 32  # steps of an executable that its base is taken from
PER_POINT = 5  # steps of similar context that a point of the slopes' fit stands for, at most
LEAST_PER_POINT = 3  # and at least, so that its middle one is none that was held up
NOISE = 0.1  # assumed relative deviation of such a point; sets how much contexts must differ before slopes move
ERRORS = 256  # steps of each kind whose prediction error is kept
SHORTEST = 1e-6  # seconds; no base is below
FORMAT = "omni-jax step times 1"

Measured = tuple[int, int, float]  # context, attended, seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionError:
    """How well steps of a kind were predicted, before they were learnt from.

    Attributes:
        steps: observed in all.
        median: of abs(predicted - measured) / measured over the latest ERRORS of them; None without any.
    """

    steps: int
    median: float | None


class TableCost:
    """A CostModel of measured steps. Not thread-safe.

    Args:
        sizes: the compiled sizes of each kind; those of mixed steps at least. Sizes that are observed are added.
        overhead: what a step costs besides its tokens, in tokens (scheduling.Buckets.overhead): the prior's shape.
        seconds_per_token: the prior's scale, of which nothing is left once a step was observed.

    Raises:
        ValueError: a size that is no positive integer, no mixed sizes, a kind there is not, or a prior that is not
            positive.
    """

    def __init__(self, sizes: Mapping[Kind, Iterable[int]], *, overhead: float = 16.0, seconds_per_token: float = 1e-3):
        if unknown := sizes.keys() - set(get_args(Kind)):
            raise ValueError(f"kinds are {', '.join(get_args(Kind))}, got {', '.join(map(repr, sorted(unknown)))}")
        self._sizes: dict[Kind, list[int]] = {kind: sorted(set(sizes.get(kind, ()))) for kind in get_args(Kind)}
        if wrong := [size for some in self._sizes.values() for size in some if size < 1 or size != int(size)]:
            raise ValueError(f"sizes are positive integers, got {wrong[0]!r}")
        if not self._sizes["mixed"]:
            raise ValueError("the sizes of mixed steps are needed, without them no prompt can be computed")
        if not (0 < seconds_per_token < math.inf and 0 <= overhead < math.inf):
            raise ValueError(
                f"seconds_per_token must be above 0 and overhead at least 0, got {seconds_per_token} and {overhead}"
            )
        self._overhead, self._seconds_per_token = overhead, seconds_per_token
        self._fits: dict[Kind, dict[int, _Fit]] = {kind: {} for kind in get_args(Kind)}
        self._slopes: dict[Kind, tuple[float, float]] = dict.fromkeys(get_args(Kind), (0.0, 0.0))
        self._curves: dict[Kind, tuple[list[int], list[float]]] = {kind: ([], []) for kind in get_args(Kind)}
        self._scale = 1.0  # of the prior, for kinds without a step
        self._bases: dict[tuple[Kind, int], float] = {}
        self._errors: dict[Kind, collections.deque[float]] = {
            kind: collections.deque(maxlen=ERRORS) for kind in get_args(Kind)
        }
        self._steps: collections.Counter[Kind] = collections.Counter()
        self._tabulate(get_args(Kind))

    # -- learning -----------------------------------------------------------------------------------------------------

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learns from a step that took `seconds`.

        Raises:
            ValueError: seconds are negative or not finite: the clock is broken, and the table is left as it was.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"a step takes a finite time of at least 0 seconds, got {seconds}")
        self._errors[shape.kind].append(abs(self.seconds(shape) - seconds) / max(seconds, SHORTEST))
        self._steps[shape.kind] += 1
        if shape.size not in self._sizes[shape.kind]:
            bisect.insort(self._sizes[shape.kind], shape.size)
        fit = self._fits[shape.kind].setdefault(shape.size, _Fit())
        fit.add((shape.context, shape.attended, seconds))
        self._refit(shape.kind)

    def _refit(self, kind: Kind) -> None:
        """Everything that follows from the measured steps of a kind."""
        fits = sorted(self._fits[kind].items())
        per_context, per_pair = self._slopes[kind] = _slopes([fit for _, fit in fits])
        bases = [fit.base(per_context, per_pair) for _, fit in fits]
        weights = [len(fit.recent) for _, fit in fits]
        self._curves[kind] = ([size for size, _ in fits], _never_falling(bases, weights))
        ratios = [
            math.log(base / self._prior(size))
            for curve in self._curves.values()
            for size, base in zip(*curve, strict=True)
        ]
        self._scale = math.exp(statistics.fmean(ratios))
        self._tabulate([kind, *(other for other in get_args(Kind) if not self._fits[other])])

    def _tabulate(self, kinds: Iterable[Kind]) -> None:
        for kind in kinds:
            for size in self._sizes[kind]:
                self._bases[kind, size] = self._base(kind, size)

    def _prior(self, size: int) -> float:
        return (size + self._overhead) * self._seconds_per_token

    def _base(self, kind: Kind, size: int) -> float:
        sizes, bases = self._curves[kind]
        if not sizes:
            return self._prior(size) * self._scale
        at = bisect.bisect_left(sizes, size)
        if at < len(sizes) and sizes[at] == size:
            return bases[at]
        if at in (0, len(sizes)):
            nearest = min(at, len(sizes) - 1)
            return bases[nearest] * (self._prior(size) / self._prior(sizes[nearest]))
        below, above = sizes[at - 1], sizes[at]
        return bases[at - 1] + (bases[at] - bases[at - 1]) * ((size - below) / (above - below))

    # -- predictions --------------------------------------------------------------------------------------------------

    def seconds(self, shape: StepShape) -> float:
        """See CostModel. Any size will do, not only the compiled ones."""
        base = self._bases.get((shape.kind, shape.size))
        if base is None:
            base = self._base(shape.kind, shape.size)
        per_context, per_pair = self._slopes[shape.kind]
        return base + per_context * shape.context + per_pair * shape.attended

    def prefill_seconds(self, tokens: int, context: int) -> float:
        """See CostModel: full steps of the bucket that is cheapest for a token; what is left in the bucket that holds
        it, or in full steps of smaller ones and another, whichever costs less."""
        if tokens <= 0:
            return 0.0
        sizes, bases = self._sizes["mixed"], self._bases
        best = min(sizes, key=lambda size: bases["mixed", size] / size)
        full, left = divmod(tokens, best)
        # Step i of the full ones ends with context + (i + 1) * best tokens in the cache, and reads them.
        read = full * context + best * (full * (full + 1) // 2) + (context + tokens if left else 0)
        per_context, per_pair = self._slopes["mixed"]
        return (
            full * bases["mixed", best]
            + self._cheapest(left)
            + per_context * read
            + per_pair * causal_pairs(tokens, context)
        )

    def _cheapest(self, tokens: int) -> float:
        """Bases of the mixed steps that compute fewer tokens than a step holds."""
        if tokens <= 0:
            return 0.0
        sizes = self._sizes["mixed"]
        at = bisect.bisect_left(sizes, tokens)
        whole = self._bases["mixed", sizes[at]]
        if at == 0:
            return whole
        below = sizes[at - 1]
        return min(whole, self._bases["mixed", below] + self._cheapest(tokens - below))

    def decode_seconds(self, rows: int, context: int) -> float:
        """See CostModel: in the smallest bucket that holds the rows."""
        size = self._cover("decode", rows)
        return self.seconds(
            StepShape(kind="decode", size=size, rows=rows, tokens=rows, context=context, attended=context)
        )

    def encode_seconds(self, patches: int) -> float:
        """See CostModel: alone in a call of the smallest bucket that holds it."""
        size = self._cover("encode", patches)
        return self.seconds(StepShape(kind="encode", size=size, rows=1, tokens=patches, context=0, attended=patches**2))

    def _cover(self, kind: Kind, wanted: int) -> int:
        """The smallest compiled size of at least `wanted`; that itself, when none is."""
        at = bisect.bisect_left(self._sizes[kind], wanted)
        return self._sizes[kind][at] if at < len(self._sizes[kind]) else wanted

    def errors(self) -> dict[Kind, PredictionError]:
        """How well each kind of step has been predicted, for metrics."""
        return {
            kind: PredictionError(steps=self._steps[kind], median=statistics.median(window) if window else None)
            for kind, window in self._errors.items()
        }

    # -- files --------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """All that was learnt, as text: `from_json` predicts the same, and learns on. Prediction errors are left out:
        they tell of a process, not of the machine."""
        executables = [
            {"kind": kind, "size": size, "recent": list(fit.recent), "by_context": [list(p) for p in fit.near.values()]}
            for kind, fits in self._fits.items()
            for size, fit in fits.items()
        ]
        return json.dumps(
            {
                "format": FORMAT,
                "sizes": self._sizes,
                "overhead": self._overhead,
                "seconds_per_token": self._seconds_per_token,
                "executables": executables,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "TableCost":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        found = json.loads(text)
        given = found.get("format") if isinstance(found, dict) else None
        if given != FORMAT:
            raise ValueError(f"not a table of step times: its format is {given!r}, expected {FORMAT!r}")
        table = cls(found["sizes"], overhead=found["overhead"], seconds_per_token=found["seconds_per_token"])
        for entry in found["executables"]:
            fit = table._fits[entry["kind"]][entry["size"]] = _Fit()
            fit.restore(entry)
        for kind, fits in table._fits.items():
            if fits:
                table._refit(kind)
        return table


class _Fit:
    """What is kept of one executable.

    Attributes:
        recent: the latest steps.
        near: the latest steps of each octave of context and pairs.
        sums: of the points, relative to their seconds and about their mean: context by context, context by attended,
            attended by attended, context by seconds, attended by seconds; then not about the mean: context squared,
            attended squared, and the number of points.
    """

    def __init__(self) -> None:
        self.recent: collections.deque[Measured] = collections.deque(maxlen=RECENT)
        self.near: dict[tuple[int, int], collections.deque[Measured]] = {}
        self.sums: tuple[float, ...] = (0.0,) * 8
        self._points: dict[tuple[int, int], Measured] = {}

    def add(self, measured: Measured) -> None:
        self.recent.append(measured)
        self._add_near(measured)
        self.sums = self._sums()

    def restore(self, entry: Mapping[str, Any]) -> None:
        self.recent.extend((int(c), int(a), float(s)) for c, a, s in entry["recent"])
        for context, attended, seconds in (step for steps in entry["by_context"] for step in steps):
            self._add_near((int(context), int(attended), float(seconds)))
        self.sums = self._sums()

    def _add_near(self, measured: Measured) -> None:
        key = (measured[0].bit_length(), measured[1].bit_length())
        steps = self.near.setdefault(key, collections.deque(maxlen=PER_POINT))
        steps.append(measured)
        if len(steps) >= LEAST_PER_POINT:
            # The lower middle of an even number: what goes wrong makes a step long more often than short.
            self._points[key] = sorted(steps, key=_seconds)[(len(steps) - 1) // 2]

    def _sums(self) -> tuple[float, ...]:
        """Errors count in relation to a step's seconds, but not to fewer than most steps take, so that none that seems
        to have taken no time outweighs the others."""
        typical = sorted(map(_seconds, self.recent))[len(self.recent) // 3]
        return _centred_sums(self._points.values(), max(typical, SHORTEST))

    def base(self, per_context: float, per_pair: float) -> float:
        """Seconds of a step that attends to nothing."""
        rest = sorted([seconds - per_context * context - per_pair * pairs for context, pairs, seconds in self.recent])
        n = len(rest)
        cut = max(n // 4, 1) if n > 2 else 0
        middle = rest[cut : n - cut] if n != 2 else rest[:1]  # of two, one may have been held up
        return max(sum(middle) / len(middle), SHORTEST)


def _seconds(measured: Measured) -> float:
    return measured[2]


def _centred_sums(points: Iterable[Measured], least: float) -> tuple[float, ...]:
    """See _Fit.sums; points weigh 1 / max(seconds, least) ** 2."""
    n = 0
    w = wx = wz = wy = wxx = wxz = wzz = wxy = wzy = 0.0
    for x, z, y in points:
        root = 1.0 / max(y, least)
        x, z, y = x * root, z * root, y * root
        n += 1
        w += root * root
        wx += x * root
        wz += z * root
        wy += y * root
        wxx += x * x
        wxz += x * z
        wzz += z * z
        wxy += x * y
        wzy += z * y
    if not n:
        return (0.0,) * 8
    return (
        max(wxx - wx * wx / w, 0.0),
        wxz - wx * wz / w,
        max(wzz - wz * wz / w, 0.0),
        wxy - wx * wy / w,
        wzy - wz * wy / w,
        wxx,
        wzz,
        float(n),
    )


def _slopes(fits: list[_Fit]) -> tuple[float, float]:
    """Seconds for a token of context and for a pair, by least squares over the points of all executables of a kind.

    Each is drawn towards 0 as if it were known beforehand that attention takes no part of a step, give or take all of
    it, which only matters where the points are few or alike (ridge regression; NOISE squared is the ratio of the two
    variances).
    """
    cc, ca, aa, cs, as_, c2, a2, n = (sum(column) for column in zip(*(fit.sums for fit in fits), strict=True))
    if not n:
        return 0.0, 0.0
    return _least_squares(cc + NOISE**2 * c2 / n, ca, aa + NOISE**2 * a2 / n, cs, as_)


def _least_squares(a11: float, a12: float, a22: float, b1: float, b2: float) -> tuple[float, float]:
    """The x >= 0 that minimises x'Ax / 2 - b'x for a positive semidefinite A of two rows."""
    det = a11 * a22 - a12 * a12
    if det > 1e-9 * a11 * a22:
        first, second = (a22 * b1 - a12 * b2) / det, (a11 * b2 - a12 * b1) / det
        if first >= 0 and second >= 0:
            return first, second
    # Else one of them is 0: the other alone, whichever explains more.
    first = max(b1 / a11, 0.0) if a11 > 0 else 0.0
    second = max(b2 / a22, 0.0) if a22 > 0 else 0.0
    return (first, 0.0) if b1 * first >= b2 * second else (0.0, second)


def _never_falling(values: list[float], weights: list[int]) -> list[float]:
    """The non-decreasing sequence nearest to `values` by weighted squares: pool adjacent violators (Ayer et al.,
    1955)."""
    pools: list[tuple[float, int, int]] = []  # mean, weight, members
    for value, weight in zip(values, weights, strict=True):
        members = 1
        while pools and pools[-1][0] > value:
            mean, other, more = pools.pop()
            value = (mean * other + value * weight) / (other + weight)
            weight, members = weight + other, members + more
        pools.append((value, weight, members))
    return [mean for mean, _, members in pools for _ in range(members)]
