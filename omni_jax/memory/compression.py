"""Compression schedules: the share of a sequence's cache that may be dropped at each decode step."""

import functools
import time
from collections.abc import Callable

import numpy as np

from omni_jax.user_code import load_function

Controller = Callable[[int, int], float]  # (decode step, max output tokens) -> share of the tokens that may be dropped

SINKS = 4  # first rows (attention sinks), never dropped
WINDOW = 32  # latest rows, never dropped
RAMP_START, RAMP_END, DECAY_START, FINAL_CAP = 10, 30, 50, 0.1  # see default_ratio
STEP = 1 / 1024  # steps whose shares differ by less than this may get the smallest of them
MAX_SECONDS = 10.0  # of a controller for all steps of a request
MAX_TABLES = 32  # output lengths whose tables are cached; a table of 131,072 steps takes at most 2 MB, usually 16 kB


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


def share_at(table: np.ndarray, step: int) -> float:
    """The share that a table of `Schedule.table` gives for a decode step."""
    return float(table[1, max(int(table[0].searchsorted(step, side="right")) - 1, 0)])


class Schedule:
    """The share that may be dropped at each step by a custom controller, never above the cap. Thread-safe.

    Args:
        path: Path of a Controller, `package.module:function`.
        cap: Maximum share that is dropped.

    Raises:
        ValueError: The function does not exist.
        BadController: It raises or returns an invalid value for an output length of 256.
    """

    def __init__(self, path: str, cap: float):
        self._path, self._cap = path, cap
        self._controller = load_function(path, "compression controller")
        self._tabulated = functools.lru_cache(MAX_TABLES)(self._tabulate)
        self.table(256)

    def table(self, total: int) -> np.ndarray:
        """The controller's shares for a request of at most `total` output tokens, for Request.drop_shares: float64
        [2, runs], the first step of each run of steps and its share, see `share_at`. Do not change it.

        A share is less than STEP below the controller's, so that a table is small. A long one takes a tenth of a
        second, so it is made where requests are made, and not in the engine's thread.

        Raises:
            BadController: The controller raises, returns something other than a number from 0 to below 1, or takes
                more than MAX_SECONDS.
        """
        return self._tabulated(total)

    def _tabulate(self, total: int) -> np.ndarray:
        starts, shares = [0], [self._checked(0, total)]
        high = shares[0]  # the largest share of the present run; shares[-1] is the smallest
        deadline = time.monotonic() + MAX_SECONDS
        for step in range(1, total):
            share = self._checked(step, total)
            if time.monotonic() > deadline:
                taken = f"more than {MAX_SECONDS:g} s for the first {step + 1} of {total} steps"
                raise BadController(f"controller {self._path!r} took {taken}")
            if max(high, share) - min(shares[-1], share) < STEP:
                high, shares[-1] = max(high, share), min(shares[-1], share)
            else:
                starts.append(step)
                shares.append(share)
                high = share
        return np.array([starts, shares], np.float64)

    def _checked(self, step: int, total: int) -> float:
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
