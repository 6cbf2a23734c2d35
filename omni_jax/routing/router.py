"""Routers: which replica gets a request, in a fleet or in an engine with several replicas."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from omni_jax.memory.prefix import prompt_digests
from omni_jax.requests import Request


class Router(Protocol):
    """Chooses a replica by what a proxy in front of the replicas can see: the request and the load of each replica."""

    def route(self, request: Request, loads: Sequence[int]) -> int:
        """Index of the replica for a request.

        Args:
            request: The request.
            loads: Per replica, the tokens of its unfinished requests: of their prompts, and of their outputs as far
                as their number is known or estimated.
        """
        ...


class RoundRobin:
    """Each replica in turn, regardless of load."""

    def __init__(self) -> None:
        self._next = 0

    def route(self, request: Request, loads: Sequence[int]) -> int:
        """See Router."""
        chosen = self._next % len(loads)
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """The replica with the lowest load; among equals the first."""

    def route(self, request: Request, loads: Sequence[int]) -> int:
        """See Router."""
        return min(range(len(loads)), key=loads.__getitem__)


class PrefixAware:
    """The replica that last served the longest prefix of the prompt, because it may still have its blocks cached.

    If that replica is overloaded, the one with the lowest load. Of each prompt, the whole one and the prefixes of 1, 2,
    4, ... blocks are remembered: the next turn of a conversation contains the last one whole, and of requests that part
    earlier at least half of what they share is found.

    Args:
        block_size: Tokens per block; prefixes are whole blocks, including their images.
        max_load: A replica is overloaded if its load exceeds this multiple of the mean load plus the prompt's length.
        max_prefixes: Number of prefixes remembered; the least recently used are forgotten first.
    """

    def __init__(self, *, block_size: int = 32, max_load: float = 1.5, max_prefixes: int = 100_000):
        self._block_size, self._max_load, self._max_prefixes = block_size, max_load, max_prefixes
        self._served: collections.OrderedDict[bytes, int] = collections.OrderedDict()

    def route(self, request: Request, loads: Sequence[int]) -> int:
        """See Router."""
        prefixes = request.digests or prompt_digests(request, self._block_size)
        limit = self._max_load * sum(loads) / len(loads) + len(request.prompt_ids)
        known = (self._served[key] for key in reversed(prefixes) if key in self._served)
        chosen = next((replica for replica in known if replica < len(loads) and loads[replica] <= limit), None)
        if chosen is None:
            chosen = min(range(len(loads)), key=loads.__getitem__)
        for blocks in sorted({len(prefixes), *(1 << power for power in range(len(prefixes).bit_length()))} - {0}):
            key = prefixes[blocks - 1]
            self._served[key] = chosen
            self._served.move_to_end(key)
        while len(self._served) > self._max_prefixes:
            self._served.popitem(last=False)
        return chosen


ROUTERS: Mapping[str, Callable[[], Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
}


def make_router(name: str, *, block_size: int = 32) -> Router:
    """Make a router by its name in ROUTERS.

    Args:
        block_size: Tokens per block of the replicas; prefix_aware counts prefixes in blocks.

    Raises:
        ValueError: The name is unknown.
    """
    if name not in ROUTERS:
        raise ValueError(f"unknown router {name!r}; expected one of {', '.join(ROUTERS)}")
    return PrefixAware(block_size=block_size) if name == "prefix_aware" else ROUTERS[name]()
