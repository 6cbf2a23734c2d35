"""The host tier with real threads and real files. Threads wait at events; no test sleeps."""

import logging
import threading

import numpy as np
import pytest

from omni_jax.memory import host_files
from omni_jax.memory.host_tier import HostTier, ParcelLost
from tests.memory.swapping import (
    BLOCK_BYTES,
    FAULTS,
    Copy,
    Held,
    blocks,
    full_at_last,
    full_disk,
    on_disk,
    store,
    swap_lines,
    tier,
)

# Round trips


@pytest.mark.parametrize("threads", [1, 3])
def test_stored_blocks_come_back_from_memory_and_disk(tmp_path, threads):
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


def test_a_taken_array_keeps_its_content_when_its_slots_are_reused():
    with tier(capacity=2) as host:
        taken = host.take(store(host, blocks(2, 1), "first"))
        store(host, blocks(2, 2), "second")
        assert np.array_equal(taken, blocks(2, 1))


def test_bandwidths_are_none_before_the_first_move():
    with tier() as host:
        assert host.stats().store_bandwidth is None


def test_take_waits_for_a_parcel_that_was_not_prefetched_and_works_once():
    with tier() as host:
        parcel = store(host, blocks(2), "x")
        assert not host.is_ready(parcel)  # not verified yet
        assert np.array_equal(host.take(parcel), blocks(2))
        with pytest.raises(ParcelLost, match="already taken"):
            host.take(parcel)
        assert host.is_ready(parcel)  # `take` raises at once
        assert host.stats().lost == 0


def test_each_move_logs_one_line(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    with tier(tmp_path, capacity=2) as host:
        parcel, _ = on_disk(host, blocks(2), "x")
        host.take(parcel)
    lines = [line for line in swap_lines(caplog, logging.INFO) if b"x".hex() in line]
    assert [line.split(" in ")[0] for line in lines] == [
        f"[SWAP] parcel 78 2 blocks 2000 bytes {way}" for way in ("device -> host", "host -> disk", "disk -> host")
    ]


# Capacity


def test_without_a_disk_store_returns_none_until_a_parcel_is_taken():
    with tier(capacity=4) as host:
        first = store(host, blocks(3), "first")
        assert host.store(b"second", Copy(blocks(2)), 2) is None
        assert store(host, blocks(1), "small") is not None
        host.take(first)
        assert store(host, blocks(2), "second") is not None


def test_reserved_slots_are_not_reserved_twice():
    with tier(capacity=4) as host:
        slow = Copy(blocks(3), held=True)
        assert host.store(b"slow", slow, 3) is not None
        assert host.store(b"late", Copy(blocks(2)), 2) is None
        slow.gate.set()


def test_a_full_disk_allowance_makes_store_return_none_without_a_warning(tmp_path, caplog):
    with tier(tmp_path, capacity=2, disk=2) as host:
        assert all(store(host, blocks(2, seed), str(seed)) for seed in range(2))
        assert host.store(b"third", Copy(blocks(2)), 2) is None
        assert host.stats().disk_parcels == 1
    assert not swap_lines(caplog, logging.WARNING)


def test_nothing_is_spilled_if_the_disk_has_too_little_room(tmp_path):
    with tier(tmp_path, capacity=4, disk=2) as host:
        parcels = [store(host, blocks(2, seed), str(seed)) for seed in range(2)]
        assert host.store(b"big", Copy(blocks(4)), 4) is None
        assert [parcel.state for parcel in parcels] == ["host", "host"]


def test_evictable_parcels_are_evicted_before_any_is_spilled(tmp_path):
    with tier(tmp_path, capacity=4) as host:
        kept = store(host, blocks(1), "kept")
        prefixes = [store(host, blocks(1, seed), str(seed), keep_until_taken=False) for seed in (1, 2, 3)]
        assert store(host, blocks(2), "new") is not None
        assert [parcel.state for parcel in prefixes] == ["lost", "lost", "host"]
        assert kept.state == "host"
        assert (host.stats().evicted, host.stats().lost) == (2, 0)
        with pytest.raises(ParcelLost, match="evicted"):
            host.take(prefixes[0])


def test_nothing_is_evicted_if_that_would_not_be_enough():
    with tier(capacity=4) as host:
        prefix = store(host, blocks(1), "prefix", keep_until_taken=False)
        store(host, blocks(3), "kept")
        assert host.store(b"big", Copy(blocks(2)), 2) is None
        assert np.array_equal(host.take(prefix), blocks(1))


def test_store_returns_none_above_max_swap_ops():
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


# Waiting


def test_only_take_waits_while_all_workers_are_busy(tmp_path, monkeypatch):
    with tier(tmp_path, capacity=4, threads=1) as host:
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
        assert np.array_equal(host.take(other), blocks(4, 99))
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


def test_close_ends_waiting_takes_joins_the_threads_and_removes_the_files(tmp_path):
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
                copy.gate.set()  # only now can the worker be joined

        taker = threading.Thread(target=take)
        taker.start()
        host.close()
        taker.join()
        assert "closed" in errors[0]
        assert host.store(b"late", Copy(blocks(1)), 1) is None
    assert threading.active_count() == before
    assert not list(tmp_path.iterdir())


# Errors


@pytest.mark.parametrize("reason", FAULTS)
def test_a_damaged_file_is_logged_once_and_loses_only_its_parcel(tmp_path, caplog, reason):
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


def test_an_intact_file_of_another_parcel_or_model_is_rejected(tmp_path):
    # Same bytes and size; only layout or key differ.
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


def test_bytes_that_changed_in_memory_are_detected():
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
    ids=["device", "blocks", "dtype", "internal error"],
)
def test_a_failing_copy_loses_its_parcel_and_take_raises(caplog, copy):
    with tier() as host:
        parcel = host.store(b"x", copy, 2)
        with pytest.raises(ParcelLost):
            host.take(parcel)
        host.wait_idle()
        assert host.stats().lost == 1
        assert host.stats().host_bytes == 0
        assert len([line for line in swap_lines(caplog, logging.WARNING) if "lost" in line]) == 1


