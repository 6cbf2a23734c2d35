"""The block pool of the KV cache: reference counts, free blocks, and the prefix cache's index. The arrays live in the
runtime.

A block is held (it has references), free, or idle: it has no references, but a prompt can still find it by the digest
of its content. Registered blocks form trees: a block's parent holds the tokens before its own. Only leaves are evicted,
so every registered block can be reached from its root.
"""

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Sequence

from omni_jax.memory.recycling import BlockUse, RecyclingPolicy, by_modality, decay

_SPARE_ENTRIES = 64  # stale entries that a heap may have before they are counted


@dataclasses.dataclass(eq=False, slots=True)
class _Cached:
    """A registered block.

    Attributes:
        children: Number of registered blocks that continue it.
        holds: Number of reasons why it is not idle: 1 if it has references, and 1 per child that is not idle. The
            children matter only if a holder of a block does not hold the blocks before it; they keep those ancestors
            from counting as idle.
        ticket: Number of its entry among the leaves; 0 if it is not an idle leaf.
    """

    block: int
    digest: bytes
    parent: "_Cached | None"
    modality: str
    depth: int
    last_used: float
    uses: float = 0.0
    children: int = 0
    holds: int = 1
    ticket: int = 0


class BlockPool:
    """Reference counts, a free list, and an index of blocks by the digest of their content.

    Each operation takes at most O(log n) per block. Block 0 is never allocated: padding rows write to it.

    Attributes:
        num_blocks: Number of blocks, including block 0.
        block_size: Tokens per block.
        now: Engine time in seconds, which the owner of the pool sets. Freed blocks are dated with it.
        peak_used: Maximum number of blocks in use at a time.
        num_shared: Number of blocks with more than one reference.
        evictions_by_modality: Number of evicted blocks (a counter).
    """

    def __init__(self, num_blocks: int, block_size: int, *, recycling: RecyclingPolicy = by_modality):
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"a pool needs at least 2 blocks of at least 1 token, got {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.now = 0.0
        self.peak_used = self.num_shared = 0
        self.evictions_by_modality: collections.Counter[str] = collections.Counter()
        self._recycling = recycling
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._cached: list[_Cached | None] = [None] * num_blocks
        self._by_digest: dict[bytes, _Cached] = {}
        self._leaves = _Leaves(recycling)
        self._num_idle = 0

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated: free and idle ones."""
        return len(self._free) + self._num_idle

    @property
    def num_idle(self) -> int:
        """Number of blocks that are registered and have no references."""
        return self._num_idle

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    @property
    def usage(self) -> float:
        """Share of usable blocks that are in use, 0 to 1."""
        return self.num_used / self.num_usable

    @property
    def evictions(self) -> int:
        """Number of evicted blocks (a counter)."""
        return self.evictions_by_modality.total()

    def references(self, block: int) -> int:
        """Number of references to a block."""
        return self._references[block]

    def count_held(self, blocks: Iterable[int]) -> int:
        """Number of those of `blocks` that have references."""
        each = list(map(self._references.__getitem__, blocks))
        return len(each) - each.count(0)

    def is_registered(self, block: int) -> bool:
        """Whether a block is registered. Its content must then not change, even with a single reference."""
        return self._cached[block] is not None

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    # -- references ---------------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` blocks with one reference each, or return None and change nothing if there are fewer.

        Idle blocks are evicted, in the policy's order, when free ones do not suffice.
        """
        if count > len(self._free):
            if count > self.num_free:
                return None
            while count > len(self._free):
                self._evict()
        first = len(self._free) - count
        taken = self._free[first:]
        taken.reverse()
        del self._free[first:]
        for block in taken:
            self._references[block] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to held or idle blocks. Raises ValueError, without a change, if one is free."""
        references, blocks = self._references, list(blocks)
        for block in blocks:
            if not references[block] and self._cached[block] is None:
                raise ValueError(f"block {block} is free and cannot be shared")
        for block in blocks:
            if not references[block]:
                self._hold(self._cached[block])
            references[block] += 1
            self.num_shared += references[block] == 2
        self.peak_used = max(self.peak_used, self.num_used)

    def free(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each block, and note its use if it is registered. Blocks without references become idle
        if they are registered, else free. Raises ValueError for a block without references."""
        references, each_cached, now = self._references, self._cached, self.now
        last, kept = now, 1.0  # share of the uses until `last` that still counts; the same for runs of blocks
        for block in blocks:
            left = references[block] - 1
            if left < 0:
                raise ValueError(f"block {block} was freed more often than it was allocated or shared")
            references[block] = left
            self.num_shared -= left == 1
            cached = each_cached[block]
            if cached is not None:
                if cached.last_used < now:
                    if cached.last_used != last:
                        last = cached.last_used
                        kept = decay(now - last)
                    cached.uses = 1.0 + cached.uses * kept
                    cached.last_used = now
                else:
                    cached.uses += 1.0
                if not left:
                    self._drop_hold(cached)
            elif not left:
                self._free.append(block)

    # -- registered blocks --------------------------------------------------------------------------------------------

    def register(self, block: int, digest: bytes, parent: bytes | None, *, modality: str, depth: int) -> bool:
        """Register a held block by the digest of its content.

        Args:
            block: The block.
            digest: Digest of the block's tokens and all tokens before them; see memory.prefix.
            parent: Digest of the block before it; None for the first block of a sequence. A holder of a block should
                hold its parent too; otherwise the parent counts as in use although no sequence holds it.
            modality: Modality that it is counted under; see prefix.modality.
            depth: Number of blocks before it.

        Returns:
            False, without a change, if another block has the digest, or no block has the parent's.

        Raises:
            ValueError: The block has no references, or it is registered by another digest.
        """
        if not self._references[block]:
            raise ValueError(f"block {block} has no references and cannot be registered")
        before = self._cached[block]
        if before is not None:
            if before.digest != digest:
                raise ValueError(
                    f"block {block} is registered as {before.digest.hex()} and cannot become {digest.hex()}"
                )
            return True
        above = None if parent is None else self._by_digest.get(parent)
        if digest in self._by_digest or (parent is not None and above is None):
            return False
        cached = _Cached(block, digest, above, modality, depth, self.now)
        self._cached[block] = self._by_digest[digest] = cached
        if above is not None:
            self._hold(above)
            above.children += 1
        return True

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of the longest prefix of `digests` that is registered. They must be shared before the next
        allocation, which may evict them."""
        found = []
        for digest in digests:
            cached = self._by_digest.get(digest)
            if cached is None:
                break
            found.append(cached.block)
        return found

    def clear_cache(self) -> None:
        """Unregister all blocks. Idle blocks become free; held blocks stay held."""
        for cached in self._by_digest.values():
            self._cached[cached.block] = None
            if not self._references[cached.block]:
                self._free.append(cached.block)
        self._by_digest.clear()
        self._leaves = _Leaves(self._recycling)
        self._num_idle = 0

    def _hold(self, cached: _Cached | None) -> None:
        """Add a reason why a block is not idle; the first one also holds its parent."""
        while cached is not None:
            cached.holds += 1
            if cached.holds > 1:
                return
            self._num_idle -= 1
            if not cached.children:
                self._leaves.remove(cached)
            cached = cached.parent

    def _drop_hold(self, cached: _Cached | None) -> None:
        """Drop a reason why a block is not idle; without any it becomes idle, and no longer holds its parent."""
        while cached is not None:
            cached.holds -= 1
            if cached.holds:
                return
            self._num_idle += 1
            if not cached.children:
                self._leaves.add(cached)
            cached = cached.parent

    def _evict(self) -> None:
        """Evict the leaf with the smallest value; its block becomes free."""
        leaf = self._leaves.pop()
        self._cached[leaf.block] = None
        del self._by_digest[leaf.digest]
        self._num_idle -= 1
        self._free.append(leaf.block)
        self.evictions_by_modality[leaf.modality] += 1
        parent = leaf.parent
        if parent is not None:
            parent.children -= 1
            if not parent.children and not parent.holds:
                self._leaves.add(parent)


class _Leaves:
    """Idle blocks without children, ordered by value.

    The entry of a block that is no longer a leaf is stale, which its ticket shows. Values are computed only
    when a block must be evicted, because most leaves are reused before.
    """

    def __init__(self, policy: RecyclingPolicy):
        self._policy = policy
        self._tickets = itertools.count(1)
        self._new: list[tuple[int, _Cached]] = []  # without a value yet
        self._heap: list[tuple[float, int, _Cached]] = []  # (value, ticket, leaf): ties in order of tickets
        self._live = 0

    def add(self, cached: _Cached) -> None:
        cached.ticket = next(self._tickets)
        self._new.append((cached.ticket, cached))
        self._live += 1
        if len(self._new) + len(self._heap) > 2 * self._live + _SPARE_ENTRIES:
            self._new = [entry for entry in self._new if entry[-1].ticket == entry[-2]]
            self._heap = [entry for entry in self._heap if entry[-1].ticket == entry[-2]]
            heapq.heapify(self._heap)

    def remove(self, cached: _Cached) -> None:
        cached.ticket = 0
        self._live -= 1

    def pop(self) -> _Cached:
        """Remove and return the leaf with the smallest value. Nothing changes if the policy raises."""
        while self._new:
            ticket, cached = self._new[-1]
            if cached.ticket == ticket:
                use = BlockUse(
                    modality=cached.modality, depth=cached.depth, last_used=cached.last_used, uses=cached.uses
                )
                heapq.heappush(self._heap, (self._policy(use), ticket, cached))
            self._new.pop()
        while True:
            _, ticket, cached = heapq.heappop(self._heap)
            if cached.ticket == ticket:
                self.remove(cached)
                return cached
