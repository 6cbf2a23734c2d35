"""Random calls of the host tier, with real threads and injected faults."""

import random
import threading
from pathlib import Path

import numpy as np
import pytest

from omni_jax.memory import host_files
from omni_jax.memory.host_tier import ParcelLost
from tests.memory.swapping import BLOCK_BYTES, FAULTS, Copy, blocks, tier


class Schedule:
    """Random calls of a tier, and what must hold after them.

    A parcel may be lost only through a fault: its file was damaged, its copy failed, it may be evicted, or the disk
    failed while others waited for room.
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
        """Damage the file of one parcel on disk."""
        self.settle()
        on_disk = [parcel for parcel in self.live if parcel.state == "disk" and parcel.file.exists()]
        if on_disk:
            parcel = self.draw.choice(on_disk)
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


@pytest.mark.parametrize("seed", range(8))
def test_stored_and_prefetched_blocks_stay_within_the_host_memory(seed):
    """Parcels are prefetched, but not taken before others are stored: their sequences lost their room meanwhile."""
    draw, refused = random.Random(seed), 0
    with tier(None, capacity=12, threads=2) as host:
        live = []
        for number in range(120):
            kind = draw.choice(("store", "store", "prefetch", "take", "drop"))
            if kind == "store":
                count = draw.randint(1, 5)
                asked = host.has_room(count)
                parcel = host.store(b"%d" % number, Copy(blocks(count, number)), count)
                assert (parcel is not None) == asked
                refused += parcel is None
                live += [] if parcel is None else [(parcel, number)]
            elif live:
                parcel, seed_of = live[draw.randrange(len(live))]
                if kind == "prefetch":
                    host.prefetch(parcel)
                    continue
                live.remove((parcel, seed_of))
                if kind == "take":
                    assert np.array_equal(host.take(parcel), blocks(parcel.blocks, seed_of))
                else:
                    host.drop(parcel)
            host.wait_idle()
            held = [len(p.slots or ()) * BLOCK_BYTES + (0 if p.data is None else p.data.nbytes) for p, _ in live]
            assert sum(held) == host.stats().host_bytes <= host.stats().host_capacity
        assert refused
        for parcel, seed_of in live:
            assert np.array_equal(host.take(parcel), blocks(parcel.blocks, seed_of))
        assert host.stats().lost == 0


@pytest.mark.parametrize("seed", range(12))
def test_any_mix_of_calls_and_faults_returns_the_bytes_or_raises(tmp_path, monkeypatch, seed):
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
