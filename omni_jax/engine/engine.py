"""An engine core with text on both sides, in the caller's thread."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from omni_jax.engine.config import EngineConfig
from omni_jax.engine.core import EngineCore
from omni_jax.engine.input_processor import InputProcessor
from omni_jax.engine.messages import End, SequenceOutput
from omni_jax.engine.output_processor import OutputProcessor
from omni_jax.engine.stats import EngineStats
from omni_jax.progress import StageReport
from omni_jax.requests import Delta, MediaSpan, Request
from omni_jax.requests.segment import Segment
from omni_jax.telemetry.recorder import Recorder


class Engine:
    """Runs requests. Not thread-safe, except where a method says otherwise.

    Attributes:
        core: Runs the steps.
        info: The served model and the engine's limits.
        tokenizer: The model's tokenizer.
        vision: Settings that turn images into patches; None for a text-only model.
    """

    def __init__(self, config: EngineConfig, progress: StageReport | None = None):
        """Load the model.

        Raises:
            whatever EngineCore raises.
        """
        self.core = core = EngineCore(config, progress)
        self.info, self.tokenizer, self.vision = core.info, core.loaded.tokenizer, core.loaded.vision
        self._inputs = InputProcessor(config, self.info, self.tokenizer, self.vision)
        self._outputs = OutputProcessor(self.tokenizer)

    def check(self, request: Request) -> None:
        """See InputProcessor.check. Thread-safe."""
        self._inputs.check(request)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: The request can never run, or its id is in use.
        """
        request = self._inputs.process(request)
        self._outputs.add(request)
        try:
            self.core.add(request)
        except BaseException:
            self._outputs.drop(request.id)
            raise

    def cut(
        self, ids: tuple[int, ...], media: tuple[MediaSpan, ...] = (), policy: str | Mapping[str, Any] | None = None
    ) -> tuple[Segment, ...]:
        """See InputProcessor.cut. Thread-safe."""
        return self._inputs.cut(ids, media, policy)

    def abort(self, request_id: str) -> list[Delta]:
        """Abort a request before the next step, and return its last deltas. Ignores unknown ids."""
        return self._deltas(self.core.abort(request_id))

    def step(self) -> list[Delta]:
        """See EngineCore.step.

        Raises:
            EngineError: Steps fail whatever they compute. The engine cannot continue; end its requests with `fail`.
        """
        return self._deltas(self.core.step())

    def fail(self, message: str) -> list[Delta]:
        """End every live request with an error, and return the last deltas."""
        return self._deltas(self.core.fail(message))

    def _deltas(self, outputs: list[SequenceOutput]) -> list[Delta]:
        deltas, ends = self._outputs.process(outputs)
        for end in ends:
            if isinstance(end, End):
                self.core.end(end.request_id, end.index, end.stop, end.kept)
            else:
                for name in end.request_ids:
                    self.core.abort(name)
        return deltas

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache. Running requests continue."""
        self.core.reset_prefix_cache()

    @property
    def has_work(self) -> bool:
        return self.core.has_work

    @property
    def recorder(self) -> Recorder:
        """Records of requests and segments."""
        return self.core.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder) -> None:
        self.core.recorder = recorder

    def stats(self) -> EngineStats:
        """A snapshot of the statistics. Thread-safe."""
        return dataclasses.replace(self.core.stats(), requests_finished=dict(self._outputs.finished))

    def close(self) -> None:
        """See EngineCore.close."""
        self.core.close()
