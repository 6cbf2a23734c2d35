"""Runs the server: binds the socket, loads the model, serves requests and shuts down."""

import asyncio
import errno
import functools
import logging
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NoReturn

from aiohttp import web

from omni_jax import garbage
from omni_jax.interrupts import end_process
from serving.http.api_processes import STOP_SIGNALS, ApiProcesses, DrainOrders, Launch
from serving.http.connections import listen
from serving.http.metrics_directory import remove_shared_metrics
from serving.http.settings import ServerSettings
from serving.http.state import SERVER

if TYPE_CHECKING:
    from omni_jax.engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

# Seconds after the shutdown timeout, of ServerSettings:
_API_SECONDS = 1.0  # until other API server processes are killed
_ENGINE_SECONDS = 2.5  # until the process exits without the engine
_HANDLER_SECONDS = 1.0  # that handlers have then to write the end of their responses, before and after a cancellation
_QUIET_SECONDS = 5.0  # between looks whether it is a quiet time
_FEW_CONNECTIONS = 128  # at a quiet time
_END_SECONDS = 5.0  # until the process ends, whatever it does


class CannotListen(Exception):
    """The server cannot listen on the address; the message has the address and the reason."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, but not listening: connections are refused until the model is loaded.

    Bind before loading the model, so that a port in use is an error at once and not after minutes.

    Args:
        host: host name or address; if a name has several addresses, the first is used.
        port: port number; 0 for any free port.

    Raises:
        CannotListen: the port is in use, or the address does not belong to this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is empty or too long
        raise CannotListen(f"cannot listen on {host}:{port}: {_reason(error)}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # do not wait for old connections on a restart
        sock.bind(address)
        if port:
            _claim(sock)
    except OSError as error:
        sock.close()
        hint = ""
        if error.errno == errno.EADDRINUSE:
            hint = "; stop the process that listens there or choose another --port (0 for any free port)"
        elif error.errno == errno.EACCES:
            hint = "; choose a --port from 1024"
        raise CannotListen(f"cannot listen on {host}:{port}: {_reason(error)}{hint}") from None
    return sock


def _claim(sock: socket.socket) -> None:
    """Claim the address of a bound socket for as long as the socket exists.

    With SO_REUSEADDR, Linux lets two processes bind an address until one of them listens, so two servers could load
    their models for it. A name in the abstract namespace of Unix sockets belongs to one process, and ends with it.

    Raises:
        OSError: EADDRINUSE: another server has claimed the address.
    """
    if sys.platform != "linux":
        return
    host, port = sock.getsockname()[:2]
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0omni-jax serves {host}:{port}")
    except OSError:
        claim.close()
        raise
    weakref.finalize(sock, claim.close)


def _reason(error: OSError | UnicodeError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def url(sock: socket.socket) -> str:
    """URL of the socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(
    make_engine: Callable[[], "AsyncEngine"],
    make_app: Callable[["AsyncEngine"], web.Application],
    sock: socket.socket,
    settings: ServerSettings,
    *,
    alone: bool = True,
    launch: "Callable[[AsyncEngine, int], Launch] | None" = None,
) -> int:
    """Loads the model, serves until SIGTERM or SIGINT, and ends the process.

    A signal while the model is loading ends the process at once, with the exit code 128 + signal number. A signal
    after that begins the end: new requests get a 503 and running ones have `settings.shutdown_timeout` seconds to
    finish. Requests that are still running then get an error event, or a 503 if they are not streamed. A second signal
    ends the process at once.

    Args:
        make_engine: builds the engine; called before the event loop runs.
        make_app: builds the app over the started engine.
        sock: bound socket, from `bind`.
        settings: time limits and the access log.
        alone: whether no other processes share the model. If they do, this function returns the exit code, and JAX
            waits for them when the process exits.
        launch: describes the other API server processes, by their number from 1, over the started engine; needed if
            `settings.api_server_count` is above 1.
    """
    engine = make_engine()
    start_others = None
    if launch is not None and settings.api_server_count > 1:
        describe = functools.partial(launch, engine)
        start_others = functools.partial(
            ApiProcesses, describe, settings.api_server_count - 1, run=run_api_server, gone=engine.client_gone
        )
    try:
        code = asyncio.run(serve(engine, make_app, sock, settings, start_others=start_others))
    finally:
        remove_shared_metrics()
    for number in STOP_SIGNALS:  # asyncio has restored Python's own handlers
        signal.signal(number, lambda number, _: end_process(128 + number))
    if alone:  # Python would wait for threads that decode images, for example
        logging.shutdown()
        end_process(code)
    return code


