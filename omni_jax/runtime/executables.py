"""Compiles every function an engine will call, before the first request, and calls nothing else afterwards."""

import concurrent.futures
import dataclasses
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

_STACK_BYTES = 64 << 20  # XLA recurses deeply over unrolled layers; a thread's 8 MiB have overflowed in other engines

Key = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A function to compile.

    Attributes:
        key: what the executable is called by, such as ("decode", 8).
        function: to be traced with `arguments`, which are shapes.
        arguments: shapes and dtypes, one pytree each.
        donate: which arguments may be reused for results.
    """

    key: Key
    function: Callable
    arguments: tuple[Any, ...]
    donate: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Executable:
    """A compiled function. Called with other shapes than it was compiled for, it raises and names its key.

    Attributes:
        key: see Job.
        compiled: the jax.stages.Compiled.
        seconds: what tracing and compiling took.
    """

    key: Key
    compiled: Any
    seconds: float

    def __call__(self, *arguments):
        try:
            return self.compiled(*arguments)
        except TypeError as error:
            raise TypeError(f"executable {self.key} was called with other shapes than compiled for: {error}") from error


def compile_all(
    jobs: list[Job], progress: Callable[[Executable, int, int], None] | None = None
) -> dict[Key, Executable]:
    """Compiles in a few threads (XLA leaves Python's lock). The first error ends the start-up.

    Args:
        progress: called after each with the executable, how many are done, and how many there are.
    """

    def one(job: Job) -> Executable:
        begin = time.perf_counter()
        compiled = jax.jit(job.function, donate_argnums=job.donate).lower(*job.arguments).compile()
        return Executable(key=job.key, compiled=compiled, seconds=time.perf_counter() - begin)

    executables: dict[Key, Executable] = {}
    previous = threading.stack_size(_STACK_BYTES)
    try:
        with concurrent.futures.ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            # The largest first: they take longest, and an error in them is found before the small ones were compiled.
            futures = [pool.submit(one, job) for job in jobs]
            try:
                for future in concurrent.futures.as_completed(futures):
                    executable = future.result()
                    executables[executable.key] = executable
                    if progress:
                        progress(executable, len(executables), len(jobs))
            finally:
                for future in futures:
                    future.cancel()  # after an error: those not begun; nothing otherwise
    finally:
        threading.stack_size(previous)
    return executables
