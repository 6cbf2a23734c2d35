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

from omni_jax.memory.encoder_cache import EncoderCache
from omni_jax.requests import MediaSpan, Sequence
from omni_jax.scheduling.discipline import Discipline, FirstCome
from omni_jax.scheduling.queues import MAX_CANDIDATES, Line


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
        self._running: set[Sequence] = set()  # running sequences with spans whose features they do not hold yet
        # Holders of spans that are not encoded yet, by key: (sequence, number of its span), in order of asking.
        self._askers: dict[bytes, dict[tuple[Sequence, int], None]] = {}
        self.order_by(FirstCome())

    def order_by(self, discipline: Discipline) -> None:
        """Set the order of service, before any sequence is tracked."""
        self._waiting = Line(discipline)  # waiting sequences with spans whose features they do not hold yet
        self._holders = Line(discipline)  # waiting sequences that hold features

    def track(self, sequence: Sequence) -> None:
        """Track the needs of a sequence that is queued, has taken cache hits or was admitted."""
        self._pass(sequence)
        self._file(sequence)

    def release(self, sequence: Sequence) -> None:
        """Drop all references of a sequence, and stop tracking its needs."""
        for index in range(sequence.media_passed, sequence.media_held):
            self._drop(sequence, index)
        sequence.media_passed = sequence.media_held = 0
        for tracked in (self._running, self._waiting, self._holders):
            tracked.discard(sequence)

    def release_passed(self, sequence: Sequence) -> None:
        """Drop the references to features of spans that lie wholly within tokens that need not be recomputed."""
        if self._pass(sequence):
            self._file(sequence)

    def _pass(self, sequence: Sequence) -> bool:
        media, before = sequence.request.media, sequence.media_passed
        while sequence.media_passed < len(media) and media[sequence.media_passed].stop <= sequence.reached:
            if sequence.media_passed < sequence.media_held:
                self._drop(sequence, sequence.media_passed)
            sequence.media_passed += 1
        sequence.media_held = max(sequence.media_held, sequence.media_passed)
        return sequence.media_passed != before

    def _file(self, sequence: Sequence) -> None:
        """Put a sequence where it belongs among those that want and hold features."""
        wants, waits = sequence.media_held < len(sequence.request.media), sequence.slot is None
        (self._running.add if wants and not waits else self._running.discard)(sequence)
        (self._waiting.put if wants and waits else self._waiting.discard)(sequence)
        holds = sequence.media_passed < sequence.media_held
        (self._holders.put if holds and waits else self._holders.discard)(sequence)

    def _drop(self, sequence: Sequence, index: int) -> None:
        """Drop the reference to a span's features."""
        key = sequence.request.media[index].key
        self.cache.release(key)
        if key in self._askers:
            self._askers[key].pop((sequence, index), None)
            if not self._askers[key]:
                del self._askers[key]

    def acquire(self, catch_up: Callable[[Sequence], None]) -> list[Sequence]:
        """Take references to the features that sequences need, as far as there is room: for running sequences first,
        then in an order that does not change with time, because two waiting sequences could otherwise take features
        from each other in turn, for ever. A call serves a limited number of waiting sequences.

        Args:
            catch_up: Takes the cache hits of a waiting sequence, which then may need fewer features.

        Returns:
            The waiting sequences whose references changed.
        """
        changed: list[Sequence] = []
        for sequence in sorted(self._running, key=self._waiting.key):
            if not self._take(sequence, changed):
                return changed
        for _ in range(MAX_CANDIDATES):
            first = self._waiting.first()
            if first is None:
                break
            catch_up(first)
            if first in self._waiting and not self._take(first, changed):
                break
        return changed

    def _take(self, sequence: Sequence, changed: list[Sequence]) -> bool:
        """Take references to all features that a sequence needs. Returns False if there was no room for some."""
        media, before = sequence.request.media, sequence.media_held
        while sequence.media_held < len(media):
            span = media[sequence.media_held]
            if not self.cache.hold(span) and not self._reclaim(span, sequence, changed):
                break
            if not self.cache.is_ready(span.key):
                self._askers.setdefault(span.key, {})[sequence, sequence.media_held] = None
            sequence.media_held += 1
        if sequence.media_held != before:
            self._file(sequence)
            if sequence.slot is None:
                changed.append(sequence)
        return sequence.media_held == len(media)

    def _reclaim(self, span: MediaSpan, taker: Sequence, changed: list[Sequence]) -> bool:
        """Take references from waiting sequences that come after `taker`, the last one first, until there is room for
        `span`, and hold it. Returns whether there was enough room."""
        holders = self._holders
        while (victim := holders.last()) is not None:
            if victim is taker or (taker.slot is None and holders.key(victim) < holders.key(taker)):
                return False
            self.release(victim)
            self.track(victim)
            changed.append(victim)
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

    def awaiting(self, running: Iterable[Sequence], now: float) -> Iterator[Sequence]:
        """Sequences whose next image is being encoded, or waits for that, with the first of them in order of service
        (among the first few that share an image)."""
        askers = (
            s for some in self._askers.values() for s, _ in itertools.islice(some, MAX_CANDIDATES) if s.slot is None
        )
        wanting = itertools.islice(self._waiting.in_order(now), 1)
        return (s for s in itertools.chain(running, askers, wanting) if not self.can_start(s))

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

    def next_batch(self, rank: Callable[[Sequence], Any], held: frozenset[str] = frozenset()) -> tuple[MediaSpan, ...]:
        """The spans to encode in the next call, the most urgent first. They count as being encoded from now on.

        Args:
            rank: Order of service of the sequences, smaller first.
            held: Ids of requests that must wait.
        """
        waiting = []
        for key, askers in self._askers.items():
            if self.cache.is_waiting(key):
                some = itertools.islice((one for one in askers if one[0].request.id not in held), MAX_CANDIDATES)
                waiting += sorted((rank(s), index, s.request.media[index]) for s, index in some)[:1]
        batch: list[MediaSpan] = []
        patches = 0
        for _, _, span in sorted(waiting, key=lambda one: one[:2]):
            if batch and patches + span.num_patches > self._pack:
                break
            batch.append(span)
            patches += span.num_patches
            self.cache.begin(span.key)
        return tuple(batch)

    def encoded(self, batch: Iterable[MediaSpan]) -> list[Sequence]:
        """Mark the features of `batch` as ready for the steps planned from now on. Returns the sequences that hold
        them."""
        sequences = []
        for span in batch:
            self.cache.finish(span.key)
            sequences += [sequence for sequence, _ in self._askers.pop(span.key, ())]
        return sequences


def can_start(features: Features | None, sequence: Sequence) -> bool:
    """Whether no image keeps a waiting sequence from starting."""
    return features is None or features.can_start(sequence)


def computable(features: Features | None, sequence: Sequence) -> int:
    """Number of uncomputed tokens of a sequence that could be computed now, once swapped blocks are back."""
    if sequence.swapped is not None:
        return sequence.num_known - sequence.reached
    if features is None or not sequence.request.media:
        return sequence.uncomputed
    return features.computable(sequence)
