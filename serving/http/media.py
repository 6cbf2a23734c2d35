"""Fetches images and videos from http(s) URLs, data: URIs and files in one allowed directory.

Clients choose the sources, so no source is trusted. An IP address is checked when its socket is created: the checked
address is the one connected to, however the URL spells it and whatever a resolver returns next time. This holds for
every redirect. Error messages quote nothing of a source but its host name.
"""

import asyncio
import binascii
import contextlib
import functools
import importlib.metadata
import os
import re
import socket
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from omni_jax.requests import InvalidRequest
from serving.http.addresses import is_public
from serving.http.settings import MediaAccessSettings

MAX_CONNECTIONS = 256  # of the server

_RESOLVER_THREADS = 32  # a separate pool, so that slow name servers delay no other work
_REDIRECTS = (301, 302, 303, 307, 308)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}):")
_ENCODED = re.compile(r"[\x21-\x7e]+")  # a URL that is already encoded; encoding it again could break its signature
_MAX_URL_LENGTH = 8192  # characters
_MAX_DATA_HEADER = 1024  # characters before the comma of a data: URI
_MAX_ESCAPES = 1_000_000  # %XX in a data: URI; each takes a step in Python
_CHUNK = 2**18  # characters decoded at once, so that other threads can run in between
_REMOVED_FROM_URLS = str.maketrans("", "", "\t\n\r")
_BASE64 = re.compile(r"; *base64 *$", re.IGNORECASE | re.ASCII)  # at the end of a media type
_WHITE = " \t\r\n\f"
# What files of images begin with as base64 (JPEG, PNG, GIF, RIFF), or far more of its letters than a path has.
_BARE_BASE64 = re.compile(r"(/9j/|iVBORw0KGgo|R0lGOD|UklGR)[A-Za-z0-9+/=\s]*\Z|[A-Za-z0-9+/]{256}")
_URL_SAFE = bytes.maketrans(b"-_", b"+/")


@contextlib.asynccontextmanager
async def open_session(
    access: MediaAccessSettings, resolver: AbstractResolver | None = None
) -> AsyncIterator[aiohttp.ClientSession]:
    """A session that connects only to addresses that `access` allows. It ignores proxies, netrc and cookies.

    Args:
        resolver: resolves host names. Default: the system's resolver in a separate thread pool.
    """
    resolver = resolver or _SystemResolver()
    connector = aiohttp.TCPConnector(
        resolver=resolver,
        socket_factory=functools.partial(_checked_socket, access),
        limit=MAX_CONNECTIONS,
        use_dns_cache=False,
    )
    async with aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,  # images are compressed anyway, and the size limit counts received bytes
        timeout=aiohttp.ClientTimeout(total=None),  # fetch has its own, which covers redirects
        headers={"Accept-Encoding": "identity", "User-Agent": f"omni-jax/{importlib.metadata.version('omni-jax')}"},
    ) as session:
        try:
            yield session
        finally:
            await resolver.close()


async def fetch(
    source: str, access: MediaAccessSettings, session: aiohttp.ClientSession, pool: Executor | None = None
) -> bytes:
    """The bytes of an image or a video.

    Nothing is retried, except by aiohttp, which repeats a request once if the connection closes before the response.

    Args:
        source: http(s) URL; data: URI; file:// URL; or path, absolute or relative to the allowed directory.
        session: from `open_session` with the same `access`.
        pool: threads that decode data: URIs and read files. Default: the event loop's.

    Raises:
        InvalidRequest: the source is not allowed, not available, too large or too slow. The message does not name the
            part of the request; the caller adds that.
    """
    source = source.strip()
    if _scheme(source) not in ("http", "https"):
        return await asyncio.get_running_loop().run_in_executor(pool, read, source, access)
    url = _url(source)
    try:
        async with asyncio.timeout(access.media_timeout):
            return await _download(url, access, session)
    except TimeoutError:
        limit = f"{access.media_timeout:g} s that an item may take"
        raise InvalidRequest(f"{_quoted_host(url.host)} did not respond in full within the {limit}") from None


