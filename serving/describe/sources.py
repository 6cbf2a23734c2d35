"""Which images `describe-images` is about, and the bytes of one as they are sent."""

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
    ".avif": "image/avif",
    ".bmp": "image/bmp",
    ".gif": "image/gif",
    ".jpe": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".jpg": "image/jpeg",
    ".png": "image/png",
    ".tif": "image/tiff",
    ".tiff": "image/tiff",
    ".webp": "image/webp",
}  # by suffix; also what is looked for in a folder
MAX_FILE_BYTES = 64 * 2**20  # of one image: as many are in memory as requests are in flight, a third larger each

_PIECE = 3 * 2**18  # a multiple of 3, so that the base64 of the pieces is the base64 of the whole
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class UsageError(ValueError):
    """An argument that cannot be meant; the message says what to do."""


class Unreadable(Exception):
    """A file that cannot be sent; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One image.

    Attributes:
        name: what its row calls it: the URL, or the file's absolute path, so that one output file can take several
            folders and does not depend on where the command was started. A path that is not UTF-8 is its file:// URI,
            since JSON could not carry it.
        path: where to read it; None is a URL, which the server fetches.
        fault: why it cannot be sent, when that is known already.
    """

    name: str
    path: str | None = None
    fault: str | None = None


def find_sources(given: str) -> list[Source]:
    """The images that `given` stands for, each once.

    Args:
        given: a folder, searched with all its subfolders for files with an image's suffix and sorted by name; a text
            file (.txt) with a path or URL a line, in that order; one image; or one URL. Paths are relative to the
            working directory; blank lines and blanks around a line do not count.

    Raises:
        UsageError: there is nothing of that name, or no image in it.
    """
    if _URL.match(given):
        return [_source(given)]
    if os.path.isdir(given):
        found = sorted(_images(given), key=lambda source: source.name)
        nothing = f"no images in {given}: no file there ends in {', '.join(MEDIA_TYPES)}"
    elif not os.path.exists(given):
        raise UsageError(f"no such folder, image or list: {given}")
    elif given.lower().endswith(".txt"):
        try:
            lines = Path(given).read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
        except OSError as error:
            raise UsageError(f"cannot read the list {given}: {error.strerror}") from None
        found = [_source(os.fsdecode(line.strip())) for line in lines if line.strip()]
        nothing = f"no lines in {given}: a list has one path or URL a line"
    else:
        return [_source(given)]
    if not found:
        raise UsageError(nothing)
    return list({source.name: source for source in found}.values())


def data_uri(path: str) -> bytes:
    """Reads a file: `data:<type>;base64,<bytes>`, the type by its suffix. For a worker thread.

    Encodes piece by piece: b2a_base64 holds the interpreter's lock, and 50 MB at once would stop the event loop too.

    Raises:
        Unreadable: it is no file, cannot be read, is empty, or has more than MAX_FILE_BYTES.
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
        raise Unreadable(f"the file is larger than {MAX_FILE_BYTES} bytes, the most that is sent")
    return b"".join(pieces)


def _source(given: str) -> Source:
    if given.startswith("file:///"):
        given = os.fsdecode(urllib.parse.unquote_to_bytes(urllib.parse.urlsplit(given).path))
    elif _URL.match(given):
        # What is not UTF-8 came through fsdecode as lone surrogates; a URL writes bytes as %XX.
        return Source(name=re.sub("[\udc80-\udcff]", lambda match: f"%{ord(match[0]) - 0xDC00:02X}", given))
    return Source(name=_name(given), path=given)


def _name(path: str) -> str:
    path = os.path.abspath(path)
    try:
        path.encode()
    except UnicodeEncodeError:
        return Path(path).as_uri()
    return path


def _images(folder: str) -> Iterator[Source]:
    """Files with an image's suffix, hidden ones and hidden folders left out.

    A folder is searched once however many links lead to it, which also ends loops; under its own name, since links are
    followed after everything else.
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
        except OSError as error:  # a row of its own: the images in it must not be missing without a word
            yield Source(name=_name(folder), path=folder, fault=f"cannot list the folder: {error.strerror}")
            continue
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isdir(path):
                if os.path.islink(path):
                    waiting.append(path)
                else:
                    waiting.appendleft(path)
            elif os.path.splitext(name)[1].lower() in MEDIA_TYPES:
                yield Source(name=_name(path), path=path)
