"""The host tier's files across restarts, and next to files of others."""

import subprocess
import sys

from omni_jax.memory import host_files
from tests.memory.swapping import blocks, on_disk, tier

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

def block(_):
    print("written", flush=True)
    threading.Event().wait()

for number in range(2):
    host.store(bytes([number]), Copy(), 2)
    host.wait_idle()
host_files.os.fsync = block
host.store(b"2", Copy(), 2)
threading.Event().wait()
"""


def test_a_restart_removes_the_files_of_a_process_killed_in_mid_swap(tmp_path):
    mine = tmp_path / "notes.txt"
    mine.write_text("mine")
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"written\n"
            (folder,) = tmp_path.glob("omni-jax-swap-*")
            names = {path.name for path in folder.iterdir()}
            assert names == {"lock", "parcel-0", "parcel-1.tmp"}
            with tier(tmp_path):
                assert {path.name for path in folder.iterdir()} == names  # its process runs
        finally:
            process.kill()
    (folder / "parcel-9.txt").write_text("mine too")
    with tier(tmp_path):
        assert [path.name for path in folder.iterdir() if path.name != "lock"] == ["parcel-9.txt"]
    (folder / "parcel-9.txt").unlink()
    with tier(tmp_path):
        assert not folder.exists()
    assert list(tmp_path.iterdir()) == [mine]


def test_files_of_others_are_never_touched(tmp_path):
    """Files and unlocked folders named like ours with other content; links; folders without a lock."""
    stale = tmp_path / "omni-jax-swap-stale"
    stale.mkdir()
    (stale / "lock").write_bytes(host_files.MAGIC)
    (stale / "parcel-1").write_bytes(b"a letter")
    (stale / "parcel-2").mkdir()
    outside = tmp_path / "outside"
    outside.write_bytes(host_files.MAGIC)
    (stale / "parcel-3").symlink_to(outside)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").write_bytes(host_files.MAGIC)
    (elsewhere / "parcel-1").write_bytes(host_files.MAGIC)
    (tmp_path / "omni-jax-swap-link").symlink_to(elsewhere)
    unlocked = tmp_path / "omni-jax-swap-unlocked"
    unlocked.mkdir()
    (unlocked / "parcel-1").write_bytes(host_files.MAGIC)
    (tmp_path / "omni-jax-swap-file").write_bytes(host_files.MAGIC)
    (tmp_path / "omni-jax-swap-empty").mkdir()
    (stale / "parcel-4").write_bytes(b"")  # left by a kill before the header, or by a power cut
    (stale / "parcel-5.tmp").write_bytes(b"\0" * 4096)
    before = {path: path.lstat().st_ino for path in tmp_path.rglob("*")}
    with tier(tmp_path):
        pass
    after = {path: path.lstat().st_ino for path in tmp_path.rglob("*")}
    gone = {path.relative_to(tmp_path).as_posix() for path in before.keys() - after.keys()}
    assert gone == {"omni-jax-swap-empty", "omni-jax-swap-stale/parcel-4", "omni-jax-swap-stale/parcel-5.tmp"}
    assert after.items() <= before.items()


def test_a_new_folder_that_is_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
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
