"""Compiled programs that tests keep on disk, outside the clone: the next clone starts warm."""

import contextlib
import fcntl
import hashlib
import platform
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxlib

from checkpoints.demo_model import default_cache_dir
from omni_jax import compat

SLOW = 0.05  # seconds; programs outside `one_process_at_a_time` are kept if compiling took longer


def _processor() -> str:
    """A digest of the processor's model and features: JAX's keys have neither, and XLA compiles for both."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else [platform.machine(), platform.processor()]
    about = dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features"))) or lines
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:8]


CACHE = default_cache_dir() / "tests" / f"jaxlib-{jaxlib.__version__}-{_processor()}"


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
