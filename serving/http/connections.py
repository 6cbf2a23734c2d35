"""Connections of clients: time limits, malformed requests and the access log."""

import asyncio
import collections
import functools
import logging
from collections.abc import Callable
from email.utils import formatdate
from typing import Any, cast

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.http import SERVER_SOFTWARE
from aiohttp.http_exceptions import LineTooLong

from serving.http.errors import REQUEST_ID, ApiError, to_api_error
from serving.http.settings import ServerSettings
from serving.http.wire import new_id

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/metrics", "/version"})  # need no API key: for probes and scrapers
MAX_LOGGED_PATH = 200  # characters
_BACKLOG = 1024
_ACCEPTED_AT_ONCE = 16  # connections in one iteration of the event loop
TURNS = 4  # requests that begin, and lost connections that are dealt with, in one iteration
_MAX_HELD = 2**16  # bytes of a request that waits for its turn


async def listen(runner: web.AppRunner, sock: Any, settings: ServerSettings) -> asyncio.Server:
    """Accepts connections for the app of a runner that was set up.

    Processes that share the socket accept one connection at a time, so that none takes a burst for itself.
    """
    server = runner.server
    assert server is not None
    loop = asyncio.get_running_loop()
    turns = Turns(loop)
    at_a_time = 1 if settings.api_server_count > 1 else _ACCEPTED_AT_ONCE
    listener = await loop.create_server(lambda: Connection(server, settings, turns), sock=sock, backlog=at_a_time)
    sock.listen(_BACKLOG)  # asyncio has one number for the connections that may wait and those that it accepts in a row
    return listener