def run_api_server(launch: Launch, channel: Connection) -> None:
    """Runs an API server process besides the first one, to which `channel` leads. Does not return."""
    orders = DrainOrders(channel)
    launch.prepare()
    try:
        code = asyncio.run(serve(launch.make_engine(), launch.make_app, launch.sock, launch.settings, orders))
    except Exception:
        logger.exception("%s failed", launch.name)
        code = 1
    logging.shutdown()
    end_process(code)


async def serve(
    engine: "AsyncEngine",
    make_app: Callable[["AsyncEngine"], web.Application],
    sock: socket.socket,
    settings: ServerSettings,
    orders: DrainOrders | None = None,
    *,
    start_others: Callable[[], ApiProcesses] | None = None,
) -> int:
    """Serves until it is told to stop, and returns the exit code.

    Args:
        orders: what tells it; None in the first API server process, which signals tell.
        start_others: starts the other API server processes.
    """
    stop = orders or _StopSignal()
    await engine.start()
    app = make_app(engine)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_HANDLER_SECONDS)
    await runner.setup()
    try:
        listener = await listen(runner, sock, settings)
    except OSError as error:  # while the model was loading, another process bound the port and listens
        await runner.cleanup()
        await engine.stop(drain_seconds=0)
        raise CannotListen(f"cannot listen on {url(sock)}: {error.strerror or error}") from None
    garbage.postpone()
    quiet = asyncio.create_task(_collect_garbage(runner))
    others = start_others() if start_others else None
    logger.info("omni-jax serving %s at %s", ", ".join(app[SERVER].names), url(sock))
    await stop.wait()
    app[SERVER].draining = True
    drain = settings.shutdown_timeout
    logger.info("shutting down: running requests have %g s to finish", drain)
    _end_after(drain + _END_SECONDS)
    if others is not None:  # first, since the cores that they use end with this engine
        began = time.monotonic()
        await others.drain(drain + _API_SECONDS)
        drain = max(drain - (time.monotonic() - began), 0.0)
    code = 0
    try:
        async with asyncio.timeout(drain + _ENGINE_SECONDS):
            await engine.stop(drain_seconds=drain)
    except TimeoutError:
        logger.error("the engine did not stop within another %g s; exiting without it", _ENGINE_SECONDS)
        code = 1
    listener.close()
    quiet.cancel()
    await runner.cleanup()
    logger.info("stopped")
    if code:
        _end(code)  # the engine's thread would keep the process alive
    return code


async def _collect_garbage(runner: web.AppRunner) -> None:
    """Makes full collections when few connections are open."""
    while True:
        await asyncio.sleep(_QUIET_SECONDS)
        if runner.server is not None and len(runner.server.connections) <= _FEW_CONNECTIONS:
            garbage.collect()


class _StopSignal:
    """The first SIGTERM or SIGINT after someone waits for it. Any other ends the process."""

    def __init__(self):
        self._stop, self._waiting = asyncio.Event(), False
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    async def wait(self) -> None:
        self._waiting = True
        await self._stop.wait()

    def _on_signal(self, number: int) -> None:
        if not self._waiting or self._stop.is_set():
            what = "second signal" if self._stop.is_set() else "interrupted while the model was loading"
            logger.warning("%s: exiting at once", what)
            _end(128 + number)
        self._stop.set()


def _end_after(seconds: float) -> None:
    """Ends the process after this time, whatever keeps it."""

    def end() -> None:
        logger.error("still not stopped after %g s; exiting", seconds)
        _end(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _end(code: int) -> NoReturn:
    """Ends the process without waiting for its threads."""
    remove_shared_metrics()
    logging.shutdown()
    end_process(code)
