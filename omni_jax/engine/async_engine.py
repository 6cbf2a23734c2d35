"""The engine for an event loop: engine cores run beside it, coroutines read their deltas."""

import asyncio
import collections
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from omni_jax.engine.config import EngineConfig, EngineInfo
from omni_jax.engine.core_client import CoreLink, OwnedCore
from omni_jax.engine.cores import MakeCores, attached_cores, link, thread_cores
from omni_jax.engine.dispatcher import Core, Dispatcher
from omni_jax.engine.messages import ClientGone, FromCore
from omni_jax.engine.stats import EngineStats
from omni_jax.inputs.prompt import VisionInputs
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.progress import StageReport
from omni_jax.requests import Delta, InvalidRequest, MediaSpan, Request, Unavailable
from omni_jax.requests.segment import Segment
from omni_jax.telemetry.recorder import Recorder


class DeltaStream:
    """Deltas of one request until all its continuations have ended. For one reading coroutine, or for a function."""

    def __init__(self, continuations: int):
        self.unfinished = continuations
        self._deltas: collections.deque[Delta] = collections.deque()
        self._arrived = asyncio.Event()
        self._take: Callable[[Delta], object] = self._keep

    def put(self, delta: Delta) -> None:
        self.unfinished -= delta.finish_reason is not None
        self._take(delta)

    def forward(self, take: Callable[[Delta], object]) -> None:
        """Call `take` with each delta as it arrives. Nothing is left for a coroutine to read."""
        self._take = take

    def _keep(self, delta: Delta) -> None:
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
    """Runs an engine core for each replica, in a thread or a process of its own. Call its methods on one event loop.

    Args:
        progress: Reports loading.
        make_cores: Makes the cores: thread_cores, or process_cores or attached_cores with their other arguments bound.

    Attributes:
        info: the served model and the engine's limits; set by `start`.
        tokenizer: the model's tokenizer; set by `start`.
        vision: settings that turn images into patches, None for a text-only model; set by `start`.
    """

    info: EngineInfo
    tokenizer: Tokenizer
    vision: VisionInputs | None

    def __init__(
        self, config: EngineConfig, progress: StageReport | None = None, *, make_cores: MakeCores = thread_cores
    ):
        self._config = config
        self._cores = make_cores(config, progress, self._receive)
        self._dispatcher: Dispatcher | None = None
        self._early: list[tuple[Core, FromCore]] = []  # messages that came before the dispatcher was made
        self._streams: dict[str, DeltaStream] = {}
        self._draining = False

    @classmethod
    def attach(cls, link: CoreLink) -> "AsyncEngine":
        """An engine over the cores of another process; see `link`. `stop` leaves the cores alone."""
        return cls(link.config, make_cores=lambda config, progress, receive: attached_cores(link, receive))

    async def start(self) -> None:
        """Load and compile in the cores. Returns when requests can be submitted.

        Raises:
            whatever loading raises.
        """
        self._loop = asyncio.get_running_loop()
        try:
            for core in self._cores:
                core.start()
            await asyncio.gather(*(asyncio.wrap_future(core.ready) for core in self._cores))
        except BaseException:
            for core in self._cores:
                core.stop()
            raise
        self._dispatcher = Dispatcher(self._config, self._cores, self._deliver)
        for core, message in self._early:
            self._dispatcher.receive(core, message)
        self._early.clear()
        served = self._dispatcher.served
        self.info, self.tokenizer, self.vision = served.info, served.tokenizer, served.vision

    @property
    def _running(self) -> Dispatcher:
        if self._dispatcher is None:
            raise Unavailable("the engine has not started")
        return self._dispatcher

    @property
    def recorder(self) -> Recorder:
        """Records of requests and segments, for reading; available after `start`."""
        return self._running.recorder()

    @property
    def totals(self) -> Recorder:
        """The same without the latest records, whose copies take milliseconds."""
        return self._running.recorder(window=False)

    def check_queue(self) -> None:
        """Raise EngineError or Unavailable if no request should be submitted now. Thread-safe.

        `submit` does not look at the limit of the queue, so that requests that belong together enter it together.
        """
        self._check_open()
        limit = self._config.max_num_queued_reqs
        if limit is not None and self._running.num_waiting >= limit:
            raise Unavailable(f"the queue is full: {limit} requests are waiting (--max-num-queued-reqs)")

    def _check_open(self) -> None:
        self._running.check_alive()
        if self._draining:
            raise Unavailable("the server is shutting down")

    def submit(self, request: Request) -> DeltaStream:
        """Submit a request to a replica. Call `check_queue` before.

        Raises:
            InvalidRequest: the request can never run, or a live request has its id.
            Unavailable: the engine is shutting down.
            EngineError: all replicas have failed.
        """
        self._check_open()
        if request.id in self._streams:
            raise InvalidRequest(f"request id {request.id!r} is in use by a live request", param="request_id")
        self._running.submit(request)
        stream = self._streams[request.id] = DeltaStream(request.params.n)
        return stream

    def cut(
        self, ids: tuple[int, ...], media: tuple[MediaSpan, ...] = (), policy: str | Mapping[str, Any] | None = None
    ) -> tuple[Segment, ...]:
        """See InputProcessor.cut. Thread-safe."""
        return self._running.inputs.cut(ids, media, policy)

    def process(self, request: Request) -> Request:
        """See InputProcessor.process. Thread-safe; `submit` does it in the event loop for a request that lacks it."""
        return self._running.inputs.process(request)

    def abort(self, request_id: str) -> None:
        """Abort a request within two steps. Ignores unknown and ended ids."""
        if request_id in self._streams:
            self._running.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache before the next step. Running requests continue."""
        self._running.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Statistics of all replicas together. Thread-safe."""
        return self._running.stats()

    def replica_stats(self) -> tuple[EngineStats, ...]:
        """Statistics of each replica. Thread-safe."""
        return self._running.core_stats()

    def link(self, client: int) -> CoreLink:
        """What an AsyncEngine in another process needs to attach to the cores, which must be in processes; see
        attached_cores. `client` is its number, from 1."""
        return link(self._config, [core for core in self._cores if isinstance(core, OwnedCore)], client)

    def client_gone(self, client: int, pid: int) -> None:
        """Abort the requests of a client whose process has ended."""
        for core in self._cores:
            core.send(ClientGone(client, pid))

    def check_health(self) -> None:
        """Raise EngineError if a core has failed, or a step of it hangs."""
        self._running.check_health()

    async def stop(self, *, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, give live ones `drain_seconds` to finish, abort the rest, and end the threads."""
        self._draining = True
        deadline = time.monotonic() + drain_seconds
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for request_id in list(self._streams):
            self.abort(request_id)
        for core in self._cores:
            core.stop()
        for core in self._cores:
            await asyncio.to_thread(core.join)

    def _receive(self, core: Core, message: FromCore) -> None:
        """Take a message of a core, in any thread."""
        self._call_soon(lambda: self._take(core, message))

    def _take(self, core: Core, message: FromCore) -> None:
        if self._dispatcher is None:
            self._early.append((core, message))
        else:
            self._dispatcher.receive(core, message)

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue
            stream.put(delta)
            if not stream.unfinished:
                del self._streams[delta.request_id]

    def _call_soon(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)
