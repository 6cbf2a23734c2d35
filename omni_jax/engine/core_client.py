"""Engine cores in processes of their own, seen from a client.

The first client owns the cores: it starts their processes, ends those that hang, and starts others in their place.
Other clients attach to them with a CoreLink.
"""

import atexit
import concurrent.futures
import contextlib
import dataclasses
import errno
import logging
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import zmq

from omni_jax.engine.config import EngineConfig
from omni_jax.engine.core_process import (
    BEAT_SECONDS,
    OWNER,
    Launch,
    Outbox,
    Pauses,
    Started,
    client_address,
    core_address,
    envelope,
    run_core,
)
from omni_jax.engine.core_stats import CoreStats
from omni_jax.engine.dispatcher import Core, Served
from omni_jax.engine.messages import (
    Attach,
    Decoder,
    Encoder,
    Failed,
    FromCore,
    Outputs,
    Ready,
    Stats,
    Status,
    Stop,
    ToCore,
)
from omni_jax.engine.stats import EngineStats
from omni_jax.engine.tokenizer import read_tokenizer
from omni_jax.interrupts import at_end, not_at_end
from omni_jax.progress import StageReport
from omni_jax.requests import EngineError
from omni_jax.telemetry.recorder import RecorderState

logger = logging.getLogger(__name__)

SILENCE_SECONDS = 20 * BEAT_SECONDS  # without a word after which a core counts as hanging
JOIN_SECONDS = 10.0  # for a core's process to end by itself
MAX_RESTARTS = 3  # in a row, with no output between them
RETRY_SECONDS = 1.0  # after a start in place of another that failed; twice as long after each further one
_POLL_MS = 100  # between looks at the cores, while they say nothing

