"""Blocks that left the device: first in host memory, then on disk.

What leaves together is a *parcel*, usually the blocks of one preempted sequence. Worker threads do whatever takes time
(waiting for the device, copying, checksums, files); the methods the engine calls only change entries under a lock.

A parcel's way: `store` gives it to a worker, which reads the copy into memory that was allocated at the start. When
that is full, the oldest parcels are written to disk to make room. `prefetch` lets a worker bring a parcel back into an
array of its own and compare its checksum; then `take` hands that array over. The array is a new one because the device
may go on reading it after `take` has returned, when a place in our memory would be in use again.

The checksum is SHA-256. A CRC of 32 bits is made for short bursts of errors; what goes wrong here is a block in the
place of another, an old block, a page of zeros. It also covers key, layout and sizes, so bytes that are whole but those
of another parcel don't pass. Of the strong sums in the standard library it's the fastest on processors that have
instructions for it, as servers do (1.2 GB/s against 0.55 of BLAKE2b, one thread of an EPYC), and other threads run
meanwhile.
"""

import contextlib
import dataclasses
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from omni_jax.memory import host_files

logger = logging.getLogger(__name__)

_FADING = 0.8  # the last five moves make two thirds of a bandwidth

Done = Callable[[], None]  # what is to be changed when a move is done

ParcelState = Literal["storing", "host", "spilling", "disk", "loading", "lost"]


class ParcelLost(RuntimeError):
    """What a parcel held is gone: it has to be computed again."""


class Copy(Protocol):
    """Blocks on their way from the device."""

    def read(self) -> np.ndarray:
        """uint8 [blocks, block_bytes] in C order; waits for the device; called in a worker thread."""
        ...


@dataclasses.dataclass(kw_only=True, eq=False)
class Parcel:
    """Blocks that are stored together. Only the tier changes one.

    Attributes:
        key: what the bytes are, in the words of who stored them.
        blocks: how many.
        num_bytes: what they take.
        keep: whether it stays until it's taken; otherwise it gives way when its place is needed.
        state: where it is. A parcel that was taken or dropped is "lost" too.
        reason: why it's lost.
    """

    key: bytes
    blocks: int
    num_bytes: int
    keep: bool
    state: ParcelState = "storing"
    reason: str = ""
    wanted: bool = dataclasses.field(default=False, repr=False)  # somebody waits for it
    busy: bool = dataclasses.field(default=False, repr=False)  # a worker has it; what it holds must stay
    slots: list[int] | None = dataclasses.field(default=None, repr=False)
    data: np.ndarray | None = dataclasses.field(default=None, repr=False)  # on its way in, or ready to be taken
    file: Path | None = dataclasses.field(default=None, repr=False)
    checksum: bytes = dataclasses.field(default=b"", repr=False)

    @property
    def is_ready(self) -> bool:
        """Whether its bytes are verified and stand in an array of their own."""
        return self.state == "host" and self.data is not None

    def __str__(self) -> str:
        return f"parcel {self.key.hex()[:12]} {self.blocks} blocks {self.num_bytes} bytes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTierStats:
    """What the tier holds now and has done so far. Bandwidths are bytes a second of a worker, None before the first.

    Attributes:
        host_bytes: host memory in use, arrays that are ready to be taken included.
        host_capacity: bytes of the memory that was allocated for slots.
        host_parcels: parcels in host memory.
        disk_bytes: bytes of the files, those still to be written included.
        disk_capacity: bytes the files may take, 0 without a disk.
        disk_parcels: parcels that have a file.
        operations: moves that are waiting or under way.
        stored, spilled, loaded: moves done: from the device, to disk, back for `take` (from either).
        evicted: parcels that gave way (`keep_until_taken=False`).
        lost: parcels that were lost to an error.
        store_bandwidth: device to host memory, waiting for the device and the checksum included.
        load_bandwidth: host memory to an array of its own, the checksum included.
        disk_write_bandwidth: host memory to disk.
        disk_read_bandwidth: disk to an array of its own, the checksum included.
    """

    host_bytes: int
    host_capacity: int
    host_parcels: int
    disk_bytes: int
    disk_capacity: int
    disk_parcels: int
    operations: int
    stored: int
    spilled: int
    loaded: int
    evicted: int
    lost: int
    store_bandwidth: float | None
    load_bandwidth: float | None
    disk_write_bandwidth: float | None
    disk_read_bandwidth: float | None


