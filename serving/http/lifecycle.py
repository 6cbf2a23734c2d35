"""Running the server: the socket first, then the model, then requests, then a clean end."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from serving.http.server import OPEN_PATHS
from serving.http.state import SERVER

if TYPE_CHECKING:
    from omni_jax.engine.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT = 30.0  # seconds that running requests get
_LAST_WORDS = 5.0  # seconds in which handlers write what their requests ended with
_ENGINE_GRACE = 10.0  # seconds beyond the drain before an engine that does not stop is left behind


class CannotListen(Exception):
    """The address cannot be had; the message says which and why."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening: until the model is there, connections are refused.

    Bound before the model is loaded, so that a port in use is found at once and not after minutes.

    Args:
        host: a name or an address; of several addresses the first is taken.
        port: 0 takes a free one.

    Raises:
        CannotListen: the port is in use, or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
        sock.bind(address)
    except OSError as error:
        sock.close()
        hint = "; stop what listens there or choose another --port (0 takes a free one)" if port else ""
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror or error}{hint}") from None
    return sock


def url(sock: socket.socket) -> str:
    """Where a browser on this machine finds the socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(
    make_engine: Callable[[], "AsyncEngine"],
    make_app: Callable[["AsyncEngine"], web.Application],
    sock: socket.socket,
    *,
    shutdown_timeout: float = SHUTDOWN_TIMEOUT,
    access_log: bool = True,
) -> int:
    """Loads the model, serves until SIGTERM or SIGINT, and returns the process's exit code.

    On the first signal new requests get a 503, and running ones have `shutdown_timeout` seconds to finish; what is left
    then gets an error event (or a 503). A second signal ends the process at once, with 128 + its number.

    Args:
        make_engine: builds the engine; called before the event loop runs.
        make_app: the app over the started engine.
        sock: from `bind`.
        access_log: log a line for each request, those of probes and scrapers aside.
    """
    engine = make_engine()
    return asyncio.run(_serve(engine, make_app, sock, shutdown_timeout, access_log))


async def _serve(
    engine: "AsyncEngine",
    make_app: Callable[["AsyncEngine"], web.Application],
    sock: socket.socket,
    shutdown_timeout: float,
    access_log: bool,
) -> int:
    await engine.start()
    app = make_app(engine)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        shutdown_timeout=_LAST_WORDS,
        access_log=logger if access_log else None,
        access_log_class=_AccessLogger,
    )
    await runner.setup()
    stop = _signal_event()
    try:
        await web.SockSite(runner, sock, backlog=1024).start()
    except OSError as error:  # somebody else bound it while we were loading, and listens already
        await runner.cleanup()
        await engine.stop(drain_seconds=0)
        raise CannotListen(f"cannot listen on {url(sock)}: {error.strerror or error}") from None
    logger.info("omni-jax serving %s at %s", ", ".join(app[SERVER].names), url(sock))
    await stop.wait()
    app[SERVER].draining = True
    logger.info("shutting down: running requests have %g s to finish", shutdown_timeout)
    code = 0
    try:
        async with asyncio.timeout(shutdown_timeout + _ENGINE_GRACE):
            await engine.stop(drain_seconds=shutdown_timeout)
    except TimeoutError:
        logger.error("the engine did not stop within %g s more; leaving it behind", _ENGINE_GRACE)
        code = 1
    await runner.cleanup()
    logger.info("stopped")
    if code:
        _leave(code)  # its thread would keep the process alive
    return code


class _AccessLogger(AbstractAccessLogger):
    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if request.path not in OPEN_PATHS:
            name = response.headers.get("X-Request-Id")
            what = f"{request.method} {request.path!r}"
            self.logger.info("%s %s: %d in %.3f s (%s)", request.remote, what, response.status, time, name)


def _signal_event() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; the second ends the process."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            logger.warning("second signal: leaving at once")
            _leave(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def _leave(code: int) -> None:
    logging.shutdown()
    os._exit(code)
