"""The host tier: blocks swapped out of the device, in host memory first and then on disk.

Blocks that are swapped out together form a *parcel*, usually those of one preempted sequence. Worker threads do what
takes time (waiting for the device, copies, checksums, files); the methods that the engine calls only change entries
under a lock.

`store` gives a parcel to a worker, which reads the copy into memory allocated at the start. When that is full, the
oldest parcels are written to disk. `prefetch` lets a worker copy a parcel into a new array and verify its checksum;
`take` then returns that array. It is new because the device may go on reading it after `take` has returned, when the
parcel's slots may already be reused.

The checksum is SHA-256. A 32-bit CRC detects short bursts of errors, but the errors to expect here are swapped blocks,
old blocks and pages of zeros. It also covers key, layout and sizes, so the bytes of another parcel do not pass. It is
the fastest strong digest of the standard library on processors with SHA instructions (1.2 GB/s, BLAKE2b 0.55 GB/s, one
thread of an EPYC), and it releases the GIL.
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

_DECAY = 0.8  # weight of a move relative to the next; the last five moves make two thirds of a bandwidth

Done = Callable[[], None]  # changes the tier's state at the end of a move

ParcelState = Literal["storing", "host", "spilling", "disk", "loading", "lost"]


class ParcelLost(RuntimeError):
    """The content of a parcel is gone and must be recomputed."""


class Copy(Protocol):
    """Blocks being copied from the device."""

    def read(self) -> np.ndarray:
        """uint8 [blocks, block_bytes] in C order. Waits for the device; called in a worker thread."""
        ...


@dataclasses.dataclass(kw_only=True, eq=False)
class Parcel:
    """Blocks that are stored together. Only the tier changes it.

    Attributes:
        key: Identity of the bytes, chosen by the caller of `store`.
        blocks: Number of blocks.
        num_bytes: Size in bytes.
        keep: Whether it stays until it is taken; otherwise it is evicted when its slots are needed.
        state: Where it is. A parcel that was taken, dropped or evicted is "lost" too.
        reason: Why it is lost.
    """

    key: bytes
    blocks: int
    num_bytes: int
    keep: bool
    state: ParcelState = "storing"
    reason: str = ""
    wanted: bool = dataclasses.field(default=False, repr=False)  # prefetched, or `take` waits for it
    busy: bool = dataclasses.field(default=False, repr=False)  # a worker uses its slots, array and file
    slots: list[int] | None = dataclasses.field(default=None, repr=False)
    data: np.ndarray | None = dataclasses.field(default=None, repr=False)  # waiting for slots, or ready to be taken
    file: Path | None = dataclasses.field(default=None, repr=False)
    checksum: bytes = dataclasses.field(default=b"", repr=False)

    @property
    def is_ready(self) -> bool:
        """Whether its bytes are verified and in an array of their own."""
        return self.state == "host" and self.data is not None

    def __str__(self) -> str:
        return f"parcel {self.key.hex()[:12]} {self.blocks} blocks {self.num_bytes} bytes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTierStats:
    """The state and the counters of the tier. Bandwidths are bytes per second of a worker, None until measured.

    Attributes:
        host_bytes: Host memory in use, including arrays that are ready to be taken.
        host_capacity: Host memory allocated for slots, in bytes.
        host_parcels: Number of parcels in host memory.
        disk_bytes: Bytes of the files, including those still to be written.
        disk_capacity: Maximum bytes of the files; 0 without a disk.
        disk_parcels: Number of parcels that have a file.
        operations: Number of moves that wait or run.
        stored, spilled, loaded: Number of completed moves: from the device, to disk, and back (from either).
        evicted: Number of evicted parcels (`keep_until_taken=False`).
        lost: Number of parcels lost to an error.
        store_bandwidth: Device to host memory, including the wait for the device and the checksum.
        load_bandwidth: Host memory to a new array, including the checksum.
        disk_write_bandwidth: Host memory to disk.
        disk_read_bandwidth: Disk to a new array, including the checksum.
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
    """Host memory and a directory for blocks swapped out of the device. Safe to call from several threads.

    Args:
        block_bytes: Bytes of one block over all layers.
        capacity_bytes: Host memory for parcels. Nothing is stored beyond it, prefetched arrays that were not taken
            included. Arrays that wait until older parcels are on disk are extra, and those that are read from disk.
        directory: Where parcels are written when memory is full; None uses memory alone. A directory that cannot be
            used is logged and ignored.
        disk_bytes: Maximum bytes of the files.
        num_threads: Number of worker threads.
        layout: Digest of what determines the bytes besides the key: model files, dtypes, block size, layers.
        max_swap_ops: Maximum number of outstanding moves; above it nothing is stored. Loads are never rejected.
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
            raise ValueError(f"swap space of {capacity_bytes} bytes is smaller than one block of {block_bytes} bytes")
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
                self._disable_disk(error)
        self._parcels: dict[Parcel, None] = {}  # those that hold slots, an array or a file, oldest first
        self._changed = threading.Condition()  # its lock guards all state here
        self._workers = ThreadPoolExecutor(num_threads, thread_name_prefix="swap")
        self._closed = False
        self._counts = dict.fromkeys(("stored", "spilled", "loaded", "evicted", "lost"), 0)
        self._rates = {name: _Rate() for name in ("store", "load", "disk_write", "disk_read")}

    def has_room(self, blocks: int) -> bool:
        """Whether `store` would accept `blocks` blocks now. To be called before they are copied."""
        with self._changed:
            return not self._closed and self._operations() < self._max_swap_ops and self._make_room(blocks)

    def store(self, key: bytes, copy: Copy, blocks: int, *, keep_until_taken: bool = True) -> Parcel | None:
        """Store `blocks` blocks, which a worker reads from `copy`.

        Args:
            key: Identity of the bytes: tokens, media, adapter. Covered by the checksum, like the layout.
            copy: Read once.
            blocks: Number of blocks in it.
            keep_until_taken: False for blocks that may be evicted (cached prefixes).

        Returns:
            The parcel, or None without a change if no room can be made or too many moves are outstanding.
        """
        if blocks < 1:
            raise ValueError(f"a parcel must have at least one block, got {blocks}")
        with self._changed:
            if self._closed or self._operations() >= self._max_swap_ops or not self._make_room(blocks):
                return None
            parcel = Parcel(key=key, blocks=blocks, num_bytes=blocks * self.block_bytes, keep=keep_until_taken)
            self._parcels[parcel] = None
            self._submit(self._store, parcel, copy)
            return parcel

    def prefetch(self, parcel: Parcel) -> None:
        """Start loading a parcel into a new array and verifying its checksum. Returns at once; may be repeated."""
        with self._changed:
            parcel.wanted = True
            self._start_next(parcel)

    def is_ready(self, parcel: Parcel) -> bool:
        """Whether `take` returns or raises at once. Only a prefetched or lost parcel becomes ready."""
        with self._changed:
            return parcel.is_ready or parcel.state == "lost"

    def take(self, parcel: Parcel) -> np.ndarray:
        """uint8 [blocks, block_bytes]: the verified bytes of a parcel, which the caller owns. Waits if it must.

        Raises:
            ParcelLost: It could not be read, failed its checksum, was evicted, or was already taken or dropped.
        """
        with self._changed:
            parcel.wanted = True
            self._start_next(parcel)
            self._changed.wait_for(lambda: parcel.is_ready or parcel.state == "lost")
            data = parcel.data
            if data is None:
                raise ParcelLost(f"{parcel} is lost: {parcel.reason}")
            self._forget(parcel, "it was already taken")
        return data

    def drop(self, parcel: Parcel) -> None:
        """Forget a parcel, whatever its state. Returns at once; may be repeated."""
        with self._changed:
            if parcel.state != "lost":
                self._forget(parcel, "it was dropped")
                self._assign_waiting()
                self._changed.notify_all()

    def stats(self) -> HostTierStats:
        """The state and the counters of the tier."""
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
        """Wait until no move is outstanding."""
        with self._changed:
            self._changed.wait_for(lambda: self._operations() == 0)

    def close(self) -> None:
        """Forget all parcels, join the threads, remove the files and the folder. May be repeated."""
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

    # The methods from here to `_disable_disk` are called with the lock held and never wait.

    def _submit(self, work: Callable[..., Done | None], parcel: Parcel, *args: object) -> None:
        parcel.busy = True
        if not self._closed:
            future = self._workers.submit(self._run, work, parcel, *args)
            future.add_done_callback(lambda future: future.cancelled() or future.result())  # logs unexpected errors

    def _start_next(self, parcel: Parcel) -> None:
        """Start the next move of a parcel that is not busy. Called whenever its state, or `wanted`, has changed."""
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

    def _assign_waiting(self) -> None:
        """Give slots to parcels that wait for them. If there will not be enough, the newest parcels are lost."""
        while (waiting := self._waiting()) and not self._make_room():
            self._mark_lost(waiting[-1], "older parcels could not make room for it")
        for parcel in self._waiting():
            if parcel.data is not None and not parcel.busy and self._assign(parcel):
                self._submit(self._place, parcel, parcel.data)

    def _waiting(self) -> list[Parcel]:
        """Parcels that will need slots, oldest first."""
        return [p for p in self._parcels if p.state == "storing" and p.slots is None and p.file is None]

    def _make_room(self, blocks: int = 0) -> bool:
        """Make sure that there are or will be slots for all waiting parcels and for `blocks` more. The latter count
        beside the arrays that are prefetched but not taken: their sequences may have lost their room.

        Parcels that need not be kept are evicted, then the oldest parcels are sent to disk, even those being stored.

        Returns:
            False, without a change, if that is impossible.
        """
        leaving = [p for p in self._parcels if p.file is not None or p.state in ("spilling", "loading", "lost")]
        short = sum(parcel.blocks for parcel in self._waiting()) + blocks
        short -= len(self._free) + sum(len(parcel.slots or ()) for parcel in leaving)
        if blocks:
            short += sum(parcel.blocks for parcel in self._parcels if parcel.is_ready or parcel.state == "loading")
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
                self._start_next(parcel)
            else:
                self._counts["evicted"] += 1
                self._forget(parcel, "it was evicted")
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
        self._start_next(parcel)

    def _mark_lost(self, parcel: Parcel, reason: str) -> None:
        where = parcel.file or "in host memory"
        logger.warning("[SWAP] %s lost (%s): %s; it will be recomputed", parcel, where, reason)
        self._counts["lost"] += 1
        self._forget(parcel, reason)

    def _operations(self) -> int:
        return sum(parcel.busy or parcel.state == "storing" for parcel in self._parcels)

    def _disk_bytes(self) -> int:
        return sum(host_files.HEADER_BYTES + parcel.num_bytes for parcel in self._parcels if parcel.file is not None)

    def _disable_disk(self, error: OSError) -> None:
        self._disk_limit = 0
        logger.warning(
            "[SWAP] cannot write to the swap directory %s: %s; only host memory is used from now on",
            self._directory,
            error,
        )

    # The methods below run in the workers, without the lock. A move returns a function that changes the state at its
    # end. It is called under the lock, in one step with clearing `busy`, and not at all if the parcel was dropped.

    def _run(self, work: Callable[..., Done | None], parcel: Parcel, *args: object) -> None:
        done, reason = None, "an internal error, see the log"  # set first, because `take` must not wait for ever
        try:
            done, reason = work(parcel, *args), ""
        except (OSError, RuntimeError, ValueError, MemoryError) as error:  # device errors are RuntimeErrors
            reason = f"{type(error).__name__}: {error}"
        finally:
            with self._changed:
                parcel.busy = False
                if reason and parcel.state != "lost":
                    self._mark_lost(parcel, reason)
                elif done is not None and parcel.state != "lost":
                    done()
                self._start_next(parcel)
                self._assign_waiting()
                self._changed.notify_all()

    def _store(self, parcel: Parcel, copy: Copy) -> Done | None:
        with self._timed(parcel, "store", "device -> host"):
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
                    return None  # `_start_next` spills it, or `_assign_waiting` gives it slots
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

        rows = parcel.data  # not None if it has no slots yet
        try:
            with self._timed(parcel, "disk_write", "host -> disk"):
                if rows is None:
                    rows = (self._memory[slot] for slot in parcel.slots or ())
                host_files.write(file, self._header(parcel), rows)
        except OSError as error:
            with self._changed:
                if self._disk_limit:
                    self._disable_disk(error)
            return failed
        return done

    def _load(self, parcel: Parcel) -> Done:
        data = np.empty((parcel.blocks, self.block_bytes), np.uint8)
        file = parcel.file
        with self._timed(parcel, "load", "") if file is None else self._timed(parcel, "disk_read", "disk -> host"):
            if file is None:
                for slot, row in zip(parcel.slots or (), data, strict=True):
                    row[:] = self._memory[slot]
            else:
                host_files.read(file, self._header(parcel), data)
            if self._checksum(parcel, data) != parcel.checksum:
                raise ValueError("its bytes are not those that were stored (checksum)")
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
    def _timed(self, parcel: Parcel, rate: str, way: str) -> Iterator[None]:
        """Measure a move that succeeds, and log it if it has a `way`."""
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
    """Bytes over seconds of the last moves, each weighted `_DECAY` times the next. Small moves weigh little."""

    def __init__(self):
        self._bytes = 0.0
        self._seconds = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        self._bytes = _DECAY * self._bytes + num_bytes
        self._seconds = _DECAY * self._seconds + seconds

    @property
    def value(self) -> float | None:
        return self._bytes / self._seconds if self._seconds else None