class Turns:
    """Calls functions in order, a few in each iteration of the event loop.

    The loop looks at its sockets once in an iteration. So if thousands of clients send or leave at once, the next one
    that asks for something cheap still gets it soon. With one in an iteration, requests would start slowly beside
    hundreds of streams, whose chunks make each iteration long.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._waiting: collections.deque[Callable[[], object]] = collections.deque()
        self._left = TURNS  # in this iteration

    def take(self, function: Callable[[], object]) -> None:
        """Calls a function, at once if there is a turn left in this iteration."""
        if not self._left:
            self._waiting.append(function)
            return
        if self._left == TURNS:
            self._loop.call_soon(self._next)
        self._left -= 1
        function()

    def _next(self) -> None:
        self._left = TURNS
        for _ in range(min(TURNS, len(self._waiting))):
            self.take(self._waiting.popleft())


class Connection(web.RequestHandler):
    """A connection of a client, with the time limits that aiohttp's own connections lack.

    A client that does not send a whole head in time, or does not read what it was sent, loses its connection, so that
    it holds neither a file descriptor nor memory. Handlers limit the time of a body (`wire.read_body`).

    A request begins in its turn, and a lost connection is dealt with in its turn, which is what costs time. A GET waits
    for none, so that probes and scrapers get their answers while thousands of requests arrive.
    """

    def __init__(self, server: web.Server, settings: ServerSettings, turns: Turns):
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=settings.keep_alive_timeout,
            access_log=cast(logging.Logger, logger if settings.access_log else None),
            access_log_class=AccessLogger,
            auto_decompress=False,  # it runs on the event loop; see wire.read_body
        )
        self._settings, self._turns = settings, turns
        self._held: bytearray | None = None  # what was read of a request that waits for its turn
        self._socket: asyncio.Transport | None = None  # until it is closed; `transport` is until it closes
        self._handling = self._began = False  # whether a request is handled; whether any byte of a head was read
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._socket = cast(asyncio.Transport, transport)
        self._socket.set_write_buffer_limits(high=0)  # `pause_writing` as soon as the client does not read
        self._expect_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._socket = None
        for timer in (self._head_timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        self._turns.take(functools.partial(super().connection_lost, exc))

    def data_received(self, data: bytes) -> None:
        if self._held is not None:
            self._held += data
            if len(self._held) > _MAX_HELD and self._socket is not None:
                self._socket.pause_reading()
        elif self._handling or self._began or data.startswith(b"GET "):
            self._read(data)
        else:
            self.keep_alive(True)  # stops its timer, which would close a connection that waits for its turn
            self._held = bytearray(data)
            self._turns.take(self._begin)

    def _begin(self) -> None:
        """Begins to read a request whose turn it is."""
        assert self._held is not None
        data, self._held = bytes(self._held), None
        if self._socket is not None:  # otherwise the client has left
            if len(data) > _MAX_HELD:
                self._socket.resume_reading()
            self._read(data)

    def _read(self, data: bytes) -> None:
        if not self._handling:
            self._began = True
            if self._head_timer is None:  # of the first request it runs since the connection was made
                self._expect_head()
        super().data_received(data)

    def head_was_read(self) -> None:
        """The app calls this when it begins to handle a request."""
        self._handling, self._began = True, False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def log_access(self, request: web.BaseRequest, response: web.StreamResponse, time: float | None) -> None:
        super().log_access(request, response, time)
        self._handling = False  # aiohttp calls this at the end of every response

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unsent(self._unsent)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to a request that the app has not seen because it is malformed, or in which the app failed."""
        request_id = request[REQUEST_ID] = request.get(REQUEST_ID) or new_id()
        if status >= 500:
            failure = exc if isinstance(exc, Exception) else RuntimeError(f"unhandled, status {status}")
            error = to_api_error(failure, request_id)
        elif isinstance(exc, LineTooLong):
            error = ApiError(431, f"the target or a header has more than {self.max_field_size} bytes")
        else:
            first_line = (message or "").partition("\n")[0].rstrip(":")  # what follows quotes the client's bytes
            error = ApiError(400, f"the request is not HTTP as this server reads it: {first_line[:MAX_LOGGED_PATH]}")
        if status < 500:
            logger.info("%s: %d, %s (%s)", request.remote, error.status, ascii(error.message)[1:-1], request_id)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the response was sent already")
        response = error.response()
        response.headers["X-Request-Id"] = request_id
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Sends a response; an error that aiohttp raised outside the app's middleware gets this server's body."""
        if isinstance(resp, web.HTTPException) and resp.status >= 400:
            request_id = request.get(REQUEST_ID) or new_id()
            resp = to_api_error(resp, request_id).response()
            resp.headers["X-Request-Id"] = request_id
            resp.force_close()
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        if isinstance(kw.get("exc_info"), web.RequestPayloadError):
            return  # the rest of a body, which nobody needs
        super().log_exception(*args, **kw)

    def _expect_head(self) -> None:
        self._head_timer = self._loop.call_later(self._settings.header_timeout, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._handling or self._socket is None or self._held is not None:
            return
        if self._began:  # otherwise it sent nothing, and does not wait for an answer
            seconds = self._settings.header_timeout
            error, request_id = ApiError(408, f"the head of the request did not arrive within {seconds:g} s"), new_id()
            logger.info("%s: %d, %s (%s)", self._client, error.status, error.message, request_id)
            body = error.body().encode()
            head = (
                "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json; charset=utf-8\r\n"
                f"X-Request-Id: {request_id}\r\nDate: {formatdate(usegmt=True)}\r\nServer: {SERVER_SOFTWARE}\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            self._socket.write(head.encode() + body)
        self.force_close()

    @property
    def _client(self) -> str:
        """The client's address, as `request.remote` has it."""
        return str(self.peername[0] if isinstance(self.peername, tuple) else self.peername)

    @property
    def _unsent(self) -> int:
        return 0 if self._socket is None else self._socket.get_write_buffer_size()

    def _watch_unsent(self, before: int) -> None:
        """Closes the connection if the client takes none of its response for a whole send_timeout."""
        self._send_timer = self._loop.call_later(self._settings.send_timeout, self._check_unsent, before)

    def _check_unsent(self, before: int) -> None:
        if self._socket is None:
            return
        if self._unsent < before:
            self._watch_unsent(self._unsent)
            return
        logger.info("%s does not read its response: closed after %g s", self._client, self._settings.send_timeout)
        self._socket.abort()


class AccessLogger(AbstractAccessLogger):
    """Logs a line per request, except for probes and scrapers. Malformed requests have a line already."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if request.path in OPEN_PATHS or request.method == "UNKNOWN":
            return
        path = request.path if len(request.path) <= MAX_LOGGED_PATH else request.path[: MAX_LOGGED_PATH - 3] + "..."
        request_id = response.headers.get("X-Request-Id")
        route = f"{request.method[:20]} {path!a}"
        self.logger.info("%s %s: %d in %.3f s (%s)", request.remote, route, response.status, time, request_id)