class HostTier:
    """Host memory and a directory for blocks that left the device. For one calling thread, or several.

    Args:
        block_bytes: bytes of one block, all layers together.
        capacity_bytes: host memory for parcels. Arrays on their way in or out come on top: parcels that wait for older
            ones to be written, and those that are prefetched and not taken yet.
        directory: where parcels go when memory is short; None for memory alone. One that can't be used is done without,
            with a warning.
        disk_bytes: what the files may take.
        num_threads: workers.
        layout: digest of all that the bytes depend on besides the key: the model's files, dtypes, block size, layers.
        max_swap_ops: while so many moves are outstanding nothing is stored. Loads are never refused.
    """

    def __init__(
        self,
        *,
        block_bytes: int,
        capacity_bytes: int,
        directory: Path | None,
        disk_bytes: int,
        num_threads: int,
        layout: bytes,
        max_swap_ops: int = 16,
    ):
        if block_bytes < 1 or num_threads < 1 or max_swap_ops < 1:
            raise ValueError(
                "block_bytes, num_threads and max_swap_ops must be at least 1, "
                f"got {block_bytes}, {num_threads} and {max_swap_ops}"
            )
        if capacity_bytes < block_bytes:
            raise ValueError(f"swap space of {capacity_bytes} bytes is less than one block of {block_bytes} bytes")
        self.block_bytes = block_bytes
        self._memory = np.empty((capacity_bytes // block_bytes, block_bytes), np.uint8)
        self._free = list(range(len(self._memory)))[::-1]
        self._layout = hashlib.sha256(layout).digest()
        self._max_swap_ops = max_swap_ops
        self._directory = directory
        self._disk_limit = 0
        self._folder: host_files.SwapFolder | None = None
        if directory is not None and disk_bytes:
            try:
                self._folder = host_files.SwapFolder(directory)
                self._disk_limit = disk_bytes
            except OSError as error:
                self._disk_off(error)
        self._parcels: dict[Parcel, None] = {}  # those that hold anything, oldest first
        self._changed = threading.Condition()  # its lock guards everything here
        self._workers = ThreadPoolExecutor(num_threads, thread_name_prefix="swap")
        self._closed = False
        self._counts = dict.fromkeys(("stored", "spilled", "loaded", "evicted", "lost"), 0)
        self._rates = {name: _Rate() for name in ("store", "load", "disk_write", "disk_read")}

    def has_room(self, blocks: int) -> bool:
        """Whether `store` would keep so many blocks now: to be asked before they are copied."""
        with self._changed:
            return not self._closed and self._operations() < self._max_swap_ops and self._make_room(blocks)

    def store(self, key: bytes, copy: Copy, blocks: int, *, keep_until_taken: bool = True) -> Parcel | None:
        """Keeps the `blocks` blocks that `copy` brings; a worker reads it.

        Args:
            key: what the bytes are: tokens, media, adapter. Goes into the checksum with the layout.
            copy: read once.
            blocks: how many blocks it has.
            keep_until_taken: False for what may give way to others (cached prefixes).

        Returns:
            The parcel, or None (and nothing changed): there is no room and nothing can go to make some, or too many
            moves are outstanding.
        """
        if blocks < 1:
            raise ValueError(f"a parcel has at least one block, got {blocks}")
        with self._changed:
            if self._closed or self._operations() >= self._max_swap_ops or not self._make_room(blocks):
                return None
            parcel = Parcel(key=key, blocks=blocks, num_bytes=blocks * self.block_bytes, keep=keep_until_taken)
            self._parcels[parcel] = None
            self._submit(self._store, parcel, copy)
            return parcel

    def prefetch(self, parcel: Parcel) -> None:
        """Has a parcel brought back, from memory or disk, and its checksum compared. At once; again does nothing."""
        with self._changed:
            parcel.wanted = True
            self._proceed(parcel)

    def is_ready(self, parcel: Parcel) -> bool:
        """Whether `take` returns (or raises) at once. Nothing becomes ready that wasn't prefetched."""
        with self._changed:
            return parcel.is_ready or parcel.state == "lost"

    def take(self, parcel: Parcel) -> np.ndarray:
        """uint8 [blocks, block_bytes]: what was stored, verified; it's the caller's from now on. Waits where it must.

        Raises:
            ParcelLost: it couldn't be read, isn't what was stored, gave way, or was taken or dropped before.
        """
        with self._changed:
            parcel.wanted = True
            self._proceed(parcel)
            self._changed.wait_for(lambda: parcel.is_ready or parcel.state == "lost")
            data = parcel.data
            if data is None:
                raise ParcelLost(f"{parcel} is lost: {parcel.reason}")
            self._forget(parcel, "it was taken before")
        return data

    def drop(self, parcel: Parcel) -> None:
        """Forgets a parcel, whatever is being done with it. At once; again does nothing."""
        with self._changed:
            if parcel.state != "lost":
                self._forget(parcel, "it was dropped")
                self._settle()
                self._changed.notify_all()

    def stats(self) -> HostTierStats:
        """What is held now and was done so far."""
        with self._changed:
            ready = sum(parcel.num_bytes for parcel in self._parcels if parcel.data is not None)
            rates: dict[str, Any] = {f"{name}_bandwidth": rate.value for name, rate in self._rates.items()}
            return HostTierStats(
                host_bytes=(len(self._memory) - len(self._free)) * self.block_bytes + ready,
                host_capacity=self._memory.nbytes,
                host_parcels=sum(parcel.slots is not None or parcel.data is not None for parcel in self._parcels),
                disk_bytes=self._disk_bytes(),
                disk_capacity=self._disk_limit,
                disk_parcels=sum(parcel.file is not None for parcel in self._parcels),
                operations=self._operations(),
                **self._counts,
                **rates,
            )

    def wait_idle(self) -> None:
        """Waits until no move is outstanding."""
        with self._changed:
            self._changed.wait_for(lambda: self._operations() == 0)

    def close(self) -> None:
        """Forgets all parcels, joins the threads, removes the files and the folder. Again does nothing."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for parcel in list(self._parcels):
                self._forget(parcel, "the tier was closed")
            self._changed.notify_all()
        self._workers.shutdown(wait=True, cancel_futures=True)
        with self._changed:
            self._parcels.clear()
            self._free = list(range(len(self._memory)))
        if self._folder is not None:
            self._folder.close()

    # What follows down to `_disk_off` is called with the lock held and never waits.

    def _submit(self, work: Callable[..., Done | None], parcel: Parcel, *args: object) -> None:
        parcel.busy = True
        if not self._closed:
            future = self._workers.submit(self._run, work, parcel, *args)
            future.add_done_callback(lambda future: future.cancelled() or future.result())  # a fault of ours is logged

    def _proceed(self, parcel: Parcel) -> None:
        """Starts what an idle parcel needs next; called whenever its state, or what is wanted of it, has changed."""
        if parcel.busy:
            return
        if parcel.state == "lost":
            self._release(parcel)
            if parcel.file is not None:
                self._submit(self._remove, parcel, parcel.file)
            else:
                self._parcels.pop(parcel, None)
        elif parcel.file is not None and parcel.state in ("storing", "host"):
            parcel.state = "spilling"
            self._submit(self._spill, parcel, parcel.file)
        elif parcel.wanted and (parcel.state == "disk" or (parcel.state == "host" and not parcel.is_ready)):
            parcel.state = "loading"
            self._submit(self._load, parcel)

    def _settle(self) -> None:
        """Gives slots to parcels that wait for them; loses the newest where there won't be enough any more."""
        while (waiting := self._waiting()) and not self._make_room():
            self._lose(waiting[-1], "older parcels could not make room for it")
        for parcel in self._waiting():
            if parcel.data is not None and not parcel.busy and self._assign(parcel):
                self._submit(self._place, parcel, parcel.data)

    def _waiting(self) -> list[Parcel]:
        """Parcels that will need slots, oldest first."""
        return [p for p in self._parcels if p.state == "storing" and p.slots is None and p.file is None]

    def _make_room(self, blocks: int = 0) -> bool:
        """Sees to it that there are or will be slots for all that wait and for so many blocks more.

        Those that need not be kept give way, then the oldest are sent to disk, also such as are only being stored.

        Returns:
            False, and nothing changed, where that is impossible.
        """
        leaving = [p for p in self._parcels if p.file is not None or p.state in ("spilling", "loading", "lost")]
        short = sum(parcel.blocks for parcel in self._waiting()) + blocks
        short -= len(self._free) + sum(len(parcel.slots or ()) for parcel in leaving)
        folder, room = self._folder, self._disk_limit - self._disk_bytes()
        chosen = []
        able = [p for p in self._parcels if p.state in ("storing", "host") and p.file is None and not p.wanted]
        for parcel in sorted(able, key=lambda parcel: parcel.keep):
            if short <= 0:
                break
            if parcel.keep:
                if folder is None or host_files.HEADER_BYTES + parcel.num_bytes > room:
                    continue
                room -= host_files.HEADER_BYTES + parcel.num_bytes
            chosen.append(parcel)
            short -= parcel.blocks
        if short > 0:
            return False
        for parcel in chosen:
            if parcel.keep and folder is not None:
                parcel.file = folder.new_path()
                self._proceed(parcel)
            else:
                self._counts["evicted"] += 1
                self._forget(parcel, "it gave way to others")
        return True

    def _assign(self, parcel: Parcel) -> bool:
        if len(self._free) < parcel.blocks:
            return False
        parcel.slots = [self._free.pop() for _ in range(parcel.blocks)]
        return True

    def _release(self, parcel: Parcel) -> None:
        self._free.extend(parcel.slots or ())
        parcel.slots = None

    def _forget(self, parcel: Parcel, reason: str) -> None:
        parcel.state, parcel.reason, parcel.data = "lost", reason, None
        self._proceed(parcel)

    def _lose(self, parcel: Parcel, reason: str) -> None:
        where = parcel.file or "in host memory"
        logger.warning("[SWAP] %s lost (%s): %s; it will be computed again", parcel, where, reason)
        self._counts["lost"] += 1
        self._forget(parcel, reason)

    def _operations(self) -> int:
        return sum(parcel.busy or parcel.state == "storing" for parcel in self._parcels)

    def _disk_bytes(self) -> int:
        return sum(host_files.HEADER_BYTES + parcel.num_bytes for parcel in self._parcels if parcel.file is not None)

    def _disk_off(self, error: OSError) -> None:
        self._disk_limit = 0
        logger.warning(
            "[SWAP] the swap directory %s can't be written: %s; host memory alone is used from now on",
            self._directory,
            error,
        )

    # What follows runs in the workers without the lock. A move returns what is to be changed when it's done: that is
    # changed under the lock together with the end of being busy, and not at all when the parcel was dropped meanwhile.

    def _run(self, work: Callable[..., Done | None], parcel: Parcel, *args: object) -> None:
        done, reason = None, "a fault in this program, see the log"  # whatever happens, nobody may wait for ever
        try:
            done, reason = work(parcel, *args), ""
        except (OSError, RuntimeError, ValueError, MemoryError) as error:  # RuntimeError: the device's errors are such
            reason = f"{type(error).__name__}: {error}"
        finally:
            with self._changed:
                parcel.busy = False
                if reason and parcel.state != "lost":
                    self._lose(parcel, reason)
                elif done is not None and parcel.state != "lost":
                    done()
                self._proceed(parcel)
                self._settle()
                self._changed.notify_all()

    def _store(self, parcel: Parcel, copy: Copy) -> Done | None:
        with self._move(parcel, "store", "device -> host"):
            data = copy.read()
            if data.dtype != np.uint8 or data.shape != (parcel.blocks, self.block_bytes):
                expected = [parcel.blocks, self.block_bytes]
                raise ValueError(f"the copy is {data.dtype} {list(data.shape)}, expected uint8 {expected}")
            data = np.ascontiguousarray(data)
            parcel.checksum = self._checksum(parcel, data)
            with self._changed:
                if parcel.state == "lost":
                    return None
                parcel.data = data
                self._counts["stored"] += 1
                if parcel.file is not None or not self._assign(parcel):
                    return None  # `_proceed` goes on with it, or `_settle`
            return self._place(parcel, data)

    def _place(self, parcel: Parcel, data: np.ndarray) -> Done:
        for slot, row in zip(parcel.slots or (), data, strict=True):
            self._memory[slot] = row

        def done() -> None:
            parcel.state, parcel.data = "host", None

        return done

    def _spill(self, parcel: Parcel, file: Path) -> Done:
        def done() -> None:
            parcel.state, parcel.data = "disk", None
            self._counts["spilled"] += 1
            self._release(parcel)

        def failed() -> None:
            parcel.state, parcel.file = "storing" if parcel.slots is None else "host", None

        rows = parcel.data  # it had no place in memory yet
        try:
            with self._move(parcel, "disk_write", "host -> disk"):
                if rows is None:
                    rows = (self._memory[slot] for slot in parcel.slots or ())
                host_files.write(file, self._header(parcel), rows)
        except OSError as error:
            with self._changed:
                if self._disk_limit:
                    self._disk_off(error)
            return failed
        return done

    def _load(self, parcel: Parcel) -> Done:
        data = np.empty((parcel.blocks, self.block_bytes), np.uint8)
        file = parcel.file
        with self._move(parcel, "load", "") if file is None else self._move(parcel, "disk_read", "disk -> host"):
            if file is None:
                for slot, row in zip(parcel.slots or (), data, strict=True):
                    row[:] = self._memory[slot]
            else:
                host_files.read(file, self._header(parcel), data)
            if self._checksum(parcel, data) != parcel.checksum:
                raise ValueError("its bytes aren't those that were stored (checksum)")
        if file is not None:
            host_files.remove(file)

        def done() -> None:
            parcel.state, parcel.data, parcel.file = "host", data, None
            self._release(parcel)
            self._counts["loaded"] += 1

        return done

    def _remove(self, parcel: Parcel, file: Path) -> None:
        host_files.remove(file)
        with self._changed:
            parcel.file = None

    @contextlib.contextmanager
    def _move(self, parcel: Parcel, rate: str, way: str) -> Iterator[None]:
        """Measures a move that succeeds; one with a `way` is reported."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        with self._changed:
            self._rates[rate].add(parcel.num_bytes, seconds)
        if way:
            logger.info("[SWAP] %s %s in %.0f ms", parcel, way, 1e3 * seconds)

    def _header(self, parcel: Parcel, *, with_checksum: bool = True) -> bytes:
        return host_files.make_header(
            blocks=parcel.blocks,
            block_bytes=self.block_bytes,
            layout=self._layout,
            key=hashlib.sha256(parcel.key).digest(),
            checksum=parcel.checksum if with_checksum else b"",
        )

    def _checksum(self, parcel: Parcel, data: np.ndarray) -> bytes:
        digest = hashlib.sha256(self._header(parcel, with_checksum=False))
        digest.update(data.reshape(-1).data)
        return digest.digest()


class _Rate:
    """Bytes over seconds of the last moves, each counting `_FADING` of the next: a small move counts little."""

    def __init__(self):
        self._bytes = 0.0
        self._seconds = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        self._bytes = _FADING * self._bytes + num_bytes
        self._seconds = _FADING * self._seconds + seconds

    @property
    def value(self) -> float | None:
        return self._bytes / self._seconds if self._seconds else None
