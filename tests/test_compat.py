"""The compilation cache on disk."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jax._src import lru_cache

from omni_jax import compat

pytestmark = pytest.mark.smoke

PROGRAM = """
import sys
from pathlib import Path
import jax
import jax.numpy as jnp
from omni_jax import compat

compat.use_compilation_cache(Path(sys.argv[1]))
compat.count_compilations()
jax.jit(lambda x: x * 3 + 1)(jnp.ones(8))
print(compat.cache_hits(), compat.compilations())
"""


def run(*directories):
    """Compile with each directory as the cache, at the same time; return (hits, compilations) of each."""
    command = [sys.executable, "-c", PROGRAM]
    started = [subprocess.Popen([*command, each], stdout=subprocess.PIPE, text=True) for each in directories]
    outputs = [process.communicate()[0].split() for process in started]
    assert [process.returncode for process in started] == [0] * len(started)
    return [tuple(map(int, output)) for output in outputs]


@pytest.fixture
def cache(tmp_path):
    compat._protect_entries()
    compat._warn_once_of_writing.cache_clear()
    return lru_cache.LRUCache(str(tmp_path), max_size=-1)


def test_an_entry_is_written_whole_and_once(cache, tmp_path):
    cache.put("key", b"first")
    cache.put("key", b"second")
    assert cache.get("key") == b"first"
    assert [file.name for file in tmp_path.iterdir()] == [f"key-{compat._processor()}-cache"]


@pytest.mark.parametrize("fails", ["write_bytes", "replace"])
def test_a_full_disk_leaves_no_entry_and_one_line(cache, tmp_path, monkeypatch, caplog, fails):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(*((Path, fails) if fails == "write_bytes" else (os, fails)), full)
        cache.put("key", b"value")
        cache.put("other", b"value")
    assert cache.get("key") is None
    assert not list(tmp_path.iterdir())
    assert [record.getMessage() for record in caplog.records] == [
        f"programs are compiled again at the next start: the compilation cache {tmp_path} cannot be written (No space "
        "left on device); see --compilation-cache-dir"
    ]


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:10], lambda b: b"", lambda b: b[:-1] + b"X"])
def test_a_damaged_entry_is_compiled_and_written_again(cache, tmp_path, caplog, damage):
    cache.put("key", b"value")
    (entry,) = tmp_path.iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    assert cache.get("key") is None
    assert "a program is compiled again: its entry of the compilation cache is damaged" in caplog.text
    cache.put("key", b"value")
    assert cache.get("key") == b"value"


def test_an_entry_that_cannot_be_read_is_compiled_again(cache, tmp_path, caplog):
    (tmp_path / f"key-{compat._processor()}-cache").mkdir()
    assert cache.get("key") is None
    assert "cannot be read" in caplog.text


def test_an_entry_made_for_another_processor_is_not_read(cache, monkeypatch):
    cache.put("key", b"value")
    monkeypatch.setattr(compat, "_processor", lambda: "0123abcd")
    assert cache.get("key") is None


def test_a_second_process_finds_the_programs_of_the_first(tmp_path):
    """With this version of JAX, `_protect_entries` replaces what JAX calls, and JAX finds what it writes. Two processes
    that start at once on an empty directory both end well and leave whole entries."""
    assert [hits for hits, _ in run(tmp_path, tmp_path)] != []
    ((hits, compiled),) = run(tmp_path)
    assert hits == compiled > 0
    entries = list(tmp_path.iterdir())
    assert {file.name.rpartition("-")[2] for file in entries} == {"cache"}
    entries[0].write_bytes(entries[0].read_bytes()[:-20])
    ((hits, _),) = run(tmp_path)
    assert hits == compiled - 1
    assert run(tmp_path) == [(compiled, compiled)]
