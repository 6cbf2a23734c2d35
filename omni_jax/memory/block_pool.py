"""Which blocks of the KV cache are in use, by how many sequences, and what they hold. Numbers only; the arrays live in
the runtime.

A block is held by somebody, or free, or idle: nobody holds it, and it can still be found by what it holds. Blocks that
can be found form trees: a block's parent holds the tokens before its own. Only leaves are given up, so that whatever
can be found can be reached from its root.
"""

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Sequence

from omni_jax.memory.recycling import BlockUse, RecyclingPolicy, by_modality, count_use

_SPARE_ENTRIES = 64  # stale entries a heap may have before anybody counts


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class _Cached:
    """A block that can be found.

    Attributes:
        children: blocks that can be found and continue it.
        holds: why it is not idle: 1 if it has references, and 1 for each child that is not idle. If whoever holds a
            block also holds those before it, the first says it all; otherwise the others keep its ancestors from being
            taken for blocks that could be had.
        ticket: of its entry among the leaves; 0 when it is none.
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
    """Reference counts, a free list, and blocks that can be found by the digest of what they hold.

    Every operation takes O(log n) a block at most. Block 0 is never handed out: padding rows write to it.

    Attributes:
        num_blocks: blocks that exist, block 0 included.
        block_size: tokens a block.
        now: the engine's seconds, set by whoever uses the pool; blocks given back are dated with it.
        peak_used: most blocks that were in use at a time.
        evictions_by_modality: how many idle blocks were given up, counter.
    """

    def __init__(self, num_blocks: int, block_size: int, *, recycling: RecyclingPolicy = by_modality):
        if num_blocks < 2 or block_size < 1:
            raise ValueError(f"a pool needs at least 2 blocks of at least 1 token, got {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.now = 0.0
        self.peak_used = 0
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
        """Blocks that could be allocated: those that are free, and those that are idle."""
        return len(self._free) + self._num_idle

    @property
    def num_idle(self) -> int:
        """Blocks that nobody holds and that can be found."""
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
        """How many idle blocks were given up, counter."""
        return self.evictions_by_modality.total()

    def references(self, block: int) -> int:
        """How many hold a block."""
        return self._references[block]

    def is_registered(self, block: int) -> bool:
        """Whether a block can be found: then nobody may write to it, though one alone holds it."""
        return self._cached[block] is not None

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    # -- who holds what -----------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing changed) when there are fewer. When free ones do
        not suffice, idle ones are given up, in the policy's order; they cannot be found any longer."""
        if count > len(self._free):
            if count > self.num_free:
                return None
            while count > len(self._free):
                self._evict()
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to blocks that are in use or idle. Raises ValueError for one that is free."""
        references = self._references
        for block in blocks:
            if not references[block]:
                cached = self._cached[block]
                if cached is None:
                    raise ValueError(f"block {block} is free and cannot be shared")
                self._hold(cached)
            references[block] += 1
        self.peak_used = max(self.peak_used, self.num_used)

    def free(self, blocks: Iterable[int]) -> None:
        """Drops a reference. Blocks without one are idle if they can be found, else free. That they were used until now
        is noted with those that can be found. Raises ValueError for a block that has no reference."""
        references = self._references
        for block in blocks:
            if references[block] < 1:
                raise ValueError(f"block {block} was freed more often than it was taken")
            references[block] -= 1
            cached = self._cached[block]
            if cached is not None:
                now = max(self.now, cached.last_used)
                cached.uses = count_use(cached.uses, cached.last_used, now)
                cached.last_used = now
                if not references[block]:
                    self._let_go(cached)
            elif not references[block]:
                self._free.append(block)

    # -- what can be found --------------------------------------------------------------------------------------------

    def register(self, block: int, digest: bytes, parent: bytes | None, *, modality: str, depth: int) -> bool:
        """Makes a block that somebody holds one that can be found.

        Args:
            digest: of the block's tokens and all before them; see memory.prefix.
            parent: digest of the block before; None for the first of a sequence. Who holds a block must hold its
                parent too, or the parent counts as in use though nobody holds it.
            modality: what it is counted as; see prefix.modality.
            depth: blocks before it.

        Returns:
            False, and nothing changed, when another block has that digest, or when no block has the parent's.

        Raises:
            ValueError: nobody holds the block, or it is registered by another digest.
        """
        if not self._references[block]:
            raise ValueError(f"block {block} is held by nobody and cannot be registered")
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
        cached = _Cached(block=block, digest=digest, parent=above, modality=modality, depth=depth, last_used=self.now)
        self._cached[block] = self._by_digest[digest] = cached
        if above is not None:
            self._hold(above)
            above.children += 1
        return True

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of the longest run of digests, from the first on, that can be found. Whoever wants them shares
        them before anything else is allocated."""
        found = []
        for digest in digests:
            cached = self._by_digest.get(digest)
            if cached is None:
                break
            found.append(cached.block)
        return found

    def clear_cache(self) -> None:
        """Nothing can be found any longer; idle blocks become free, others stay with who holds them."""
        for cached in self._by_digest.values():
            self._cached[cached.block] = None
            if not self._references[cached.block]:
                self._free.append(cached.block)
        self._by_digest.clear()
        self._leaves = _Leaves(self._recycling)
        self._num_idle = 0

    def _hold(self, cached: _Cached | None) -> None:
        """One more reason why a block is not idle; the first is one for its parent, too."""
        while cached is not None:
            cached.holds += 1
            if cached.holds > 1:
                return
            self._num_idle -= 1
            if not cached.children:
                self._leaves.remove(cached)
            cached = cached.parent

    def _let_go(self, cached: _Cached | None) -> None:
        """One reason less; with the last a block becomes idle."""
        while cached is not None:
            cached.holds -= 1
            if cached.holds:
                return
            self._num_idle += 1
            if not cached.children:
                self._leaves.add(cached)
            cached = cached.parent

    def _evict(self) -> None:
        """Makes the leaf of least value a free block."""
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
    """Idle blocks without children, by value. One that is a leaf no longer leaves its entry behind, which is passed
    over by its ticket. Values are asked for only when something must be given up: most leaves are found again before.
    """

    def __init__(self, policy: RecyclingPolicy):
        self._policy = policy
        self._tickets = itertools.count(1)
        self._new: list[tuple[int, _Cached]] = []  # without a value yet
        self._heap: list[tuple[float, int, _Cached]] = []  # of equal values, the first to become a leaf goes first
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
        """The leaf of least value. If the policy raises, nothing has changed."""
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
