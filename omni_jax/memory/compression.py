"""How much of a sequence's cache may be dropped, by decode step: the default schedule, and functions of one's own."""

import functools
from collections.abc import Callable

from omni_jax.user_code import load_function

Controller = Callable[[int, int], float]  # (decode step, most decode steps) -> share of the tokens that may be dropped

SINKS = 4  # first rows, which attention rests on and which are never dropped
WINDOW = 32  # latest rows, likewise
QUIET, FULL, FALL, REST = 10, 30, 50, 0.1  # see default_ratio
KEPT = 4096  # lengths whose schedules are remembered


class BadController(ValueError):
    """A controller that raised or returned nonsense."""


def default_ratio(step: int, total: int, *, cap: float) -> float:
    """Nothing for the first 10 steps, rising evenly to `cap` by step 30, held to step 50, then falling evenly to a
    tenth (or staying, where the cap is below that) at the last. It caps what may have been dropped: where it falls,
    nothing comes back, and nothing more is dropped until the sequence has grown."""
    if step < QUIET:
        return 0.0
    if step < FULL:
        return cap * (step - QUIET) / (FULL - QUIET)
    if step < FALL or total <= FALL:
        return cap
    return cap + (min(cap, REST) - cap) * min((step - FALL) / (total - FALL), 1.0)


class Schedule:
    """What may be dropped at each step, by the default or by a controller, never above the cap.

    Args:
        path: of a Controller, `package.module:function`; None is the default.
        cap: share that is dropped at most.

    Raises:
        ValueError: there is no such function.
        BadController: it returns nonsense or raises for a length of 256.
    """

    def __init__(self, path: str | None, cap: float):
        self._path, self._cap = path, cap
        self._controller = None if path is None else load_function(path, "compression controller")
        self._table = functools.lru_cache(KEPT)(self._tabulate)
        self.check(256)

    def ratio(self, step: int, total: int) -> float:
        """Share of a sequence's tokens that may be dropped at a decode step, of `total` at most."""
        if self._path is None:
            return default_ratio(step, total, cap=self._cap)
        table = self._table(total)
        return table[min(step, len(table) - 1)]

    def check(self, total: int) -> None:
        """Raises BadController where the controller does not answer for each step of a sequence of this length with a
        number from 0 to below 1: before such a request is taken, and not while it runs."""
        if self._path is not None:
            self._table(total)

    def _tabulate(self, total: int) -> tuple[float, ...]:
        return tuple(self._checked(step, total) for step in range(max(total, 1)))

    def _checked(self, step: int, total: int) -> float:
        assert self._controller is not None
        try:
            found = self._controller(step, total)
        except Exception as error:  # somebody else's code: it costs one request
            raise BadController(
                f"the controller {self._path!r} raised at step {step} of {total}: {type(error).__name__}: {error}"
            ) from error
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found < 1:
            raise BadController(
                f"the controller {self._path!r} returned {found!r} at step {step} of {total}: expected a number from 0 "
                "to below 1"
            )
        return min(float(found), self._cap)
