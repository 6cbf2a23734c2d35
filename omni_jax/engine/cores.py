"""Makes the engine cores of an engine: in threads of this process, in processes of their own, or those of another."""

import dataclasses
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from omni_jax.engine.config import EngineConfig
from omni_jax.engine.core_client import AttachedCore, CoreLink, Inbox, OwnedCore, Receive
from omni_jax.engine.dispatcher import Core
from omni_jax.progress import StageReport

MAX_SOCKET_PATH = 80  # bytes of the directory; a Unix socket's path has at most 107


MakeCores = Callable[[EngineConfig, StageReport | None, Receive], Sequence[Core]]


def thread_cores(config: EngineConfig, progress: StageReport | None, receive: Receive) -> tuple[Core, ...]:
    """One core for each replica, in a thread. `progress` reports the loading of the first; the others load at the same
    time."""
    from omni_jax.engine.core_thread import ThreadCore  # imports JAX, which clients of other processes do not need

    return tuple(
        ThreadCore(index, config, None if index else progress, receive) for index in range(config.data_parallel_size)
    )


def process_cores(
    config: EngineConfig,
    progress: StageReport | None,
    receive: Receive,
    *,
    clients: int = 1,
    prepare: Callable[[], object] | None = None,
) -> tuple[OwnedCore, ...]:
    """One core for each replica, in a process.

    Args:
        clients: Number of clients; others than this one attach with `link`.
        prepare: Called first in each process, for instance to set up the log. It must be picklable.
    """
    directory = Path(tempfile.mkdtemp(prefix="omni-jax-"))
    if len(os.fsencode(directory)) > MAX_SOCKET_PATH:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="omni-jax-", dir="/tmp"))
    inbox = Inbox(directory, 0)
    return tuple(
        OwnedCore(
            index,
            config,
            inbox,
            receive,
            clients=clients,
            progress=None if index else progress,
            prepare=prepare,
        )
        for index in range(config.data_parallel_size)
    )


def link(config: EngineConfig, cores: Sequence[OwnedCore], client: int) -> CoreLink:
    """What client number `client` needs to attach to running cores.

    It has a seed of its own: with the same one, the clients would give the same seeds to their requests.
    """
    seed = None if config.seed is None else config.seed + client
    return CoreLink(
        config=dataclasses.replace(config, seed=seed),
        directory=cores[0].directory,
        client=client,
        cores=tuple(core.link() for core in cores),
    )


def attached_cores(link: CoreLink, receive: Receive) -> tuple[AttachedCore, ...]:
    """Running cores that another process owns."""
    inbox = Inbox(link.directory, link.client)
    cores = []
    for index, (pid, started, failed) in enumerate(link.cores):
        core = AttachedCore(index, link.config, inbox, receive)
        core.attach(pid)
        core.failed = failed
        core.ready.set_result(inbox.served(link.config, started))
        cores.append(core)
    return tuple(cores)
