"""A model shared by several processes: the front process schedules, and all run the same programs in the same order.

Each process holds the parts of its own devices. The front packs each step and sends the operation, the executable's key
and the packed buffers over TCP to the followers, which make the same call, so that XLA's collectives match. The port,
and a token that authenticates connections, are exchanged through JAX's coordination service.

If a process ends, the collectives of the others never finish. So a process that loses a connection logs it and exits
at once; a launcher can then start all processes again.
"""

import atexit
import dataclasses
import hmac
import json
import logging
import os
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from omni_jax import compat

logger = logging.getLogger(__name__)

EXIT_CODE = 75  # of a process that lost another one: EX_TEMPFAIL, "try again", in BSD's sysexits
# Timeouts in seconds:
JOIN_SECONDS = 300  # to connect at the start
COMPILE_SECONDS = 7200  # to wait for other processes that load and compile
TOKEN_SECONDS = 5  # to receive the token of a connection
_PREFIX = "omni-jax/"

Message = tuple[str, tuple[str | int, ...], tuple[np.ndarray, ...]]  # operation, key, buffers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The processes that share a model.

    Attributes:
        coordinator_address: host:port of the front's coordination service.
        num_processes: number of processes, the front included.
        process_id: index of this process; 0 is the front.
    """

    coordinator_address: str
    num_processes: int
    process_id: int


def join(group: Group) -> "Front | Follower":
    """Connect this process with the others. Call it before anything uses JAX's devices.

    Raises:
        whatever jax.distributed.initialize raises if not all processes join in time.
    """
    jax.distributed.initialize(
        coordinator_address=group.coordinator_address,
        num_processes=group.num_processes,
        process_id=group.process_id,
        initialization_timeout=JOIN_SECONDS,
        cluster_detection_method="deactivate",  # under Slurm it would give each process one GPU of its machine
    )
    return Follower(group) if group.process_id else Front(group)


def wait_until_all_compiled() -> None:
    """Wait until all processes have compiled. Their times differ by more than the timeout of a collective."""
    compat.wait_at_barrier(_PREFIX + "compiled", COMPILE_SECONDS)


class Front:
    """The front's side of the channel."""

    def __init__(self, group: Group):
        self._group, self._closing = group, False
        token = secrets.token_hex(16)
        with _listen() as server:
            server.settimeout(JOIN_SECONDS)
            compat.publish(_PREFIX + "channel", f"{server.getsockname()[1]} {token}")
            self._connections = [_accept(server, token) for _ in range(group.num_processes - 1)]
        for connection in self._connections:
            threading.Thread(target=self._watch, args=(connection,), name="channel", daemon=True).start()
        # Stop the followers on any exit. JAX's own handler would wait for them; it was registered earlier, so it runs
        # after this one.
        atexit.register(self.close)

    def agree(self, proposal: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Return `combine` of all processes' proposals, the front's first. Proposals and result are plain JSON."""
        others = [
            json.loads(compat.look_up(f"{_PREFIX}proposal {number}", COMPILE_SECONDS))
            for number in range(1, self._group.num_processes)
        ]
        agreed = combine([proposal, *others])
        compat.publish(_PREFIX + "agreed", json.dumps(agreed))
        return agreed

    def broadcast(self, operation: str, key: tuple[str | int, ...], buffers: Sequence[np.ndarray]) -> None:
        """Send a call to all followers. Returns once it is sent."""
        message = _encode(operation, key, buffers)
        try:
            for connection in self._connections:
                connection.sendall(message)
        except OSError as error:
            if not self._closing:
                _exit_after_loss("a follower", error)

    def close(self) -> None:
        """Stop the followers. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        self.broadcast("stop", (), ())
        for connection in self._connections:
            connection.close()

    def _watch(self, connection: socket.socket) -> None:
        try:
            while connection.recv(1):  # followers send nothing
                pass
            error = None
        except OSError as failure:
            error = failure
        if not self._closing:
            _exit_after_loss("a follower", error)


class Follower:
    """A follower's side of the channel."""

    def __init__(self, group: Group):
        self._group = group
        host = group.coordinator_address.rpartition(":")[0].strip("[]")
        port, token = compat.look_up(_PREFIX + "channel", JOIN_SECONDS).split()
        self._connection = socket.create_connection((host, int(port)), timeout=JOIN_SECONDS)
        self._connection.settimeout(None)
        self._connection.sendall(token.encode())
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="channel", daemon=True).start()

    def agree(self, proposal: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """See Front.agree. Only the front calls `combine`."""
        del combine
        compat.publish(f"{_PREFIX}proposal {self._group.process_id}", json.dumps(proposal))
        return json.loads(compat.look_up(_PREFIX + "agreed", COMPILE_SECONDS))

    def messages(self) -> Iterator[Message]:
        """Yield the front's calls in order, until it stops."""
        while (message := self._messages.get())[0] != "stop":
            yield message

    def _receive(self) -> None:
        # In its own thread, because the calling thread may be in a collective that never finishes.
        try:
            with self._connection.makefile("rb") as stream:
                while True:
                    message = _decode(stream)
                    self._messages.put(message)
                    if message[0] == "stop":
                        return
        except (OSError, EOFError, ValueError, struct.error) as error:
            _exit_after_loss("the front", error)


def _listen() -> socket.socket:
    """Listen on a free port of all addresses. (The coordinator's address may name a service, not this machine.)"""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _accept(server: socket.socket, token: str) -> socket.socket:
    """The next connection that sends the token; others are closed."""
    while True:
        connection, address = server.accept()
        connection.settimeout(TOKEN_SECONDS)
        try:
            with connection.makefile("rb", buffering=0) as stream:
                sent = b""
                while len(sent) < len(token) and (more := stream.read(len(token) - len(sent))):
                    sent += more
        except OSError:
            sent = b""
        if hmac.compare_digest(sent, token.encode()):
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        logger.warning("closed a connection from %s that did not send the group's token", address[0])
        connection.close()


def _encode(operation: str, key: tuple[str | int, ...], buffers: Sequence[np.ndarray]) -> bytes:
    arrays = [[buffer.dtype.str, list(buffer.shape)] for buffer in buffers]
    header = json.dumps([operation, list(key), arrays]).encode()
    return struct.pack("!I", len(header)) + header + b"".join(buffer.tobytes() for buffer in buffers)


def _decode(stream: Any) -> Message:
    [length] = struct.unpack("!I", _exactly(stream, 4))
    operation, key, arrays = json.loads(_exactly(stream, length))
    buffers = []
    for dtype, shape in arrays:
        # A new array each time, because JAX may alias it.
        array = np.empty(shape, np.dtype(dtype))
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(_exactly(stream, array.nbytes), np.uint8)
        buffers.append(array)
    return operation, tuple(key), tuple(buffers)


def _exactly(stream: Any, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError("the connection was closed")
    return data


def _exit_after_loss(lost: str, error: BaseException | None) -> None:
    logger.critical(
        "lost the connection to %s (%s): this process cannot continue without it and exits. See the lost process's log "
        "for the reason, then start all processes again.",
        lost,
        error or "the connection was closed",
    )
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(EXIT_CODE)