@pytest.mark.parametrize("fill", [full_disk, full_at_last])
def test_a_full_disk_is_logged_once_and_memory_stays_in_use(tmp_path, monkeypatch, caplog, fill):
    with tier(tmp_path, capacity=4) as host:
        kept, other = on_disk(host, blocks(4), "kept")
        host.drop(other)
        old = [store(host, blocks(2, seed), str(seed)) for seed in (1, 2)]
        with monkeypatch.context() as patch:
            fill(patch)
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
        assert np.array_equal(host.take(kept), blocks(4))  # parcels already on disk can still be read
        assert store(host, blocks(4), "new") is not None
        assert not list(tmp_path.glob("*/*.tmp"))
    assert not list(tmp_path.iterdir())


def test_a_parcel_whose_spill_fails_takes_the_slots_of_the_newest(tmp_path, monkeypatch):
    with tier(tmp_path, capacity=2, threads=2) as host:
        copies = [Copy(blocks(2, seed), held=True) for seed in range(2)]
        old = host.store(b"old", copies[0], 2)
        new = host.store(b"new", copies[1], 2)  # "old" must be spilled for it before it has slots itself
        full_disk(monkeypatch)
        copies[0].gate.set()
        with pytest.raises(ParcelLost, match="could not make room"):
            host.take(new)
        copies[1].gate.set()
        host.wait_idle()
        assert host.stats().host_bytes == 2 * BLOCK_BYTES
        assert np.array_equal(host.take(old), blocks(2, 0))


def test_evictable_parcels_are_evicted_when_the_disk_fails(tmp_path, monkeypatch):
    with tier(tmp_path, capacity=4, threads=1) as host:
        store(host, blocks(2, 1), "kept")
        prefix = Copy(blocks(2, 2), held=True)
        held = host.store(b"prefix", prefix, 2, keep_until_taken=False)
        new = host.store(b"new", Copy(blocks(2, 3)), 2)  # "kept" must be spilled, because "prefix" is not there yet
        full_disk(monkeypatch)
        prefix.gate.set()
        assert np.array_equal(host.take(new), blocks(2, 3))
        assert held.state == "lost"


@pytest.mark.parametrize("directory", ["file", "file/below"])
def test_an_unusable_directory_is_logged_once_and_ignored(tmp_path, caplog, directory):
    (tmp_path / "file").write_text("not a directory")
    with tier(tmp_path / directory, capacity=2) as host:
        parcel = store(host, blocks(2), "x")
        assert host.store(b"more", Copy(blocks(1)), 1) is None
        assert np.array_equal(host.take(parcel), blocks(2))
    (line,) = swap_lines(caplog, logging.WARNING)
    assert str(tmp_path / directory) in line
    assert "only host memory" in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capacity_bytes": 999}, "999 bytes is smaller than one block of 1000"),
        ({"num_threads": 0}, "at least 1"),
        ({"max_swap_ops": 0}, "at least 1"),
    ],
)
def test_invalid_sizes_are_rejected(change, message):
    good = {"block_bytes": 1000, "capacity_bytes": 4000, "directory": None, "disk_bytes": 0, "num_threads": 1}
    with pytest.raises(ValueError, match=message):
        HostTier(**{**good, "layout": b"", **change})
