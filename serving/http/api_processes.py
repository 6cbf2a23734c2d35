"""API server processes besides the first one. They accept connections of its socket, and attach to its engine cores."""

import asyncio
import contextlib
import dataclasses
import logging
import multiprocessing
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from aiohttp import web

from omni_jax.interrupts import end_process
from serving.http.metrics_directory import remove_shared_metrics
from serving.http.settings import ServerSettings

if TYPE_CHECKING:
    from omni_jax.engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
MAX_RESTARTS = 5  # of a process, in a row
_STEADY_SECONDS = 60.0  # that a process must have run, for its end to be the first in a row
_RESTART_SECONDS = 0.25  # until the first restart; twice as long until each further one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """What an API server process needs. It is pickled, with all that its functions hold.

    Attributes:
        name: Name of the process.
        prepare: Called first, to set up the log.
        make_engine: Makes an engine that attaches to running cores.
        make_app: Builds the app over the started engine.
        sock: The listening socket.
        settings: Time limits and the access log.
    """

    name: str
    prepare: Callable[[], object]
    make_engine: "Callable[[], AsyncEngine]"
    make_app: "Callable[[AsyncEngine], web.Application]"
    sock: socket.socket
    settings: ServerSettings


class ApiProcesses:
    """The other API server processes, as the first one sees them: it starts them, restarts those that end, and tells
    them to drain. They end with it, however it ends."""

    def __init__(
        self,
        launch: Callable[[int], Launch],
        count: int,
        *,
        run: Callable[[Launch, Connection], object],
        gone: Callable[[int, int], object],
    ):
        """Starts processes. Call it on the event loop.

        Args:
            launch: describes a process by its number.
            count: how many there are; their numbers begin with 1.
            run: runs in each process; the connection leads to this one.
            gone: called with the number and the pid of one that has ended, but was not told to.
        """
        self._launch, self._run, self._gone = launch, run, gone
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, tuple[BaseProcess, Connection, float]] = {}  # with the time of the start
        self._failures = dict.fromkeys(range(1, count + 1), 0)  # ends in a row
        self._draining, self._all_ended = False, asyncio.Event()
        for number in self._failures:
            self._start(number)

    async def drain(self, seconds: float) -> None:
        """Tells the processes to finish what runs and to end, and kills those that have not ended after `seconds`."""
        self._draining = True
        for _, channel, _ in self._running.values():
            with contextlib.suppress(OSError):  # it is about to end
                channel.send("drain")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._running:
                    self._all_ended.clear()
                    await self._all_ended.wait()
        self.kill()

    def kill(self) -> None:
        """Ends the processes at once."""
        self._draining = True
        for process, _, _ in list(self._running.values()):
            logger.error("%s did not end in time: killed", process.name)
            process.kill()
        while self._running:
            self._ended(next(iter(self._running)))

    def _start(self, number: int) -> None:
        if self._draining:
            return
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        launch = self._launch(number)
        process = context.Process(target=self._run, args=(launch, theirs), name=launch.name, daemon=True)
        with _signals_blocked():
            process.start()
        theirs.close()
        self._running[number] = process, ours, self._loop.time()
        self._loop.add_reader(process.sentinel, self._ended, number)

    def _ended(self, number: int) -> None:
        process, channel, started = self._running.pop(number)
        self._loop.remove_reader(process.sentinel)
        process.join()
        channel.close()
        if not self._running:
            self._all_ended.set()
        if self._draining:
            return
        assert process.pid is not None
        self._gone(number, process.pid)
        steady = self._loop.time() - started > _STEADY_SECONDS
        failures = self._failures[number] = 1 if steady else self._failures[number] + 1
        if failures > MAX_RESTARTS:
            logger.error("%s ended %d times in a row: it is not started again", process.name, failures)
            return
        logger.error("%s ended with exit code %s: starting it again", process.name, process.exitcode)
        self._loop.call_later(_RESTART_SECONDS * 2 ** (failures - 1), self._start, number)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Processes that start in this context take no stop signal before they allow them: a terminal sends Ctrl-C to all
    processes, and one that is importing would end with a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class DrainOrders:
    """What tells an API server process to drain: the first process, or a signal. If the first process ends, this one
    ends at once."""

    def __init__(self, channel: Connection):
        self._channel, self._ordered = channel, threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    async def wait(self) -> None:
        """Returns when the process is to drain. Signals are allowed from now on."""
        self._loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            self._loop.add_signal_handler(number, self._stop.set)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if not self._ordered.is_set():
            await self._stop.wait()

    def _listen(self) -> None:
        try:
            while True:
                self._channel.recv()
                self._ordered.set()
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._stop.set)
        except (EOFError, OSError):
            remove_shared_metrics()
            end_process(1)
