"""The engine beside an event loop: threads step its replicas, coroutines read what they make."""

import asyncio
import collections
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from omni_jax.engine.config import EngineConfig, EngineInfo
from omni_jax.engine.loading import Progress
from omni_jax.engine.replicas import Front
from omni_jax.engine.stats import EngineStats
from omni_jax.inputs import Tokenizer
from omni_jax.inputs.prompt import VisionInputs
from omni_jax.requests import Delta, InvalidRequest, MediaSpan, Request, Unavailable
from omni_jax.requests.segment import Segment
from omni_jax.telemetry.recorder import Recorder


class DeltaStream:
    """Deltas of one request, over all its continuations, until each has ended. Read by one coroutine."""

    def __init__(self, continuations: int):
        self.unfinished = continuations
        self._deltas: collections.deque[Delta] = collections.deque()
        self._arrived = asyncio.Event()

    def put(self, delta: Delta) -> None:
        self.unfinished -= delta.finish_reason is not None
        self._deltas.append(delta)
        self._arrived.set()

    def __aiter__(self) -> "DeltaStream":
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self.unfinished <= 0:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._deltas.popleft()


class AsyncEngine:
    """An Engine in a thread of its own, or several: one a replica. All methods are called on one event loop.

    Attributes:
        info: what it serves; known after `start`.
        tokenizer: the model's; known after `start`.
        vision: how images become patches, or None for a model that reads text only; known after `start`.
    """

    info: EngineInfo
    tokenizer: Tokenizer
    vision: VisionInputs | None

    def __init__(self, config: EngineConfig, progress: Progress | None = None):
        self._config = config
        self._front = Front(config, self._call, self._deliver, progress)
        self._streams: dict[str, DeltaStream] = {}
        self._draining = False

    async def start(self) -> None:
        """Loads and compiles in the rows' threads; returns when requests can be taken.

        Raises:
            whatever loading raises.
        """
        self._loop = asyncio.get_running_loop()
        try:
            await asyncio.gather(*map(asyncio.wrap_future, self._front.start()))
        except BaseException:
            self._front.stop()
            raise
        self._front.started()
        engine = self._front.engine
        self.info, self.tokenizer, self.vision = engine.info, engine.tokenizer, engine.vision

    @property
    def recorder(self) -> Recorder:
        """What became of requests and segments; known after `start`."""
        return self._front.recorder

    def submit(self, request: Request) -> DeltaStream:
        """Hands a request to a row.

        Raises:
            InvalidRequest: it can never run, or its id belongs to a live request.
            Unavailable: the queue is full, or the engine is shutting down.
            EngineError: the engine is dead.
        """
        _ = self._front.engine  # raises, where there is none
        if self._draining:
            raise Unavailable("the server is shutting down")
        if request.id in self._streams:
            raise InvalidRequest(f"request id {request.id!r} is in use by a live request", param="request_id")
        limit = self._config.max_num_queued_reqs
        if limit is not None and self._front.num_waiting >= limit:
            raise Unavailable(f"{limit} requests are waiting already, which is the limit (--max-num-queued-reqs)")
        self._front.submit(request)
        stream = self._streams[request.id] = DeltaStream(request.params.n)
        return stream

    def cut(
        self, ids: tuple[int, ...], media: tuple[MediaSpan, ...] = (), policy: str | Mapping[str, Any] | None = None
    ) -> tuple[Segment, ...]:
        """See Engine.cut; any thread may call it."""
        return self._front.cut(ids, media, policy)

    def abort(self, request_id: str) -> None:
        """Ends a request: nothing of it runs in the step after next. Unknown and ended ids are no error."""
        if request_id in self._streams:
            self._front.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached blocks, before the next step; what runs goes on."""
        self._front.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Of all replicas together; any thread may call it."""
        return self._front.stats()

    def replica_stats(self) -> tuple[EngineStats, ...]:
        """Of each replica; any thread may call it."""
        return self._front.replica_stats()

    def check_health(self) -> None:
        """Raises EngineError when a row is dead, or has made no progress for `hang_seconds` although it has work."""
        self._front.check_health()

    async def stop(self, *, drain_seconds: float = 0.0) -> None:
        """Takes no new requests, gives the live ones `drain_seconds`, aborts the rest, and ends the threads."""
        self._draining = True
        deadline = time.monotonic() + drain_seconds
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for request_id in list(self._streams):
            self.abort(request_id)
        self._front.stop()
        await asyncio.to_thread(self._front.join)

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue
            stream.put(delta)
            if not stream.unfinished:
                del self._streams[delta.request_id]

    def _call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is listening any more
            self._loop.call_soon_threadsafe(function)
