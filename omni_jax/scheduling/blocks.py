"""Which sequence holds which blocks: what it finds in the prefix cache, what it leaves there, what is swapped out and
comes back, and what compression takes.

- A sequence takes what the cache has of its beginning when it is about to be admitted (a new one with images also
  when it comes, so that nobody encodes an image whose keys and values are there), and computes at least one token
  itself.
- Blocks enter the cache when a step is planned that fills them with known tokens: device calls are ordered, so whoever
  reads them reads later.
- A sequence whose own block is a copy of a cached one registers nothing behind it: so whoever holds a cached block
  holds all before it.
- Who waits for what somebody else is just computing lets him do it, and takes it from the cache.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import Protocol

from omni_jax.memory import BlockPool
from omni_jax.memory.prefix import extend, modality
from omni_jax.requests import Sequence
from omni_jax.requests.sequence import Parcel, Swapped


class Swap(Protocol):
    """Where blocks go that leave the device (engine/swapping.py)."""

    def store(self, sequence: Sequence, blocks: list[int], tokens: int) -> Parcel | None:
        """Starts copying blocks, which may be handed out again at once, away. None: computing the `tokens` in them
        again is cheaper, or there is no room."""
        ...

    def is_ready(self, parcel: Parcel) -> bool:
        """Whether `load` returns at once; starts what is needed for that."""
        ...

    def load(self, parcel: Parcel, blocks: list[int]) -> bool:
        """Starts copying back into `blocks`, ahead of the next step, and forgets the parcel. False: it is lost."""
        ...

    def drop(self, parcel: Parcel) -> None:
        """Forgets a parcel."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression:
    """How the cache of a sequence shrinks while it decodes.

    Attributes:
        ratio: (decode step, most decode steps) -> the share of its tokens that may be dropped.
        compact: (blocks, rows in them, rows to keep, blocks to put them in): dispatched ahead of the next step.
        least: rows that are always kept.
    """

    ratio: Callable[[int, int], float]
    compact: Callable[[list[int], int, int, list[int]], None]
    least: int = 1


