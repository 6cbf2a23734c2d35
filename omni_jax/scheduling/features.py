"""Which sequence holds which features of the encoder cache, and what is encoded next.

A sequence asks for the features of its spans in order, keeps what it got until its computed tokens have left the span
behind, and computes up to the first span whose features are not there. Who runs asks before who waits, and each in the
order of service; nobody asks past a span for which there was no room, so a large image is not overtaken for ever by
small ones. What a waiting sequence holds may be taken back for one that comes before it: so two that each hold what the
other needs cannot block each other.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from omni_jax.memory import EncoderCache
from omni_jax.requests import MediaSpan, Sequence


class Features:
    """The scheduler's side of the encoder cache.

    Args:
        cache: rows and reference counts.
        most_patches: of one call of the encoder.
        pack_patches: images are put into one call up to so many; a larger one goes alone.

    Attributes:
        cache, most_patches: as given.
    """

    def __init__(self, cache: EncoderCache, *, most_patches: int, pack_patches: int):
        self.cache = cache
        self.most_patches = most_patches
        self._pack = min(most_patches, pack_patches)
        self._asking: set[Sequence] = set()  # with spans they have not asked for, or were refused

    def add(self, sequence: Sequence) -> None:
        """A sequence that is queued, for the first time or again; it holds nothing."""
        self.leave_behind(sequence)
        if sequence.media_held < len(sequence.request.media):
            self._asking.add(sequence)

    def release(self, sequence: Sequence) -> None:
        """Gives back all that a sequence holds; it asks for nothing any more."""
        for span in sequence.request.media[sequence.media_passed : sequence.media_held]:
            self.cache.release(span.key)
        sequence.media_passed = sequence.media_held = 0
        self._asking.discard(sequence)

    def leave_behind(self, sequence: Sequence) -> None:
        """Gives back the features of spans that lie wholly within the tokens that need not be computed again."""
        media = sequence.request.media
        while sequence.media_passed < len(media) and media[sequence.media_passed].stop <= sequence.reached:
            if sequence.media_passed < sequence.media_held:
                self.cache.release(media[sequence.media_passed].key)
            sequence.media_passed += 1
        sequence.media_held = max(sequence.media_held, sequence.media_passed)
        if sequence.media_held == len(media):
            self._asking.discard(sequence)

    def ask(self, waiting: Iterable[Sequence], rank: Callable[[Sequence], Any]) -> None:
        """Takes references to features that are needed, as far as there is room.

        Args:
            waiting: those that may have to give back what they hold, last first.
            rank: who comes first: smaller. Of two that wait it must not change with time, or they could take features
                from each other in turn, for ever.
        """

        def place(sequence: Sequence) -> tuple[bool, Any]:
            return sequence.slot is None, rank(sequence)

        for sequence in sorted(self._asking, key=place):
            media = sequence.request.media
            while sequence.media_held < len(media):
                span = media[sequence.media_held]
                if not self.cache.hold(span):
                    behind = [s for s in waiting if s.media_held > s.media_passed and place(s) > place(sequence)]
                    if not self._take_back(span, sorted(behind, key=place)):
                        return
                sequence.media_held += 1
            self._asking.discard(sequence)

    def _take_back(self, span: MediaSpan, holders: list[Sequence]) -> bool:
        """Makes room for `span` at the cost of `holders`, the last of them first, and holds it. Whether that was
        enough."""
        while holders:
            victim = holders.pop()
            self.release(victim)
            self.add(victim)
            if self.cache.hold(span):
                return True
        return False

    def starts(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence could begin: the features of its next span are there. Text before the span alone
        is no reason to occupy a slot and blocks while an image is being encoded."""
        return sequence.media_passed == len(sequence.request.media) or self._is_there(sequence, sequence.media_passed)

    def computable(self, sequence: Sequence) -> int:
        """How many of its uncomputed tokens can be computed now: those before the first span that is not there."""
        uncomputed, media = sequence.uncomputed, sequence.request.media
        for index in range(sequence.media_passed, len(media)):
            ahead = media[index].start - sequence.computed
            if ahead >= uncomputed:
                break
            if not self._is_there(sequence, index):
                return max(ahead, 0)
        return uncomputed

    def _is_there(self, sequence: Sequence, index: int) -> bool:
        return index < sequence.media_held and self.cache.is_ready(sequence.request.media[index].key)

    def awaiting(self, *queues: Iterable[Sequence]) -> Iterator[Sequence]:
        """Those of some sequences whose next image is being encoded, or is to be."""
        for sequence in itertools.chain(*queues):
            if not self.starts(sequence):
                yield sequence

    def in_row(self, sequence: Sequence, start: int, stop: int) -> tuple[tuple[int, np.ndarray], ...]:
        """(place in the row, rows of the feature array) for each span that tokens start to stop of a sequence touch."""
        found = []
        for span in sequence.request.media[sequence.media_passed :]:
            if span.start >= stop:
                break
            first, last = max(span.start, start), min(span.stop, stop)
            if first < last:
                found.append((first - start, self.cache.rows(span.key)[first - span.start : last - span.start]))
        return tuple(found)

    def next_batch(self, sequences: Iterable[Sequence]) -> tuple[MediaSpan, ...]:
        """The spans to encode in the next call, the most urgent first; they count as being encoded from here on.

        Args:
            sequences: in the order in which they are served.
        """
        batch: list[MediaSpan] = []
        patches = 0
        for span in self._not_begun(sequences):
            if batch and patches + span.num_patches > self._pack:
                break
            batch.append(span)
            patches += span.num_patches
            self.cache.begin(span.key)
        return tuple(batch)

    def _not_begun(self, sequences: Iterable[Sequence]) -> Iterator[MediaSpan]:
        for sequence in sequences:
            for span in sequence.request.media[sequence.media_passed : sequence.media_held]:
                if self.cache.is_waiting(span.key):
                    yield span
