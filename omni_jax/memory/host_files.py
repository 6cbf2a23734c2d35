"""The files of the host tier: one folder a process, one file a parcel.

A file is a header and the bytes. It is written under a temporary name and renamed when all of it is on the disk, so a
file under its final name is whole. No file outlives its process by intention: parcels are known by their objects
alone and nothing ever looks for files to read, so what a killed process left can't be taken for valid. The next start
in the same directory removes it.

Whether a process lives is told by a lock (flock) on a file in its folder, which the kernel takes back however the
process ends. That needs no process ids, which are used again and mean nothing in another container.
"""

import contextlib
import fcntl
import itertools
import logging
import os
import re
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

logger = logging.getLogger(__name__)

MAGIC = b"OMNISWAP"
VERSION = 1
FOLDER_PREFIX = "omni-jax-swap-"
LOCK_NAME = "lock"

_FILE_NAME = re.compile(r"parcel-\d+(\.tmp)?")
_FIELDS = ("magic", "version", "blocks", "bytes of a block", "layout", "key", "checksum")
_HEADER = struct.Struct("<8sQQQ32s32s32s")
HEADER_BYTES = _HEADER.size


class FileCorrupt(ValueError):
    """A parcel's file isn't what was written."""


def make_header(*, blocks: int, block_bytes: int, layout: bytes, key: bytes, checksum: bytes) -> bytes:
    """What a parcel's file begins with; `layout`, `key` and `checksum` are digests of 32 bytes."""
    return _HEADER.pack(MAGIC, VERSION, blocks, block_bytes, layout, key, checksum)


class SwapFolder:
    """This process's folder in `directory`, which is made where it's missing and cleaned of what dead processes left.

    Raises:
        OSError: the directory can't be made, written or locked in.
    """

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        _remove_stale(directory)
        self.path, self._lock = _make_folder(directory)
        self._numbers = itertools.count()

    def new_path(self) -> Path:
        """Where the next file goes."""
        return self.path / f"parcel-{next(self._numbers)}"

    def close(self) -> None:
        """Removes the folder with all our files."""
        try:
            _empty(self.path)
        except OSError as error:
            logger.warning("[SWAP] %s could not be removed: %s; the next start will try again", self.path, error)
        finally:
            os.close(self._lock)


def write(path: Path, header: bytes, rows: Iterable[np.ndarray]) -> None:
    """Writes a file, all of it or nothing.

    Raises:
        OSError: the disk is full or broken; nothing is left of the file.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(header)
            for row in rows:
                file.write(row.data)
            file.flush()
            os.fsync(file.fileno())  # a file system that allocates late tells here that it's full
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read(path: Path, header: bytes, out: np.ndarray) -> None:
    """Fills `out` (C order) with the bytes of a file.

    Raises:
        OSError: it can't be read.
        FileCorrupt: its header isn't `header` or its size isn't right. Bytes that changed are the caller's to find.
    """
    with open(path, "rb", buffering=0) as file:
        found = file.read(len(header))
        if found != header:
            raise FileCorrupt(_difference(found, header))
        rest = out.reshape(-1).data
        while rest and (count := file.readinto(rest)):
            rest = rest[count:]
        if rest:
            raise FileCorrupt(f"it ends early: of {out.nbytes} bytes {len(rest)} are missing")
        if file.read(1):
            raise FileCorrupt(f"it goes on after its {out.nbytes} bytes")


def remove(path: Path) -> None:
    """Removes a file. One that is gone is no error; one that can't be removed waits for the next start (a warning)."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("[SWAP] %s could not be removed: %s", path, error)


def _make_folder(directory: Path) -> tuple[Path, int]:
    # Another process that starts just now may clean a new folder away before its lock is held: then make another one.
    for _ in range(100):
        path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=directory))  # for its owner's eyes only
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.write(lock, MAGIC)
                if os.path.samestat(os.stat(path / LOCK_NAME), os.fstat(lock)):
                    return path, lock
            except BlockingIOError:
                pass
            except OSError:
                os.close(lock)
                raise
            os.close(lock)
    raise OSError(f"no folder in {directory} stays: another process removes them")


def _remove_stale(directory: Path) -> None:
    for path in sorted(directory.glob(f"{FOLDER_PREFIX}*")):
        if path.is_symlink() or not path.is_dir():
            continue
        try:
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                path.rmdir()  # killed before it had a lock: then it is empty, and if it isn't it isn't ours
            continue
        except OSError:
            continue  # another user's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            logger.info("[SWAP] %s: %d files of a process that is gone were removed", path, _empty(path))
        except FileNotFoundError:
            pass  # another process that starts just now was faster
        except BlockingIOError:
            pass  # its process lives
        except OSError as error:
            logger.warning("[SWAP] %s of a process that is gone could not be removed: %s", path, error)
        finally:
            os.close(lock)


def _empty(path: Path) -> int:
    """Removes our files from a folder whose lock we hold, and the folder when nothing else is in it; how many."""
    names = [name for name in os.listdir(path) if _FILE_NAME.fullmatch(name) and _is_ours(path / name)]
    for name in names:
        (path / name).unlink()
    if os.listdir(path) == [LOCK_NAME] and _is_ours(path / LOCK_NAME):
        (path / LOCK_NAME).unlink()
        path.rmdir()
    return len(names)


def _is_ours(path: Path) -> bool:
    """Whether a file begins as ours do. One killed in mid-write may be shorter, or zeros after a power cut."""
    if path.is_symlink() or not path.is_file():
        return False
    with open(path, "rb") as file:
        return MAGIC.startswith(file.read(len(MAGIC)).rstrip(b"\0"))


def _difference(found: bytes, expected: bytes) -> str:
    if len(found) < len(expected):
        return f"it ends within the header ({len(found)} of {len(expected)} bytes)"
    pairs = zip(_FIELDS, _HEADER.unpack(found), _HEADER.unpack(expected), strict=True)
    return f"its header has another {', '.join(name for name, one, other in pairs if one != other)}"
