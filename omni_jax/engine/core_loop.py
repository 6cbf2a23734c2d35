"""The loop of an engine core: messages in, steps, outputs out."""

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable

from omni_jax.engine.core import EngineCore
from omni_jax.engine.messages import (
    Abort,
    Add,
    Attach,
    ClientGone,
    End,
    Failed,
    FromCore,
    Outputs,
    ResetPrefixCache,
    SequenceOutput,
    Stats,
    Status,
    Stop,
    ToCore,
)
from omni_jax.requests import EngineError, InvalidRequest, Request

logger = logging.getLogger(__name__)

STATS_SECONDS = 0.25  # between two Stats of a core that works


class CoreLoop:
    """Runs an engine core in the thread that calls `run`. `put` and `status` are thread-safe.

    Args:
        core: The core. It is closed at the end.
        emit: Takes (client, message) in the loop's thread.
        clients: Number of clients.
        idle: Called when there is nothing to do.
    """

    def __init__(
        self,
        core: EngineCore,
        emit: Callable[[int, FromCore], object],
        clients: int = 1,
        *,
        idle: Callable[[], object] = lambda: None,
    ):
        self.core, self._emit, self._idle = core, emit, idle
        self._messages: collections.deque[tuple[int, ToCore]] = collections.deque()
        self._wake = threading.Event()
        self._stopped = False
        self._progressed = time.monotonic()
        self._clients: dict[str, int] = {}  # of live requests, by their ids
        self._received = [0] * clients
        self._gone: set[tuple[int, int]] = set()  # clients and their processes that have ended
        self._absent: set[int] = set()  # clients of which no process listens
        self._reported_at = 0.0  # when Stats were sent,
        self._recorded = (0, 0)  # and how many requests and segments their records had

    @property
    def busy(self) -> bool:
        """Whether it has something to do. Thread-safe."""
        return self.core.has_work or bool(self._messages)

    def put(self, client: int, message: ToCore, pid: int = 0) -> None:
        """Give the core a message of a client, which process `pid` has sent."""
        match message:
            case ClientGone(client=gone, pid=ended):
                self._gone.add((gone, ended))
                self._absent.add(gone)
            case Attach():
                self._gone.discard((client, pid))
                self._absent.discard(client)
                self._received[client] = 0
        if (client, pid) in self._gone:
            return  # it was on its way when its sender ended
        if not self.busy:  # `status` may be asked before the loop has woken
            self._progressed = time.monotonic()
        self._received[client] += 1
        self._messages.append((client, message))
        self._wake.set()

    def listens(self, client: int) -> bool:
        """Whether a process of this client runs. What is sent to others would be kept for ever."""
        return client not in self._absent

    def status(self, client: int) -> Status:
        """The state of the core, as one of its clients sees it."""
        stalled = time.monotonic() - self._progressed if self.busy else 0.0
        return Status(
            waiting=self.core.num_waiting + len(self._messages),
            received=self._received[client],
            stalled=stalled if stalled > self.core.patience else 0.0,
        )

    def excuse(self) -> None:
        """Do not count the time so far as time without progress: the process was stopped. Thread-safe."""
        self._progressed = time.monotonic()

    def run(self) -> None:
        """Run until a Stop, or until the core fails; then tell all clients why."""
        with contextlib.closing(self.core):
            try:
                self._report()
                while not self._stopped:
                    self._turn()
            except Exception as error:
                logger.exception("the engine core has stopped")
                try:
                    self._take_messages()  # requests that were aborted meanwhile end so
                    self.core.fail("the engine failed while it computed this request")
                finally:  # whatever else fails, nobody must wait for this core
                    for client in range(len(self._received)):
                        self._emit(client, Failed(f"the engine has stopped: {error}"))

    def _turn(self) -> None:
        if not self.busy:
            self._idle()
            self._wake.wait()
        self._wake.clear()
        self._progressed = time.monotonic()
        some = bool(self._messages)
        self._take_messages()
        if self.core.has_work and not self._stopped:
            self._send(self.core.step())
        self._progressed = time.monotonic()
        if self._progressed - self._reported_at > STATS_SECONDS or (some and self.core.num_live == 0):
            self._report()

    def _report(self) -> None:
        """Tell all clients the statistics."""
        self._reported_at = time.monotonic()
        records = self.core.recorder.state(after=self._recorded)
        self._recorded = records.num_requests, records.num_segments
        stats = self.core.stats()
        for client in filter(self.listens, range(len(self._received))):
            self._emit(client, Stats(stats, records))

    def _take_messages(self) -> None:
        while self._messages and not self._stopped:
            client, message = self._messages.popleft()
            match message:
                case Add(request=request):
                    self._add(client, request)
                case Abort(request_ids=names):
                    self._abort(name for name in names if self._clients.get(name) == client)
                case End(request_id=name, index=index, stop=stop, kept=kept):
                    if self._clients.get(name) == client:
                        self.core.end(name, index, stop, kept)
                        self._forget(name)
                case ResetPrefixCache():
                    self.core.reset_prefix_cache()
                case Attach():
                    self._report()
                case ClientGone(client=gone):
                    self._abort([name for name, owner in self._clients.items() if owner == gone])
                case Stop():
                    self._stopped = True

    def _add(self, client: int, request: Request) -> None:
        message = "the engine could not take this request"
        try:
            if request.id in self._clients:
                raise InvalidRequest(f"request id {request.id!r} is in use by a live request", param="request_id")
            self.core.add(request)
            self._clients[request.id] = client
            return
        except InvalidRequest as error:
            message = str(error)
        except EngineError:
            raise
        except Exception:  # a fault of ours must end this stream, and no other
            logger.exception("request %s could not be added", request.id)
        indices = range(request.params.n)
        ended = [SequenceOutput(request.id, i, finish_reason="error", error=message) for i in indices]
        self._emit(client, Outputs(ended))

    def _abort(self, names: Iterable[str]) -> None:
        self._send([output for name in names for output in self.core.abort(name)])

    def _send(self, outputs: list[SequenceOutput]) -> None:
        """Emit outputs, each to the client of its request."""
        if not outputs:
            return
        if self.core.num_live == 0:
            self._report()
        if len(self._received) == 1:
            self._emit(0, Outputs(outputs))
        else:
            by_client: dict[int, list[SequenceOutput]] = {}
            for output in outputs:
                by_client.setdefault(self._clients[output.request_id], []).append(output)
            for client, own in by_client.items():
                if self.listens(client):
                    self._emit(client, Outputs(own))
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(output.request_id)

    def _forget(self, name: str) -> None:
        """Forget the client of a request if it is not live any more."""
        if not self.core.has(name):
            self._clients.pop(name, None)
