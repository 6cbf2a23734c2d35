"""The encoder cache: which rows of the device's feature array hold which features. The array lives in the runtime.

An entry is made when a request first needs the features, and they are computed once for all requests. It stays after
its last reference is gone until its rows are needed; the least recently released entry is evicted first.
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
    """Feature rows allocated in blocks, by digest, with reference counts.

    Args:
        num_rows: Number of features that fit, not counting row 0, which means "no feature".
        rows_per_block: Rows per block.

    Attributes:
        queries: Number of requests for features (a counter).
        hits: Number of those that found an entry, computed or being computed (a counter).
    """

    def __init__(self, num_rows: int, *, rows_per_block: int = ROWS_PER_BLOCK):
        self._pool = BlockPool(-(-num_rows // rows_per_block) + 1, rows_per_block)
        self._entries: dict[bytes, _Entry] = {}
        self._unused: collections.OrderedDict[bytes, None] = collections.OrderedDict()  # no references; oldest first
        self._kept = 0  # blocks of the entries in _unused
        self.queries = 0
        self.hits = 0

    @property
    def capacity(self) -> int:
        """Number of features that fit."""
        return self._pool.num_usable * self._pool.block_size

    @property
    def array_rows(self) -> int:
        """Number of rows of the device's array, including the block that contains row 0."""
        return self._pool.num_blocks * self._pool.block_size

    @property
    def usage(self) -> float:
        """Share of the rows that are referenced, 0 to 1. May be called from any thread."""
        return (self._pool.num_used - self._kept) / self._pool.num_usable

    def fits(self, length: int) -> bool:
        """Whether the features of `length` tokens fit into an empty cache."""
        return self._pool.blocks_for(length) <= self._pool.num_usable

    def hold(self, span: MediaSpan) -> bool:
        """Take a reference to the features of `span`; return False and change nothing if there is no room for them."""
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
        """Drop a reference."""
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
        """int32 [length]: the rows of the features."""
        return self._entries[key].rows

    def is_ready(self, key: bytes) -> bool:
        """Whether the features are there for steps dispatched from now on."""
        return self._entries[key].state == "ready"

    def is_waiting(self, key: bytes) -> bool:
        """Whether the features are neither computed nor being computed."""
        return self._entries[key].state == "waiting"

    def begin(self, key: bytes) -> None:
        """Mark features as being computed. Their rows are not evicted before `finish`."""
        self._entries[key].state = "encoding"

    def finish(self, key: bytes) -> None:
        """Mark features as computed."""
        self._entries[key].state = "ready"

    def clear(self) -> None:
        """Forget all entries and references, because the array is lost."""
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
