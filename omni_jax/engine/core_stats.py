"""What a core has told of its statistics, as its clients have it."""

import collections
import dataclasses
import threading

from omni_jax.engine.messages import Stats
from omni_jax.engine.stats import EngineStats
from omni_jax.telemetry.recorder import WINDOW, Recorder, RecorderState
from omni_jax.telemetry.records import RequestRecord, SegmentRecord


class CoreStats:
    """The latest Stats of a core, and its latest records. Thread-safe.

    Attributes:
        stats: Its statistics.
    """

    def __init__(self) -> None:
        self.stats = EngineStats()
        self._totals = Recorder().state()
        self._requests: collections.deque[RequestRecord] = collections.deque(maxlen=WINDOW)
        self._segments: collections.deque[SegmentRecord] = collections.deque(maxlen=WINDOW)
        self._lock = threading.Lock()

    def take(self, message: Stats) -> None:
        """Take what the core says."""
        with self._lock:
            self.stats, self._totals = message.stats, message.records
            self._requests.extend(message.records.requests)
            self._segments.extend(message.records.segments)

    def records(self, *, window: bool) -> RecorderState:
        """Its records; without `window`, the latest requests and segments are left out."""
        with self._lock:
            latest = (list(self._requests), list(self._segments)) if window else ([], [])
            return dataclasses.replace(self._totals, requests=latest[0], segments=latest[1])
