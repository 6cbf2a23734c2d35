"""The block pool, compared with a plain model: hypothesis's moves, and many random ones.
`python -m tests.memory.soak` makes a million or more."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from omni_jax.memory.block_pool import BlockPool
from omni_jax.memory.recycling import POLICIES
from tests.memory import soak
from tests.memory.soak import Player

LETTERS = st.binary(min_size=1, max_size=4).map(lambda path: bytes(letter % 5 for letter in path))


class Pool(RuleBasedStateMachine):
    """Moves, each followed by a thorough check; each eviction is compared with the policy's definition."""

    @initialize(blocks=st.integers(2, 14), policy=st.sampled_from(sorted(POLICIES)), holds_parents=st.booleans())
    def begin(self, blocks, policy, holds_parents):
        self.player = Player(blocks, policy=policy, holds_parents=holds_parents)

    def chain(self, number):
        return self.player.chains[number % len(self.player.chains)]

    def has_chains(self):
        return bool(self.player.chains)

    @rule(path=LETTERS, register=st.booleans())
    def start(self, path, register):
        before = len(self.player.chains)
        self.player.start(path)
        if register and len(self.player.chains) > before:
            self.player.register(self.player.chains[-1])

    @precondition(has_chains)
    @rule(number=st.integers(0, 9))
    def register(self, number):
        self.player.register(self.chain(number))

    @precondition(has_chains)
    @rule(number=st.integers(0, 9), count=st.integers(1, 4))
    def grow(self, number, count):
        self.player.grow(self.chain(number), count)

    @precondition(has_chains)
    @rule(number=st.integers(0, 9))
    def fork(self, number):
        self.player.fork(self.chain(number))

    @precondition(has_chains)
    @rule(number=st.integers(0, 9), keep=st.integers(0, 3))
    def cut(self, number, keep):
        self.player.cut(self.chain(number), keep)

    @precondition(has_chains)
    @rule(number=st.integers(0, 9))
    def finish(self, number):
        self.player.finish(self.chain(number))

    @rule(seconds=st.sampled_from([1.0, 60.0, 2000.0]))
    def wait(self, seconds):
        self.player.pool.now += seconds

    @rule()
    def clear(self):
        self.player.clear()

    @invariant()
    def audit(self):
        if hasattr(self, "player"):
            self.player.audit()

    def teardown(self):
        if hasattr(self, "player"):
            self.player.drain()


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_200_000_calls():
    report = soak.soak(200_000, seed=0)
    # Each kind of call and event occurred often.
    assert report.calls.total() >= 200_000
    assert min(report.calls[name] for name in ("allocate", "share", "free", "find", "register")) > 5000
    assert report.calls["clear_cache"] > 10
    assert min(report.hits, report.evicted) > 10_000


def without_children(monkeypatch):
    """Evicts blocks that have children."""
    real = BlockPool._drop_hold

    def drop_hold(self, cached):
        children, cached.children = cached.children, 0
        real(self, cached)
        cached.children = children

    monkeypatch.setattr(BlockPool, "_drop_hold", drop_hold)


def with_stale_digests(monkeypatch):
    """Does not unregister evicted blocks."""
    monkeypatch.setattr(BlockPool, "_evict", lambda self: self._free.append(self._leaves.pop().block))


def with_a_leak(monkeypatch):
    """Loses a free block now and then."""
    real = BlockPool.free

    def free(self, blocks):
        real(self, blocks)
        if len(self._free) > 5 and self.num_used % 7 == 3:
            self._free.pop()

    monkeypatch.setattr(BlockPool, "free", free)


def most_valuable_first(monkeypatch):
    monkeypatch.setitem(POLICIES, "lru", lambda use: -use.last_used)


@pytest.mark.parametrize("fault", [without_children, with_stale_digests, with_a_leak, most_valuable_first])
def test_the_soak_detects_a_broken_pool(monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        soak.soak(200_000, seed=0)
