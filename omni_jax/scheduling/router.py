"""Which replica of a fleet, or which replica of an engine, gets a request."""

import collections
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from omni_jax.requests import Request


class Router(Protocol):
    """Chooses by what a proxy in front of the replicas can know: requests, and how much each replica has."""

    def route(self, request: Request, loads: Sequence[int]) -> int:
        """Index of the replica.

        Args:
            loads: of each replica, tokens of the requests it has that have not ended: of their prompts, and of what
                is generated as far as that is known or guessed.
        """
        ...


class RoundRobin:
    """One after another, whatever they have."""

    def __init__(self) -> None:
        self._next = 0

    def route(self, request: Request, loads: Sequence[int]) -> int:
        """See Router."""
        chosen = self._next % len(loads)
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """Whoever has least; of several the first."""

    def route(self, request: Request, loads: Sequence[int]) -> int:
        """See Router."""
        return min(range(len(loads)), key=loads.__getitem__)


class PrefixAware:
    """Whoever served the longest of the prompt's beginnings last, for it may have its blocks still, unless it has too
    much; then whoever has least.

    Args:
        block: tokens of a block; a beginning is a number of whole blocks, its images included.
        blocks: of the longest beginning that is looked at.
        most_load: a replica has too much with more than so many times the mean of all and a prompt besides.
        remembered: beginnings that are known, those used longest ago forgotten first.
    """

    def __init__(self, *, block: int = 32, blocks: int = 16, most_load: float = 1.5, remembered: int = 100_000):
        self._block, self._blocks, self._most_load, self._remembered = block, blocks, most_load, remembered
        self._served: collections.OrderedDict[bytes, int] = collections.OrderedDict()

    def route(self, request: Request, loads: Sequence[int]) -> int:
        """See Router."""
        beginnings = self._beginnings(request)
        most = self._most_load * sum(loads) / len(loads) + len(request.prompt_ids)
        known = (self._served[key] for key in reversed(beginnings) if key in self._served)
        chosen = next((replica for replica in known if replica < len(loads) and loads[replica] <= most), None)
        if chosen is None:
            chosen = min(range(len(loads)), key=loads.__getitem__)
        for key in beginnings:
            self._served[key] = chosen
            self._served.move_to_end(key)
        while len(self._served) > self._remembered:
            self._served.popitem(last=False)
        return chosen

    def _beginnings(self, request: Request) -> list[bytes]:
        """A digest of each, the shortest first."""
        ids, media = request.prompt_ids, list(request.media)
        digest, found = hashlib.sha256(), []
        for stop in range(self._block, min(len(ids), self._block * self._blocks) + 1, self._block):
            digest.update(repr(ids[stop - self._block : stop]).encode())
            while media and media[0].start < stop:  # placeholders of all images are the same
                digest.update(media.pop(0).key)
            found.append(digest.digest())
        return found


ROUTERS: Mapping[str, Callable[[], Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
}


def make_router(name: str) -> Router:
    """A fresh router of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in ROUTERS:
        raise ValueError(f"unknown router {name!r}; there are {', '.join(ROUTERS)}")
    return ROUTERS[name]()
