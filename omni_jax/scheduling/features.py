"""Which sequence holds which features of the encoder cache, and which images are encoded next.

A sequence takes references to the features of its spans in order, drops them once its computed tokens have passed the
span, and can be computed up to the first span whose features are not ready. Running sequences come before waiting ones,
each in the order of service. When there is no room for a span, no later span is considered, so a large image is not
overtaken for ever by small ones. A waiting sequence may lose its references to one that ranks before it, so two
sequences that each hold what the other needs cannot block each other.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from omni_jax.memory import EncoderCache
from omni_jax.requests import MediaSpan, Sequence


class Features:
    """The scheduler's view of the encoder cache.

    Args:
        cache: The encoder cache.
        max_patches: Maximum number of patches of one call of the encoder.
        pack_patches: Maximum number of patches of a call with several images; a larger image has a call of its own.

    Attributes:
        cache, max_patches: As given.
    """

    def __init__(self, cache: EncoderCache, *, max_patches: int, pack_patches: int):
        self.cache = cache
        self.max_patches = max_patches
        self._pack = min(max_patches, pack_patches)
        self._wanting: set[Sequence] = set()  # sequences with spans whose features they do not hold yet

    def track(self, sequence: Sequence) -> None:
        """Track the needs of a sequence that is queued, for the first time or again, and holds no features."""
        self.release_passed(sequence)
        if sequence.media_held < len(sequence.request.media):
            self._wanting.add(sequence)

    def release(self, sequence: Sequence) -> None:
        """Drop all references of a sequence, and stop tracking its needs."""
        for span in sequence.request.media[sequence.media_passed : sequence.media_held]:
            self.cache.release(span.key)
        sequence.media_passed = sequence.media_held = 0
        self._wanting.discard(sequence)

    def release_passed(self, sequence: Sequence) -> None:
        """Drop the references to features of spans that lie wholly within tokens that need not be recomputed."""
        media = sequence.request.media
        while sequence.media_passed < len(media) and media[sequence.media_passed].stop <= sequence.reached:
            if sequence.media_passed < sequence.media_held:
                self.cache.release(media[sequence.media_passed].key)
            sequence.media_passed += 1
        sequence.media_held = max(sequence.media_held, sequence.media_passed)
        if sequence.media_held == len(media):
            self._wanting.discard(sequence)

    def acquire(self, waiting: Iterable[Sequence], rank: Callable[[Sequence], Any]) -> None:
        """Take references to the features that sequences need, as far as there is room.

        Args:
            waiting: Waiting sequences, which may lose their references, the last in rank first.
            rank: Order of sequences, smaller first. It must not change the order of two waiting sequences over time,
                or they could take features from each other in turn, for ever.
        """

        def order(sequence: Sequence) -> tuple[bool, Any]:
            return sequence.slot is None, rank(sequence)

        for sequence in sorted(self._wanting, key=order):
            media = sequence.request.media
            while sequence.media_held < len(media):
                span = media[sequence.media_held]
                if not self.cache.hold(span):
                    later = [s for s in waiting if s.media_held > s.media_passed and order(s) > order(sequence)]
                    if not self._reclaim(span, sorted(later, key=order)):
                        return
                sequence.media_held += 1
            self._wanting.discard(sequence)

    def _reclaim(self, span: MediaSpan, holders: list[Sequence]) -> bool:
        """Take references from `holders`, the last one first, until there is room for `span`, and hold it. Returns
        whether there was enough room."""
        while holders:
            victim = holders.pop()
            self.release(victim)
            self.track(victim)
            if self.cache.hold(span):
                return True
        return False

    def can_start(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence can start: the features of its next span are ready. Text before the span is no
        reason to occupy a slot and blocks while an image is being encoded."""
        return sequence.media_passed == len(sequence.request.media) or self._is_ready(sequence, sequence.media_passed)

    def computable(self, sequence: Sequence) -> int:
        """Number of uncomputed tokens that can be computed now: those before the first span that is not ready."""
        uncomputed, media = sequence.uncomputed, sequence.request.media
        for index in range(sequence.media_passed, len(media)):
            ahead = media[index].start - sequence.computed
            if ahead >= uncomputed:
                break
            if not self._is_ready(sequence, index):
                return max(ahead, 0)
        return uncomputed

    def _is_ready(self, sequence: Sequence, index: int) -> bool:
        return index < sequence.media_held and self.cache.is_ready(sequence.request.media[index].key)

    def awaiting(self, *queues: Iterable[Sequence]) -> Iterator[Sequence]:
        """The sequences whose next image is being encoded, or waits for that."""
        for sequence in itertools.chain(*queues):
            if not self.can_start(sequence):
                yield sequence

    def in_range(self, sequence: Sequence, start: int, stop: int) -> tuple[tuple[int, np.ndarray], ...]:
        """(offset, rows of the feature array) for each span that overlaps tokens start to stop of a sequence. The
        offset counts from start."""
        found = []
        for span in sequence.request.media[sequence.media_passed :]:
            if span.start >= stop:
                break
            first, last = max(span.start, start), min(span.stop, stop)
            if first < last:
                found.append((first - start, self.cache.rows(span.key)[first - span.start : last - span.start]))
        return tuple(found)

    def next_batch(self, sequences: Iterable[Sequence]) -> tuple[MediaSpan, ...]:
        """The spans to encode in the next call, the most urgent first. They count as being encoded from now on.

        Args:
            sequences: Sequences in the order of service.
        """
        batch: list[MediaSpan] = []
        patches = 0
        for span in self._unencoded(sequences):
            if batch and patches + span.num_patches > self._pack:
                break
            batch.append(span)
            patches += span.num_patches
            self.cache.begin(span.key)
        return tuple(batch)

    def _unencoded(self, sequences: Iterable[Sequence]) -> Iterator[MediaSpan]:
        for sequence in sequences:
            for span in sequence.request.media[sequence.media_passed : sequence.media_held]:
                if self.cache.is_waiting(span.key):
                    yield span
