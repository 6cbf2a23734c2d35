"""Compiled programs that tests keep on disk, outside the clone: the next clone starts warm."""

import contextlib
import fcntl
import hashlib
from collections.abc import Iterator
from importlib.metadata import version

import jax

from checkpoints.demo_model import default_cache_dir
from omni_jax import compat

SLOW = 0.05  # seconds; programs outside `one_process_at_a_time` are kept if compiling took longer


CACHE = default_cache_dir() / "tests" / f"jaxlib-{version('jaxlib')}"


def keep_slow_programs() -> None:
    """Keep programs that are slow to compile, from now on, whatever test compiles them."""
    compat.use_compilation_cache(CACHE)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SLOW)


@contextlib.contextmanager
def one_process_at_a_time(what: object = None) -> Iterator[None]:
    """Keep a second process from compiling `what` at the same time: it waits, and finds the programs in the cache."""
    CACHE.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            keep_slow_programs()
