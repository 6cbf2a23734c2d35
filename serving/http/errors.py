"""Every failure a client can see, in the one shape `{"error": {message, type, param, code}}`."""

import json
import logging
import reprlib
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from aiohttp import web

from omni_jax.requests import EngineError, InvalidRequest, Unavailable

logger = logging.getLogger(__name__)

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)  # what the log and the client call a request

MAX_MESSAGE = 1000  # characters; no message may grow with what the client sent
MAX_REPR = 200  # characters of a client's value in a message

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A failure with a status of its own.

    Attributes:
        status: HTTP status, also the body's `code` (as vLLM has it), so that an error inside a stream has one too.
        message: for the client: no traceback, no path of this machine.
        param: the offending field, or None.
        headers: added to the response.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers or {}

    def body(self) -> str:
        """The JSON text of the error, the same in a response and in a stream."""
        message = self.message if len(self.message) <= MAX_MESSAGE else self.message[: MAX_MESSAGE - 3] + "..."
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return json.dumps({"error": {"message": message, "type": kind, "param": self.param, "code": self.status}})

    def response(self) -> web.Response:
        return web.Response(status=self.status, text=self.body(), content_type="application/json", headers=self.headers)


def describe(error: Exception, request_id: str) -> ApiError:
    """What the client is told about `error`. What only the operator may read is logged with the request's id."""
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
            return ApiError(500, f"the engine failed; the server's log has the reason (request {request_id})")
        case _:
            logger.error("request %s: internal error", request_id, exc_info=error)
            return ApiError(500, f"internal error (request {request_id})")


@web.middleware
async def error_middleware(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """The request boundary: whatever a handler raises becomes a response of the one shape."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        if error.status in (404, 405):
            what = "no such route" if error.status == 404 else "method not allowed"
            allow = error.headers.get("Allow")
            detail = f"; use {allow}" if allow else ""
            return ApiError(
                error.status,
                f"{what}: {request.method} {request.path[:200]}{detail}",
                headers={"Allow": allow} if allow else None,
            ).response()
        return describe(error, request[REQUEST_ID]).response()
    except Exception as error:  # noqa: BLE001 - the boundary: logged there, and answered with a 500
        return describe(error, request[REQUEST_ID]).response()


def _phrase(status: int) -> str:
    return HTTPStatus(status).phrase.lower()


class _BoundedRepr(reprlib.Repr):
    def __init__(self):
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80


def bounded_repr(value: Any) -> str:
    """The repr of what a client sent, cut to MAX_REPR characters."""
    return _BoundedRepr().repr(value)[:MAX_REPR]