class Blocks:
    """The scheduler's side of the block pool.

    Args:
        prefix_caching: whether beginnings are shared between requests.
        swap, compression: None does without.

    Attributes:
        pool: the pool.
        queries, hits: prompt tokens of admitted requests, and those among them that were in the cache, by modality.
        dropped: tokens that compression took.
        swapped_out, swapped_in, swapped: blocks that went and came, and those that are out.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        prefix_caching: bool = False,
        swap: Swap | None = None,
        compression: Compression | None = None,
    ):
        self.pool = pool
        self.prefix_caching, self.swap, self.compression = prefix_caching, swap, compression
        self.queries: collections.Counter[str] = collections.Counter()
        self.hits: collections.Counter[str] = collections.Counter()
        self.dropped = self.swapped_out = self.swapped_in = self.swapped = 0

    # -- how many -----------------------------------------------------------------------------------------------------

    def missing(self, sequence: Sequence, hits: Iterable[int] = ()) -> int:
        """Blocks to be taken from the pool before all its known tokens can be computed; of `hits`, which it takes from
        the cache, those that nobody holds."""
        need = self.pool.blocks_for(len(sequence.known) - _dropped(sequence)) - len(sequence.blocks)
        return need - sum(self.pool.references(block) > 0 for block in hits)

    def reserve(self, sequence: Sequence) -> int:
        """Blocks that stay free for a sequence beside those that its known tokens need: one to grow by. A compressed
        sequence cannot be computed again, so with compression it is all that it may come to need."""
        if self.compression is None:
            return 1
        held = max(len(sequence.blocks), self.pool.blocks_for(len(sequence.known) - _dropped(sequence)))
        most = sequence.num_prompt + sequence.max_output - _dropped(sequence)
        return max(self.pool.blocks_for(most) - held, 0)

    def may_lose(self, sequence: Sequence) -> bool:
        """Whether blocks or a slot may be taken from a sequence: not from a compressed one that cannot be swapped."""
        return not sequence.dropped or self.swap is not None

    # -- the prefix cache ---------------------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> list[int]:
        """Cached blocks that continue what a waiting sequence holds, as far as its last token but one."""
        held = len(sequence.blocks)
        if (
            not self.prefix_caching
            or sequence.wants_prompt_logprobs
            or sequence.swapped is not None
            or sequence.pending
            or sequence.registered != held
            or sequence.computed != held * self.pool.block_size
        ):
            return []
        self._extend(sequence)
        return self.pool.find(sequence.digests[held : (len(sequence.known) - 1) // self.pool.block_size])

    def take(self, sequence: Sequence, hits: list[int]) -> None:
        """Gives a waiting sequence what `match` found."""
        self.pool.share(hits)
        sequence.blocks += hits
        sequence.registered = len(sequence.blocks)
        sequence.computed += len(hits) * self.pool.block_size

    def next_digest(self, sequence: Sequence, hits: int = 0) -> bytes | None:
        """Of the block that it would compute next, with so many hits; None where the cache could not hold that."""
        at = len(sequence.blocks) + hits if sequence.slot is None else sequence.registered
        if not self.prefix_caching or sequence.swapped is not None or sequence.wants_prompt_logprobs:
            return None
        self._extend(sequence)
        last = (len(sequence.known) - (sequence.slot is None)) // self.pool.block_size
        return sequence.digests[at] if at < last else None

    def register(self, sequence: Sequence) -> None:
        """Enters blocks that are full of known and computed tokens into the cache."""
        if not self.prefix_caching or sequence.dropped or sequence.finish_reason == "error":
            return
        size = self.pool.block_size
        full = min(sequence.computed, len(sequence.known)) // size
        if sequence.registered >= full:
            return
        self._extend(sequence)
        while sequence.registered < full:
            at = sequence.registered
            if not self.pool.register(
                sequence.blocks[at],
                sequence.digests[at],
                sequence.digests[at - 1] if at else None,
                modality=modality(sequence.request, at * size, (at + 1) * size),
                depth=at,
            ):
                return
            sequence.registered += 1

    def count(self, sequence: Sequence) -> None:
        """Notes what a sequence found when it was admitted for the first time."""
        sequence.cached = sequence.computed
        if not self.prefix_caching:
            return
        size, request = self.pool.block_size, sequence.request
        for at in range(0, sequence.num_prompt, size):
            kind = modality(request, at, min(at + size, sequence.num_prompt))
            self.queries[kind] += min(size, sequence.num_prompt - at)
            self.hits[kind] += min(max(sequence.cached - at, 0), size)

    def _extend(self, sequence: Sequence) -> None:
        extend(sequence.digests, sequence.request, sequence.known, self.pool.block_size)

    # -- giving back --------------------------------------------------------------------------------------------------

    def cut(self, sequence: Sequence, keep: int) -> None:
        """Takes the blocks behind the first `keep` from a sequence, to be computed again."""
        if sequence.swapped is not None and keep < sequence.swapped.first:
            self.forget(sequence)
        self.pool.free(reversed(sequence.blocks[keep:]))
        del sequence.blocks[keep:]
        if not keep:
            sequence.dropped = 0
        sequence.computed = min(sequence.computed, keep * self.pool.block_size + sequence.dropped)
        sequence.registered = min(sequence.registered, keep)
        sequence.on_device_blocks = 0

    def take_from(self, sequence: Sequence, keep: int) -> bool | None:
        """Takes the blocks behind the first `keep` away, to the host where that is cheaper than to compute them again.

        Returns:
            whether they were swapped out; None where nothing was taken: from a compressed sequence either all blocks go
            to the host or none does.
        """
        if sequence.dropped:
            keep = 0
        else:  # taking what others hold too would free nothing
            while keep < len(sequence.blocks) and self.pool.references(sequence.blocks[keep]) > 1:
                keep += 1
        lost = sequence.blocks[keep : self.pool.blocks_for(sequence.rows)]  # those that hold something
        if lost and self.swap is not None and sequence.swapped is None:
            parcel = self.swap.store(sequence, lost, sequence.rows - keep * self.pool.block_size)
            if parcel is not None:
                swapped = Swapped(
                    parcel=parcel,
                    first=keep,
                    count=len(lost),
                    computed=sequence.computed,
                    dropped=sequence.dropped,
                )
                self.cut(sequence, keep)
                sequence.swapped = swapped
                self.swapped_out += len(lost)
                self.swapped += len(lost)
                return True
        if sequence.dropped:
            return None
        self.cut(sequence, keep)
        return False

    def is_back(self, sequence: Sequence) -> bool:
        """Whether what was swapped out of a waiting sequence, if anything, could be brought back at once. Starts what
        is needed for that."""
        if sequence.swapped is None:
            return True
        assert self.swap is not None
        return self.swap.is_ready(sequence.swapped.parcel)

    def restore(self, sequence: Sequence) -> bool:
        """Brings back what was swapped out of a sequence that has got all its blocks. False: it is lost, and has to be
        computed again."""
        swapped = sequence.swapped
        assert swapped is not None
        assert self.swap is not None
        sequence.swapped = None
        self.swapped -= swapped.count
        if not self.swap.load(swapped.parcel, sequence.blocks[swapped.first : swapped.first + swapped.count]):
            return False
        sequence.computed, sequence.dropped = swapped.computed, swapped.dropped
        self.swapped_in += swapped.count
        return True

    def forget(self, sequence: Sequence) -> None:
        """Drops what was swapped out of a sequence."""
        if sequence.swapped is not None:
            assert self.swap is not None
            self.swap.drop(sequence.swapped.parcel)
            self.swapped -= sequence.swapped.count
            sequence.swapped = None

    # -- compression --------------------------------------------------------------------------------------------------

    def compress(self, sequence: Sequence, spare: int) -> bool:
        """Before a decode step: drops rows where the controller allows it and a block comes free. Whether the sequence
        now lies in other blocks.

        Args:
            spare: free blocks beyond all that is kept for running sequences. Blocks that are shared or cached are not
                written to, so survivors may need others; what is kept for the others stays theirs.
        """
        compression = self.compression
        assert compression is not None
        step = sequence.num_output + sequence.pending
        length, rows = sequence.computed, sequence.rows
        allowed = int(compression.ratio(step, sequence.max_output) * length) - sequence.dropped
        drop = min(allowed, rows - compression.least)
        count = self.pool.blocks_for(rows - drop + 1)
        if drop <= 0 or count >= self.pool.blocks_for(rows + 1):
            return False
        alone = [block for block in sequence.blocks if self.pool.references(block) == 1]
        own = [block for block in alone if not self.pool.is_registered(block)][:count]
        fresh, freed = count - len(own), len(alone) - len(own)
        most = sequence.num_prompt + sequence.max_output - sequence.dropped - drop
        reserved = max(self.pool.blocks_for(most) - count, 0)
        if spare + self.reserve(sequence) - reserved + freed - fresh < 0:
            return False
        taken = self.pool.allocate(fresh)
        if taken is None:
            return False
        target = own + taken
        compression.compact(sequence.blocks, rows, rows - drop, target)
        kept = set(own)
        self.pool.free(reversed([block for block in sequence.blocks if block not in kept]))
        sequence.blocks = target
        sequence.registered = sequence.on_device_blocks = 0
        sequence.dropped += drop
        self.dropped += drop
        return True


def _dropped(sequence: Sequence) -> int:
    return sequence.dropped if sequence.swapped is None else sequence.swapped.dropped
