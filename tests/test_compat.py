"""The compilation cache on disk."""

import os
import subprocess
import sys

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
print(compat.cache_hits())
"""


@pytest.fixture
def cache(tmp_path):
    compat._write_whole_entries()
    return lru_cache.LRUCache(str(tmp_path), max_size=-1)


def test_an_entry_is_written_whole_and_once(cache, tmp_path):
    cache.put("key", b"first")
    cache.put("key", b"second")
    assert cache.get("key") == b"first"
    assert [file.name for file in tmp_path.iterdir()] == ["key-cache"]


def test_a_write_that_fails_leaves_no_entry(cache, tmp_path, monkeypatch):
    def fails(source, target):
        assert source.read_bytes() == b"value"
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        cache.put("key", b"value")
    assert cache.get("key") is None
    assert not list(tmp_path.iterdir())


def test_a_second_process_finds_the_programs_of_the_first(tmp_path):
    """With this version of JAX, `_write_whole_entries` replaces what JAX calls, and JAX finds what it writes."""
    hits = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, text=True, check=True)
        hits.append(int(done.stdout))
    assert hits[0] == 0
    assert hits[1] > 0
    assert {file.name.rpartition("-")[2] for file in tmp_path.iterdir()} == {"cache"}
