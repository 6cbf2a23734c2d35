"""Files of the host tier: one folder per process, one file per parcel.

A file is a header followed by the bytes. It is written under a temporary name and renamed once it is on the disk, so a
file under its final name is complete. Parcels are found only through their objects; files of an earlier process are
never read, and the next start in the same directory removes them.

A process holds a lock (flock) on a file in its folder; the kernel releases it however the process ends. Process ids
would not do: they are reused, and mean nothing in another container.
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
    """A parcel's file is not what was written."""


def make_header(*, blocks: int, block_bytes: int, layout: bytes, key: bytes, checksum: bytes) -> bytes:
    """The header of a parcel's file. `layout`, `key` and `checksum` are digests of 32 bytes."""
    return _HEADER.pack(MAGIC, VERSION, blocks, block_bytes, layout, key, checksum)


class SwapFolder:
    """This process's folder in `directory`.

    The directory is created if it does not exist, and cleaned of the folders of processes that ended.

    Raises:
        OSError: The directory cannot be created, written to or locked in.
    """

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        _remove_stale(directory)
        self.path, self._lock = _make_folder(directory)
        self._numbers = itertools.count()

    def new_path(self) -> Path:
        """The path of the next file."""
        return self.path / f"parcel-{next(self._numbers)}"

    def close(self) -> None:
        """Remove the folder and the files of this process."""
        try:
            _empty(self.path)
        except OSError as error:
            logger.warning("[SWAP] %s could not be removed: %s; the next start will try again", self.path, error)
        finally:
            os.close(self._lock)


def write(path: Path, header: bytes, rows: Iterable[np.ndarray]) -> None:
    """Write a whole file or none.

    Raises:
        OSError: The disk is full or broken; the file does not exist.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(header)
            for row in rows:
                file.write(row.data)
            file.flush()
            os.fsync(file.fileno())  # a file system with delayed allocation reports here that it is full
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read(path: Path, header: bytes, out: np.ndarray) -> None:
    """Fill `out` (C order) with the bytes of a file. The caller checks their checksum.

    Raises:
        OSError: The file cannot be read.
        FileCorrupt: Its header is not `header`, or its size is wrong.
    """
    with open(path, "rb", buffering=0) as file:
        found = file.read(len(header))
        if found != header:
            raise FileCorrupt(_difference(found, header))
        rest = out.reshape(-1).data
        while rest and (count := file.readinto(rest)):
            rest = rest[count:]
        if rest:
            raise FileCorrupt(f"it ends early: {len(rest)} of {out.nbytes} bytes are missing")
        if file.read(1):
            raise FileCorrupt(f"it goes on after {out.nbytes} bytes")


def remove(path: Path) -> None:
    """Remove a file if it exists. A file that cannot be removed is left to the next start, with a warning."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("[SWAP] %s could not be removed: %s", path, error)


def _make_folder(directory: Path) -> tuple[Path, int]:
    # Another process that starts now may remove the new folder before its lock is held: then make another one.
    for _ in range(100):
        path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=directory))  # readable by its owner only
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
    raise OSError(f"cannot make a folder in {directory}: other processes keep removing it")


def _remove_stale(directory: Path) -> None:
    for path in sorted(directory.glob(f"{FOLDER_PREFIX}*")):
        if path.is_symlink() or not path.is_dir():
            continue
        try:
            lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                path.rmdir()  # a process that was killed before it had a lock left it empty; another folder is not ours
            continue
        except OSError:
            continue  # another user's folder
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            logger.info("[SWAP] removed %d files of a process that ended, in %s", _empty(path), path)
        except FileNotFoundError:
            pass  # another process that starts now removed it
        except BlockingIOError:
            pass  # its process runs
        except OSError as error:
            logger.warning("[SWAP] %s of a process that ended could not be removed: %s", path, error)
        finally:
            os.close(lock)


def _empty(path: Path) -> int:
    """Remove our files from a folder whose lock we hold, and the folder if nothing is left; return their number."""
    names = [name for name in os.listdir(path) if _FILE_NAME.fullmatch(name) and _is_ours(path / name)]
    for name in names:
        (path / name).unlink()
    if os.listdir(path) == [LOCK_NAME] and _is_ours(path / LOCK_NAME):
        (path / LOCK_NAME).unlink()
        path.rmdir()
    return len(names)


def _is_ours(path: Path) -> bool:
    """Whether a file begins with our magic. After a kill it may be shorter, after a power cut it may be zeros."""
    if path.is_symlink() or not path.is_file():
        return False
    with open(path, "rb") as file:
        return MAGIC.startswith(file.read(len(MAGIC)).rstrip(b"\0"))


def _difference(found: bytes, expected: bytes) -> str:
    if len(found) < len(expected):
        return f"it ends inside the header ({len(found)} of {len(expected)} bytes)"
    pairs = zip(_FIELDS, _HEADER.unpack(found), _HEADER.unpack(expected), strict=True)
    return f"its header has another {', '.join(name for name, one, other in pairs if one != other)}"