def read(source: str, access: MediaAccessSettings) -> bytes:
    """The bytes of a data: URI or a local file; the part of `fetch` that needs no network."""
    scheme = _scheme(source)
    if scheme == "data":
        data = _decode_data(source)
        if len(data) > access.max_media_bytes:
            raise InvalidRequest(f"the data: URI has {len(data)} bytes; at most {access.max_media_bytes} are allowed")
        return data
    if scheme in (None, "file"):
        return _read_file(_local_path(source) if scheme else source, access)
    raise InvalidRequest(f"URLs with the scheme {scheme!a} are not supported; use an http(s) URL or a data: URI")


# -- http -------------------------------------------------------------------------------------------------------------


class _NotPublic(OSError):
    """The address is not on the public internet."""


def _checked_socket(access: MediaAccessSettings, addr_info: tuple) -> socket.socket:
    """Creates all sockets, and checks the address that the socket is about to connect to."""
    family, kind, protocol, _, address = addr_info
    if not (access.allow_private_media_addresses or is_public(address[0])):
        raise _NotPublic("not a public address")
    return socket.socket(family, kind, protocol)


class _SystemResolver(AbstractResolver):
    """The system's resolver in a separate thread pool."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(_RESOLVER_THREADS, thread_name_prefix="resolve")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        lookup = functools.partial(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._pool, lookup)
        common = {"hostname": host, "port": port, "flags": socket.AI_NUMERICHOST}
        return [
            ResolveResult(host=str(address[0]), family=kind, proto=protocol, **common)
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


async def _download(url: URL, access: MediaAccessSettings, session: aiohttp.ClientSession) -> bytes:
    for _ in range(access.max_media_redirects + 1):
        _check_url(url, access)
        try:
            async with session.get(url, allow_redirects=False) as response:
                if response.status == 200:
                    return await _body(response, access.max_media_bytes)
                location = response.headers.get("Location")
                if response.status not in _REDIRECTS or location is None:
                    raise InvalidRequest(f"{_quoted_host(url.host)} responded with status {response.status}")
        except (aiohttp.ClientError, OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
            raise InvalidRequest(_reason(error, url)) from None
        url = _url(location, base=url)
    raise InvalidRequest(f"{_quoted_host(url.host)} exceeds the limit of {access.max_media_redirects} redirects")


async def _body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    too_large = InvalidRequest(
        f"{_quoted_host(response.url.host)} sent more than the {limit} bytes that an item may have"
    )
    if (response.content_length or 0) > limit:
        raise too_large
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > limit:
            raise too_large
    return bytes(body)


def _url(text: str, base: URL | None = None) -> URL:
    """Parses a URL without encoding it again, which would break signed URLs."""
    if len(text) > _MAX_URL_LENGTH:
        raise InvalidRequest(f"the URL has {len(text)} characters; at most {_MAX_URL_LENGTH} are allowed")
    text = text.strip()
    try:
        url = URL(text, encoded=_ENCODED.fullmatch(text) is not None)
        url = url if base is None else base.join(url)
        _ = url.raw_host, url.port  # raise ValueError if invalid
        return url
    except ValueError:
        raise InvalidRequest(
            "the URL is not valid" if base is None else f"{_quoted_host(base.host)} redirected to an invalid URL"
        ) from None


def _check_url(url: URL, access: MediaAccessSettings) -> None:
    if url.scheme not in ("http", "https"):  # after a redirect
        raise InvalidRequest(f"redirects to the scheme {url.scheme[:31]!a} are not followed, only to http and https")
    if not url.raw_host:
        raise InvalidRequest("the URL has no host")
    if url.raw_user is not None or url.raw_password is not None:
        raise InvalidRequest("URLs with credentials (user@host) are not allowed")
    if access.allowed_media_domains and url.raw_host.lower().rstrip(".") not in access.allowed_media_domains:
        raise InvalidRequest(f"{_quoted_host(url.host)} is not among the domains this server fetches from")


def _reason(error: Exception, url: URL) -> str:
    """The error message for a failed request."""
    match error:
        case aiohttp.ClientConnectorDNSError():
            problem = "cannot be resolved"
        case aiohttp.ClientConnectorError(os_error=_NotPublic()):
            problem = "is not on the public internet, and this server fetches only from there"
        case aiohttp.ClientSSLError():
            problem = "has no TLS or no valid certificate"
        case aiohttp.ClientConnectorError():
            problem = "cannot be reached"
        case aiohttp.InvalidURL() | UnicodeError():
            problem = "is not a valid host name"
        case _:
            problem = "closed the connection early or did not send valid HTTP"
    return f"{_quoted_host(url.host)} {problem}"


def _quoted_host(host: str | None) -> str:
    return f"the host {(host or '')[:100]!a}"


# -- data: and file: --------------------------------------------------------------------------------------------------


def _scheme(source: str) -> str | None:
    found = _SCHEME.match(source)
    return found[1].lower() if found else None


def _decode_data(source: str) -> bytes:
    """The bytes in a data: URI, as the "data: URL processor" of the WHATWG's fetch standard reads it.

    Beyond that standard, base64 may have the URL-safe alphabet.
    """
    comma = source.find(",", 0, _MAX_DATA_HEADER)
    if comma < 0:
        raise InvalidRequest("the data: URI has no comma between its media type and its data")
    # The media type is ignored: the type is detected from the bytes.
    header = source[len("data:") : comma].translate(_REMOVED_FROM_URLS)
    payload = source[comma + 1 :].partition("#")[0]
    if "#" in header:
        raise InvalidRequest("the data: URI has a fragment (#) before its data")
    if payload.count("%") > _MAX_ESCAPES:
        raise InvalidRequest(f"the data: URI has more than {_MAX_ESCAPES} percent escapes; send it as base64")
    if not _BASE64.search(header):
        data = unquote_to_bytes(payload.translate(_REMOVED_FROM_URLS))
    else:
        data = _decode_base64(unquote(payload) if "%" in payload else payload)
    if not data:
        raise InvalidRequest("the data: URI is empty")
    return data


def _decode_base64(text: str) -> bytes:
    """Decodes base64 with or without white space, in the standard or the URL-safe alphabet.

    Padding may be left out, but not in part.
    """
    text = text.rstrip(_WHITE)
    bare = text.rstrip("=" + _WHITE)
    padding = text.count("=", len(bare))
    data, rest = bytearray(), b""
    try:
        for start in range(0, len(bare), _CHUNK):
            rest += bare[start : start + _CHUNK].encode("ascii").translate(_URL_SAFE, _WHITE.encode())
            if b"=" in rest:  # padding before the end
                raise ValueError
            whole = len(rest) // 4 * 4
            data += binascii.a2b_base64(rest[:whole], strict_mode=True)
            rest = rest[whole:]
        missing = -len(rest) % 4
        if padding not in (0, missing):
            raise ValueError
        data += binascii.a2b_base64(rest + b"=" * missing, strict_mode=True)
    except ValueError:  # includes binascii.Error and UnicodeEncodeError
        raise InvalidRequest("the data: URI is not valid base64") from None
    return bytes(data)


def _local_path(url: str) -> str:
    """The path in a file: URL."""
    host, slash, path = url[len("file:") :].removeprefix("//").partition("/")
    if not url.startswith("//", len("file:")) or host.lower() not in ("", "localhost") or not slash:
        raise InvalidRequest("a file: URL must be file:/// followed by an absolute path")
    return "/" + unquote(path, errors="surrogateescape")


def _read_file(path: str, access: MediaAccessSettings) -> bytes:
    if _BARE_BASE64.match(path):
        raise InvalidRequest("base64 alone is not a URL; put a header before it, as in data:image/png;base64,iVBO...")
    root = access.allowed_local_media_path
    if root is None:
        raise InvalidRequest("local files are not allowed by this server; use an http(s) URL or a data: URI")
    data = None
    with contextlib.suppress(OSError, ValueError):  # ValueError: a NUL in the path
        real = Path(os.path.realpath(root / path))
        if real.is_relative_to(root) and real.is_file():  # not a directory, nor a pipe, which could block
            with open(real, "rb", opener=_open_without_links) as file:
                data = file.read(access.max_media_bytes + 1)
    if data is None:  # one message for all reasons, so that it does not reveal which files exist
        raise InvalidRequest("the local file cannot be read: it must be a file in the directory this server allows")
    if len(data) > access.max_media_bytes:
        raise InvalidRequest(f"the local file has more than the {access.max_media_bytes} bytes that an item may have")
    return data


def _open_without_links(path: str, flags: int) -> int:
    """Opens a resolved path. Follows no link created since then, and does not block."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
