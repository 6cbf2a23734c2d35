"""The scheduler's queues of waiting and running sequences, and the slots."""

import bisect
import operator

from omni_jax.requests import Sequence

_order = operator.attrgetter("order")


class Queues:
    """Waiting and running sequences, each in order of arrival, and the free slots.

    Attributes:
        waiting: Sequences without a slot.
        running: Sequences with a slot.
        free_slots: Slots that no sequence has.
    """

    def __init__(self, max_num_seqs: int):
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Add a waiting sequence."""
        bisect.insort(self.waiting, sequence, key=_order)

    def admit(self, sequence: Sequence) -> None:
        """Give a waiting sequence a slot. There must be a free one."""
        sequence.slot = self.free_slots.pop()
        _remove(self.waiting, sequence)
        bisect.insort(self.running, sequence, key=_order)

    def requeue(self, sequence: Sequence) -> None:
        """Take the slot of a running sequence, which waits again."""
        self.remove(sequence)
        self.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is in a queue, and free its slot."""
        if sequence.slot is None:
            _remove(self.waiting, sequence)
            return
        _remove(self.running, sequence)
        self.free_slots.append(sequence.slot)
        sequence.slot = None
        sequence.on_device = False


def _remove(queue: list[Sequence], sequence: Sequence) -> None:
    index = bisect.bisect_left(queue, sequence.order, key=_order)
    if index < len(queue) and queue[index] is sequence:
        del queue[index]
