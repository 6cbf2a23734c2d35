"""Image sources of `describe-images`: folders, lists, files and URLs, and data URIs of files."""

import binascii
import dataclasses
import os
import re
import stat
import urllib.parse
from collections import deque
from collections.abc import Iterator
from pathlib import Path

MEDIA_TYPES = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif", ".jif", ".jfi", ".pjpeg", ".pjp"), "image/jpeg"),
    **dict.fromkeys((".png", ".apng"), "image/png"),
    **dict.fromkeys((".tif", ".tiff"), "image/tiff"),
    **dict.fromkeys((".bmp", ".dib"), "image/bmp"),
    **dict.fromkeys((".avif", ".avifs"), "image/avif"),
    ".gif": "image/gif",
    ".mpo": "image/mpo",
    ".webp": "image/webp",
}  # by suffix; other files of a folder are skipped
_UNREAD = (  # suffixes of images that the server does not read
    *(".heic", ".heif", ".hif", ".jxl", ".jp2", ".j2k", ".jpx", ".svg", ".ico", ".psd", ".tga", ".ppm", ".pgm", ".pbm"),
    *(".pnm", ".dng", ".raw", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".eps", ".pdf"),
)
MAX_FILE_BYTES = 64 * 2**20  # largest image; one per request in flight is in memory, a third larger as base64

_PIECE = 3 * 2**18  # a multiple of 3, so that the base64 of pieces can be joined
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class UsageError(ValueError):
    """An invalid argument; the message names the remedy."""


class Unreadable(Exception):
    """A file cannot be sent; the message is the reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """An image.

    Attributes:
        name: `source` of its row: the URL, or the absolute path, so that an output file can hold several folders and
            does not depend on the working directory. A path that is not UTF-8 becomes a file:// URI, which JSON can
            hold.
        path: path of the file; None for a URL, which the server fetches.
        fault: reason why it cannot be sent, if already known.
    """

    name: str
    path: str | None = None
    fault: str | None = None


def find_sources(given: str, skipped: list[Source] | None = None) -> list[Source]:
    """Return the images that an argument names, each once.

    Args:
        given: a folder, searched recursively for files with an image suffix, sorted by name; a text file (.txt) with a
            path or URL in each line, in that order; an image; or a URL. Paths are relative to the working directory;
            blank lines and surrounding blanks are ignored.
        skipped: gets the files of the folder that are not sent, each with its reason as `fault`.

    Raises:
        UsageError: nothing has that name, or it has no images.
    """
    if _URL.match(given):
        return [_source(given)]
    if os.path.isdir(given):
        others: list[Source] = [] if skipped is None else skipped
        found = sorted(_images(given, others), key=lambda source: source.name)
        others.sort(key=lambda source: source.name)
        rest = f"; {len(others)} other files, such as {others[0].name}: {others[0].fault}" if others else ""
        nothing = f"no images in {given}: expected files that end in {', '.join(MEDIA_TYPES)}{rest}"
    elif not os.path.exists(given):
        raise UsageError(f"no such folder, image or list: {given}")
    elif given.lower().endswith(".txt"):
        try:
            lines = Path(given).read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
        except OSError as error:
            raise UsageError(f"cannot read the list {given}: {error.strerror}") from None
        found = [_source(os.fsdecode(line.strip())) for line in lines if line.strip()]
        nothing = f"no lines in {given}: expected a path or URL in each line"
    else:
        return [_source(given)]
    if not found:
        raise UsageError(nothing)
    return list({source.name: source for source in found}.values())


def data_uri(path: str) -> bytes:
    """Read a file into `data:<type>;base64,<bytes>`, with the type of its suffix. Call it in a worker thread.

    It encodes in pieces: b2a_base64 holds Python's lock, so 50 MB at once would block the event loop.

    Raises:
        Unreadable: it is not a regular file, cannot be read, is empty, or is larger than MAX_FILE_BYTES.
    """
    kind = MEDIA_TYPES.get(os.path.splitext(path)[1].lower(), "application/octet-stream")
    pieces = [f"data:{kind};base64,".encode()]
    size = 0
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # before opening: a named pipe would wait for a writer
            raise Unreadable("not a regular file")
        with open(path, "rb") as file:
            while size <= MAX_FILE_BYTES and (piece := file.read(_PIECE)):
                size += len(piece)
                pieces.append(binascii.b2a_base64(piece, newline=False))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise Unreadable(f"cannot read the file: {getattr(error, 'strerror', None) or error}") from None
    if size == 0:
        raise Unreadable("the file is empty")
    if size > MAX_FILE_BYTES:
        raise Unreadable(f"the file is larger than the limit of {MAX_FILE_BYTES} bytes")
    return b"".join(pieces)


def _source(given: str) -> Source:
    if given.startswith("file:///"):
        given = os.fsdecode(urllib.parse.unquote_to_bytes(urllib.parse.urlsplit(given).path))
    elif _URL.match(given):
        # fsdecode turned bytes that are not UTF-8 into lone surrogates; a URL has them as %XX.
        return Source(name=re.sub("[\udc80-\udcff]", lambda match: f"%{ord(match[0]) - 0xDC00:02X}", given))
    return Source(name=_name(given), path=given)


def _name(path: str) -> str:
    path = os.path.abspath(path)
    try:
        path.encode()
    except UnicodeEncodeError:
        return Path(path).as_uri()
    return path


def _why_not(suffix: str) -> str:
    if suffix in _UNREAD:
        return f"the server does not read {suffix[1:].upper()}: convert it to JPEG or PNG"
    return f"{suffix} is no image's suffix" if suffix else "its name has no suffix"


def _images(folder: str, others: list[Source]) -> Iterator[Source]:
    """Yield files with an image suffix, except hidden ones and those in hidden folders. Append other files to `others`.

    A folder is searched once even if links lead to it, so loops end. Links are followed last, so that files are found
    under the folder's own name.
    """
    seen = set()
    waiting = deque([folder])
    while waiting:
        folder = waiting.popleft()
        try:
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as entries:
                names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
        except OSError as error:  # becomes an error row, so that missing images are noticed
            yield Source(name=_name(folder), path=folder, fault=f"cannot list the folder: {error.strerror}")
            continue
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isdir(path):
                if os.path.islink(path):
                    waiting.append(path)
                else:
                    waiting.appendleft(path)
            elif (suffix := os.path.splitext(name)[1].lower()) in MEDIA_TYPES:
                yield Source(name=_name(path), path=path)
            else:
                others.append(Source(name=_name(path), path=path, fault=_why_not(suffix)))
