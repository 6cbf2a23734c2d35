"""Which sequence holds which blocks: prefix cache hits, registration, swapping and compression.

- A sequence takes its hits when it is about to be admitted, and computes at least one token itself. A new sequence with
  images takes them when it arrives, so that an image with cached keys and values is not encoded.
- Blocks are registered when the step that fills them with known tokens is planned. Device calls are ordered, so a
  sequence that takes them reads them later.
- A sequence that has computed a block that another one has registered takes that block in place of its own. So a
  holder of a cached block also holds all blocks before it.
- A sequence waits if a running one is already computing its next block, and takes the block from the cache.
- The continuations of a request are sequences like others, which share its prompt in this way. Where prefix caching is
  off, they alone do: the cache_salt of their request is its own (engine/input_processor.py).
"""

import bisect
import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import Protocol

from omni_jax.memory.accounting import count_rows
from omni_jax.memory.block_pool import BlockPool
from omni_jax.memory.compression import share_at
from omni_jax.memory.prefix import count_blocks, count_modalities, extend, modality
from omni_jax.requests import Sequence
from omni_jax.requests.segment import Modality
from omni_jax.requests.sequence import Parcel, Swapped


class Swap(Protocol):
    """The store for blocks that are swapped out of the device (engine/swapping.py)."""

    def store(self, sequence: Sequence, blocks: list[int], tokens: int, cached: int) -> Parcel | None:
        """Start copying blocks away; they may be reused at once. Returns None if recomputing is cheaper, or if there is
        no room. Of the `tokens` tokens in them, the first `cached` would come back from the prefix cache."""
        ...

    def is_ready(self, parcel: Parcel) -> bool:
        """Whether `load` returns at once. Starts what that needs."""
        ...

    def load(self, parcel: Parcel, blocks: list[int]) -> bool:
        """Start copying into `blocks`, before the next step, and forget the parcel. Returns False if it is lost."""
        ...

    def drop(self, parcel: Parcel) -> None:
        """Forget a parcel."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression:
    """How the cache of a sequence is compressed while it decodes.

    Attributes:
        ratio: (decode step, maximum number of decode steps) -> share of its tokens that may be dropped, for requests
            without shares of their own (Request.drop_shares).
        compact: (blocks, rows in them, rows to keep, blocks to write them to) -> None. Dispatched before the next step.
        min_rows: Number of rows that are always kept.
    """

    ratio: Callable[[int, int], float]
    compact: Callable[[list[int], int, int, list[int]], None]
    min_rows: int = 1


class Blocks:
    """The scheduler's view of the block pool.

    Args:
        pool: The pool.
        prefix_caching: Whether requests share the blocks of common prefixes. The continuations of a request always do.
        swap: Store for swapped blocks; None disables swapping.
        compression: Compression settings; None disables compression.

    Attributes:
        queries, hits: Number of prompt tokens of admitted requests, and of those found in the cache, by modality.
        slots: Number of filled slots of held blocks, by modality; those of shared blocks count once. See PoolUsage.
        dropped: Number of tokens dropped by compression.
        swapped_out, swapped_in, swapped: Number of blocks swapped out, swapped in, and out at present.
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
        self.slots: collections.Counter[Modality] = collections.Counter()
        self.dropped = self.swapped_out = self.swapped_in = self.swapped = 0

    # -- block counts -------------------------------------------------------------------------------------------------

    def missing(self, sequence: Sequence, hits: Iterable[int] = ()) -> int:
        """Number of blocks to take from the pool before all known tokens of a sequence can be computed.

        Of `hits`, the cached blocks that it will share, only those without references count.
        """
        need = self.pool.blocks_for(sequence.num_known - _dropped(sequence)) - len(sequence.blocks)
        return need - self.pool.count_held(hits)

    def num_reserved(self, sequence: Sequence) -> int:
        """Number of free blocks to keep for a sequence in addition to those for its known tokens: one to grow by. With
        compression it is all that it may still need, because a compressed sequence cannot be recomputed."""
        if self.compression is None:
            return 1
        size, dropped = self.pool.block_size, _dropped(sequence)
        held = max(len(sequence.blocks), -((dropped - sequence.num_known) // size))
        return max(-((dropped - sequence.num_prompt - sequence.max_output) // size) - held, 0)

    def num_reserved_for(self, running: list[Sequence]) -> int:
        """Number of free blocks to keep for all running sequences."""
        return len(running) if self.compression is None else sum(map(self.num_reserved, running))

    def is_preemptible(self, sequence: Sequence) -> bool:
        """Whether a sequence may lose blocks or its slot. A compressed one may only if it can be swapped out."""
        return not sequence.dropped or self.swap is not None

    def num_unshared(self, sequence: Sequence, hits: Iterable[int] = ()) -> int:
        """Number of a sequence's blocks that become free if it loses them: those that no other sequence holds, or will
        hold as `hits`. Blocks before a shared one are shared, too."""
        blocks, shared = sequence.blocks, set(hits)
        return len(blocks) - bisect.bisect_left(
            range(len(blocks)),
            True,
            key=lambda at: self.pool.references(blocks[at]) < 2 and blocks[at] not in shared,
        )

    # -- the prefix cache ---------------------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> list[int]:
        """Cached blocks that continue the blocks of a waiting sequence, up to its last token but one."""
        held = len(sequence.blocks)
        if (
            not self.shares(sequence)
            or sequence.wants_prompt_logprobs
            or sequence.swapped is not None
            or sequence.pending
            or sequence.registered != held
            or sequence.computed != held * self.pool.block_size
        ):
            return []
        self._extend(sequence)
        return self.pool.find(sequence.digests[held : (sequence.num_known - 1) // self.pool.block_size])

    def take_hits(self, sequence: Sequence, hits: list[int]) -> None:
        """Let a waiting sequence share the blocks that `match` found."""
        size, idle = self.pool.block_size, sum(self.pool.references(block) == 0 for block in hits)  # the last ones
        self.pool.share(hits)
        sequence.blocks += hits
        sequence.registered = len(sequence.blocks)
        sequence.computed += len(hits) * size
        self.slots.update(count_rows(sequence, sequence.computed - idle * size, sequence.computed))

    def next_digest(self, sequence: Sequence, hits: int = 0) -> bytes | None:
        """Digest of the block that a sequence would compute next, after `hits` hits; None if it could not be cached."""
        at = len(sequence.blocks) + hits if sequence.slot is None else sequence.registered
        if not self.shares(sequence) or sequence.swapped is not None:
            return None
        self._extend(sequence)
        last = (sequence.num_known - (sequence.slot is None)) // self.pool.block_size
        return sequence.digests[at] if at < last else None

    def is_cached(self, digest: bytes) -> bool:
        """Whether a block is registered by this digest."""
        return bool(self.pool.find((digest,)))

    def last_shared(self, first: Sequence, second: Sequence, at: int) -> int:
        """The last block, from block `at` on, up to which the digests of two sequences agree; they do there."""
        stop = min(len(first.digests), len(second.digests))
        ours, theirs = first.digests, second.digests
        return bisect.bisect_left(range(at, stop), True, key=lambda index: ours[index] != theirs[index]) + at - 1

    def register(self, sequence: Sequence, end: int) -> None:
        """Register a sequence's blocks that are full of known tokens once its first `end` tokens are computed.

        If another block has the same content, the sequence takes that one in place of its own, so that the blocks after
        it can be found too. A block that the step being planned writes to is replaced in the next one, and one that
        others hold too, after a clearing of the cache, is not: they would hold registered blocks without those before.
        """
        if not self.shares(sequence) or sequence.dropped or sequence.finish_reason == "error":
            return
        size = self.pool.block_size
        shared = sequence.num_known if self.prefix_caching else sequence.num_prompt
        full, written = min(end, shared) // size, sequence.computed // size
        if sequence.registered >= full:
            return
        self._extend(sequence)
        request, blocks, digests = sequence.request, sequence.blocks, sequence.digests
        for at in range(sequence.registered, full):
            parent, kind = digests[at - 1] if at else None, modality(request, at * size, (at + 1) * size)
            if not self.pool.register(blocks[at], digests[at], parent, modality=kind, depth=at):
                if at >= written or self.pool.references(blocks[at]) > 1:
                    return
                self._replace(sequence, at)
            sequence.registered = at + 1

    def _replace(self, sequence: Sequence, at: int) -> None:
        """Replace block number `at` of a sequence by the registered block with the same content."""
        found, size = self.pool.find((sequence.digests[at],)), self.pool.block_size
        if self.pool.references(found[0]):
            self.slots.subtract(count_rows(sequence, at * size, (at + 1) * size))
        self.pool.share(found)
        self.pool.free((sequence.blocks[at],))
        sequence.blocks[at : at + 1] = found
        sequence.on_device_blocks = 0

    def count_hits(self, sequence: Sequence) -> None:
        """Count the hits of a sequence that is admitted for the first time."""
        sequence.cached = sequence.computed
        if not self.prefix_caching:
            return
        for kind, tokens, hits in count_blocks(sequence.request, sequence.cached, self.pool.block_size):
            self.queries[kind] += tokens
            self.hits[kind] += hits

    def shares(self, sequence: Sequence) -> bool:
        """Whether other sequences may hold the same blocks as this one."""
        return self.prefix_caching or sequence.request.params.n > 1

    def _extend(self, sequence: Sequence) -> None:
        extend(sequence.digests, sequence.request, sequence.output, self.pool.block_size)

    # -- filled slots -------------------------------------------------------------------------------------------------

    def fill(self, sequence: Sequence, count: int) -> None:
        """Advance `computed`, and count the rows that the next `count` tokens of a sequence fill."""
        if sequence.dropped:
            self.slots.subtract(count_rows(sequence, 0, sequence.rows))
            sequence.computed += count
            self.slots.update(count_rows(sequence, 0, sequence.rows))
            return
        sequence.computed += count
        self.slots.update(count_rows(sequence, sequence.computed - count, sequence.computed))

    def _empty(self, sequence: Sequence, keep: int) -> None:
        """Count the rows of a sequence's blocks after the first `keep` no more, where no other sequence holds them. A
        sequence that holds a block holds those before it, so these are the last ones."""
        blocks, references = sequence.blocks, self.pool.references
        alone = bisect.bisect_left(range(keep, len(blocks)), True, key=lambda index: references(blocks[index]) == 1)
        self.slots.subtract(count_rows(sequence, (keep + alone) * self.pool.block_size, sequence.rows))

    # -- preemption ---------------------------------------------------------------------------------------------------

    def truncate(self, sequence: Sequence, keep: int) -> None:
        """Free a sequence's blocks after the first `keep`; their tokens must be recomputed."""
        if sequence.swapped is not None and keep < sequence.swapped.first:
            self.drop_swapped(sequence)
        if len(sequence.blocks) > keep:
            self._empty(sequence, keep)
            self.pool.free(reversed(sequence.blocks[keep:]))
            del sequence.blocks[keep:]
        if not keep:
            sequence.dropped = 0
        sequence.computed = min(sequence.computed, keep * self.pool.block_size + sequence.dropped)
        sequence.registered = min(sequence.registered, keep)
        sequence.on_device_blocks = 0

    def preempt(self, sequence: Sequence, keep: int, wanted: int) -> bool | None:
        """Free a sequence's blocks after the first `keep`, swapping them out if that is cheaper than recomputing.

        `wanted` of them are for another sequence. The others stay in the prefix cache if they are registered.

        Returns:
            Whether they were swapped out, or None if none were freed: a compressed sequence loses all blocks to the
            host, or none.
        """
        if sequence.dropped:
            keep = 0
        else:  # freeing shared blocks would not help
            while keep < len(sequence.blocks) and self.pool.references(sequence.blocks[keep]) > 1:
                keep += 1
        lost = sequence.blocks[keep : self.pool.blocks_for(sequence.rows)]  # without the empty ones
        if lost and self.swap is not None and sequence.swapped is None:
            size, cached = self.pool.block_size, 0
            if self.shares(sequence) and not sequence.wants_prompt_logprobs:
                found = min(sequence.registered, (sequence.num_known - 1) // size)  # as in `match`
                cached = max(min(found - keep, len(lost) - wanted), 0)
            parcel = self.swap.store(sequence, lost, sequence.rows - keep * size, cached * size)
            if parcel is not None:
                swapped = Swapped(
                    parcel=parcel,
                    first=keep,
                    count=len(lost),
                    computed=sequence.computed,
                    dropped=sequence.dropped,
                )
                self.truncate(sequence, keep)
                sequence.swapped = swapped
                self.swapped_out += len(lost)
                self.swapped += len(lost)
                return True
        if sequence.dropped:
            return None
        self.truncate(sequence, keep)
        return False

    def can_restore(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence has no swapped blocks, or they can be restored at once. Starts what that needs."""
        if sequence.swapped is None:
            return True
        assert self.swap is not None
        return self.swap.is_ready(sequence.swapped.parcel)

    def restore(self, sequence: Sequence) -> bool:
        """Restore the swapped blocks of a sequence that holds all blocks for them. Returns False if they are lost, and
        must be recomputed."""
        swapped = sequence.swapped
        assert swapped is not None
        assert self.swap is not None
        sequence.swapped = None
        self.swapped -= swapped.count
        if not self.swap.load(swapped.parcel, sequence.blocks[swapped.first : swapped.first + swapped.count]):
            return False
        start = sequence.rows
        sequence.computed, sequence.dropped = swapped.computed, swapped.dropped
        self.slots.update(count_rows(sequence, start, sequence.rows))
        self.swapped_in += swapped.count
        return True

    def drop_swapped(self, sequence: Sequence) -> None:
        """Drop the swapped blocks of a sequence."""
        if sequence.swapped is not None:
            assert self.swap is not None
            self.swap.drop(sequence.swapped.parcel)
            self.swapped -= sequence.swapped.count
            sequence.swapped = None

    # -- compression --------------------------------------------------------------------------------------------------

    def compress(self, sequence: Sequence, spare: int) -> bool:
        """Drop rows before a decode step, if the controller allows it and a block becomes free.

        Args:
            spare: Number of free blocks beyond those reserved for running sequences. Shared and cached blocks are not
                written to, so the remaining rows may need other blocks, but not the reserved ones.

        Returns:
            Whether the sequence's rows are now in other blocks.
        """
        compression = self.compression
        assert compression is not None
        step = sequence.num_output + sequence.pending
        length, rows = sequence.computed, sequence.rows
        shares = sequence.request.drop_shares
        ratio = compression.ratio(step, sequence.max_output) if shares is None else share_at(shares, step)
        drop = min(int(ratio * length) - sequence.dropped, rows - compression.min_rows)
        if drop <= 0:
            return False
        count = self.pool.blocks_for(rows - drop + 1)
        if count >= self.pool.blocks_for(rows + 1):
            return False
        alone = [block for block in sequence.blocks if self.pool.references(block) == 1]
        own = [block for block in alone if not self.pool.is_registered(block)][:count]
        fresh, freed = count - len(own), len(alone) - len(own)
        total = sequence.num_prompt + sequence.max_output - sequence.dropped - drop
        reserved = max(self.pool.blocks_for(total) - count, 0)
        if spare + self.num_reserved(sequence) - reserved + freed - fresh < 0:
            return False
        taken = self.pool.allocate(fresh)
        if taken is None:
            return False
        target = own + taken
        compression.compact(sequence.blocks, rows, rows - drop, target)
        self._empty(sequence, 0)
        kept = set(own)
        self.pool.free(reversed([block for block in sequence.blocks if block not in kept]))
        sequence.blocks = target
        sequence.registered = sequence.on_device_blocks = 0
        if not sequence.dropped:
            sequence.mixture = count_modalities(sequence.request, 0, sequence.num_prompt)
        sequence.dropped += drop
        self.slots.update(count_rows(sequence, 0, sequence.rows))
        self.dropped += drop
        return True


def _dropped(sequence: Sequence) -> int:
    return sequence.dropped if sequence.swapped is None else sequence.swapped.dropped
