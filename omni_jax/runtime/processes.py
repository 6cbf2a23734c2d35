"""A model over several processes: one front schedules, all run the same programs in the same order.

Every process holds the parts of its own devices. The front packs each step and tells the others the operation, the
executable's key and the packed buffers, over TCP; they make the same call. (XLA's collectives then meet.) Where to
connect, and a token that a connection has to show, travel through JAX's own coordination service.

When one process goes, the collective that the others are in never ends. So whoever loses the connection says so and
ends its process, at once: a launcher starts all again.
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

EXIT = 75  # of a process that lost another: "temporary failure, try again" in BSD's sysexits
SECONDS = 300  # that processes wait for each other at the start
COMPILE_SECONDS = 7200  # that they wait for each other's loading and compiling
TOKEN_SECONDS = 5  # that a connection has to show the token
_NAME = "omni-jax/"

Message = tuple[str, tuple[str | int, ...], tuple[np.ndarray, ...]]  # operation, key, buffers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The processes, and which of them this is; 0 is the front.

    Attributes:
        coordinator_address: host:port where the front's coordination service listens.
        num_processes: all of them.
        process_id: this one.
    """

    coordinator_address: str
    num_processes: int
    process_id: int


def join(group: Group) -> "Front | Follower":
    """Connects this process with the others. Nothing may have touched JAX's devices before.

    Raises:
        whatever jax.distributed.initialize raises, when not all come.
    """
    jax.distributed.initialize(
        coordinator_address=group.coordinator_address,
        num_processes=group.num_processes,
        process_id=group.process_id,
        initialization_timeout=SECONDS,
        cluster_detection_method="deactivate",  # it would give a process one GPU of its machine, under Slurm
    )
    return Follower(group) if group.process_id else Front(group)


def meet() -> None:
    """Waits until all have compiled, which takes some of them longer: a collective waits for nobody so long."""
    compat.meet(_NAME + "compiled", COMPILE_SECONDS)


class Front:
    """The front's side of the channel."""

    def __init__(self, group: Group):
        self._group, self._closing = group, False
        token = secrets.token_hex(16)
        with _listen() as server:
            server.settimeout(SECONDS)
            compat.publish(_NAME + "channel", f"{server.getsockname()[1]} {token}")
            self._connections = [_accept(server, token) for _ in range(group.num_processes - 1)]
        for connection in self._connections:
            threading.Thread(target=self._watch, args=(connection,), name="channel", daemon=True).start()
        # However this process ends, the followers do: JAX would wait for them, and they for what they are told. (Called
        # before what was registered earlier, JAX's own.)
        atexit.register(self.close)

    def settle(self, proposal: Any, agree: Callable[[list[Any]], Any]) -> Any:
        """What holds for all processes: `agree` makes it of what each proposes, the front first. All is plain JSON."""
        others = [
            json.loads(compat.look_up(f"{_NAME}proposal {number}", COMPILE_SECONDS))
            for number in range(1, self._group.num_processes)
        ]
        settled = agree([proposal, *others])
        compat.publish(_NAME + "settled", json.dumps(settled))
        return settled

    def tell(self, operation: str, key: tuple[str | int, ...], buffers: Sequence[np.ndarray]) -> None:
        """Has all followers make the same call. Returns once it was sent."""
        message = _encode(operation, key, buffers)
        try:
            for connection in self._connections:
                connection.sendall(message)
        except OSError as error:
            if not self._closing:
                _lost("a follower", error)

    def close(self) -> None:
        """Ends the followers. Closing again does nothing."""
        if self._closing:
            return
        self._closing = True
        self.tell("stop", (), ())
        for connection in self._connections:
            connection.close()

    def _watch(self, connection: socket.socket) -> None:
        try:
            while connection.recv(1):  # followers send nothing
                pass
            error = None
        except OSError as found:
            error = found
        if not self._closing:
            _lost("a follower", error)


class Follower:
    """A follower's side of the channel."""

    def __init__(self, group: Group):
        self._group = group
        host = group.coordinator_address.rpartition(":")[0].strip("[]")
        port, token = compat.look_up(_NAME + "channel", SECONDS).split()
        self._connection = socket.create_connection((host, int(port)), timeout=SECONDS)
        self._connection.settimeout(None)
        self._connection.sendall(token.encode())
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="channel", daemon=True).start()

    def settle(self, proposal: Any, agree: Callable[[list[Any]], Any]) -> Any:
        """See Front.settle, which decides."""
        del agree
        compat.publish(f"{_NAME}proposal {self._group.process_id}", json.dumps(proposal))
        return json.loads(compat.look_up(_NAME + "settled", COMPILE_SECONDS))

    def messages(self) -> Iterator[Message]:
        """The front's calls, in order, until it ends."""
        while (message := self._messages.get())[0] != "stop":
            yield message

    def _receive(self) -> None:
        # A thread of its own: the calling one may be in a collective that never ends.
        try:
            with self._connection.makefile("rb") as stream:
                while True:
                    message = _decode(stream)
                    self._messages.put(message)
                    if message[0] == "stop":
                        return
        except (OSError, EOFError, ValueError, struct.error) as error:
            _lost("the front", error)


def _listen() -> socket.socket:
    """On any port of all addresses: the coordinator's may be the name of a service that stands for this machine."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _accept(server: socket.socket, token: str) -> socket.socket:
    """The next connection that shows the token; others are closed."""
    while True:
        connection, address = server.accept()
        connection.settimeout(TOKEN_SECONDS)
        try:
            with connection.makefile("rb", buffering=0) as stream:
                shown = b""
                while len(shown) < len(token) and (more := stream.read(len(token) - len(shown))):
                    shown += more
        except OSError:
            shown = b""
        if hmac.compare_digest(shown, token.encode()):
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        logger.warning("a connection from %s without the group's token was closed", address[0])
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
        # Its own array each, never filled again: JAX may read it where it lies.
        array = np.empty(shape, np.dtype(dtype))
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(_exactly(stream, array.nbytes), np.uint8)
        buffers.append(array)
    return operation, tuple(key), tuple(buffers)


def _exactly(stream: Any, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError("the connection was closed")
    return data


def _lost(who: str, error: BaseException | None) -> None:
    logger.critical(
        "%s has gone (%s): the steps of this model cannot go on, and this process ends. Start all processes again; the "
        "log of the one that has gone has the reason.",
        who,
        error or "the connection was closed",
    )
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(EXIT)
