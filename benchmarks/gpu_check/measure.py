"""Timing of kernels for benchmarks.gpu_check.

A kernel is called many times in a compiled loop, each call on the result of the last, so that one dispatch keeps the
device busy for about LOOP_SECONDS: this measures the kernel with the small ones that feed it, and not the host. A
figure is the median of ROUNDS loops. Programs that are compared run in interleaved rounds, so that changes of the clock
affect all of them.
"""

import concurrent.futures
import importlib.metadata
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
from jax import lax

LOOP_SECONDS = 0.03
ROUNDS = 5
WITHIN_SECONDS = 15.0  # limit for all rounds, so that an unexpectedly slow case leaves time for the others
MAX_CALLS = 2000  # calls in a loop
Item = TypeVar("Item")


def describe_device() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "versions": {
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "python": sys.version.split()[0],
        },
    }


def calls_for(floor_seconds: float, *, dry_run: bool) -> int:
    """Return the number of calls of a loop, if a call takes at least `floor_seconds`."""
    return 2 if dry_run else max(4, min(MAX_CALLS, int(LOOP_SECONDS / max(floor_seconds, 1e-9))))


def loop(step: Callable, count: int) -> Callable:
    """Return a function (state, *rest) -> state that calls `step(i, state, *rest)` `count` times.

    The compiler knows the trip count, so the device does not wait for the host between trips."""

    def run(state, *rest):
        return lax.fori_loop(0, count, lambda i, state: step(i, state, *rest), state)

    return run


def compile_each(jobs: Iterable[tuple[Item, Callable[[], Any]]]) -> Iterable[tuple[Item, Any]]:
    """Yield (item, result of its function, or the exception it raised), in the order of the jobs. XLA releases Python's
    lock, so several compile at once."""
    jobs = list(jobs)
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(function) for _, function in jobs]
        for (item, _), future in zip(jobs, futures, strict=True):
            error = future.exception()
            yield item, future.result() if error is None else error


def in_turn(
    calls: Mapping[Item, Callable[[], Any]], *, rounds: int = ROUNDS, within: float = WITHIN_SECONDS
) -> dict[Item, float]:
    """Return the median seconds of each call, its completion included. The first round does not count. After `within`
    seconds no further round begins, once one has counted."""
    seconds: dict[Item, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for number in range(rounds + 1):
        if number > 1 and time.perf_counter() - start > within:
            break
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            if number:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(each) for name, each in seconds.items()}
