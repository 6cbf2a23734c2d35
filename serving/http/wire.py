"""HTTP bodies: reading JSON, writing JSON and server-sent events."""

import contextlib
import logging
import re
import uuid
from collections.abc import AsyncGenerator
from typing import TypeGuard

from aiohttp import web
from pydantic import BaseModel

from omni_jax.requests import InvalidRequest
from serving.http.errors import REQUEST_ID, ApiError, to_api_error
from serving.http.state import SERVER

logger = logging.getLogger(__name__)

_HEADER_SAFE = re.compile(r"[\x21-\x7e]{1,128}")


async def read_body(request: web.Request) -> bytes:
    """The raw body of a POST.

    Raises:
        InvalidRequest: the Content-Type is not JSON.
        ApiError: 413, the body is too large.
    """
    if request.content_type != "application/json":
        given = request.headers.get("Content-Type", "nothing")[:100]
        raise InvalidRequest(f"Content-Type must be application/json, got {given!a}")
    limit = request.app[SERVER].max_body_size
    if (request.content_length or 0) > limit:  # before reading any of it
        raise ApiError(413, f"the body has {request.content_length} bytes; this server accepts at most {limit}")
    body = bytearray()  # not request.read(), which keeps the body, with its images, until the response ends
    async for piece in request.content.iter_any():
        body += piece
        if len(body) > limit:
            raise ApiError(413, f"the body is larger than the {limit} bytes this server accepts")
    return bytes(body)


def header_safe(name: str | None) -> TypeGuard[str]:
    """Whether a client's request id can be sent back in a header."""
    return name is not None and _HEADER_SAFE.fullmatch(name) is not None


def new_id(prefix: str) -> str:
    """A unique id, independent of ids that clients send."""
    return f"{prefix}-{uuid.uuid4().hex}"


def json_response(model: BaseModel) -> web.Response:
    """A JSON response. May run in a thread, because a large one takes long to serialize."""
    return web.Response(text=model.model_dump_json(exclude_unset=True), content_type="application/json")


async def serve_events(request: web.Request, events: AsyncGenerator[BaseModel, None]) -> web.StreamResponse:
    """Sends each event as `data: {json}`, then `data: [DONE]`.

    An error after the headers becomes a last `data: {"error": ...}` event without [DONE], which would mean that the
    response is complete. A slow client delays only its own stream.
    """
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # otherwise nginx buffers the events
        }
    )
    await response.prepare(request)
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                await response.write(b"data: %b\n\n" % event.model_dump_json(exclude_unset=True).encode())
        await response.write(b"data: [DONE]\n\n")
    except ConnectionResetError:
        logger.debug("request %s: the client disconnected", request[REQUEST_ID])
        return response
    except Exception as error:  # noqa: BLE001 - the request boundary after the headers: logged and sent to the client
        with contextlib.suppress(ConnectionResetError):
            await response.write(b"data: %b\n\n" % to_api_error(error, request[REQUEST_ID]).body().encode())
    await response.write_eof()
    return response