Receive = Callable[[Core, FromCore], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoreLink:
    """What a client in another process needs to attach to running cores. It can be pickled.

    Attributes:
        directory: Where the sockets are.
        client: Number of the client, from 1.
        cores: Process and Started of each core, and why it does not run, if it does not.
    """

    config: EngineConfig
    directory: Path
    client: int
    cores: tuple[tuple[int, Started, Failed | None], ...]


class AttachedCore:
    """A core in another process. `send`, `status`, `stats` and `records` are thread-safe.

    Attributes:
        ready: See dispatcher.Core.
        pid: Its process; 0 before the start, and once it has ended.
        failed: Why it has ended, until another process takes its place.
    """

    def __init__(self, index: int, config: EngineConfig, inbox: "Inbox", receive: Receive):
        self.index, self.pid = index, 0
        self.failed: Failed | None = None
        self.ready: concurrent.futures.Future[Served] = concurrent.futures.Future()
        self._config, self._inbox, self._receive = config, inbox, receive
        self._lock = threading.RLock()  # of the socket
        self._socket: zmq.Socket | None = None
        self._encoder, self._sent = Encoder(), 0
        self._status, self._heard = Status(waiting=0, received=0, stalled=0.0), time.monotonic()
        self._stats = CoreStats()

    @property
    def sentinel(self) -> int | None:
        """File descriptor that can be read once the process has ended, if this client owns it and it runs."""
        return None

    # -- the interface of dispatcher.Core -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to listen to the core."""
        self._inbox.add(self)
        if self.failed is not None:
            self._receive(self, self.failed)
        self.send(Attach())

    def send(self, message: ToCore) -> None:
        """Send a message to the core, if it runs."""
        with self._lock:
            if self._socket is not None:
                sender = envelope(self._inbox.client, os.getpid())
                self._socket.send_multipart([sender, *self._encoder.encode(message)])
                self._sent += 1

    def status(self) -> Status:
        """Its latest state. A core that says nothing hangs, too."""
        silent = time.monotonic() - self._heard
        return Status(
            waiting=self._status.waiting + max(self._sent - self._status.received, 0),
            received=self._status.received,
            stalled=silent if self.pid and silent > self._patience else self._status.stalled,
        )

    @property
    def _patience(self) -> float:
        return max(self._config.hang_seconds or SILENCE_SECONDS, 2 * BEAT_SECONDS)

    def stats(self) -> EngineStats:
        """Its latest statistics."""
        if not self.pid:  # it has ended
            idle = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage": 0.0}
            return dataclasses.replace(self._stats.stats, **idle)
        return self._stats.stats

    def records(self, *, window: bool) -> RecorderState:
        """Its latest records, see CoreStats.records."""
        return self._stats.records(window=window)

    def stop(self) -> None:
        """Detach from the core."""
        self._inbox.remove(self)
        self._close(linger=1000)

    def join(self) -> None:
        """Wait until the core is detached."""
        self._inbox.join()

    # -- in the thread that receives ----------------------------------------------------------------------------------

    def take(self, pid: int, message: FromCore) -> None:
        """Take a message that process `pid`, or the OWNER, sent as this core."""
        if isinstance(message, Ready) and pid != self.pid:
            if self.pid:
                self._lost("the engine core was replaced", final=False)
            self.attach(pid)
        if pid not in (self.pid, OWNER):
            return  # of a process that has ended: its requests may already run on another core
        self._heard = time.monotonic()
        match message:
            case Status():
                self._status = message
            case Stats():
                self._stats.take(message)
            case Failed(reason=reason, final=final):  # only the owner knows whether another one is started
                self._lost(reason, final=final if pid == OWNER else not self._config.restart_core)
            case _:
                self._receive(self, message)

    def attach(self, pid: int) -> None:
        """Send to this process from now on."""
        with self._lock:
            if pid == self.pid:
                return
            self._close(linger=0)
            self._socket = socket = self._inbox.context.socket(zmq.PUSH)
            socket.set_hwm(0)
            socket.connect(core_address(self._inbox.directory, self.index))
            self._sent, self._status = 0, Status(waiting=0, received=0, stalled=0.0)
            self.pid, self.failed, self._heard = pid, None, time.monotonic()

    def excuse(self) -> None:
        """Do not count the time so far as silence: this process was stopped."""
        self._heard = time.monotonic()

    def ended(self) -> None:
        """The process has ended."""

    def look_after(self) -> None:
        """Called now and then. Its owner may have told of its end before this client listened."""
        if self.pid and time.monotonic() - self._heard > self._patience and not _exists(self.pid):
            self._lost("the engine core has ended", final=not self._config.restart_core)

    def end(self) -> None:
        """End what would outlive this process."""

    def _close(self, *, linger: int) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close(linger=linger)
                self._socket = None

    def _lost(self, reason: str, *, final: bool) -> None:
        """The core has stopped."""
        self._close(linger=0)  # it would send to the core's successor what this one has not read
        self.pid = 0
        self._fail(Failed(reason, final))

    def _fail(self, failed: Failed) -> None:
        self.failed = failed
        self._receive(self, failed)


class OwnedCore(AttachedCore):
    """A core whose process this client starts, ends if it hangs, and replaces if `restart_core` is set.

    Args:
        clients: Number of clients, this one included.
        progress: Takes reports of loading, in a thread.
        prepare: See Launch.
    """

    def __init__(
        self,
        index: int,
        config: EngineConfig,
        inbox: "Inbox",
        receive: Receive,
        *,
        clients: int,
        progress: StageReport | None,
        prepare: Callable[[], object] | None,
    ):
        super().__init__(index, config, inbox, receive)
        self._launch = Launch(config=config, index=index, directory=inbox.directory, clients=clients, prepare=prepare)
        self._progress, self._restarts, self._stopping = progress, 0, False
        self._begin_at: float | None = None  # when to start another process
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self.started: Started | None = None

    def start(self) -> None:
        """Start the process. `ready` is done once it takes requests."""
        super().start()
        atexit.register(self._kill)  # before multiprocessing waits for it: it ends only with this process
        self._begin()

    def stop(self) -> None:
        """Let the process end after the messages sent so far."""
        self._stopping = True
        self.send(Stop())
        if not self.pid:  # it is loading, or gone
            self._kill()

    def join(self) -> None:
        """Wait until the process has ended; after JOIN_SECONDS, end it."""
        if self._process is not None and self._process.pid is not None:
            self._process.join(JOIN_SECONDS)
            self._kill()
        atexit.unregister(self._kill)
        super().stop()
        super().join()

    def end(self) -> None:
        """Kill the process: this one ends."""
        self._stopping = True
        if self._process is not None and self._process.pid is not None:
            self._process.kill()

    @property
    def sentinel(self) -> int | None:
        """See AttachedCore.sentinel."""
        return None if not self.pid or self._process is None else self._process.sentinel

    @property
    def directory(self) -> Path:
        """Where its sockets are."""
        return self._inbox.directory

    def link(self) -> tuple[int, Started, Failed | None]:
        """Its part of a CoreLink."""
        assert self.started is not None
        return self.pid, self.started, self.failed

    def ended(self) -> None:
        """The process has ended."""
        assert self._process is not None
        self._process.join()
        code = self._process.exitcode or 0
        how = f"was ended by signal {-code}" if code < 0 else f"has ended with exit code {code}"
        self._replace(f"the engine core {how}; see the log above for the reason")

    def look_after(self) -> None:
        """End the process if it hangs; start another one if it is time to."""
        if self._begin_at is not None and time.monotonic() >= self._begin_at and not self._stopping:
            self._begin_at = None
            self._begin()
        if self.pid and (seconds := self.status().stalled):
            self._replace(f"the engine has made no progress for {seconds:.0f} s")

    def take(self, pid: int, message: FromCore) -> None:
        """See AttachedCore.take."""
        if isinstance(message, Failed) and pid == self.pid:
            self._replace(message.reason)
        else:
            self._restarts = 0 if isinstance(message, Outputs) else self._restarts
            super().take(pid, message)

    def _replace(self, reason: str) -> None:
        """End what is left of the process, and start another one if that is wanted and may help."""
        if not self.pid:
            return
        self._kill()
        again = self._config.restart_core and self._restarts < MAX_RESTARTS and not self._stopping
        if self._stopping:
            reason = "the engine has stopped"
        else:
            logger.error("%s; %s", reason, "starting another one" if again else "it is not started again")
        self._tell_others(reason, pid=self.pid, final=not again)
        self._lost(reason, final=not again)
        if again:
            self._restarts += 1
            self._begin()

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=run_core, args=(self._launch, theirs), name=f"engine-core-{self.index}", daemon=True
        )
        threading.Thread(target=self._await_start, args=(self._process, self._pipe, theirs), daemon=True).start()

    def _await_start(self, process: BaseProcess, pipe: Connection, theirs: Connection) -> None:
        """Start the process and follow its progress until it is ready or has failed."""
        try:
            process.start()
        except Exception as error:  # noqa: BLE001  no memory or file descriptor is left, for example
            self._did_not_start(EngineError(f"the engine core's process could not be started: {error}"))
            return
        theirs.close()
        if self._stopping:
            self._kill()
        try:
            while isinstance(message := pipe.recv(), tuple):
                if self._progress is not None:
                    self._progress(*message)
        except (EOFError, OSError):
            process.join()
            message = EngineError(f"the engine core ended with exit code {process.exitcode} while it was loading")
        if isinstance(message, Started):
            self.started = message
            assert process.pid is not None
            self.attach(process.pid)
            if not self.ready.done():
                self._finish(message)
        else:
            self._did_not_start(message)

    def _did_not_start(self, error: BaseException) -> None:
        if not self.ready.done():
            if self.ready.set_running_or_notify_cancel():
                self.ready.set_exception(error)
        elif (
            self._restarts < MAX_RESTARTS and not self._stopping
        ):  # its devices' memory may not be free yet, for example
            seconds = RETRY_SECONDS * 2**self._restarts
            self._restarts += 1
            logger.error("the engine core could not be started again, the next attempt is in %g s: %s", seconds, error)
            self._begin_at = time.monotonic() + seconds
        else:
            logger.error("the engine core could not be started again: %s", error)
            self._fail(Failed(str(error)))
            self._tell_others(str(error), final=True)

    def _finish(self, started: Started) -> None:
        try:
            served = self._inbox.served(self._config, started)
        except Exception as error:  # noqa: BLE001  passed on through `ready`
            if self.ready.set_running_or_notify_cancel():
                self.ready.set_exception(error)
            return
        if self.ready.set_running_or_notify_cancel():
            self.ready.set_result(served)

    def _tell_others(self, reason: str, *, final: bool, pid: int = OWNER) -> None:
        """Tell the other clients that process `pid` has ended; if `final`, that no other takes its place."""
        outbox = Outbox(self._inbox.context, self._launch, OWNER if final else pid)
        for client in range(1, self._launch.clients):
            outbox.send(client, Failed(reason, final))
        outbox.close()

    def _kill(self) -> None:
        if self._process is not None and self._process.pid is not None:
            self._process.kill()
            self._process.join()


