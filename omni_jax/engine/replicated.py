"""Several engine cores with the interface of an Engine, for LLM."""

import contextlib
import queue

from omni_jax.engine.config import EngineConfig
from omni_jax.engine.cores import thread_cores
from omni_jax.engine.dispatcher import Core, Dispatcher
from omni_jax.engine.messages import FromCore
from omni_jax.engine.stats import EngineStats
from omni_jax.progress import StageReport
from omni_jax.requests import Delta, EngineError, Request


class ReplicatedEngine:
    """Several engine cores with the interface of an Engine, for one calling thread."""

    def __init__(self, config: EngineConfig, progress: StageReport | None = None):
        """Load the model on the devices of all replicas.

        Raises:
            whatever loading raises.
        """
        self._received: queue.SimpleQueue[tuple[Core, FromCore]] = queue.SimpleQueue()
        self._deltas: list[Delta] = []
        self._cores = thread_cores(config, progress, lambda core, message: self._received.put((core, message)))
        try:
            for core in self._cores:
                core.start()
            for core in self._cores:
                core.ready.result()
        except BaseException:
            for core in self._cores:
                core.stop()
            raise
        self._dispatcher = Dispatcher(config, self._cores, self._deltas.extend)
        served = self._dispatcher.served
        self.info, self.tokenizer, self.vision = served.info, served.tokenizer, served.vision

    def check(self, request: Request) -> None:
        """See InputProcessor.check."""
        self._dispatcher.inputs.check(request)

    def add(self, request: Request) -> None:
        """See Dispatcher.submit."""
        self._dispatcher.submit(request)

    def abort(self, request_id: str) -> None:
        """Abort a request. Later steps return its last deltas."""
        self._dispatcher.abort(request_id)

    def step(self) -> list[Delta]:
        """Wait for new deltas and return them.

        Raises:
            EngineError: A replica has failed, and its requests are lost.
        """
        self._dispatcher.receive(*self._received.get())
        with contextlib.suppress(queue.Empty):
            while True:
                self._dispatcher.receive(*self._received.get_nowait())
        for index, reason in self._dispatcher.failures.items():
            raise EngineError(f"replica {index}: {reason}")
        deltas = self._deltas[:]
        self._deltas.clear()
        return deltas

    def stats(self) -> EngineStats:
        """See Dispatcher.stats."""
        return self._dispatcher.stats()

    def replica_stats(self) -> tuple[EngineStats, ...]:
        """See Dispatcher.core_stats."""
        return self._dispatcher.core_stats()

    def close(self) -> None:
        """End the cores."""
        for core in self._cores:
            core.stop()
        for core in self._cores:
            core.join()
