"""Replicas of an engine, each an Engine in its own thread, and a dispatcher that distributes requests to them.

A request stays on one replica. The router picks the replica that last served the longest prefix of the prompt, unless
that replica is overloaded; otherwise it picks the least loaded one. Replicas share nothing: each has its own devices,
weights, pool and scheduler.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from omni_jax.engine.config import EngineConfig
from omni_jax.engine.engine import Engine
from omni_jax.engine.stats import EngineStats, total
from omni_jax.progress import StageReport
from omni_jax.requests import Delta, EngineError, InvalidRequest, MediaSpan, Request, Unavailable
from omni_jax.requests.segment import Segment
from omni_jax.routing.router import LeastLoaded, PrefixAware, Router
from omni_jax.telemetry.recorder import Recorder

logger = logging.getLogger(__name__)

Task = Callable[[Engine], list[Delta]]

MAX_EXPECTED_OUTPUT = 256  # upper limit of the output length assumed for a continuation in a replica's load


class Replica:
    """An Engine that runs in its own thread.

    Attributes:
        index: number of the replica.
        ready: done when the engine can take requests; holds the exception if loading fails.
        engine: the engine; None until it is ready.
        failure: why the engine stopped; None while it runs.
    """

    def __init__(
        self,
        index: int,
        config: EngineConfig,
        progress: StageReport | None,
        *,
        on_deltas: Callable[[list[Delta]], object],
        on_failure: Callable[["Replica", str], object],
    ):
        """The replica's thread calls `on_deltas` with new deltas, and `on_failure` if its engine fails."""
        self.index, self.engine, self.failure = index, None, None
        self.ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._config, self._progress, self._on_deltas, self._on_failure = config, progress, on_deltas, on_failure
        self._tasks: collections.deque[Task] = collections.deque()
        self._wake = threading.Event()
        self._stopping = False
        self._progressed = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    engine: Engine | None
    failure: str | None

    def start(self) -> None:
        """Load and compile in the replica's thread."""
        self._thread.start()

    def running_engine(self) -> Engine:
        """The engine.

        Raises:
            EngineError: it has stopped.
            Unavailable: it has not started.
        """
        if self.failure is not None:
            raise EngineError(self.failure)
        if self.engine is None:
            raise Unavailable("the engine has not started")
        return self.engine

    def submit(self, task: Task) -> None:
        """Run a task in the replica's thread, between two steps."""
        self._tasks.append(task)
        self._wake.set()

    @property
    def num_waiting(self) -> int:
        return (self.engine.num_waiting if self.engine else 0) + len(self._tasks)

    def check_health(self) -> None:
        """Raise EngineError if the engine has stopped or hangs."""
        engine, seconds = self.running_engine(), time.monotonic() - self._progressed
        if (engine.has_work or self._tasks) and seconds > self._config.hang_seconds:
            raise EngineError(f"the engine has made no progress for {seconds:.0f} s")

    def stop(self) -> None:
        """End the thread after the submitted tasks."""
        self._stopping = True
        self._wake.set()

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread.ident is not None:
            self._thread.join()

    def fail_requests(self, reason: str) -> list[Delta]:
        """Mark the replica as failed and end all its requests. Returns their last deltas.

        Called in the dispatcher's thread, so that no request can be submitted at the same time.
        """
        self.failure = reason
        assert self.engine is not None
        deltas = []
        while self._tasks:
            deltas += self._tasks.popleft()(self.engine)
        return deltas + self.engine.fail("the engine failed while it computed this request")

    # -- in the replica's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = Engine(self._config, self._progress, replica=self.index)
        except Exception as error:  # noqa: BLE001  passed on through `ready`
            if self.ready.set_running_or_notify_cancel():
                self.ready.set_exception(error)
            return
        self.engine = engine
        if self.ready.set_running_or_notify_cancel():
            self.ready.set_result(None)
        try:
            with contextlib.closing(engine):
                while not (self._stopping and not self._tasks):
                    self._step(engine)
        except Exception as error:
            logger.exception("the engine has stopped")
            self._on_failure(self, f"the engine has stopped: {error}")

    def _step(self, engine: Engine) -> None:
        if not engine.has_work and not self._tasks:
            self._wake.wait()
        self._wake.clear()
        self._progressed = time.monotonic()
        while self._tasks:
            self._emit(self._tasks.popleft()(engine))
        if engine.has_work and not self._stopping:
            self._emit(engine.step())
        self._progressed = time.monotonic()

    def _emit(self, deltas: list[Delta]) -> None:
        if deltas:
            self._on_deltas(deltas)


