"""Finds the request whose tokens or images make steps raise.

An exception does not say which row of a step caused it. So the requests of the step are suspects: the newer half of
them is held back, and the others run again. If a step raises again, the request is among those that ran; once all of
those have got further than they were, it is among those held back. After about log2(suspects) failures one request is
left, and it has failed at least twice: it alone gets an error.
"""

import math
from collections.abc import Mapping

MAX_FAILURES = 2  # steps in a row that raise before the engine gives up, if no request is known to have caused it
MAX_BLAMED = 2  # requests that get an error, with no step between them that succeeds, before the engine gives up


class Blame:
    """The suspects of the steps that raised.

    Requests are named by id. `reached` maps each request of a step to the number of its tokens that are computed after
    the step, the oldest request first.

    Attributes:
        held: Requests that must not run now.
    """

    def __init__(self, max_num_seqs: int):
        self.held: frozenset[str] = frozenset()
        self._suspects: dict[str, int] = {}
        self._tries = 0  # failures of all present suspects
        self._failures = 0  # since a step succeeded
        self._blamed = 0  # since a step succeeded
        self._limit = MAX_FAILURES + math.ceil(math.log2(max(max_num_seqs, 2)))

    def failed(self, reached: Mapping[str, int]) -> str | None:
        """Note that a step or an encoder call with these requests raised, or none if that is unknown.

        Returns:
            The request that must end with an error, if it is found.
        """
        self._failures += 1
        again = {name: max(end, self._suspects[name]) for name, end in reached.items() if name in self._suspects}
        self._tries = self._tries + 1 if again else 1
        self._suspects = again or dict(reached)
        if len(self._suspects) == 1 and self._tries >= 2:
            self._blamed += 1
            (found,) = self._suspects
            self.forget(found)
            return found
        self._hold_back()
        return None

    @property
    def hopeless(self) -> bool:
        """Whether steps fail whatever they compute."""
        limit = self._limit if self._suspects else MAX_FAILURES
        return self._blamed >= MAX_BLAMED or (not self._blamed and self._failures >= limit)

    def succeeded(self, reached: Mapping[str, int]) -> None:
        """Note that a step with these requests was read: those that got further than they were are no suspects."""
        self._failures = self._blamed = 0
        for name, end in reached.items():
            if end >= self._suspects.get(name, math.inf) and name not in self.held:
                self.forget(name)

    @property
    def suspects(self) -> bool:
        """Whether there are any."""
        return bool(self._suspects)

    def forget(self, name: str) -> None:
        """Drop a suspect, for instance because it has ended."""
        if self._suspects.pop(name, None) is not None and self._suspects.keys() <= self.held:
            self._hold_back()

    def release(self) -> None:
        """Hold nothing back any more. The suspects remain."""
        self.held = frozenset()

    def _hold_back(self) -> None:
        names = list(self._suspects)
        self.held = frozenset(names[(len(names) + 1) // 2 :])
