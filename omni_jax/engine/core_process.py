"""An engine core in a process of its own, seen from inside: its sockets and its end.

Each client sends its messages to the core's socket, and the core sends to each client's; both are ZeroMQ over Unix
sockets in a private directory. Two threads run here. One steps (CoreLoop) and sends outputs and statistics. The other
receives, and tells how the core is, also while a step takes long. Nothing here imports JAX before the devices
that this process may see are chosen.
"""

import contextlib
import ctypes
import dataclasses
import logging
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from omni_jax import garbage
from omni_jax.engine.config import EngineConfig, EngineInfo
from omni_jax.engine.messages import Decoder, Encoder, FromCore, Ready, Status, ToCore
from omni_jax.inputs.prompt import VisionInputs
from omni_jax.interrupts import end_process

if TYPE_CHECKING:  # imports JAX
    from omni_jax.engine.core_loop import CoreLoop

logger = logging.getLogger(__name__)

OWNER = 0  # in the place of a process, see `envelope`
BEAT_SECONDS = 0.5  # at most this long after a Status comes the next
PAUSE_SECONDS = 2 * BEAT_SECONDS  # between two turns of a loop that takes less: its process was stopped
_PR_SET_PDEATHSIG = 1  # of Linux, prctl.h
_POLL_SECONDS = 0.02  # between looks at a status that may have changed
_SWITCH_SECONDS = 1e-3  # at most, before the thread that steps gets the interpreter from the one that receives


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """What a core's process needs to start.

    Attributes:
        index: Number of the replica.
        directory: Where the sockets are.
        clients: Number of clients.
        prepare: Called first, for instance to set up the log.
    """

    config: EngineConfig
    index: int
    directory: Path
    clients: int
    prepare: Callable[[], object] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Started:
    """Sent over the pipe when the core takes requests."""

    info: EngineInfo
    vision: VisionInputs | None


def core_address(directory: Path, index: int) -> str:
    """Address of the socket of a core."""
    return f"ipc://{directory}/core-{index}"


def client_address(directory: Path, client: int) -> str:
    """Address of the socket of a client."""
    return f"ipc://{directory}/client-{client}"


def envelope(number: int, pid: int) -> bytes:
    """The first frame of a message: which core or client has sent it, and in which process, since another may take its
    place. OWNER stands for the client that owns the cores, if it speaks for one."""
    return b"%d %d" % (number, pid)


class Pauses:
    """Notices that this process was stopped for a while, with those that it watches: by Ctrl-Z, or in a container or
    machine that was paused. None of them hangs then."""

    def __init__(self) -> None:
        self._asked = time.monotonic()

    def noticed(self) -> bool:
        """Whether it was stopped since the last call. Ask in each turn of a loop."""
        before, self._asked = self._asked, time.monotonic()
        return self._asked - before > PAUSE_SECONDS


class Outbox:
    """Sends messages of a core to its clients, from one thread.

    Args:
        pid: The core's process; OWNER if its owner speaks for it.
    """

    def __init__(self, context: zmq.Context, launch: Launch, pid: int):
        self._envelope = envelope(launch.index, pid)
        self._encoder = Encoder()
        self._sockets = []
        for client in range(launch.clients):
            socket = context.socket(zmq.PUSH)
            socket.set_hwm(0)  # a slow client must not stop the core; what is not read is in memory
            socket.linger = 1000
            socket.connect(client_address(launch.directory, client))
            self._sockets.append(socket)

    def send(self, client: int, message: FromCore) -> None:
        """Send a message. Never waits."""
        self._sockets[client].send_multipart([self._envelope, *self._encoder.encode(message)], copy=True)

    def close(self) -> None:
        """Close the sockets, once they have sent what they have."""
        for socket in self._sockets:
            socket.close()


