"""HTTP bodies: reading JSON, writing JSON and server-sent events."""

import asyncio
import contextlib
import logging
import re
import uuid
import zlib
from collections.abc import AsyncGenerator, Sequence

import msgspec
from aiohttp import web

from omni_jax.requests import InvalidRequest
from serving.http.errors import REQUEST_ID, ApiError, to_api_error
from serving.http.state import SERVER

logger = logging.getLogger(__name__)

_JSON = msgspec.json.Encoder()
_HEADER_SAFE = re.compile(r"[\x21-\x7e]{1,128}")


async def read_body(request: web.Request) -> bytes:
    """The body of a POST, decompressed.

    Raises:
        InvalidRequest: the Content-Type is not JSON, or the body is not compressed as its Content-Encoding says.
        ApiError: 400, the body is malformed; 408, it did not arrive in time; 413, it is too large; 415, it has another
            Content-Encoding than gzip and deflate.
    """
    if request.content_type != "application/json":
        given = request.headers.get("Content-Type", "nothing")[:100]
        raise InvalidRequest(f"Content-Type must be application/json, got {given!a}")
    server = request.app[SERVER]
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "deflate"):
        raise ApiError(415, f"Content-Encoding must be gzip or deflate, or left out, got {encoding[:100]!a}")
    try:
        async with asyncio.timeout(server.body_timeout):
            raw = await _read(request, server.max_body_size)
    except TimeoutError:
        raise ApiError(408, f"the body of the request did not arrive within {server.body_timeout:g} s") from None
    except web.RequestPayloadError:
        raise ApiError(400, "the body of the request is malformed, or ended too early") from None
    if encoding == "identity":
        return raw
    return await server.in_turn(_decompressed, raw, encoding, server.max_body_size)


async def _read(request: web.Request, limit: int) -> bytes:
    if (request.content_length or 0) > limit:  # before reading any of it
        raise ApiError(413, f"the body has {request.content_length} bytes; this server accepts at most {limit}")
    body = bytearray()  # not request.read(), which keeps the body, with its images, until the response ends
    async for piece in request.content.iter_any():
        body += piece
        if len(body) > limit:
            raise ApiError(413, f"the body is larger than the {limit} bytes this server accepts")
    return bytes(body)


def _decompressed(raw: bytes, encoding: str, limit: int) -> bytes:
    """A gzip or zlib stream; as deflate, also one without zlib's header, as some clients send it."""
    bare = encoding == "deflate" and raw[:1] and raw[0] & 0xF != zlib.DEFLATED
    decoder = zlib.decompressobj(-zlib.MAX_WBITS if bare else zlib.MAX_WBITS | 32)
    try:
        body = decoder.decompress(raw, limit + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not {encoding}, as its Content-Encoding says: {error}") from None
    if len(body) > limit:
        raise ApiError(413, f"the decompressed body is larger than the {limit} bytes this server accepts")
    if not decoder.eof or decoder.unused_data:
        raise InvalidRequest(f"the body is not one whole {encoding} stream, as its Content-Encoding says")
    return body


def new_id() -> str:
    """A new id of a request."""
    return uuid.uuid4().hex


def name_request(request: web.Request, chosen: str | None = None) -> None:
    """Sets the id of a request: its X-Request-Id, else `chosen` by the body, else a new one.

    Ids of responses contain it, as in vLLM, so the log has both. Ids that cannot be sent back in a header are ignored.
    """
    of_client = [
        name for name in (request.headers.get("X-Request-Id"), chosen) if name and _HEADER_SAFE.fullmatch(name)
    ]
    if of_client or REQUEST_ID not in request:
        request[REQUEST_ID] = of_client[0] if of_client else new_id()


def json_response(response: msgspec.Struct) -> web.Response:
    """A JSON response. May run in a thread, because a large one takes long to serialize."""
    return web.Response(body=_JSON.encode(response), content_type="application/json", charset="utf-8")


async def serve_events(
    request: web.Request, batches: AsyncGenerator[Sequence[msgspec.Struct], None]
) -> web.StreamResponse:
    """Sends each event as `data: {json}`, those of a batch together, then `data: [DONE]`.

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
    last = b"data: [DONE]\n\n"
    try:
        async with contextlib.aclosing(batches):
            await response.prepare(request)
            async for events in batches:
                await response.write(b"".join([b"data: %b\n\n" % _JSON.encode(event) for event in events]))
    except ConnectionResetError:
        logger.debug("request %s: the client disconnected", request[REQUEST_ID])
        return response
    except Exception as error:  # noqa: BLE001 - the request boundary after the headers: logged and sent to the client
        last = b"data: %b\n\n" % to_api_error(error, request[REQUEST_ID]).body().encode()
    with contextlib.suppress(ConnectionResetError):
        await response.write_eof(last)
    return response
