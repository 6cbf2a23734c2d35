"""Compiles every function an engine will call, before the first request, and calls nothing else afterwards."""

import concurrent.futures
import dataclasses
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from omni_jax.runtime.sharding import WHOLE, placed, spread

_stack_size = threading.Lock()  # it is the process's, and replicas compile at the same time
_STACK_BYTES = 64 << 20  # XLA recurses deeply over unrolled layers; a thread's 8 MiB have overflowed in other engines

Key = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A function to compile.

    Attributes:
        key: what the executable is called by, such as ("decode", 8).
        function: to be traced with `arguments`, on whole arrays.
        arguments: shapes, dtypes and shardings, one pytree each.
        donate: which arguments may be reused for results.
        results: shardings of the results, a prefix of their pytree.
    """

    key: Key
    function: Callable
    arguments: tuple[Any, ...]
    donate: tuple[int, ...]
    results: Any = None

    def lower(self) -> Any:
        """Traces the function; what comes can be compiled."""
        return jax.jit(self.function, donate_argnums=self.donate, out_shardings=self.results).lower(*self.arguments)


def make_job(
    mesh: Mesh,
    key: Key,
    function: Callable,
    arguments: tuple[Any, ...],
    *,
    donate: tuple[int, ...] = (),
    results: Any = WHOLE,
) -> Job:
    """A job for the devices of a row.

    Args:
        mesh: the row.
        function: computes with one device's parts of `arguments`.
        arguments: shapes; those without a sharding are whole on every device.
        results: rules for the results, a prefix of their pytree.
    """
    arguments = jax.tree.map(lambda x: placed(mesh, x) if x.sharding is None else x, arguments)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), results, is_leaf=lambda x: isinstance(x, P))
    return Job(
        key=key,
        function=spread(mesh, function, arguments, results),
        arguments=arguments,
        donate=donate,
        results=shardings,
    )


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
        compiled = job.lower().compile()
        return Executable(key=job.key, compiled=compiled, seconds=time.perf_counter() - begin)

    executables: dict[Key, Executable] = {}
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        # The largest first: they take longest, and an error in them is found before the small ones were compiled.
        with _stack_size:
            previous = threading.stack_size(_STACK_BYTES)
            try:
                futures = [pool.submit(one, job) for job in jobs]
            finally:
                threading.stack_size(previous)
        try:
            for future in concurrent.futures.as_completed(futures):
                executable = future.result()
                executables[executable.key] = executable
                if progress:
                    progress(executable, len(executables), len(jobs))
        finally:
            for future in futures:
                future.cancel()  # after an error: those not begun; nothing otherwise
    return executables
