"""The replicas of an engine: each is an Engine in its own thread, and one front hands requests to them.

A request goes to one replica and stays there. The router picks the replica that last served the longest prefix of the
prompt, unless that replica is overloaded; otherwise it picks the least loaded one. Replicas share nothing: each has
its own devices, weights, pool and scheduler.
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
from omni_jax.engine.loading import Progress
from omni_jax.engine.stats import EngineStats, total
from omni_jax.requests import Delta, EngineError, InvalidRequest, MediaSpan, Request, Unavailable
from omni_jax.requests.segment import Segment
from omni_jax.scheduling.router import LeastLoaded, PrefixAware, Router
from omni_jax.telemetry.recorder import Recorder

logger = logging.getLogger(__name__)

Order = Callable[[Engine], list[Delta]]

OUTPUT = 256  # tokens that a continuation is taken to become at most, when replicas are compared


class Replica:
    """One replica: an Engine that steps in a thread of its own.

    Attributes:
        index: which replica it is.
        ready: done when the engine can take requests; has whatever loading raised.
        engine: there from then on.
        dead: why the engine has stopped; None as long as it goes on.
    """

    def __init__(
        self,
        index: int,
        config: EngineConfig,
        progress: Progress | None,
        *,
        post: Callable[[list[Delta]], None],
        died: Callable[["Replica", str], None],
    ):
        """The replica's thread calls `post` with new deltas, and `died` when its engine has failed."""
        self.index, self.engine, self.dead = index, None, None
        self.ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._config, self._progress, self._post, self._died = config, progress, post, died
        self._orders: collections.deque[Order] = collections.deque()
        self._wake = threading.Event()
        self._stopping = False
        self._progressed = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    engine: Engine | None
    dead: str | None

    def start(self) -> None:
        """Loads and compiles, in the replica's thread."""
        self._thread.start()

    def alive(self) -> Engine:
        """The engine.

        Raises:
            EngineError: it has stopped.
            Unavailable: it has not started.
        """
        if self.dead is not None:
            raise EngineError(self.dead)
        if self.engine is None:
            raise Unavailable("the engine has not started")
        return self.engine

    def order(self, order: Order) -> None:
        """Has something done between two steps, in the replica's thread."""
        self._orders.append(order)
        self._wake.set()

    @property
    def num_waiting(self) -> int:
        return (self.engine.num_waiting if self.engine else 0) + len(self._orders)

    def check_health(self) -> None:
        """Raises EngineError when the engine has stopped, or hangs."""
        engine, still = self.alive(), time.monotonic() - self._progressed
        if (engine.has_work or self._orders) and still > self._config.hang_seconds:
            raise EngineError(f"the engine has made no progress for {still:.0f} s")

    def stop(self) -> None:
        """Has the thread end, once it has done what it was ordered."""
        self._stopping = True
        self._wake.set()

    def join(self) -> None:
        """Waits until the thread has ended."""
        if self._thread.ident is not None:
            self._thread.join()

    def bury(self, reason: str) -> list[Delta]:
        """Last deltas of all that the dead engine had. In the front's thread, where no request can slip in
        meanwhile."""
        self.dead = reason
        assert self.engine is not None
        deltas = []
        while self._orders:
            deltas += self._orders.popleft()(self.engine)
        return deltas + self.engine.fail("the engine failed while it computed this request")

    # -- in the replica's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = Engine(self._config, self._progress, replica=self.index)
        except Exception as error:  # noqa: BLE001  handed to whoever waits for `ready`
            if self.ready.set_running_or_notify_cancel():
                self.ready.set_exception(error)
            return
        self.engine = engine
        if self.ready.set_running_or_notify_cancel():
            self.ready.set_result(None)
        try:
            with contextlib.closing(engine):
                while not (self._stopping and not self._orders):
                    self._step(engine)
        except Exception as error:
            logger.exception("the engine has stopped")
            self._died(self, f"the engine has stopped: {error}")

    def _step(self, engine: Engine) -> None:
        if not engine.has_work and not self._orders:
            self._wake.wait()
        self._wake.clear()
        self._progressed = time.monotonic()
        while self._orders:
            self._tell(self._orders.popleft()(engine))
        if engine.has_work and not self._stopping:
            self._tell(engine.step())
        self._progressed = time.monotonic()

    def _tell(self, deltas: list[Delta]) -> None:
        if deltas:
            self._post(deltas)


