"""Helpers of the host tier's tests: copies and functions that wait at events, a tier, damaged files, full disks."""

import contextlib
import errno
import os
import threading

import numpy as np

from omni_jax.memory import host_files
from omni_jax.memory.host_tier import HostTier

BLOCK_BYTES = 1000
HEADER = host_files.HEADER_BYTES
GATES: list[threading.Event] = []  # opened when a test ends, so that a failing test does not hang


def gate():
    GATES.append(threading.Event())
    return GATES[-1]


class Copy:
    """A copy whose `read` waits until the test opens its gate."""

    def __init__(self, data, *, held=False, error=None):
        self.data, self.error, self.gate = data, error, gate()
        self.begun = threading.Event()
        if not held:
            self.gate.set()

    def read(self):
        self.begun.set()
        self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.data


class Held:
    """A function whose calls wait until the test opens its gate."""

    def __init__(self, function):
        self.function, self.begun, self.gate = function, threading.Event(), gate()

    def __call__(self, *args):
        self.begun.set()
        self.gate.wait()
        return self.function(*args)


def blocks(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, BLOCK_BYTES), np.uint8)


@contextlib.contextmanager
def tier(directory=None, *, capacity=8, disk=100, threads=2, layout=b"layout", ops=16):
    """A tier for `capacity` blocks in memory and `disk` blocks (each with a header) on disk."""
    made = HostTier(
        block_bytes=BLOCK_BYTES,
        capacity_bytes=capacity * BLOCK_BYTES,
        directory=directory,
        disk_bytes=disk * (BLOCK_BYTES + HEADER),
        num_threads=threads,
        layout=layout,
        max_swap_ops=ops,
    )
    try:
        yield made
    finally:
        while GATES:
            GATES.pop().set()
        made.close()


def store(to, data, name, **options):
    parcel = to.store(name.encode(), Copy(data), len(data), **options)
    to.wait_idle()
    return parcel


def on_disk(to, data, name="on disk"):
    """A parcel on disk, and the parcel that took its place in memory."""
    parcel = store(to, data, name)
    size = to.stats().host_capacity // BLOCK_BYTES
    other = store(to, blocks(size, 99), "other")
    assert parcel.state == "disk"
    return parcel, other


def swap_lines(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


FAULTS = {
    "checksum": flip,
    "ends early": lambda path: os.truncate(path, path.stat().st_size - 1),
    "inside the header": lambda path: os.truncate(path, 10),
    "goes on after": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "another magic": lambda path: path.write_bytes(b"x" * path.stat().st_size),
    "No such file": lambda path: path.unlink(),
}


def full_disk(monkeypatch):
    """Write files to /dev/full: a real ENOSPC, also for root."""
    monkeypatch.setattr(
        host_files, "open", lambda *_: os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb"), raising=False
    )


def full_at_last(monkeypatch):
    """A disk that reports only after the last byte that it is full."""

    def fsync(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(host_files.os, "fsync", fsync)
