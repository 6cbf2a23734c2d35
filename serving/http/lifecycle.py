"""Runs the server: binds the socket, loads the model, serves requests and shuts down."""

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

SHUTDOWN_TIMEOUT = 30.0  # seconds that running requests have to finish
_HANDLER_TIMEOUT = 5.0  # seconds that handlers have after that to write the end of their responses
_ENGINE_TIMEOUT = 10.0  # seconds after the shutdown timeout until the process exits without the engine


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
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # do not wait for old connections on a restart
        sock.bind(address)
    except OSError as error:
        sock.close()
        hint = "; stop the process that listens there or choose another --port (0 for any free port)" if port else ""
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror or error}{hint}") from None
    return sock


def url(sock: socket.socket) -> str:
    """URL of the socket."""
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

    After the first signal, new requests get a 503 and running ones have `shutdown_timeout` seconds to finish. Requests
    that are still running then get an error event, or a 503 if they are not streamed. A second signal ends the process
    at once, with the exit code 128 + signal number.

    Args:
        make_engine: builds the engine; called before the event loop runs.
        make_app: builds the app over the started engine.
        sock: bound socket, from `bind`.
        shutdown_timeout: seconds that running requests have to finish.
        access_log: whether to log a line per request, except for probes and scrapers.
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
        shutdown_timeout=_HANDLER_TIMEOUT,
        access_log=logger if access_log else None,
        access_log_class=_AccessLogger,
    )
    await runner.setup()
    stop = _signal_event()
    try:
        await web.SockSite(runner, sock, backlog=1024).start()
    except OSError as error:  # while the model was loading, another process bound the port and listens
        await runner.cleanup()
        await engine.stop(drain_seconds=0)
        raise CannotListen(f"cannot listen on {url(sock)}: {error.strerror or error}") from None
    logger.info("omni-jax serving %s at %s", ", ".join(app[SERVER].names), url(sock))
    await stop.wait()
    app[SERVER].draining = True
    logger.info("shutting down: running requests have %g s to finish", shutdown_timeout)
    code = 0
    try:
        async with asyncio.timeout(shutdown_timeout + _ENGINE_TIMEOUT):
            await engine.stop(drain_seconds=shutdown_timeout)
    except TimeoutError:
        logger.error("the engine did not stop within another %g s; exiting without it", _ENGINE_TIMEOUT)
        code = 1
    await runner.cleanup()
    logger.info("stopped")
    if code:
        _exit(code)  # the engine's thread would keep the process alive
    return code


class _AccessLogger(AbstractAccessLogger):
    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if request.path not in OPEN_PATHS:
            request_id = response.headers.get("X-Request-Id")
            route = f"{request.method} {request.path!r}"
            self.logger.info("%s %s: %d in %.3f s (%s)", request.remote, route, response.status, time, request_id)


def _signal_event() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; the second signal ends the process."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            logger.warning("second signal: exiting at once")
            _exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def _exit(code: int) -> None:
    logging.shutdown()
    os._exit(code)