@dataclasses.dataclass(kw_only=True)
class _Live:
    """A request that a replica has.

    Attributes:
        load: tokens of its prompt, and those its continuations are taken to become.
        unfinished: continuations that have not ended.
    """

    replica: Replica
    load: int
    unfinished: int


class Front:
    """Hands requests to replicas and returns their deltas. One thread uses it; any may call `cut`, `stats` and
    `replica_stats`.

    Args:
        config: of all replicas.
        call: has a function called in the front's thread, soon; called by any thread.
        deliver: is given what became visible, in the front's thread.
        progress: of the first replica's loading; the others do the same at the same time.
    """

    def __init__(
        self,
        config: EngineConfig,
        call: Callable[[Callable[[], object]], object],
        deliver: Callable[[list[Delta]], object],
        progress: Progress | None = None,
    ):
        self._config, self._call, self._deliver = config, call, deliver
        self.replicas = tuple(
            Replica(index, config, None if index else progress, post=self._post, died=self._died)
            for index in range(config.data_parallel_size)
        )
        self._live: dict[str, _Live] = {}
        self._loads = dict.fromkeys(self.replicas, 0)
        self._router: Router = LeastLoaded()
        self._random = random.Random(config.seed)

    def start(self) -> tuple[concurrent.futures.Future, ...]:
        """Has all replicas load; `started` is to be called when all of what this returns is done."""
        for replica in self.replicas:
            replica.start()
        return tuple(replica.ready for replica in self.replicas)

    def started(self) -> None:
        """All replicas are ready."""
        for replica in self.replicas:
            replica.alive().count_compilations_from_now()
        self._router = self._make_router()

    @property
    def engine(self) -> Engine:
        """Which tells what all are: info, tokenizer, vision. It is that whose cache holds the shortest sequence, if
        replicas found different room for it: what it can run, all can."""
        return min((replica.alive() for replica in self._going()), key=lambda engine: engine.info.max_model_len)

    @property
    def recorder(self) -> Recorder:
        """What became of requests and segments: the only replica's, or a copy of what all have written down."""
        recorders = [replica.engine.recorder for replica in self.replicas if replica.engine is not None]
        return recorders[0] if len(recorders) == 1 else Recorder.merged(recorders)

    @property
    def num_waiting(self) -> int:
        return sum(replica.num_waiting for replica in self.replicas if replica.dead is None)

    def submit(self, request: Request) -> None:
        """Hands a request to a replica.

        Raises:
            InvalidRequest: it can never run.
            EngineError: all replicas have stopped.
        """
        replicas = self._going()
        self.engine.check(request)
        params = request.params
        if params.seed is None:  # here, so that it does not depend on the replica
            params = dataclasses.replace(params, seed=self._random.getrandbits(63))
            request = dataclasses.replace(request, params=params)
        replica = replicas[self._router.route(request, [self._loads[replica] for replica in replicas])]
        output = OUTPUT if params.max_tokens is None else min(params.max_tokens, OUTPUT)
        load = len(request.prompt_ids) + params.n * output
        self._live[request.id] = _Live(replica=replica, load=load, unfinished=params.n)
        self._loads[replica] += load

        def add(engine: Engine) -> list[Delta]:
            try:
                engine.add(request)
            except InvalidRequest as error:  # refused after all: its stream must end, and the engine go on
                return [
                    Delta(request_id=request.id, index=index, finish_reason="error", error=str(error))
                    for index in range(request.params.n)
                ]
            return []

        replica.order(add)

    def abort(self, request_id: str) -> None:
        """Ends a request: nothing of it runs in the step after next. Unknown and ended ids are no error."""
        if (live := self._live.get(request_id)) is not None and live.replica.dead is None:
            live.replica.order(lambda engine: engine.abort(request_id))

    def reset_prefix_cache(self) -> None:
        """Forgets all cached blocks, before the next steps; what runs goes on."""

        def forget(engine: Engine) -> list[Delta]:
            engine.reset_prefix_cache()
            return []

        for replica in self._going():
            replica.order(forget)
        self._router = self._make_router()

    def cut(
        self, ids: tuple[int, ...], media: tuple[MediaSpan, ...] = (), policy: str | Mapping[str, Any] | None = None
    ) -> tuple[Segment, ...]:
        """See Engine.cut."""
        return self.engine.cut(ids, media, policy)

    def replica_stats(self) -> tuple[EngineStats, ...]:
        """Of each replica."""
        return tuple(replica.engine.stats() if replica.engine else EngineStats() for replica in self.replicas)

    def stats(self) -> EngineStats:
        """Of all replicas together."""
        return total(self.replica_stats())

    def check_health(self) -> None:
        """Raises EngineError when a replica has stopped or hangs. (The others go on and take what comes.)"""
        for replica in self.replicas:
            try:
                replica.check_health()
            except EngineError as error:
                if len(self.replicas) == 1:
                    raise
                raise EngineError(f"replica {replica.index}: {error}") from error

    def stop(self) -> None:
        """Has all replicas end; see `join`."""
        for replica in self.replicas:
            replica.stop()

    def join(self) -> None:
        """Waits until the replicas' threads have ended."""
        for replica in self.replicas:
            replica.join()

    def _going(self) -> list[Replica]:
        """The replicas that have not stopped, one at least."""
        replicas = [replica for replica in self.replicas if replica.dead is None]
        if not replicas:
            self.replicas[0].alive()
        return replicas

    def _make_router(self) -> Router:
        if len(self._going()) == 1 or not self._config.enable_prefix_caching:
            return LeastLoaded()
        return PrefixAware(block=self.engine.info.block_size)

    def _post(self, deltas: list[Delta]) -> None:
        self._call(lambda: self._take(deltas))

    def _died(self, replica: Replica, reason: str) -> None:
        self._call(lambda: self._bury(replica, reason))

    def _take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            live = self._live.get(delta.request_id)
            if live is not None and delta.finish_reason is not None:
                live.unfinished -= 1
                if not live.unfinished:
                    self._loads[live.replica] -= live.load
                    del self._live[delta.request_id]
        self._deliver(deltas)

    def _bury(self, replica: Replica, reason: str) -> None:
        deltas = replica.bury(reason)
        if any(other.dead is None for other in self.replicas):
            self._router = self._make_router()  # it counts replicas that go on
        self._take(deltas)


