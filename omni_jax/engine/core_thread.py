"""An engine core in a thread of this process: for LLM with several replicas, tests, notebooks and debugging."""

import concurrent.futures
import threading
from collections.abc import Callable

from omni_jax.engine.config import EngineConfig
from omni_jax.engine.core import EngineCore
from omni_jax.engine.core_loop import CoreLoop
from omni_jax.engine.core_stats import CoreStats
from omni_jax.engine.dispatcher import Served
from omni_jax.engine.messages import FromCore, Stats, Status, Stop, ToCore
from omni_jax.engine.stats import EngineStats
from omni_jax.progress import StageReport
from omni_jax.requests import Unavailable
from omni_jax.telemetry.recorder import RecorderState


class ThreadCore:
    """An engine core in its own thread. All methods are thread-safe.

    Args:
        index: Number of the replica.
        receive: Takes the core and each of its messages, in the core's thread.

    Attributes:
        ready: Done when the core takes requests; holds the exception if loading fails.
    """

    def __init__(
        self,
        index: int,
        config: EngineConfig,
        progress: StageReport | None,
        receive: Callable[["ThreadCore", FromCore], object],
    ):
        self.index = index
        self.ready: concurrent.futures.Future[Served] = concurrent.futures.Future()
        self._config, self._progress, self._receive = config, progress, receive
        self._loop: CoreLoop | None = None
        self._stats = CoreStats()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Load and compile in the core's thread."""
        self._thread.start()

    @property
    def core(self) -> EngineCore:
        """The core itself.

        Raises:
            Unavailable: It has not started.
        """
        if self._loop is None:
            raise Unavailable("the engine has not started")
        return self._loop.core

    def send(self, message: ToCore) -> None:
        """Give the core a message."""
        assert self._loop is not None
        self._loop.put(0, message)

    def status(self) -> Status:
        """Its present state."""
        return Status(waiting=0, received=0, stalled=0.0) if self._loop is None else self._loop.status(0)

    def stats(self) -> EngineStats:
        """Its latest statistics."""
        return self._stats.stats

    def records(self, *, window: bool) -> RecorderState:
        """Its latest records, see CoreStats.records."""
        return self._stats.records(window=window)

    def stop(self) -> None:
        """End the thread after the messages sent so far."""
        self._stopping = True
        if self._loop is not None:
            self._loop.put(0, Stop())

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            core = EngineCore(self._config, self._progress, replica=self.index)
        except Exception as error:  # noqa: BLE001  passed on through `ready`
            if self.ready.set_running_or_notify_cancel():
                self.ready.set_exception(error)
            return
        self._loop = CoreLoop(core, lambda _, message: self._emit(message))
        if self._stopping:
            self._loop.put(0, Stop())
        if self.ready.set_running_or_notify_cancel():
            loaded = core.loaded
            self.ready.set_result(Served(info=loaded.info, tokenizer=loaded.tokenizer, vision=loaded.vision))
        self._loop.run()

    def _emit(self, message: FromCore) -> None:
        if isinstance(message, Stats):
            self._stats.take(message)
        else:
            self._receive(self, message)
