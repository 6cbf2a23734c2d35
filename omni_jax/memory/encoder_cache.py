"""Which rows of the device's feature array hold which features, and who needs them. Numbers only; the array lives in
the runtime.

An entry is made when somebody first needs the features, computed once however many wait for it, and kept after its last
reference is gone until its rows are wanted for others: least recently released first.
"""

import collections
import dataclasses
from typing import Literal

import numpy as np

from omni_jax.memory.block_pool import BlockPool
from omni_jax.requests import MediaSpan

ROWS_PER_BLOCK = 16


@dataclasses.dataclass(kw_only=True, eq=False)
class _Entry:
    blocks: list[int]
    rows: np.ndarray
    state: Literal["waiting", "encoding", "ready"] = "waiting"
    references: int = 0


class EncoderCache:
    """Rows handed out in blocks, by digest, with reference counts.

    Args:
        num_rows: features that fit. Row 0 is not among them: it means "no feature".
        rows_per_block: rows are handed out by so many.

    Attributes:
        queries: times somebody asked for features, counter.
        hits: how many of them found an entry, computed or being computed, counter.
    """

    def __init__(self, num_rows: int, *, rows_per_block: int = ROWS_PER_BLOCK):
        self._pool = BlockPool(-(-num_rows // rows_per_block) + 1, rows_per_block)
        self._entries: dict[bytes, _Entry] = {}
        self._unused: collections.OrderedDict[bytes, None] = collections.OrderedDict()  # no references; oldest first
        self._kept = 0  # blocks of the unused
        self.queries = 0
        self.hits = 0

    @property
    def capacity(self) -> int:
        """Features that fit."""
        return self._pool.num_usable * self._pool.block_size

    @property
    def array_rows(self) -> int:
        """Rows the device's array has: the block that row 0 lies in comes on top."""
        return self._pool.num_blocks * self._pool.block_size

    @property
    def usage(self) -> float:
        """Share of the rows that are held, 0 to 1; those kept for luck are not counted. Any thread may ask."""
        return (self._pool.num_used - self._kept) / self._pool.num_usable

    def fits(self, length: int) -> bool:
        """Whether features of so many tokens could be held at all."""
        return self._pool.blocks_for(length) <= self._pool.num_usable

    def hold(self, span: MediaSpan) -> bool:
        """Takes a reference to the features of `span`; False (and nothing changed) when there is no room for them."""
        entry = self._entries.get(span.key)
        known = entry is not None
        if entry is None:
            blocks = self._allocate(self._pool.blocks_for(span.length))
            if blocks is None:
                return False
            size = self._pool.block_size
            rows = np.asarray(blocks, np.int32)[:, None] * size + np.arange(size, dtype=np.int32)
            entry = self._entries[span.key] = _Entry(blocks=blocks, rows=rows.reshape(-1)[: span.length])
        self.queries += 1
        self.hits += known
        entry.references += 1
        if span.key in self._unused:
            del self._unused[span.key]
            self._kept -= len(entry.blocks)
        return True

    def release(self, key: bytes) -> None:
        """Gives a reference back."""
        entry = self._entries[key]
        if entry.references < 1:
            raise ValueError("features were released more often than they were held")
        entry.references -= 1
        if entry.references:
            return
        if entry.state == "waiting":
            self._drop(key)
        else:
            self._unused[key] = None
            self._kept += len(entry.blocks)

    def rows(self, key: bytes) -> np.ndarray:
        """int32 [length]: where the features lie."""
        return self._entries[key].rows

    def is_ready(self, key: bytes) -> bool:
        """Whether steps dispatched from now on find the features there."""
        return self._entries[key].state == "ready"

    def is_waiting(self, key: bytes) -> bool:
        """Whether nobody has begun to compute the features."""
        return self._entries[key].state == "waiting"

    def begin(self, key: bytes) -> None:
        """Marks features as being computed: their rows stay theirs until `finish`."""
        self._entries[key].state = "encoding"

    def finish(self, key: bytes) -> None:
        """Marks features as computed."""
        self._entries[key].state = "ready"

    def clear(self) -> None:
        """Forgets everything, references included: the array is lost."""
        for key in list(self._entries):
            self._drop(key)
        self._unused.clear()
        self._kept = 0

    def _allocate(self, count: int) -> list[int] | None:
        spare = [key for key in self._unused if self._entries[key].state == "ready"]
        if count > self._pool.num_free + sum(len(self._entries[key].blocks) for key in spare):
            return None
        for key in spare:
            if self._pool.num_free >= count:
                break
            del self._unused[key]
            self._kept -= len(self._entries[key].blocks)
            self._drop(key)
        return self._pool.allocate(count)

    def _drop(self, key: bytes) -> None:
        self._pool.free(self._entries.pop(key).blocks)
