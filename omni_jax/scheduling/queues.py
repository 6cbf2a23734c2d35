"""The queues of waiting and running sequences, and the slots. No operation's time grows with the number that wait,
but for a logarithm.

A waiting sequence is in one place: in the line, if it may start as far as is known; parked, if another computes its
next block; or in neither, while its image is not encoded. It returns to the line when the reason may have gone, a
limited number in each step, so that thousands that waited for the same block or image do not stop a step.
"""

import bisect
import collections
import heapq
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator

from sortedcontainers import SortedDict, SortedKeyList, SortedList

from omni_jax.requests import Sequence
from omni_jax.scheduling.discipline import Discipline

MAX_CANDIDATES = 64  # waiting sequences that a step looks at, more than it has free slots

_order = operator.attrgetter("order")
_Key = tuple[int, float, tuple[int, int]]  # cohort, due, order of arrival


class Line:
    """Waiting sequences in the order of service at any time.

    Each is filed by its cohort, and in it by what is due first. Cohorts never overtake each other; those that have the
    same class at a time are merged.
    """

    def __init__(self, discipline: Discipline):
        self._discipline = discipline
        self._cohorts: SortedDict = SortedDict()  # cohort -> SortedList of (due, order, sequence)
        self._keys: dict[Sequence, _Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._keys

    def key(self, sequence: Sequence) -> _Key:
        """The place of a sequence: an order of waiting sequences that does not change while time passes."""
        return self._discipline.cohort(sequence), self._discipline.due(sequence), sequence.order

    def put(self, sequence: Sequence) -> None:
        """Add a sequence, or move it to its present place."""
        key = self.key(sequence)
        if self._keys.get(sequence) == key:
            return
        self.discard(sequence)
        cohort, due, order = self._keys[sequence] = key
        if cohort not in self._cohorts:
            self._cohorts[cohort] = SortedList()
        self._cohorts[cohort].add((due, order, sequence))

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is there."""
        key = self._keys.pop(sequence, None)
        if key is None:
            return
        cohort, due, order = key
        queue = self._cohorts[cohort]
        queue.remove((due, order, sequence))
        if not queue:
            del self._cohorts[cohort]

    def in_order(self, now: float) -> Iterator[Sequence]:
        """The sequences in the order of service. The line must not change meanwhile."""
        for _, cohorts in itertools.groupby(self._cohorts, key=lambda cohort: self._discipline.level(cohort, now)):
            queues = [self._cohorts[cohort] for cohort in cohorts]
            for _, _, sequence in queues[0] if len(queues) == 1 else heapq.merge(*queues):
                yield sequence

    def first(self) -> Sequence | None:
        """The first by `key`."""
        return self._cohorts.peekitem(0)[1][0][2] if self._cohorts else None

    def last(self) -> Sequence | None:
        """The last by `key`."""
        return self._cohorts.peekitem(-1)[1][-1][2] if self._cohorts else None


class Parked:
    """Waiting sequences whose next block is being computed by another sequence, its owner.

    Attributes:
        most_urgent: A class that none of them is more urgent than.
    """

    def __init__(self) -> None:
        self.most_urgent = math.inf
        # By owner and the last block that they share with it; each group in the order of parking.
        self._by_owner: dict[Sequence, SortedDict] = {}
        self._places: dict[Sequence, tuple[Sequence, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._places

    def add(self, sequence: Sequence, owner: Sequence, last: int, priority: float) -> None:
        """Park a sequence until the owner has registered its block number `last`, the last one that they share."""
        self.most_urgent = min(self.most_urgent, priority) if self._places else priority
        self.discard(sequence)
        self._places[sequence] = owner, last
        self._by_owner.setdefault(owner, SortedDict()).setdefault(last, {})[sequence] = None

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is there."""
        place = self._places.pop(sequence, None)
        if place is None:
            return
        owner, last = place
        groups = self._by_owner[owner]
        del groups[last][sequence]
        if not groups[last]:
            del groups[last]
            if not groups:
                del self._by_owner[owner]

    def wake(self, owners: Collection[Sequence], limit: int) -> list[Sequence]:
        """Remove and return up to `limit` sequences whose owner is not among `owners` (those that go on computing new
        blocks) or has passed the last block that they share."""
        woken: list[Sequence] = []
        for owner, groups in self._by_owner.items():
            for last, group in groups.items():
                if len(woken) >= limit or (owner in owners and last >= owner.registered):
                    break
                woken += itertools.islice(group, limit - len(woken))
        for sequence in woken:
            self.discard(sequence)
        return woken


class Queues:
    """Waiting and running sequences, and the free slots.

    Args:
        max_num_seqs: Number of slots.
        discipline: The order of service.
        can_start: Whether the next image of a sequence is encoded, if it has one.

    Attributes:
        waiting: Sequences without a slot; the keys of a dict, since thousands may leave it in one step.
        running: Sequences with a slot, in order of arrival.
        line: Waiting sequences in the order of service, without those that are known to be unable to start.
        parked: Waiting sequences whose next block is being computed.
        returning: Waiting sequences that will be filed anew, since their image is encoded; the keys of a dict.
        holders: Waiting sequences that hold blocks, by the last of these.
        preempted: Those of them that had a slot before.
        free_slots: Slots that no sequence has.
        running_requests: Number of running sequences of each request that has any.
    """

    def __init__(self, max_num_seqs: int, discipline: Discipline, can_start: Callable[[Sequence], bool]):
        self.waiting: dict[Sequence, None] = {}
        self.running: list[Sequence] = []
        self._discipline = discipline
        self.line = Line(discipline)
        self.parked = Parked()
        self.returning: collections.OrderedDict[Sequence, None] = collections.OrderedDict()
        self.holders: dict[int, SortedKeyList] = {}
        self.preempted: dict[Sequence, None] = {}
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.running_requests: collections.Counter[str] = collections.Counter()
        self._can_start = can_start
        self._last_blocks: dict[Sequence, int] = {}

    def add(self, sequence: Sequence) -> None:
        """Add a waiting sequence."""
        self.waiting[sequence] = None
        self.file(sequence)

    def file(self, sequence: Sequence) -> None:
        """File a waiting sequence anew. Called after each change of its tokens, blocks or features."""
        self.parked.discard(sequence)
        if self._can_start(sequence):
            self.line.put(sequence)
        else:
            self.line.discard(sequence)
        last = sequence.blocks[-1] if sequence.blocks else None
        if self._last_blocks.get(sequence) != last:
            self._forget_holder(sequence)
            if last is not None:
                self._last_blocks[sequence] = last
                self.holders.setdefault(last, SortedKeyList(key=_order)).add(sequence)
                if sequence.scheduled_at is not None:
                    self.preempted[sequence] = None

    def park(self, sequence: Sequence, owner: Sequence, last: int) -> None:
        """Take a sequence out of the line, see Parked."""
        self.line.discard(sequence)
        self.parked.add(sequence, owner, last, self._discipline.priority(sequence))

    def file_returning(self) -> None:
        """File some of the sequences whose images are encoded."""
        for _ in range(min(len(self.returning), MAX_CANDIDATES + len(self.free_slots))):
            self.file(self.returning.popitem(last=False)[0])

    def next_in_line(self, count: int, now: float, held: Collection[str]) -> list[Sequence]:
        """The first `count` sequences of the line, without requests that are held."""
        sequences: Iterable[Sequence] = self.line.in_order(now)
        if held:
            sequences = (sequence for sequence in sequences if sequence.request.id not in held)
        return list(itertools.islice(sequences, count))

    def admit(self, sequence: Sequence) -> None:
        """Give a waiting sequence a slot. There must be a free one."""
        self._forget(sequence)
        sequence.slot = self.free_slots.pop()
        self.running_requests[sequence.request.id] += 1
        bisect.insort(self.running, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is in a queue, and free its slot."""
        if sequence.slot is None:
            self._forget(sequence)
            return
        index = bisect.bisect_left(self.running, sequence.order, key=_order)
        del self.running[index]
        self.free_slots.append(sequence.slot)
        self.running_requests[sequence.request.id] -= 1
        if not self.running_requests[sequence.request.id]:
            del self.running_requests[sequence.request.id]
        sequence.slot = None
        sequence.on_device = False

    def _forget(self, sequence: Sequence) -> None:
        """Remove a waiting sequence from all places."""
        self.waiting.pop(sequence, None)
        self.returning.pop(sequence, None)
        self.line.discard(sequence)
        self.parked.discard(sequence)
        self._forget_holder(sequence)

    def _forget_holder(self, sequence: Sequence) -> None:
        last = self._last_blocks.pop(sequence, None)
        self.preempted.pop(sequence, None)
        if last is not None:
            queue = self.holders[last]
            queue.remove(sequence)
            if not queue:
                del self.holders[last]
