"""Everything that depends on the JAX version or on APIs that JAX does not promise to keep."""

import contextlib
import functools
import hashlib
import logging
import os
import platform
import threading
import uuid
from pathlib import Path

import jax

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_counts = {"compiled": 0, "cache_hits": 0}
_own = threading.local()  # .compiled: the same count for one thread
_listening = False


def count_compilations() -> None:
    """Start to count compilations; a second call does nothing. Counts are per process, as JAX's listeners are."""
    global _listening
    with _lock:
        if _listening:
            return
        _listening = True

    def on_duration(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            with _lock:
                _counts["compiled"] += 1
            _own.compiled = compilations_here() + 1  # JAX calls this in the thread that compiles

    def on_event(event: str, **_: str | int) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            with _lock:
                _counts["cache_hits"] += 1

    jax.monitoring.register_event_duration_secs_listener(on_duration)
    jax.monitoring.register_event_listener(on_event)


def compilations() -> int:
    """Number of programs compiled or loaded from the compilation cache since `count_compilations`."""
    return _counts["compiled"]


def compilations_here() -> int:
    """The same number, of the calling thread only."""
    return getattr(_own, "compiled", 0)


def cache_hits() -> int:
    """Number of programs loaded from the compilation cache since `count_compilations`."""
    return _counts["cache_hits"]


def use_compilation_cache(directory: Path) -> None:
    """Cache every compiled program under `directory`, small and quickly compiled ones too."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning(
            "programs are compiled at every start: %s cannot be made (%s); set --compilation-cache-dir",
            directory,
            error,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # XLA's own caches put their path into the key of every entry: a cache that was moved would never be hit.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _protect_entries()


@functools.cache
def _protect_entries() -> None:
    """Make JAX read only entries of the compilation cache that are whole and made for this kind of processor.

    JAX writes entries in place and never overwrites one: another process could read half an entry, and a process that
    is killed while it writes would leave half an entry for good. It reads an entry without a checksum. And its keys
    have nothing of the CPU, for whose instructions XLA compiles: a cache made on a newer CPU would end the process.
    """
    from jax._src import lru_cache  # JAX has no public way to change how it reads and writes

    get_in_place, put_in_place = lru_cache.LRUCache.get, lru_cache.LRUCache.put

    def get(self, key: str) -> bytes | None:
        key = f"{key}-{_processor()}"
        try:
            entry = get_in_place(self, key)
        except OSError as error:
            logger.warning("a program is compiled again: its entry of the compilation cache cannot be read (%s)", error)
            return None
        if entry is None or hashlib.sha256(entry[_DIGEST:]).digest() == entry[:_DIGEST]:
            return entry and entry[_DIGEST:]
        logger.warning("a program is compiled again: its entry of the compilation cache is damaged (%s)", key)
        with contextlib.suppress(OSError):
            (Path(self.path) / f"{key}-cache").unlink()
        return None

    def put(self, key: str, value: bytes) -> None:
        key, value = f"{key}-{_processor()}", hashlib.sha256(value).digest() + value
        if self.eviction_enabled:  # then JAX locks the directory
            return put_in_place(self, key, value)
        entry = Path(self.path) / f"{key}-cache"
        if entry.exists():
            return None
        partial = entry.with_name(f".{uuid.uuid4().hex}.partial")  # hosts may share the directory
        try:
            partial.write_bytes(value)
            os.replace(partial, entry)
        except OSError as error:
            _warn_once_of_writing(self.path, error.strerror)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        return None

    lru_cache.LRUCache.get, lru_cache.LRUCache.put = get, put


_DIGEST = 32  # bytes of SHA-256


@functools.cache
def _warn_once_of_writing(directory: Path, reason: str) -> None:
    logger.warning(
        "programs are compiled again at the next start: the compilation cache %s cannot be written (%s); see "
        "--compilation-cache-dir",
        directory,
        reason,
    )


@functools.cache
def _processor() -> str:
    """A digest of the processor's model and features."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else [platform.machine(), platform.processor()]
    about = dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features"))) or lines
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:8]


def no_tracing() -> contextlib.AbstractContextManager:
    """A context in which tracing a function in this thread raises."""
    return jax.no_tracing()


def publish(name: str, text: str) -> None:
    """Store a text for all processes of jax.distributed. A name can be used once."""
    _coordination().key_value_set(name, text)


def look_up(name: str, seconds: float) -> str:
    """Wait up to `seconds` for the text that a process publishes under `name`. JAX raises on timeout."""
    return _coordination().blocking_key_value_get(name, int(seconds * 1000))


def wait_at_barrier(name: str, seconds: float) -> None:
    """Wait up to `seconds` until all processes are at this barrier."""
    _coordination().wait_at_barrier(name, int(seconds * 1000))


def _coordination():
    from jax._src import distributed  # JAX's key-value store has no public API

    client = distributed.global_state.client
    assert client is not None, "jax.distributed.initialize has not been called"
    return client


def is_ready(array: jax.Array) -> bool:
    """Whether the computation of `array` has finished."""
    return array.is_ready()  # type: ignore[attr-defined]  # all arrays have it; jax.Array's type does not list it
