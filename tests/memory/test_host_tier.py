"""The host tier with real threads and real files. Nothing here sleeps: threads are held at events and let go."""

import contextlib
import logging
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from omni_jax.memory import host_files
from omni_jax.memory.host_tier import HostTier, ParcelLost

BLOCK_BYTES = 1000
HEADER = host_files.HEADER_BYTES
GATES: list[threading.Event] = []  # all are opened when a test ends, so that one that fails doesn't hang


def gate():
    GATES.append(threading.Event())
    return GATES[-1]


class Copy:
    """Blocks that arrive when the test says so."""

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
    """A function whose callers wait at the door."""

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
    """A parcel that has gone to disk, because another one needs its place; and that other one."""
    parcel = store(to, data, name)
    size = to.stats().host_capacity // BLOCK_BYTES
    other = store(to, blocks(size, 99), "other")
    assert parcel.state == "disk"
    return parcel, other


def swap_lines(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


# What comes back is what went


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_stored_is_taken_back_from_memory_and_from_disk(tmp_path, threads):
    with tier(tmp_path, threads=threads) as host:
        data = [blocks(3, seed) for seed in range(6)]
        parcels = [host.store(bytes([seed]), Copy(data[seed]), 3) for seed in range(6)]
        host.wait_idle()
        assert {parcel.state for parcel in parcels[:4]} == {"disk"}
        assert {parcel.state for parcel in parcels[4:]} == {"host"}
        stats = host.stats()
        assert (stats.host_parcels, stats.host_bytes, stats.disk_parcels) == (2, 6 * BLOCK_BYTES, 4)
        assert stats.disk_bytes == sum(path.stat().st_size for path in tmp_path.glob("*/parcel-*"))
        for parcel in parcels:
            host.prefetch(parcel)
        host.wait_idle()
        for parcel, expected in zip(parcels, data, strict=True):
            assert host.is_ready(parcel)
            assert np.array_equal(host.take(parcel), expected)
        stats = host.stats()
        assert (stats.host_bytes, stats.disk_bytes, stats.host_parcels, stats.disk_parcels) == (0, 0, 0, 0)
        assert (stats.stored, stats.spilled, stats.loaded, stats.lost, stats.operations) == (6, 4, 6, 0, 0)
        rates = stats.store_bandwidth, stats.load_bandwidth, stats.disk_write_bandwidth, stats.disk_read_bandwidth
        assert all(rate > 0 for rate in rates)
        assert not list(tmp_path.glob("*/parcel-*"))


def test_a_taken_array_stays_what_it_is_when_its_place_is_used_again():
    with tier(capacity=2) as host:
        taken = host.take(store(host, blocks(2, 1), "first"))
        store(host, blocks(2, 2), "second")
        assert np.array_equal(taken, blocks(2, 1))


def test_a_tier_that_did_nothing_knows_no_bandwidths():
    with tier() as host:
        assert host.stats().store_bandwidth is None


def test_take_waits_for_what_was_not_prefetched_and_nothing_can_be_taken_twice():
    with tier() as host:
        parcel = store(host, blocks(2), "x")
        assert not host.is_ready(parcel)  # not verified yet
        assert np.array_equal(host.take(parcel), blocks(2))
        with pytest.raises(ParcelLost, match="taken before"):
            host.take(parcel)
        assert host.is_ready(parcel)  # `take` raises at once
        assert host.stats().lost == 0


def test_each_move_is_one_line(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with tier(tmp_path, capacity=2) as host:
        parcel, _ = on_disk(host, blocks(2), "x")
        host.take(parcel)
    lines = [line for line in swap_lines(caplog, logging.INFO) if b"x".hex() in line]
    assert [line.split(" in ")[0] for line in lines] == [
        f"[SWAP] parcel 78 2 blocks 2000 bytes {way}" for way in ("device -> host", "host -> disk", "disk -> host")
    ]


# Room


def test_without_a_disk_a_full_memory_says_no_and_a_taken_parcel_makes_room():
    with tier(capacity=4) as host:
        first = store(host, blocks(3), "first")
        assert host.store(b"second", Copy(blocks(2)), 2) is None
        assert store(host, blocks(1), "small") is not None
        host.take(first)
        assert store(host, blocks(2), "second") is not None


def test_promised_room_is_not_promised_twice():
    with tier(capacity=4) as host:
        slow = Copy(blocks(3), held=True)
        assert host.store(b"slow", slow, 3) is not None
        assert host.store(b"late", Copy(blocks(2)), 2) is None
        slow.gate.set()


def test_a_full_disk_allowance_says_no_without_a_warning(tmp_path, caplog):
    with tier(tmp_path, capacity=2, disk=2) as host:
        assert all(store(host, blocks(2, seed), str(seed)) for seed in range(2))
        assert host.store(b"third", Copy(blocks(2)), 2) is None
        assert host.stats().disk_parcels == 1
    assert not swap_lines(caplog, logging.WARNING)


def test_what_need_not_be_kept_gives_way_before_anything_goes_to_disk(tmp_path):
    with tier(tmp_path, capacity=4) as host:
        kept = store(host, blocks(1), "kept")
        prefixes = [store(host, blocks(1, seed), str(seed), keep_until_taken=False) for seed in (1, 2, 3)]
        assert store(host, blocks(2), "new") is not None
        assert [parcel.state for parcel in prefixes] == ["lost", "lost", "host"]
        assert kept.state == "host"
        assert (host.stats().evicted, host.stats().lost) == (2, 0)
        with pytest.raises(ParcelLost, match="gave way"):
            host.take(prefixes[0])


def test_nothing_gives_way_when_that_would_not_be_enough():
    with tier(capacity=4) as host:
        prefix = store(host, blocks(1), "prefix", keep_until_taken=False)
        store(host, blocks(3), "kept")
        assert host.store(b"big", Copy(blocks(2)), 2) is None
        assert np.array_equal(host.take(prefix), blocks(1))


def test_so_many_moves_and_no_more():
    with tier(threads=1, ops=2) as host:
        copies = [Copy(blocks(1, seed), held=True) for seed in range(2)]
        parcels = [host.store(bytes([seed]), copy, 1) for seed, copy in enumerate(copies)]
        assert host.store(b"more", Copy(blocks(1)), 1) is None
        assert host.stats().operations == 2
        for copy in copies:
            copy.gate.set()
        host.wait_idle()
        assert store(host, blocks(1), "more") is not None
        assert all(np.array_equal(host.take(parcel), blocks(1, seed)) for seed, parcel in enumerate(parcels))


# Nobody waits


def test_nothing_but_take_waits_while_every_worker_stands(tmp_path, monkeypatch):
    with tier(tmp_path, capacity=2, threads=1) as host:
        parcel, other = on_disk(host, blocks(2, 1), "x")
        read = Held(host_files.read)
        monkeypatch.setattr(host_files, "read", read)
        host.prefetch(parcel)
        read.begun.wait()
        assert parcel.state == "loading"
        queued = host.store(b"queued", Copy(blocks(2, 2)), 2)
        assert queued.state == "storing"
        assert other.state == "spilling"
        host.prefetch(queued)
        host.prefetch(other)
        host.drop(queued)
        assert not host.is_ready(parcel)
        assert not host.is_ready(other)
        assert host.stats().operations == 3
        read.gate.set()
        assert np.array_equal(host.take(other), blocks(2, 99))
        assert np.array_equal(host.take(parcel), blocks(2, 1))
        host.wait_idle()
        assert host.stats().host_bytes == 0


@pytest.mark.parametrize("state", ["storing", "parked", "host", "ready", "spilling", "disk", "loading"])
def test_drop_forgets_a_parcel_in_every_state(tmp_path, monkeypatch, state):
    with tier(tmp_path, capacity=2, threads=2) as host:
        gates = []
        if state == "storing":
            copy = Copy(blocks(2), held=True)
            gates.append(copy.gate)
            parcel = host.store(b"x", copy, 2)
            copy.begun.wait()
        elif state in ("parked", "spilling"):
            write = Held(host_files.write)
            gates.append(write.gate)
            monkeypatch.setattr(host_files, "write", write)
            old = store(host, blocks(2, 1), "old")
            new_copy = Copy(blocks(2))
            new = host.store(b"x", new_copy, 2)
            write.begun.wait()
            new_copy.begun.wait()
            parcel = new if state == "parked" else old
            assert (old.state, new.state) == ("spilling", "storing")
        elif state in ("host", "ready"):
            parcel = store(host, blocks(2), "x")
            if state == "ready":
                host.prefetch(parcel)
                host.wait_idle()
        else:
            parcel, other = on_disk(host, blocks(2))
            if state == "loading":
                read = Held(host_files.read)
                gates.append(read.gate)
                monkeypatch.setattr(host_files, "read", read)
                host.prefetch(parcel)
                read.begun.wait()
            host.drop(other)
        host.drop(parcel)
        host.drop(parcel)
        assert parcel.state == "lost"
        with pytest.raises(ParcelLost, match="dropped"):
            host.take(parcel)
        for gate in gates:
            gate.set()
        host.wait_idle()
        if state == "parked":
            host.drop(old)
        elif state == "spilling":
            assert np.array_equal(host.take(new), blocks(2))
        host.wait_idle()
        stats = host.stats()
        assert (stats.host_bytes, stats.disk_bytes, stats.operations, stats.lost) == (0, 0, 0, 0)
        assert not list(tmp_path.glob("*/parcel-*"))
        assert store(host, blocks(2), "again") is not None


def test_close_lets_takers_go_joins_the_threads_and_removes_the_files(tmp_path):
    before = threading.active_count()
    with tier(tmp_path, capacity=2) as host:
        on_disk(host, blocks(2))
        copy = Copy(blocks(1), held=True)
        parcel = host.store(b"slow", copy, 1)
        errors = []

        def take():
            try:
                host.take(parcel)
            except ParcelLost as error:
                errors.append(str(error))
            finally:
                copy.gate.set()  # only now the worker comes back to be joined

        taker = threading.Thread(target=take)
        taker.start()
        host.close()
        taker.join()
        assert "closed" in errors[0]
        assert host.store(b"late", Copy(blocks(1)), 1) is None
    assert threading.active_count() == before
    assert not list(tmp_path.iterdir())


# Faults


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


FAULTS = {
    "checksum": flip,
    "ends early": lambda path: os.truncate(path, path.stat().st_size - 1),
    "within the header": lambda path: os.truncate(path, 10),
    "goes on after": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "another magic": lambda path: path.write_bytes(b"x" * path.stat().st_size),
    "No such file": lambda path: path.unlink(),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_a_damaged_file_is_found_said_once_and_costs_only_its_parcel(tmp_path, caplog, reason):
    with tier(tmp_path, capacity=2) as host:
        parcel, other = on_disk(host, blocks(2))
        path = parcel.file
        FAULTS[reason](path)
        host.prefetch(parcel)
        host.wait_idle()
        assert host.is_ready(parcel)
        for _ in range(2):
            with pytest.raises(ParcelLost, match=reason):
                host.take(parcel)
        (line,) = swap_lines(caplog, logging.WARNING)
        assert str(path) in line
        assert reason in line
        assert not path.exists()
        assert (host.stats().lost, host.stats().disk_bytes) == (1, 0)
        assert np.array_equal(host.take(other), blocks(2, 99))


def test_a_whole_file_of_another_parcel_or_another_model_does_not_pass(tmp_path):
    # The same bytes of the same size: only what they are differs.
    with tier(tmp_path, capacity=2) as host, tier(tmp_path, capacity=2, layout=b"another model") as another:
        parcel, _ = on_disk(host, blocks(2), "mine")
        neighbour, _ = on_disk(another, blocks(2), "mine")
        parcel.file.write_bytes(neighbour.file.read_bytes())
        with pytest.raises(ParcelLost, match="another layout, checksum"):
            host.take(parcel)
    with tier(tmp_path, capacity=2) as host:
        parcel = store(host, blocks(2), "mine")
        neighbour, _ = on_disk(host, blocks(2), "theirs")
        parcel.file.write_bytes(neighbour.file.read_bytes())
        with pytest.raises(ParcelLost, match="another key, checksum"):
            host.take(parcel)


def test_bytes_that_changed_in_memory_are_found():
    with tier() as host:
        parcel = store(host, blocks(2), "x")
        host._memory[parcel.slots[1], 7] ^= 1
        with pytest.raises(ParcelLost, match="checksum"):
            host.take(parcel)
        assert len(host._free) == 8


@pytest.mark.parametrize(
    "copy",
    [
        Copy(blocks(2), error=RuntimeError("the device is gone")),
        Copy(blocks(1)),
        Copy(blocks(2).astype(np.int32)),
        Copy(None),
    ],
    ids=["device", "blocks", "dtype", "fault of ours"],
)
def test_a_copy_that_fails_is_a_lost_parcel_and_nobody_waits_for_it(caplog, copy):
    with tier() as host:
        parcel = host.store(b"x", copy, 2)
        with pytest.raises(ParcelLost):
            host.take(parcel)
        host.wait_idle()
        assert host.stats().lost == 1
        assert host.stats().host_bytes == 0
        assert len([line for line in swap_lines(caplog, logging.WARNING) if "lost" in line]) == 1


def full_disk(monkeypatch):
    """The device that is always full: a real ENOSPC, for root too."""
    monkeypatch.setattr(
        host_files, "open", lambda *_: os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb"), raising=False
    )


def test_a_full_disk_is_said_once_and_memory_goes_on_alone(tmp_path, monkeypatch, caplog):
    with tier(tmp_path, capacity=4) as host:
        kept, _ = on_disk(host, blocks(4), "kept")
        host.drop(_)
        old = [store(host, blocks(2, seed), str(seed)) for seed in (1, 2)]
        with monkeypatch.context() as patch:
            full_disk(patch)
            new = host.store(b"new", Copy(blocks(3)), 3)
            with pytest.raises(ParcelLost, match="could not make room"):
                host.take(new)
            host.wait_idle()
        lines = swap_lines(caplog, logging.WARNING)
        assert len([line for line in lines if str(tmp_path) in line and "No space left" in line]) == 1
        assert host.store(b"new", Copy(blocks(1)), 1) is None
        assert host.stats().disk_capacity == 0
        for seed, parcel in enumerate(old, 1):
            assert np.array_equal(host.take(parcel), blocks(2, seed))
        assert np.array_equal(host.take(kept), blocks(4))  # what is on the disk already can be read
        assert store(host, blocks(4), "new") is not None
        assert not list(tmp_path.glob("*/*.tmp"))
    assert not list(tmp_path.iterdir())


def test_what_need_not_be_kept_helps_when_the_disk_fails(tmp_path, monkeypatch):
    with tier(tmp_path, capacity=4, threads=1) as host:
        store(host, blocks(2, 1), "kept")
        prefix = Copy(blocks(2, 2), held=True)
        held = host.store(b"prefix", prefix, 2, keep_until_taken=False)
        new = host.store(b"new", Copy(blocks(2, 3)), 2)  # "kept" is to make room: "prefix" isn't there yet
        full_disk(monkeypatch)
        prefix.gate.set()
        assert np.array_equal(host.take(new), blocks(2, 3))
        assert held.state == "lost"


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_directory_that_cannot_be_used_is_said_once_and_done_without(tmp_path, caplog, place):
    (tmp_path / "file").write_text("not a directory")
    with tier(tmp_path / place, capacity=2) as host:
        parcel = store(host, blocks(2), "x")
        assert host.store(b"more", Copy(blocks(1)), 1) is None
        assert np.array_equal(host.take(parcel), blocks(2))
    (line,) = swap_lines(caplog, logging.WARNING)
    assert str(tmp_path / place) in line
    assert "host memory alone" in line


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"capacity_bytes": 999}, "999 bytes is less than one block of 1000"),
        ({"num_threads": 0}, "at least 1"),
        ({"max_swap_ops": 0}, "at least 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change, words):
    good = {"block_bytes": 1000, "capacity_bytes": 4000, "directory": None, "disk_bytes": 0, "num_threads": 1}
    with pytest.raises(ValueError, match=words):
        HostTier(**{**good, "layout": b"", **change})


# Restarts

KILLED = """
import sys, threading
from pathlib import Path
import numpy as np
from omni_jax.memory import host_files
from omni_jax.memory.host_tier import HostTier

host = HostTier(block_bytes=1000, capacity_bytes=2000, directory=Path(sys.argv[1]), disk_bytes=10**6, num_threads=1,
                layout=b"layout")

class Copy:
    def read(self):
        return np.ones((2, 1000), np.uint8)

def stand(_):
    print("written", flush=True)
    threading.Event().wait()

for number in range(2):
    host.store(bytes([number]), Copy(), 2)
    host.wait_idle()
host_files.os.fsync = stand
host.store(b"2", Copy(), 2)
threading.Event().wait()
"""


def test_a_process_killed_in_mid_swap_leaves_nothing_to_a_restart(tmp_path):
    mine = tmp_path / "notes.txt"
    mine.write_text("mine")
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"written\n"
            (folder,) = tmp_path.glob("omni-jax-swap-*")
            names = {path.name for path in folder.iterdir()}
            assert names == {"lock", "parcel-0", "parcel-1.tmp"}
            with tier(tmp_path):
                assert {path.name for path in folder.iterdir()} == names  # its process lives: hands off
        finally:
            process.kill()  # SIGKILL: nothing of it runs any more
    (folder / "parcel-9.txt").write_text("mine too")
    with tier(tmp_path):
        assert [path.name for path in folder.iterdir() if path.name != "lock"] == ["parcel-9.txt"]
    (folder / "parcel-9.txt").unlink()
    with tier(tmp_path):
        assert not folder.exists()
    assert list(tmp_path.iterdir()) == [mine]


def test_other_peoples_files_are_never_touched(tmp_path):
    """Names like ours in folders like ours whose lock is free, but not our content; links; a folder without a lock."""
    stale = tmp_path / "omni-jax-swap-stale"
    stale.mkdir()
    (stale / "lock").write_bytes(host_files.MAGIC)
    (stale / "parcel-1").write_bytes(b"my letter")
    (stale / "parcel-2").mkdir()
    outside = tmp_path / "outside"
    outside.write_bytes(host_files.MAGIC)
    (stale / "parcel-3").symlink_to(outside)
    (tmp_path / "omni-jax-swap-link").symlink_to(stale)
    unlocked = tmp_path / "omni-jax-swap-unlocked"
    unlocked.mkdir()
    (unlocked / "parcel-1").write_bytes(host_files.MAGIC)
    (tmp_path / "omni-jax-swap-file").write_bytes(host_files.MAGIC)
    (tmp_path / "omni-jax-swap-empty").mkdir()
    (stale / "parcel-4").write_bytes(b"")  # killed before its header, or a power cut
    (stale / "parcel-5.tmp").write_bytes(b"\0" * 4096)
    before = {path: path.lstat().st_ino for path in tmp_path.rglob("*")}
    with tier(tmp_path):
        pass
    after = {path: path.lstat().st_ino for path in tmp_path.rglob("*")}
    gone = {path.relative_to(tmp_path).as_posix() for path in before.keys() - after.keys()}
    assert gone == {"omni-jax-swap-empty", "omni-jax-swap-stale/parcel-4", "omni-jax-swap-stale/parcel-5.tmp"}
    assert after.items() <= before.items()


def test_a_new_folder_that_is_cleaned_away_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    lock, taken = host_files.fcntl.flock, []

    def late(file, how):
        if not taken:
            taken.append(file)
            for path in tmp_path.glob("omni-jax-swap-*"):
                (path / "lock").unlink()
                path.rmdir()
        lock(file, how)

    monkeypatch.setattr(host_files.fcntl, "flock", late)
    with tier(tmp_path, capacity=2) as host:
        parcel, _ = on_disk(host, blocks(2))
        assert parcel.file.exists()


# Any mix of it


class Schedule:
    """Random calls on a tier and what must be true after them.

    A parcel may be lost only when a fault hit it: its file was damaged, reading failed, its copy failed, it need not be
    kept, or the disk failed while others waited for the room.
    """

    def __init__(self, host, draw, faults):
        self.host, self.draw, self.faults = host, draw, faults
        self.live, self.copies, self.number = {}, [], 0
        self.taken = 0

    def store(self):
        draw, self.number = self.draw, self.number + 1
        count, keep = draw.randint(1, 5), draw.random() < 0.8
        error = RuntimeError("device") if draw.random() < 0.03 else None
        data = blocks(count, self.number)
        copy = Copy(data, held=draw.random() < 0.5, error=error)
        parcel = self.host.store(b"%d" % self.number, copy, count, keep_until_taken=keep)
        if parcel is not None:
            self.live[parcel] = data
            self.copies.append(copy)
            if error is not None or not keep:
                self.faults.hit.add(parcel)

    def release(self):
        if self.copies:
            self.copies.pop(self.draw.randrange(len(self.copies))).gate.set()

    def prefetch(self):
        if self.live:
            self.host.prefetch(self.pick())

    def take_ready(self):
        for parcel in [parcel for parcel in self.live if self.host.is_ready(parcel)][:2]:
            self.take(parcel)

    def take_any(self):
        if self.live:
            self.open_all()
            self.take(self.pick())

    def drop(self):
        if self.live:
            parcel = self.pick()
            del self.live[parcel]
            self.host.drop(parcel)

    def damage(self):
        """Of one parcel that rests on disk."""
        self.settle()
        resting = [parcel for parcel in self.live if parcel.state == "disk" and parcel.file.exists()]
        if resting:
            parcel = self.draw.choice(resting)
            self.draw.choice(list(FAULTS.values()))(parcel.file)
            self.faults.hit.add(parcel)

    def settle(self):
        self.open_all()
        self.host.wait_idle()
        held = [parcel.slots for parcel in self.live if parcel.slots is not None]
        used = [slot for slots in held for slot in slots]
        assert sorted(used + self.host._free) == list(range(len(self.host._memory)))
        stats = self.host.stats()
        assert stats.operations == 0
        assert {parcel.state for parcel in self.live} <= {"host", "disk", "lost"}
        files = {path for path in Path(self.host._folder.path).iterdir() if path.name != "lock"}
        assert {parcel.file for parcel in self.live if parcel.state == "disk"} >= files

    def take(self, parcel):
        data = self.live.pop(parcel)
        try:
            assert np.array_equal(self.host.take(parcel), data)
            self.taken += 1
        except ParcelLost:
            assert parcel in self.faults.hit or self.faults.disk_failed

    def open_all(self):
        while self.copies:
            self.copies.pop().gate.set()

    def pick(self):
        return self.draw.choice(list(self.live))


class Faults:
    def __init__(self, seed, monkeypatch):
        self.hit, self.disk_failed, self.write_rate = set(), False, 0.02 if seed % 4 == 0 else 0.0
        self.draw, self.write, self.read = random.Random(seed), host_files.write, host_files.read
        monkeypatch.setattr(host_files, "write", self.write_or_fail)

    def write_or_fail(self, path, header, rows):
        if self.draw.random() < self.write_rate:
            self.disk_failed = True
            raise OSError(28, "No space left on device")
        self.write(path, header, rows)


@pytest.mark.parametrize("seed", range(12))
def test_any_mix_of_calls_and_faults_gives_the_bytes_or_says_that_they_are_lost(tmp_path, monkeypatch, seed):
    draw, faults = random.Random(seed), Faults(seed, monkeypatch)
    before = threading.active_count()
    with tier(tmp_path, capacity=12, disk=30, threads=1 + seed % 3, ops=6) as host:
        schedule = Schedule(host, draw, faults)
        calls = [schedule.store] * 6 + [schedule.release] * 6 + [schedule.prefetch] * 3 + [schedule.take_ready] * 3
        calls += [schedule.take_any, schedule.drop]
        for step in range(300):
            draw.choice(calls)()
            if step % 30 == 29:
                schedule.damage()
        schedule.settle()
        for parcel in list(schedule.live):
            schedule.take(parcel)
        schedule.settle()
        stats = host.stats()
        assert schedule.taken > 20
        assert stats.spilled or faults.disk_failed
        assert (stats.host_bytes, stats.disk_bytes, stats.host_parcels, stats.disk_parcels) == (0, 0, 0, 0)
        assert {path.name for path in host._folder.path.iterdir()} == {"lock"}
    assert threading.active_count() == before
    assert not list(tmp_path.iterdir())