class Inbox:
    """Receives the messages of all cores for one client, and notices when a core ends, in a thread.

    Attributes:
        directory: Where the sockets are.
        client: Number of the client.
    """

    def __init__(self, directory: Path, client: int):
        self.directory, self.client, self.context = directory, client, zmq.Context()
        self._cores: dict[int, AttachedCore] = {}
        self._lock = threading.Lock()  # of what is read once for all cores
        self._served: dict[str, Served] = {}
        self._socket = self.context.socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(client_address(directory, client))
        self._thread = threading.Thread(target=self._run, name="cores", daemon=True)
        at_end(self._end)

    def add(self, core: AttachedCore) -> None:
        """Receive for a core."""
        self._cores = {**self._cores, core.index: core}
        if self._thread.ident is None:
            self._thread.start()

    def remove(self, core: AttachedCore) -> None:
        """Receive for a core no more. Ends with the last one."""
        self._cores = {index: other for index, other in self._cores.items() if other is not core}

    def join(self) -> None:
        """Wait until nothing is received any more, if no core is left."""
        if not self._cores and self._thread.ident is not None:
            self._thread.join()
            self.context.destroy(linger=1000)
            not_at_end(self._end)
            self._end()

    def _end(self) -> None:
        for core in self._cores.values():
            core.end()
        if self.client == 0:
            shutil.rmtree(self.directory, ignore_errors=True)

    def served(self, config: EngineConfig, started: Started) -> Served:
        """What a core serves. The tokenizer is read once."""
        with self._lock:
            model = dataclasses.replace(config, model_dir=started.info.model_dir)
            known = next(iter(self._served.values()), None)
            tokenizer = (
                known.tokenizer
                if known is not None
                else read_tokenizer(model, started.info.vocab_size, has_tower=started.vision is not None)
            )
            found = Served(info=started.info, tokenizer=tokenizer, vision=started.vision)
            self._served[started.info.model_dir] = found
            return found

    def _run(self) -> None:
        decoder, pauses = Decoder(FromCore), Pauses()
        while self._cores:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            cores = list(self._cores.values())
            sentinels = {sentinel: core for core in cores if (sentinel := core.sentinel) is not None}
            for sentinel in sentinels:
                poller.register(sentinel, zmq.POLLIN)
            ready = dict(poller.poll(_POLL_MS))
            paused = pauses.noticed()
            if self._socket in ready:
                self._read(decoder)
            for sentinel, core in sentinels.items():
                if sentinel in ready and core.sentinel == sentinel:
                    core.ended()
            for core in cores:
                if paused:
                    core.excuse()
                core.look_after()

    def _read(self, decoder: Decoder) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                envelope, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                index, pid = map(int, envelope.split())
                if (core := self._cores.get(index)) is not None:
                    core.take(pid, decoder.decode(frames))


def _exists(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True
