"""Errors for clients, all in the form `{"error": {message, type, param, code}}`."""

import json
import logging
import reprlib
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from aiohttp import web

from omni_jax.requests import EngineError, InvalidRequest, Unavailable

logger = logging.getLogger(__name__)

# Id of an HTTP request in the log and in X-Request-Id.
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
# When the head of a request was read, in seconds of time.monotonic, which is the engine's clock.
ARRIVAL: web.RequestKey[float] = web.RequestKey("arrival", float)

MAX_MESSAGE_LENGTH = 1000  # characters, however long the values are that a message quotes
MAX_REPR_LENGTH = 200  # characters of a value that a message quotes

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An error with an HTTP status.

    Attributes:
        status: HTTP status; also the body's `code`, as in vLLM, so that errors in streams have it too.
        message: text for the client, without tracebacks or paths of the server.
        param: invalid field of the request, or None.
        headers: headers to add to the response.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers or {}

    def body(self) -> str:
        """The error as JSON, for responses and streams."""
        message = (
            self.message if len(self.message) <= MAX_MESSAGE_LENGTH else self.message[: MAX_MESSAGE_LENGTH - 3] + "..."
        )
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return json.dumps({"error": {"message": message, "type": kind, "param": self.param, "code": self.status}})

    def response(self) -> web.Response:
        return web.Response(status=self.status, text=self.body(), content_type="application/json", headers=self.headers)


def to_api_error(error: Exception, request_id: str) -> ApiError:
    """The error for the client. Logs a server error with its details, which clients must not see."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return ApiError(400, str(error), param=error.param)
        case Unavailable():
            return ApiError(503, str(error), headers={"Retry-After": "1"})
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, "the body is larger than this server accepts")
        case web.HTTPException():
            allow = error.headers.get("Allow")
            return ApiError(error.status, _phrase(error.status), headers={"Allow": allow} if allow else None)
        case EngineError():
            logger.error("request %s: the engine failed: %s", request_id, error)
            return ApiError(500, f"the engine failed; see the server's log for the reason (request {request_id})")
        case _:
            logger.error("request %s: internal error", request_id, exc_info=error)
            return ApiError(500, f"internal error (request {request_id})")


@web.middleware
async def error_middleware(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """The request boundary: turns every exception of a handler into an error response."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        if error.status in (404, 405):
            reason = "no such route" if error.status == 404 else "method not allowed"
            allow = error.headers.get("Allow")
            detail = f"; use {allow}" if allow else ""
            return ApiError(
                error.status,
                f"{reason}: {request.method} {request.path[:200]}{detail}",
                headers={"Allow": allow} if allow else None,
            ).response()
        return to_api_error(error, request[REQUEST_ID]).response()
    except Exception as error:  # noqa: BLE001 - the request boundary
        return to_api_error(error, request[REQUEST_ID]).response()


def _phrase(status: int) -> str:
    return HTTPStatus(status).phrase.lower()


class _BoundedRepr(reprlib.Repr):
    def __init__(self):
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80


def bounded_repr(value: Any) -> str:
    """The repr of what a client sent, cut to MAX_REPR_LENGTH characters."""
    return _BoundedRepr().repr(value)[:MAX_REPR_LENGTH]
