"""Full collections happen at quiet times only."""

import gc
import weakref

import pytest

from omni_jax import garbage


@pytest.fixture
def full():
    """The generations of all collections so far; Python's settings are restored."""
    thresholds, found = gc.get_threshold(), []

    def note(phase, info):
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


class Cycle:
    def __init__(self):
        self.itself = self


def test_a_growing_heap_is_collected_in_full_at_a_quiet_time_only(full):
    before = [[] for _ in range(100_000)]
    garbage.postpone()
    full.clear()
    held = [[] for _ in range(500_000)]  # Python would make several full collections meanwhile
    assert 2 not in full
    assert max(full) == 1
    old = Cycle()
    gone = weakref.ref(old)
    gc.collect(1)
    del old
    garbage.collect()
    assert gone() is None
    assert full.count(2) == 1
    garbage.collect()  # none is due
    assert full.count(2) == 1
    assert len(held) > len(before)
