"""Random calls of a block pool, checked for leaks, double frees and stale or missed hits:
`python -m tests.memory.soak --calls 10000000`.

Here a digest is the path from the root, one letter per block, so that it shows a block's content and parent.
"""

import argparse
import collections
import dataclasses
import math
import random
import sys
import time

from omni_jax.memory.block_pool import BlockPool
from omni_jax.memory.recycling import HALF_LIFE_SECONDS, PIN_SECONDS, PINNED_BLOCKS, POLICIES

MODALITIES = ("text", "text", "image", "video", "table")
CALLS_PER_ROUND = 20_000  # calls before all blocks are freed
CALLS_PER_AUDIT = 1000  # calls between thorough checks
MOVES_PER_ORDER_CHECK = 50  # moves between checks of the eviction order


@dataclasses.dataclass(kw_only=True, eq=False)
class Chain:
    """The blocks of a sequence: block i holds path[: i + 1]; `own` are blocks that are never registered."""

    path: bytes
    blocks: list[int]
    registered: int
    own: list[int] = dataclasses.field(default_factory=list)


class Player:
    """Chains that hold blocks of a pool, and a plain model of the pool.

    Attributes:
        holds_parents: Whether the holder of a registered block always holds its parent too.
        content: What the device would hold in each block.
        used: Times at which each registered block was freed.
        calls: Number of calls of each method of the pool.
        hits, evicted: Number of blocks found, and of blocks evicted.
    """

    def __init__(self, num_blocks: int, *, policy: str = "by_modality", holds_parents: bool = True):
        self.pool = BlockPool(num_blocks, 16, recycling=POLICIES[policy])
        self.policy, self.holds_parents = policy, holds_parents
        self.chains: list[Chain] = []
        self.content: list[bytes | None] = [None] * num_blocks
        self.used: dict[int, list[float]] = {}
        self.peak = 0
        self.calls: collections.Counter[str] = collections.Counter()
        self.hits = self.evicted = 0

    # -- moves --------------------------------------------------------------------------------------------------------

    def start(self, path: bytes, *, check_order: bool = True) -> None:
        """Start a chain of a path: share the cached blocks and allocate the rest."""
        digests = [path[: i + 1] for i in range(len(path))]
        found = self.pool.find(digests)
        assert [self.content[block] for block in found] == digests[: len(found)], "a stale hit"
        assert len(found) == len(path) or digests[len(found)] not in self.pool._by_digest, "a hit was missed"
        self.pool.share(found)
        self.hits += len(found)
        self.calls.update(("find", "share"))
        taken = self.allocate(len(path) - len(found), check_order)
        if taken is None:
            self.free(found)
            return
        for block, digest in zip(taken, digests[len(found) :], strict=True):
            self.content[block] = digest
        self.chains.append(Chain(path=path, blocks=found + taken, registered=len(found)))

    def register(self, chain: Chain) -> None:
        """Register a chain's blocks. With `holds_parents`, stop at a block whose digest another block has."""
        for i in range(chain.registered, len(chain.path)):
            block, path = chain.blocks[i], chain.path
            done = self.pool.register(
                block,
                path[: i + 1],
                path[:i] or None,
                modality=MODALITIES[path[i] % len(MODALITIES)],
                depth=i,
            )
            self.calls["register"] += 1
            if done:
                self.used.setdefault(block, [])
                chain.registered = i + 1
            elif self.holds_parents:
                return

    def grow(self, chain: Chain, count: int, *, check_order: bool = True) -> None:
        """Allocate blocks that are never registered."""
        taken = self.allocate(count, check_order)
        for block in taken or ():
            self.content[block] = None
            chain.own.append(block)

    def fork(self, chain: Chain) -> None:
        self.pool.share(chain.blocks)
        self.calls["share"] += 1
        self.chains.append(Chain(path=chain.path, blocks=list(chain.blocks), registered=chain.registered))

    def cut(self, chain: Chain, keep: int) -> None:
        """Free the blocks after the first `keep`, the last one first."""
        lost = chain.blocks[keep:] + chain.own
        chain.own = []
        del chain.blocks[keep:]
        chain.path, chain.registered = chain.path[:keep], min(chain.registered, keep)
        self.free(lost)

    def finish(self, chain: Chain) -> None:
        self.chains.remove(chain)
        self.cut(chain, 0)

    def clear(self) -> None:
        self.pool.clear_cache()
        self.calls["clear_cache"] += 1
        self.used.clear()
        for chain in self.chains:
            chain.registered = 0

    def allocate(self, count: int, check_order: bool) -> list[int] | None:
        pool, before = self.pool, self.used
        idle = {b: self.value(b) for b in before if not pool.references(b)} if check_order else {}
        parents = {b: self.content[b][:-1] for b in idle}
        room = pool.num_free
        taken = pool.allocate(count)
        self.calls["allocate"] += 1
        assert (taken is None) == (count > room)
        evicted = [block for block in taken or () if block in before]
        if check_order:
            self.check_order(set(evicted), idle, parents)
        for block in evicted:
            del before[block]
            assert not pool.is_registered(block)
        self.evicted += len(evicted)
        return taken

    def free(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in self.used:
                self.used[block].append(self.pool.now)
        self.pool.free(reversed(blocks))
        self.calls["free"] += 1

    # -- checks -------------------------------------------------------------------------------------------------------

    def value(self, block: int) -> float:
        """A block's value by the definition of its policy, from the times of its uses."""
        times, path = self.used[block], self.content[block]
        if self.policy == "lru" or MODALITIES[path[-1] % len(MODALITIES)] in ("image", "video"):
            return times[-1]
        # Times are relative to the last use, because 2 ** t of the times themselves overflows.
        count = sum(2.0 ** ((t - times[-1]) / HALF_LIFE_SECONDS) for t in times)
        lfu = times[-1] + HALF_LIFE_SECONDS * math.log2(count)
        table = MODALITIES[path[-1] % len(MODALITIES)] == "table"
        pinned = table or (len(path) <= PINNED_BLOCKS and count > 1)
        return lfu + PIN_SECONDS * pinned

    def check_order(self, evicted: set[int], idle: dict[int, float], parents: dict[int, bytes]) -> None:
        """Check that each evicted block was the leaf with the smallest value among the idle blocks."""
        while evicted:
            children = collections.Counter(parents[b] for b in self.used if b in parents)
            children.update(self.content[b][:-1] for b in self.used if b not in parents)
            leaves = [b for b in idle if not children[self.content[b]]]
            first = min((b for b in leaves if b in evicted), key=idle.__getitem__, default=None)
            assert first is not None, "an evicted block was no leaf"
            assert idle[first] <= min(idle[b] for b in leaves) + 1e-6, "a more valuable block was evicted"
            evicted.remove(first)
            parents[first] = b"gone"
            del idle[first]

    def audit(self) -> None:
        pool = self.pool
        held = collections.Counter(b for chain in self.chains for b in chain.blocks + chain.own)
        assert [pool.references(b) for b in range(pool.num_blocks)] == [held[b] for b in range(pool.num_blocks)]
        assert not held[0]
        found = {cached.digest: cached for cached in pool._by_digest.values()}
        assert found == pool._by_digest
        assert {b for b in range(pool.num_blocks) if pool.is_registered(b)} == {c.block for c in found.values()}
        assert self.used.keys() == {c.block for c in found.values()}
        children, kept = collections.Counter(), set()
        for digest, cached in found.items():
            assert pool._cached[cached.block] is cached
            assert self.content[cached.block] == digest, "a stale hit"
            assert cached.parent is found.get(digest[:-1]), "a block cannot be reached from its root"
            assert (cached.parent is None) == (len(digest) == 1)
            children[digest[:-1]] += 1
            if held[cached.block]:
                kept.update(digest[:i] for i in range(1, len(digest) + 1))
                assert not self.holds_parents or cached.parent is None or held[cached.parent.block], "parent not held"
        assert all(cached.children == children[digest] for digest, cached in found.items())
        idle = {cached.block for digest, cached in found.items() if digest not in kept}
        used = held.keys() | {found[digest].block for digest in kept}
        free = set(pool._free)
        assert len(free) == len(pool._free), "a block is free twice"
        assert sorted([*free, *idle, *used]) == list(range(1, pool.num_blocks)), "a block leaked, or is in two states"
        assert (pool.num_free, pool.num_idle, pool.num_used) == (len(free) + len(idle), len(idle), len(used))
        leaves = {cached.block for digest, cached in found.items() if cached.block in idle and not children[digest]}
        entries = [*pool._leaves._new, *pool._leaves._heap]
        assert sorted(e[-1].block for e in entries if e[-1].ticket == e[-2]) == sorted(leaves)
        assert len(entries) <= 2 * max(pool.num_blocks, 64), "stale entries pile up"
        self.peak = max(self.peak, len(used))
        assert pool.num_used <= self.peak <= pool.peak_used
        assert pool.evictions == self.evicted

    def drain(self) -> None:
        for chain in list(self.chains):
            self.finish(chain)
        self.audit()
        assert self.pool.num_used == 0
        everything = self.allocate(self.pool.num_usable, True)
        assert everything is not None
        assert sorted(everything) == list(range(1, self.pool.num_blocks))
        assert not self.pool._by_digest
        self.pool.free(everything)


def play(player: Player, rng: random.Random, calls: int) -> None:
    """Make random calls of the pool, at least `calls`, then free all blocks."""
    max_chains, depth, letters = rng.randint(1, 12), rng.randint(1, 12), rng.randint(1, 6)
    paths = [bytes(rng.randrange(256) for _ in range(rng.randint(1, depth))) for _ in range(4)]
    limit, audited, moves = player.calls.total() + calls, 0, 0
    while player.calls.total() < limit:
        moves += 1
        player.pool.now += rng.choice((0.0, 1.0, 1.0, 300.0))
        check_order, move = not moves % MOVES_PER_ORDER_CHECK, rng.random()
        if move < 0.0005:
            player.clear()
        elif move < 0.3 and len(player.chains) < max_chains:
            shared = rng.choice(paths)[: rng.randint(0, depth)]
            path = shared + bytes(rng.randrange(letters) for _ in range(rng.randint(1, 4)))
            paths[rng.randrange(4)] = path
            player.start(path[:depth], check_order=check_order)
        elif player.chains:
            chain = rng.choice(player.chains)
            if move < 0.55:
                player.register(chain)
            elif move < 0.7:
                player.grow(chain, rng.randint(1, 3), check_order=check_order)
            elif move < 0.75:
                player.fork(chain)
            elif move < 0.8 and chain.blocks:
                player.cut(chain, rng.randrange(len(chain.blocks)))
            else:
                player.finish(chain)
        if player.calls.total() >= audited + CALLS_PER_AUDIT:
            audited = player.calls.total()
            player.audit()
    player.drain()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Counts over all rounds."""

    calls: collections.Counter[str]
    hits: int
    evicted: int


def soak(calls: int, seed: int, *, progress=lambda calls: None) -> Report:
    """Make at least `calls` random calls, in rounds with pools of random sizes."""
    rng, total = random.Random(seed), collections.Counter()
    hits = evicted = 0
    while total.total() < calls:
        holds_parents = rng.random() < 0.8
        size, policy = rng.choice((2, 9, 33, 129, 1025)), rng.choice(list(POLICIES))
        player = Player(size, policy=policy, holds_parents=holds_parents)
        play(player, rng, min(CALLS_PER_ROUND, calls - total.total()))
        total.update(player.calls)
        hits, evicted = hits + player.hits, evicted + player.evicted
        progress(total.total())
    return Report(calls=total, hits=hits, evicted=evicted)


def main() -> None:
    parser = argparse.ArgumentParser(description="Block pool properties over many seeded calls.")
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()

    def progress(calls: int) -> None:
        rate = calls / (time.monotonic() - began)
        sys.stdout.write(f"\r{calls:,} of {arguments.calls:,} calls, {rate:,.0f} per second")
        sys.stdout.flush()

    sys.stdout.write(f"\n{soak(arguments.calls, arguments.seed, progress=progress)}\n")


if __name__ == "__main__":
    main()
