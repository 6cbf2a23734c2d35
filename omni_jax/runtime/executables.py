"""Ahead-of-time compilation of every function that an engine calls."""

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

_stack_size_lock = threading.Lock()  # the stack size is global to the process, and replicas compile concurrently
_STACK_BYTES = 64 << 20  # XLA recurses deeply over unrolled layers, which can overflow the default of 8 MiB

Key = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A function to compile.

    Attributes:
        key: name of the executable, such as ("decode", 8).
        function: function of whole arrays.
        arguments: shapes, dtypes and shardings, one pytree per argument.
        donate: indices of the arguments whose memory may be reused for results.
        results: shardings of the results, a prefix of their pytree.
    """

    key: Key
    function: Callable
    arguments: tuple[Any, ...]
    donate: tuple[int, ...]
    results: Any = None

    def lower(self) -> Any:
        """Trace the function. Returns a jax.stages.Lowered."""
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
    """A job for the devices of a replica.

    Args:
        mesh: the replica's mesh.
        function: function of one device's parts of `arguments`.
        arguments: shapes; arguments without a sharding are whole on every device.
        results: partition specs of the results, a prefix of their pytree.
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
    """A compiled function. A call with other shapes than it was compiled for raises an error that names the key.

    Attributes:
        key: see Job.
        compiled: the jax.stages.Compiled.
        seconds: time to trace and compile.
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
    """Compile all jobs in a few threads (XLA releases Python's lock). Raises the first error.

    Args:
        progress: called after each job with (executable, number done, total).
    """

    def one(job: Job) -> Executable:
        begin = time.perf_counter()
        compiled = job.lower().compile()
        return Executable(key=job.key, compiled=compiled, seconds=time.perf_counter() - begin)

    executables: dict[Key, Executable] = {}
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        # Callers list the largest first: they take longest, and their errors appear before small ones are compiled.
        with _stack_size_lock:
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
                future.cancel()  # after an error: those that have not begun
    return executables