def run_core(launch: Launch, pipe: Connection) -> None:
    """Run a core until a Stop message, or until the other end of `pipe` is closed.

    Sends over the pipe: the arguments of each progress report, then a Started or the exception that prevented it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches the whole group; the client says when to stop
        signal.signal(number, signal.SIG_IGN)
    _continue_without_parent()
    if launch.prepare is not None:
        launch.prepare()
    threading.Thread(target=_end_with, args=(pipe, launch), name="parent", daemon=True).start()
    _choose_devices(launch)
    sys.setswitchinterval(_SWITCH_SECONDS)

    def report(*progress: Any) -> None:
        with contextlib.suppress(OSError):
            pipe.send(progress)

    try:
        from omni_jax.engine.core import EngineCore
        from omni_jax.engine.core_loop import CoreLoop

        core = EngineCore(launch.config, report, replica=launch.index, isolated=True)
    except BaseException as error:  # noqa: BLE001  passed on, whatever it is
        pipe.send(_sendable(error))
        return
    context = zmq.Context()
    outbox = Outbox(context, launch, os.getpid())
    loop = CoreLoop(core, outbox.send, launch.clients, idle=garbage.collect)
    inbox = context.socket(zmq.PULL)
    inbox.set_hwm(0)
    inbox.bind(core_address(launch.directory, launch.index))
    threading.Thread(target=_receive, args=(context, inbox, loop, launch), name="messages", daemon=True).start()
    pipe.send(Started(info=core.info, vision=core.loaded.vision))
    garbage.postpone()
    loop.run()
    outbox.close()
    context.destroy(linger=1000)
    logging.shutdown()
    end_process(0)


def _receive(context: zmq.Context, inbox: zmq.Socket, loop: "CoreLoop", launch: Launch) -> None:
    """Pass messages on, and send the state when it changes."""
    outbox, decoder, pauses = Outbox(context, launch, os.getpid()), Decoder(ToCore), Pauses()
    clients = range(launch.clients)
    for client in clients:
        outbox.send(client, Ready())
    sent: dict[int, tuple[Status, float]] = {}
    poll_ms = int(_POLL_SECONDS * 1000)
    with contextlib.suppress(zmq.ContextTerminated, zmq.ZMQError):  # at the end
        while True:
            waiting = inbox.poll(poll_ms if loop.busy else int(BEAT_SECONDS * 1000))
            while waiting:
                envelope, *frames = inbox.recv_multipart()
                client, pid = map(int, envelope.split())
                loop.put(client, decoder.decode(frames), pid)
                waiting = inbox.poll(0)
            if pauses.noticed():
                loop.excuse()
            now = time.monotonic()
            for client in filter(loop.listens, clients):
                status = loop.status(client)
                before, at = sent.get(client, (None, 0.0))
                if status != before or now - at >= BEAT_SECONDS:
                    outbox.send(client, status)
                    sent[client] = status, now


def _continue_without_parent() -> None:
    """Let the kernel continue this process when its parent ends, should it be stopped: otherwise it could not end.

    The signal also comes when the parent's thread ends that started this process, which changes nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def _end_with(pipe: Connection, launch: Launch) -> None:
    """End this process when the other end of the pipe is closed: nobody needs it any more, nor its sockets."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    shutil.rmtree(launch.directory, ignore_errors=True)
    end_process(1)


def _choose_devices(launch: Launch) -> None:
    """Let this process see only the GPUs of its replica: JAX reserves memory on all that it sees."""
    config = launch.config
    if config.data_parallel_size == 1:
        return
    size = config.tensor_parallel_size
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(i) for i in range(config.data_parallel_size * size)] if visible is None else visible.split(",")
    own = devices[launch.index * size : (launch.index + 1) * size]
    if len(own) == size:  # otherwise loading says what is missing
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)


def _sendable(error: BaseException) -> BaseException:
    """The error, or one of a type that can be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  exceptions may not survive pickling
        for kind in (ValueError, OSError):
            if isinstance(error, kind):
                return kind(str(error))
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
