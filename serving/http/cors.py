"""Cross-origin requests of browsers (the CORS protocol of WHATWG's Fetch standard), by vLLM's flags. Off by default."""

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import hdrs, web

from serving.http.errors import ApiError
from serving.http.settings import SecuritySettings

MAX_AGE = 600  # seconds for which a browser may keep the answer to a preflight request
EXPOSED = "X-Request-Id, Retry-After"  # headers of responses that a page may read
_SAFE_HEADERS = frozenset({"accept", "accept-language", "content-language", "content-type"})


def preflight(settings: SecuritySettings) -> Any:
    """Middleware that answers preflight requests on every path. They need no key: browsers send none."""

    @web.middleware
    async def answer(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        method = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
        if not settings.allowed_origins or request.method != hdrs.METH_OPTIONS or method is None:
            return await handler(request)
        headers = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        asked = {name.strip().lower() for name in headers.split(",")} - {""}
        allowed = {name.lower() for name in settings.allowed_headers}
        refused = sorted(asked - allowed - _SAFE_HEADERS) if "*" not in allowed else []
        for what, given, fits, flag in (
            ("origin", request.headers.get(hdrs.ORIGIN), _allows_origin(settings, request), "--allowed-origins"),
            ("method", method, bool({"*", method} & set(settings.allowed_methods)), "--allowed-methods"),
            ("header", refused[0] if refused else None, not refused, "--allowed-headers"),
        ):
            if not fits:
                raise ApiError(
                    400, f"this server does not allow cross-origin requests of the {what} {given!a} ({flag})"
                )
        return web.Response(
            status=204,
            headers={
                hdrs.ACCESS_CONTROL_ALLOW_METHODS: method
                if "*" in settings.allowed_methods
                else ", ".join(settings.allowed_methods),
                **({hdrs.ACCESS_CONTROL_ALLOW_HEADERS: headers} if asked else {}),
                hdrs.ACCESS_CONTROL_MAX_AGE: str(MAX_AGE),
            },
        )

    return answer


def response_headers(settings: SecuritySettings) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """A signal handler that adds the headers to every response to an allowed origin: errors and streams, too."""

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        if not settings.allowed_origins:
            return
        anyone = "*" in settings.allowed_origins and not settings.allow_credentials
        if not anyone:
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        if not _allows_origin(settings, request):
            return
        # Browsers take no "*" together with credentials.
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = "*" if anyone else request.headers[hdrs.ORIGIN]
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED
        if settings.allow_credentials:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_CREDENTIALS] = "true"

    return add


def _allows_origin(settings: SecuritySettings, request: web.Request) -> bool:
    origin = request.headers.get(hdrs.ORIGIN)
    return origin is not None and bool({"*", origin} & set(settings.allowed_origins))