@dataclasses.dataclass(kw_only=True)
class _Live:
    """A request on a replica.

    Attributes:
        load: tokens of its prompt, plus those expected of its continuations.
        unfinished: number of continuations that have not ended.
    """

    replica: Replica
    load: int
    unfinished: int


class Dispatcher:
    """Distributes requests to replicas and delivers their deltas. Use it in one thread; `cut`, `stats` and
    `replica_stats` are thread-safe.

    Args:
        config: settings of all replicas.
        call_soon: schedules a function in the dispatcher's thread; thread-safe.
        deliver: called with new deltas in the dispatcher's thread.
        progress: reports loading of the first replica; the others load at the same time.
    """

    def __init__(
        self,
        config: EngineConfig,
        call_soon: Callable[[Callable[[], object]], object],
        deliver: Callable[[list[Delta]], object],
        progress: StageReport | None = None,
    ):
        self._config, self._call_soon, self._deliver = config, call_soon, deliver
        self.replicas = tuple(
            Replica(
                index,
                config,
                None if index else progress,
                on_deltas=lambda deltas: self._call_soon(lambda: self._forward(deltas)),
                on_failure=lambda replica, reason: self._call_soon(lambda: self._handle_failure(replica, reason)),
            )
            for index in range(config.data_parallel_size)
        )
        self._live: dict[str, _Live] = {}
        self._loads = dict.fromkeys(self.replicas, 0)
        self._router: Router = LeastLoaded()
        self._random = random.Random(config.seed)

    def start(self) -> tuple[concurrent.futures.Future, ...]:
        """Start to load all replicas. Call `finish_start` when all returned futures are done."""
        for replica in self.replicas:
            replica.start()
        return tuple(replica.ready for replica in self.replicas)

    def finish_start(self) -> None:
        """Finish the start, when all replicas are ready."""
        self._router = self._make_router()

    @property
    def engine(self) -> Engine:
        """The engine whose info, tokenizer and vision stand for all: the one with the lowest max_model_len, so that all
        replicas can run what it can run."""
        engines = [replica.running_engine() for replica in self._alive()]
        return min(engines, key=lambda engine: engine.info.max_model_len)

    @property
    def recorder(self) -> Recorder:
        """Records of requests and segments: the only replica's recorder, or a merged copy of all."""
        recorders = [replica.engine.recorder for replica in self.replicas if replica.engine is not None]
        return recorders[0] if len(recorders) == 1 else Recorder.merged(recorders)

    @property
    def num_waiting(self) -> int:
        return sum(replica.num_waiting for replica in self.replicas if replica.failure is None)

    def submit(self, request: Request) -> None:
        """Submit a request to a replica.

        Raises:
            InvalidRequest: the request can never run.
            EngineError: all replicas have failed.
        """
        replicas = self._alive()
        self.engine.check(request)
        params = request.params
        if params.seed is None:  # drawn here, so that it does not depend on the replica
            params = dataclasses.replace(params, seed=self._random.getrandbits(63))
            request = dataclasses.replace(request, params=params)
        if not request.arrival:  # here, so that the wait for the replica's thread counts
            request = dataclasses.replace(request, arrival=time.monotonic())
        replica = replicas[self._router.route(request, [self._loads[replica] for replica in replicas])]
        output = MAX_EXPECTED_OUTPUT if params.max_tokens is None else min(params.max_tokens, MAX_EXPECTED_OUTPUT)
        load = len(request.prompt_ids) + params.n * output
        self._live[request.id] = _Live(replica=replica, load=load, unfinished=params.n)
        self._loads[replica] += load

        def add(engine: Engine) -> list[Delta]:
            try:
                engine.add(request)
            except InvalidRequest as error:  # must end the stream, but not the engine
                return [
                    Delta(request_id=request.id, index=index, finish_reason="error", error=str(error))
                    for index in range(request.params.n)
                ]
            return []

        replica.submit(add)

    def abort(self, request_id: str) -> None:
        """Abort a request within two steps. Ignores unknown and ended ids."""
        if (live := self._live.get(request_id)) is not None and live.replica.failure is None:
            live.replica.submit(lambda engine: engine.abort(request_id))

    def reset_prefix_cache(self) -> None:
        """Clear all prefix caches before the next steps. Running requests continue."""

        def reset(engine: Engine) -> list[Delta]:
            engine.reset_prefix_cache()
            return []

        for replica in self._alive():
            replica.submit(reset)
        self._router = self._make_router()

    def cut(
        self, ids: tuple[int, ...], media: tuple[MediaSpan, ...] = (), policy: str | Mapping[str, Any] | None = None
    ) -> tuple[Segment, ...]:
        """See Engine.cut."""
        return self.engine.cut(ids, media, policy)

    def replica_stats(self) -> tuple[EngineStats, ...]:
        """Statistics of each replica."""
        return tuple(replica.engine.stats() if replica.engine else EngineStats() for replica in self.replicas)

    def stats(self) -> EngineStats:
        """Statistics of all replicas together."""
        return total(self.replica_stats())

    def check_health(self) -> None:
        """Raise EngineError if a replica has stopped or hangs. (The others still serve.)"""
        for replica in self.replicas:
            try:
                replica.check_health()
            except EngineError as error:
                if len(self.replicas) == 1:
                    raise
                raise EngineError(f"replica {replica.index}: {error}") from error

    def stop(self) -> None:
        """Stop all replicas without waiting; see `join`."""
        for replica in self.replicas:
            replica.stop()

    def join(self) -> None:
        """Wait until the replicas' threads have ended."""
        for replica in self.replicas:
            replica.join()

    def _alive(self) -> list[Replica]:
        """The replicas that have not failed. Raises EngineError if all have."""
        replicas = [replica for replica in self.replicas if replica.failure is None]
        if not replicas:
            self.replicas[0].running_engine()
        return replicas

    def _make_router(self) -> Router:
        if len(self._alive()) == 1 or not self._config.enable_prefix_caching:
            return LeastLoaded()
        return PrefixAware(block_size=self.engine.info.block_size)

    def _forward(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            live = self._live.get(delta.request_id)
            if live is not None and delta.finish_reason is not None:
                live.unfinished -= 1
                if not live.unfinished:
                    self._loads[live.replica] -= live.load
                    del self._live[delta.request_id]
        self._deliver(deltas)

    def _handle_failure(self, replica: Replica, reason: str) -> None:
        deltas = replica.fail_requests(reason)
        if any(other.failure is None for other in self.replicas):
            self._router = self._make_router()  # its indices count replicas that are alive
        self._forward(deltas)


class ReplicatedEngine:
    """Several replicas with the interface of an Engine, for one calling thread. LLM uses it."""

    def __init__(self, config: EngineConfig, progress: StageReport | None = None):
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._deltas: list[Delta] = []
        self._dispatcher = Dispatcher(config, self._calls.put, self._deltas.extend, progress)
        try:
            for ready in self._dispatcher.start():
                ready.result()
        except BaseException:
            self._dispatcher.stop()
            raise
        self._dispatcher.finish_start()
        first = self._dispatcher.engine
        self.info, self.tokenizer, self.vision = first.info, first.tokenizer, first.vision

    def check(self, request: Request) -> None:
        """See Engine.check."""
        self._dispatcher.engine.check(request)

    def add(self, request: Request) -> None:
        """See Dispatcher.submit."""
        self._dispatcher.submit(request)

    def abort(self, request_id: str) -> None:
        """Abort a request. Later steps return its last deltas."""
        self._dispatcher.abort(request_id)

    def step(self) -> list[Delta]:
        """Wait for new deltas and return them.

        Raises:
            EngineError: a replica has failed, and its requests are lost.
        """
        self._calls.get()()
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()()
        for replica in self._dispatcher.replicas:
            if replica.failure is not None:
                raise EngineError(f"replica {replica.index}: {replica.failure}")
        deltas = self._deltas[:]
        self._deltas.clear()
        return deltas

    def stats(self) -> EngineStats:
        """See Dispatcher.stats."""
        return self._dispatcher.stats()

    def replica_stats(self) -> tuple[EngineStats, ...]:
        """See Dispatcher.replica_stats."""
        return self._dispatcher.replica_stats()

    def close(self) -> None:
        """End the replicas' threads."""
        self._dispatcher.stop()
        self._dispatcher.join()