class Replicas:
    """Several replicas with an Engine's face, for one calling thread: what LLM steps."""

    def __init__(self, config: EngineConfig, progress: Progress | None = None):
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._deltas: list[Delta] = []
        self._front = Front(config, self._calls.put, self._deltas.extend, progress)
        try:
            for ready in self._front.start():
                ready.result()
        except BaseException:
            self._front.stop()
            raise
        self._front.started()
        first = self._front.engine
        self.info, self.tokenizer, self.vision = first.info, first.tokenizer, first.vision

    def check(self, request: Request) -> None:
        """See Engine.check."""
        self._front.engine.check(request)

    def add(self, request: Request) -> None:
        """See Front.submit."""
        self._front.submit(request)

    def abort(self, request_id: str) -> None:
        """Ends a request; what it still gives comes with later steps."""
        self._front.abort(request_id)

    def step(self) -> list[Delta]:
        """Waits until something becomes visible, and hands it out.

        Raises:
            EngineError: a replica has stopped. Its requests are lost, and whoever asked for many would not see which.
        """
        self._calls.get()()
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()()
        for replica in self._front.replicas:
            if replica.dead is not None:
                raise EngineError(f"replica {replica.index}: {replica.dead}")
        deltas = self._deltas[:]
        self._deltas.clear()
        return deltas

    def stats(self) -> EngineStats:
        """See Front.stats."""
        return self._front.stats()

    def replica_stats(self) -> tuple[EngineStats, ...]:
        """See Front.replica_stats."""
        return self._front.replica_stats()

    def close(self) -> None:
        """Ends the replicas' threads."""
        self._front.stop()
        self._front.join()
