"""Compression schedules: the share of a sequence's cache that may be dropped at each decode step."""

import functools
from collections.abc import Callable

from omni_jax.user_code import load_function

Controller = Callable[[int, int], float]  # (decode step, max output tokens) -> share of the tokens that may be dropped

SINKS = 4  # first rows (attention sinks), never dropped
WINDOW = 32  # latest rows, never dropped
RAMP_START, RAMP_END, DECAY_START, FINAL_CAP = 10, 30, 50, 0.1  # see default_ratio
MAX_TABLES = 4096  # output lengths whose schedules are cached


class BadController(ValueError):
    """A controller raised, or returned something other than a number from 0 to below 1."""


def default_ratio(step: int, total: int, *, cap: float) -> float:
    """The default schedule: 0 for the first 10 steps, rising linearly to `cap` at step 30, constant to step 50, then
    falling linearly to min(cap, 0.1) at the last step.

    It bounds what may have been dropped in total. Where it falls, no row comes back; nothing more is dropped until the
    sequence has grown.
    """
    if step < RAMP_START:
        return 0.0
    if step < RAMP_END:
        return cap * (step - RAMP_START) / (RAMP_END - RAMP_START)
    if step < DECAY_START or total <= DECAY_START:
        return cap
    return cap + (min(cap, FINAL_CAP) - cap) * min((step - DECAY_START) / (total - DECAY_START), 1.0)


class Schedule:
    """The share that may be dropped at each step, from the default or a controller, never above the cap.

    Args:
        path: Path of a Controller, `package.module:function`; None is the default.
        cap: Maximum share that is dropped.

    Raises:
        ValueError: The function does not exist.
        BadController: It raises or returns an invalid value for an output length of 256.
    """

    def __init__(self, path: str | None, cap: float):
        self._path, self._cap = path, cap
        self._controller = None if path is None else load_function(path, "compression controller")
        self._table = functools.lru_cache(MAX_TABLES)(self._tabulate)
        self.check(256)

    def ratio(self, step: int, total: int) -> float:
        """Share of a sequence's tokens that may be dropped at decode step `step` of at most `total`."""
        if self._path is None:
            return default_ratio(step, total, cap=self._cap)
        table = self._table(total)
        return table[min(step, len(table) - 1)]

    def check(self, total: int) -> None:
        """Raise BadController unless the controller returns a number from 0 to below 1 for each of `total` steps.

        Called before a request with this output length is accepted, so that it cannot fail while it runs.
        """
        if self._path is not None:
            self._table(total)

    def _tabulate(self, total: int) -> tuple[float, ...]:
        return tuple(self._checked(step, total) for step in range(max(total, 1)))

    def _checked(self, step: int, total: int) -> float:
        assert self._controller is not None
        try:
            found = self._controller(step, total)
        except Exception as error:  # custom code
            raise BadController(
                f"controller {self._path!r} raised at step {step} of {total}: {type(error).__name__}: {error}"
            ) from error
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found < 1:
            raise BadController(
                f"controller {self._path!r} returned {found!r} at step {step} of {total}; expected a number from 0 to "
                "below 1"
            )
        return min(float(found), self._cap)
