"""Step times of this machine, learnt from the steps it runs.

    seconds = base[kind, size] + per_context[kind] * context + per_pair[kind] * attended

Each executable has a base, and the executables of a kind share two slopes. All are fitted by medians and trimmed means,
so a step that was delayed, for instance by garbage collection, has no influence. The same holds for the step after a
delayed one, which seems to take no time. A lasting change is followed within three quarters of RECENT
steps of an executable.

- Slopes: least squares of relative errors over points, centred per executable; never below 0. A point is the median of
  the latest PER_POINT steps in one octave of context and of pairs, so rare long contexts count as much as frequent
  short ones and are not forgotten. If contexts hardly differ, slopes stay near 0 and the base holds the cost.
- Base: the mean of the middle half of the latest RECENT steps, minus what the slopes explain. The first step of an
  executable sets it.
- Bases of a kind do not fall with size: measured bases that do are pooled by isotonic regression (pool adjacent
  violators), weighted by their numbers of recent steps.
- Executables that have not run: linear interpolation between measured neighbours of their kind; outside of them, the
  nearest one times the ratio of the prior, which is linear in size. A kind without steps uses the prior, scaled to the
  other kinds.
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

RECENT = 32  # latest steps of an executable that determine its base
PER_POINT = 5  # maximum number of steps of similar context behind one point of the slope fit
MIN_PER_POINT = 3  # minimum number, so that the median is not a delayed step
NOISE = 0.1  # assumed relative deviation of a point; sets how much contexts must differ before slopes move
MAX_ERRORS = 256  # latest prediction errors kept per kind
MIN_SECONDS = 1e-6  # lower limit of a base
FORMAT = "omni-jax step times 1"

Measured = tuple[int, int, float]  # context, attended, seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionError:
    """Error of the predictions for one kind of step, each made before the step was learnt from.

    Attributes:
        steps: number of steps observed so far.
        median: median of abs(predicted - measured) / measured over the latest MAX_ERRORS steps; None without steps.
    """

    steps: int
    median: float | None


class TableCost:
    """A CostModel of measured steps. Not thread-safe.

    Args:
        sizes: compiled sizes by kind; "mixed" is required. Observed sizes are added.
        overhead: fixed cost of a step in tokens (scheduling.Buckets.overhead): the shape of the prior.
        seconds_per_token: scale of the prior; has no effect once a step was observed.

    Raises:
        ValueError: a size is not a positive integer, mixed sizes are missing, a kind is unknown, or the prior is not
            positive.
    """

    def __init__(self, sizes: Mapping[Kind, Iterable[int]], *, overhead: float = 16.0, seconds_per_token: float = 1e-3):
        if unknown := sizes.keys() - set(get_args(Kind)):
            raise ValueError(f"kinds are {', '.join(get_args(Kind))}, got {', '.join(map(repr, sorted(unknown)))}")
        self._sizes: dict[Kind, list[int]] = {kind: sorted(set(sizes.get(kind, ()))) for kind in get_args(Kind)}
        if wrong := [size for some in self._sizes.values() for size in some if size < 1 or size != int(size)]:
            raise ValueError(f"sizes are positive integers, got {wrong[0]!r}")
        if not self._sizes["mixed"]:
            raise ValueError('sizes must have "mixed", the sizes of steps that compute prompts')
        if not (0 < seconds_per_token < math.inf and 0 <= overhead < math.inf):
            raise ValueError(
                f"seconds_per_token must be above 0 and overhead at least 0, got {seconds_per_token} and {overhead}"
            )
        self._overhead, self._seconds_per_token = overhead, seconds_per_token
        self._fits: dict[Kind, dict[int, _Fit]] = {kind: {} for kind in get_args(Kind)}
        self._slopes: dict[Kind, tuple[float, float]] = dict.fromkeys(get_args(Kind), (0.0, 0.0))
        self._curves: dict[Kind, tuple[list[int], list[float]]] = {kind: ([], []) for kind in get_args(Kind)}
        self._scale = 1.0  # factor of the prior, for kinds without steps
        self._bases: dict[tuple[Kind, int], float] = {}
        self._errors: dict[Kind, collections.deque[float]] = {
            kind: collections.deque(maxlen=MAX_ERRORS) for kind in get_args(Kind)
        }
        self._steps: collections.Counter[Kind] = collections.Counter()
        self._tabulate(get_args(Kind))

    # -- learning -----------------------------------------------------------------------------------------------------

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step that took `seconds`.

        Raises:
            ValueError: seconds are negative or not finite, so the clock is broken. The table does not change.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds of a step must be finite and at least 0, got {seconds}")
        self._errors[shape.kind].append(abs(self.seconds(shape) - seconds) / max(seconds, MIN_SECONDS))
        self._steps[shape.kind] += 1
        if shape.size not in self._sizes[shape.kind]:
            bisect.insort(self._sizes[shape.kind], shape.size)
        fit = self._fits[shape.kind].setdefault(shape.size, _Fit())
        fit.add((shape.context, shape.attended, seconds))
        self._refit(shape.kind)

    def _refit(self, kind: Kind) -> None:
        """Recompute slopes, bases and scale after a step of a kind was measured."""
        fits = sorted(self._fits[kind].items())
        per_context, per_pair = self._slopes[kind] = _slopes([fit for _, fit in fits])
        bases = [fit.base(per_context, per_pair) for _, fit in fits]
        weights = [len(fit.recent) for _, fit in fits]
        self._curves[kind] = ([size for size, _ in fits], _isotonic(bases, weights))
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
        # The mixed size with the lowest cost per token:
        self._best = min(self._sizes["mixed"], key=lambda size: self._bases["mixed", size] / size)

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
        """See CostModel. Accepts sizes that are not compiled, too."""
        base = self._bases.get((shape.kind, shape.size))
        if base is None:
            base = self._base(shape.kind, shape.size)
        per_context, per_pair = self._slopes[shape.kind]
        return base + per_context * shape.context + per_pair * shape.attended

    def prefill_seconds(self, tokens: int, context: int) -> float:
        """See CostModel: full steps of the bucket with the lowest cost per token, then the cheapest steps for the
        rest."""
        if tokens <= 0:
            return 0.0
        bases, best = self._bases, self._best
        full, left = divmod(tokens, best)
        # Full step i reads context + (i + 1) * best cached tokens.
        read = full * context + best * (full * (full + 1) // 2) + (context + tokens if left else 0)
        per_context, per_pair = self._slopes["mixed"]
        return (
            full * bases["mixed", best]
            + self._cheapest(left)
            + per_context * read
            + per_pair * causal_pairs(tokens, context)
        )

    def _cheapest(self, tokens: int) -> float:
        """Lowest sum of bases of mixed steps for `tokens` tokens that fit one step: one padded step, or a full smaller
        one and steps for its rest."""
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
        """See CostModel: in the smallest bucket that fits."""
        size = self._cover("decode", rows)
        return self.seconds(
            StepShape(kind="decode", size=size, rows=rows, tokens=rows, context=context, attended=context)
        )

    def encode_seconds(self, patches: int) -> float:
        """See CostModel: alone in the smallest bucket that fits."""
        size = self._cover("encode", patches)
        return self.seconds(StepShape(kind="encode", size=size, rows=1, tokens=patches, context=0, attended=patches**2))

    def _cover(self, kind: Kind, wanted: int) -> int:
        """The smallest compiled size of at least `wanted`, or `wanted` if there is none."""
        at = bisect.bisect_left(self._sizes[kind], wanted)
        return self._sizes[kind][at] if at < len(self._sizes[kind]) else wanted

    def errors(self) -> dict[Kind, PredictionError]:
        """Prediction errors by kind of step, for metrics."""
        return {
            kind: PredictionError(steps=self._steps[kind], median=statistics.median(window) if window else None)
            for kind, window in self._errors.items()
        }

    # -- files --------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The learnt table as text, for `from_json`. Leaves out prediction errors, which belong to one process."""
        executables = [
            {
                "kind": kind,
                "size": size,
                "recent": list(fit.recent),
                "by_context": [list(steps) for steps in fit.octaves.values()],
            }
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
        """Read a table that `to_json` wrote. It predicts the same and goes on learning.

        Raises:
            ValueError: the text has another format.
        """
        saved = json.loads(text)
        given = saved.get("format") if isinstance(saved, dict) else None
        if given != FORMAT:
            raise ValueError(f"not a table of step times: its format is {given!r}, expected {FORMAT!r}")
        table = cls(saved["sizes"], overhead=saved["overhead"], seconds_per_token=saved["seconds_per_token"])
        for entry in saved["executables"]:
            fit = table._fits[entry["kind"]][entry["size"]] = _Fit()
            fit.restore(entry)
        for kind, fits in table._fits.items():
            if fits:
                table._refit(kind)
        return table


class _Fit:
    """Measured steps of one executable.

    Attributes:
        recent: latest steps.
        octaves: latest steps of each octave of context and pairs.
        sums: sums over the points, relative to their seconds. Centred: context * context, context * attended,
            attended * attended, context * seconds, attended * seconds. Not centred: context squared, attended squared,
            number of points.
    """

    def __init__(self) -> None:
        self.recent: collections.deque[Measured] = collections.deque(maxlen=RECENT)
        self.octaves: dict[tuple[int, int], collections.deque[Measured]] = {}
        self.sums: tuple[float, ...] = (0.0,) * 8
        self._points: dict[tuple[int, int], Measured] = {}

    def add(self, measured: Measured) -> None:
        self.recent.append(measured)
        self._add_to_octave(measured)
        self.sums = self._sums()

    def restore(self, entry: Mapping[str, Any]) -> None:
        self.recent.extend((int(c), int(a), float(s)) for c, a, s in entry["recent"])
        for context, attended, seconds in (step for steps in entry["by_context"] for step in steps):
            self._add_to_octave((int(context), int(attended), float(seconds)))
        self.sums = self._sums()

    def _add_to_octave(self, measured: Measured) -> None:
        key = (measured[0].bit_length(), measured[1].bit_length())
        steps = self.octaves.setdefault(key, collections.deque(maxlen=PER_POINT))
        steps.append(measured)
        if len(steps) >= MIN_PER_POINT:
            # The lower median of an even number: disturbances make steps longer more often than shorter.
            self._points[key] = sorted(steps, key=_seconds)[(len(steps) - 1) // 2]

    def _sums(self) -> tuple[float, ...]:
        """Sums of relative errors. The lower limit of the seconds keeps a step that seems to take no time from
        outweighing the others."""
        typical = sorted(map(_seconds, self.recent))[len(self.recent) // 3]
        return _centred_sums(self._points.values(), max(typical, MIN_SECONDS))

    def base(self, per_context: float, per_pair: float) -> float:
        """Seconds of a step without attention."""
        rest = sorted([seconds - per_context * context - per_pair * pairs for context, pairs, seconds in self.recent])
        n = len(rest)
        cut = max(n // 4, 1) if n > 2 else 0
        middle = rest[cut : n - cut] if n != 2 else rest[:1]  # the longer of two may have been delayed
        return max(sum(middle) / len(middle), MIN_SECONDS)


def _seconds(measured: Measured) -> float:
    return measured[2]


def _centred_sums(points: Iterable[Measured], min_seconds: float) -> tuple[float, ...]:
    """_Fit.sums of points, each weighted by 1 / max(seconds, min_seconds) ** 2."""
    n = 0
    w = wx = wz = wy = wxx = wxz = wzz = wxy = wzy = 0.0
    for x, z, y in points:
        root = 1.0 / max(y, min_seconds)
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
    """Seconds per token of context and per query-key pair, by least squares over the points of a kind's executables.

    Ridge regression with a prior of 0 and a deviation of a whole step, which matters only if points are few or alike;
    NOISE squared is the ratio of the two variances.
    """
    cc, ca, aa, cs, as_, c2, a2, n = (sum(column) for column in zip(*(fit.sums for fit in fits), strict=True))
    if not n:
        return 0.0, 0.0
    return _least_squares(cc + NOISE**2 * c2 / n, ca, aa + NOISE**2 * a2 / n, cs, as_)


def _least_squares(a11: float, a12: float, a22: float, b1: float, b2: float) -> tuple[float, float]:
    """The x >= 0 that minimises x'Ax / 2 - b'x for a positive semidefinite 2 x 2 matrix A."""
    det = a11 * a22 - a12 * a12
    if det > 1e-9 * a11 * a22:
        first, second = (a22 * b1 - a12 * b2) / det, (a11 * b2 - a12 * b1) / det
        if first >= 0 and second >= 0:
            return first, second
    # Otherwise one of them is 0: keep the one that explains more.
    first = max(b1 / a11, 0.0) if a11 > 0 else 0.0
    second = max(b2 / a22, 0.0) if a22 > 0 else 0.0
    return (first, 0.0) if b1 * first >= b2 * second else (0.0, second)


def _isotonic(values: list[float], weights: list[int]) -> list[float]:
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
