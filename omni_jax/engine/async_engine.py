"""The engine beside an event loop: one thread steps it, coroutines read what it makes."""

import asyncio
import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from omni_jax.engine.config import EngineConfig, EngineInfo
from omni_jax.engine.engine import Engine
from omni_jax.engine.loading import Progress
from omni_jax.engine.stats import EngineStats
from omni_jax.inputs import Tokenizer
from omni_jax.inputs.prompt import VisionInputs
from omni_jax.requests import Delta, EngineError, InvalidRequest, MediaSpan, Request, Unavailable
from omni_jax.scheduling.records import Recorder
from omni_jax.segments import Segment

logger = logging.getLogger(__name__)


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
    """An Engine in a thread of its own. All methods are called on one event loop.

    Attributes:
        info: what it serves; known after `start`.
        tokenizer: the model's; known after `start`.
        vision: how pictures become patches, or None for a model that reads text only; known after `start`.
        recorder: what became of requests and segments; known after `start`.
    """

    info: EngineInfo
    tokenizer: Tokenizer
    vision: VisionInputs | None
    recorder: Recorder

    def __init__(self, config: EngineConfig, progress: Progress | None = None):
        self._config, self._progress = config, progress
        self._engine: Engine | None = None
        self._thread: threading.Thread | None = None
        self._streams: dict[str, DeltaStream] = {}
        self._orders: collections.deque[Callable[[Engine], list[Delta]]] = collections.deque()
        self._wake = threading.Event()
        self._stopping = False
        self._draining = False
        self._dead: str | None = None
        self._progressed = time.monotonic()

    async def start(self) -> None:
        """Loads and compiles in the engine's thread; returns when requests can be taken.

        Raises:
            whatever loading raises.
        """
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="engine", daemon=True)
        self._thread.start()
        await ready

    def submit(self, request: Request) -> DeltaStream:
        """Hands a request to the engine.

        Raises:
            InvalidRequest: it can never run, or its id belongs to a live request.
            Unavailable: the queue is full, or the engine is shutting down.
            EngineError: the engine is dead.
        """
        engine = self._alive()
        if self._draining:
            raise Unavailable("the server is shutting down")
        if request.id in self._streams:
            raise InvalidRequest(f"request id {request.id!r} is in use by a live request", param="request_id")
        limit = self._config.max_num_queued_reqs
        if limit is not None and engine.num_waiting + len(self._orders) >= limit:
            raise Unavailable(f"{limit} requests are waiting already, which is the limit (--max-num-queued-reqs)")
        engine.check(request)
        stream = self._streams[request.id] = DeltaStream(request.params.n)

        def add(engine: Engine) -> list[Delta]:
            try:
                engine.add(request)
            except InvalidRequest as error:  # refused after all: its stream must end, and the engine go on
                return [
                    Delta(request_id=request.id, index=index, finish_reason="error", error=str(error))
                    for index in range(request.params.n)
                ]
            return []

        self._order(add)
        return stream

    def cut(
        self, ids: tuple[int, ...], media: tuple[MediaSpan, ...] = (), policy: str | Mapping[str, Any] | None = None
    ) -> tuple[Segment, ...]:
        """See Engine.cut; any thread may call it."""
        return self._alive().cut(ids, media, policy)

    def abort(self, request_id: str) -> None:
        """Ends a request: nothing of it runs in the step after next. Unknown and ended ids are no error."""
        if request_id in self._streams and not self._dead:
            self._order(lambda engine: engine.abort(request_id))

    def reset_prefix_cache(self) -> None:
        """Forgets all cached blocks, before the next step; what runs goes on."""

        def forget(engine: Engine) -> list[Delta]:
            engine.reset_prefix_cache()
            return []

        self._alive()
        self._order(forget)

    def stats(self) -> EngineStats:
        return self._engine.stats() if self._engine else EngineStats()

    def check_health(self) -> None:
        """Raises EngineError when the engine is dead, or has made no progress for `hang_seconds` although it has
        work."""
        engine = self._alive()
        still = time.monotonic() - self._progressed
        if (engine.has_work or self._orders) and still > self._config.hang_seconds:
            raise EngineError(f"the engine has made no progress for {still:.0f} s")

    async def stop(self, *, drain_seconds: float = 0.0) -> None:
        """Takes no new requests, gives the live ones `drain_seconds`, aborts the rest, and ends the thread."""
        self._draining = True
        deadline = time.monotonic() + drain_seconds
        while self._streams and not self._dead and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for request_id in list(self._streams):
            self.abort(request_id)
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    # -- on the event loop --------------------------------------------------------------------------------------------

    def _alive(self) -> Engine:
        if self._dead is not None:
            raise EngineError(self._dead)
        if self._engine is None:
            raise Unavailable("the engine has not started")
        return self._engine

    def _order(self, order: Callable[[Engine], list[Delta]]) -> None:
        self._orders.append(order)
        self._wake.set()

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue
            stream.put(delta)
            if not stream.unfinished:
                del self._streams[delta.request_id]

    def _die(self, engine: Engine, reason: str) -> None:
        """Ends every stream, for the engine's thread has ended. Here, where no request can slip in meanwhile."""
        self._dead = reason
        self._deliver(self._obey(engine) + engine.fail("the engine failed while it computed this request"))

    # -- in the engine's thread ---------------------------------------------------------------------------------------

    def _run(self, ready: "asyncio.Future[None]") -> None:
        try:
            engine = Engine(self._config, self._progress)
        except Exception as error:  # noqa: BLE001  handed to whoever awaits `start`
            self._call(lambda error=error: ready.cancelled() or ready.set_exception(error))
            return
        self.info, self.tokenizer, self.vision = engine.info, engine.tokenizer, engine.vision
        self.recorder, self._engine = engine.recorder, engine
        self._call(lambda: ready.cancelled() or ready.set_result(None))
        try:
            with contextlib.closing(engine):
                while not (self._stopping and not self._orders):
                    self._step(engine)
        except Exception as error:
            logger.exception("the engine has stopped")
            reason = f"the engine has stopped: {error}"
            self._call(lambda: self._die(engine, reason))

    def _step(self, engine: Engine) -> None:
        if not engine.has_work and not self._orders:
            self._wake.wait()
        self._wake.clear()
        self._progressed = time.monotonic()
        self._post(self._obey(engine))
        if engine.has_work and not self._stopping:
            self._post(engine.step())
        self._progressed = time.monotonic()

    def _obey(self, engine: Engine) -> list[Delta]:
        deltas = []
        while self._orders:
            deltas += self._orders.popleft()(engine)
        return deltas

    def _post(self, deltas: list[Delta]) -> None:
        if deltas:
            self._call(lambda: self._deliver(deltas))

    def _call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is listening any more
            self._loop.call_soon_threadsafe(function)
