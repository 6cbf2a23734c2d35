"""Distributes requests over engine cores, and turns their outputs into deltas.

A request stays on one core. The router picks the core that last served the longest prefix of the prompt, unless that
core is overloaded; otherwise it picks the least loaded one. Cores share nothing: each has its own devices, weights,
pool and scheduler.

If a core fails, its requests that have shown no output yet go to another core, or wait for the one that is started in
its place. The others end with an error.
"""

import concurrent.futures
import dataclasses
import itertools
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Protocol

from omni_jax.engine.config import EngineConfig, EngineInfo
from omni_jax.engine.input_processor import InputProcessor
from omni_jax.engine.messages import Abort, Add, Failed, FromCore, Outputs, Ready, ResetPrefixCache, Status, ToCore
from omni_jax.engine.output_processor import OutputProcessor
from omni_jax.engine.stats import EngineStats, total
from omni_jax.inputs.prompt import VisionInputs
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.requests import Delta, EngineError, InvalidRequest, Request
from omni_jax.routing.router import LeastLoaded, PrefixAware, Router
from omni_jax.telemetry.recorder import Recorder, RecorderState

logger = logging.getLogger(__name__)

MAX_EXPECTED_OUTPUT = 256  # upper limit of the output length assumed for a continuation in a core's load
MAX_TRIES = 2  # cores that a request may lose before it counts as what makes them fail
LOST = "the engine failed while it computed this request"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What a core serves, once it has started. See InputProcessor."""

    info: EngineInfo
    tokenizer: Tokenizer
    vision: VisionInputs | None


class Core(Protocol):
    """An engine core, see ThreadCore and ProcessCore. Its messages go to Dispatcher.receive. `ready` is done when it
    takes requests, and holds the exception if it cannot start."""

    index: int
    ready: "concurrent.futures.Future[Served]"

    def start(self) -> None: ...

    def send(self, message: ToCore) -> None: ...

    def status(self) -> Status: ...

    def stats(self) -> EngineStats: ...

    def records(self, *, window: bool) -> RecorderState: ...

    def stop(self) -> None: ...

    def join(self) -> None: ...


@dataclasses.dataclass(kw_only=True)
class _Live:
    """A live request.

    Attributes:
        core_id: The id that cores know it by.
        request: It, until its first output: another core may have to begin again.
        core: Where it runs; None while it waits for a core.
        load: Tokens of its prompt, plus those expected of its continuations.
        unfinished: Number of continuations that have not ended.
        tries: Number of cores that had it.
    """

    core_id: str
    request: Request | None
    core: Core | None = None
    load: int
    unfinished: int
    tries: int = 0


class Dispatcher:
    """Use it in one thread; `inputs`, `num_waiting`, `check_alive`, `stats`, `core_stats` and `recorder` are
    thread-safe.

    Cores know a request by an id of its own, made from its name. So a name can be used again as soon as its request has
    ended here, though a core may still send outputs of it; and by several clients.

    Args:
        config: Settings of all cores.
        cores: The cores. All are ready.
        deliver: Takes new deltas.

    Attributes:
        served: What all cores can serve.
        inputs: Checks and completes requests.
        failures: Why cores have stopped, by their index.
    """

    def __init__(
        self,
        config: EngineConfig,
        cores: Sequence[Core],
        deliver: Callable[[list[Delta]], object],
    ):
        self.cores, self._deliver = cores, deliver
        # The one with the lowest max_model_len stands for all: they can run what it can run.
        self.served = served = min((core.ready.result() for core in cores), key=lambda each: each.info.max_model_len)
        self.inputs = InputProcessor(config, served.info, served.tokenizer, served.vision)
        self._outputs = OutputProcessor(served.tokenizer)
        self._caches = config.enable_prefix_caching
        self.failures: dict[int, str] = {}
        self._restarting: set[int] = set()  # of those that have failed
        self._live: dict[str, _Live] = {}
        self._client, self._numbers = secrets.token_hex(4), itertools.count()
        self._loads = {core.index: 0 for core in cores}
        self._router = self._make_router()

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait, or are on their way to a core."""
        held = sum(live.core is None for live in list(self._live.values())) if self._restarting else 0
        return held + sum(core.status().waiting for core in self._alive())

    def check_alive(self) -> None:
        """Raise EngineError if all cores have failed, and none is being started in their place."""
        if not self._alive() and not self._restarting:
            raise EngineError(next(iter(self.failures.values()), LOST))

    def submit(self, request: Request) -> None:
        """Submit a request to a core.

        Raises:
            InvalidRequest: The request can never run, or its id is in use.
            EngineError: All cores have failed.
        """
        self.check_alive()
        name = request.id
        if name in self._live:
            raise InvalidRequest(f"request id {name!r} is in use by a live request", param="request_id")
        core_id = f"{name}-{self._client}-{next(self._numbers)}"
        request = dataclasses.replace(self.inputs.process(request), id=core_id)
        self._outputs.add(request, name)
        asked = request.params.max_tokens
        output = MAX_EXPECTED_OUTPUT if asked is None else min(asked, MAX_EXPECTED_OUTPUT)
        load, n = len(request.prompt_ids) + request.params.n * output, request.params.n
        live = self._live[name] = _Live(core_id=core_id, request=request, load=load, unfinished=n)
        try:
            self._place(live)
        except BaseException:  # it could not be sent
            del self._live[name]
            self._outputs.drop(core_id)
            raise

    def _place(self, live: _Live) -> None:
        """Give a request to a core, if one takes requests; otherwise it waits for one."""
        cores, request = self._alive(), live.request
        assert request is not None
        if not cores:
            return
        core = cores[self._router.route(request, [self._loads[core.index] for core in cores])]
        core.send(Add(request))
        live.core, live.tries = core, live.tries + 1
        self._loads[core.index] += live.load

    def abort(self, request_id: str) -> None:
        """Abort a request within two steps. Ignores unknown and ended ids."""
        live = self._live.get(request_id)
        if live is None:
            return
        if live.core is None:
            self._forward(self._outputs.end(live.core_id, "abort"))
        else:
            live.request = None  # nobody needs it on another core, if this one fails before it has read this
            live.core.send(Abort([live.core_id]))

    def reset_prefix_cache(self) -> None:
        """Clear all prefix caches before the next steps. Running requests continue."""
        for core in self._alive():
            core.send(ResetPrefixCache())
        self._router = self._make_router()

    # -- messages of cores --------------------------------------------------------------------------------------------

    def receive(self, core: Core, message: FromCore) -> None:
        """Take a message of a core."""
        match message:
            case Outputs(outputs=outputs):
                deltas, ends = self._outputs.process(outputs)
                for end in ends:
                    core.send(end)
                self._forward(deltas)
            case Failed(reason=reason, final=final):
                self._fail(core, reason, final=final)
            case Ready():
                self._restarted(core)

    def _forward(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            live = self._live.get(delta.request_id)
            if live is None:
                continue
            live.request = None
            if delta.finish_reason is not None:
                live.unfinished -= 1
                if not live.unfinished:
                    if live.core is not None:
                        self._loads[live.core.index] -= live.load
                    del self._live[delta.request_id]
        if deltas:
            self._deliver(deltas)

    def _fail(self, core: Core, reason: str, *, final: bool) -> None:
        """Take a core out of service. Its requests without output go elsewhere, and the others end."""
        if final:
            self._restarting.discard(core.index)
        elif core.index not in self.failures:
            self._restarting.add(core.index)
        self.failures[core.index] = reason
        self._loads[core.index] = 0
        self._router = self._make_router()  # its indices count cores that are alive
        elsewhere = bool(self._alive() or self._restarting)
        for live in list(self._live.values()):
            if live.core is core:
                live.core = None
            if live.core is not None:
                continue
            if live.request is None or live.tries >= MAX_TRIES or not elsewhere:
                self._forward(self._outputs.end(live.core_id, "error", LOST))
            else:
                self._place(live)

    def _restarted(self, core: Core) -> None:
        """A core takes requests again."""
        self.failures.pop(core.index, None)
        self._restarting.discard(core.index)
        self._router = self._make_router()
        for live in self._live.values():
            if live.core is None:
                self._place(live)

    # -- state --------------------------------------------------------------------------------------------------------

    def core_stats(self) -> tuple[EngineStats, ...]:
        """Statistics of each core."""
        return tuple(core.stats() for core in self.cores)

    def stats(self) -> EngineStats:
        """Statistics of all cores together."""
        return dataclasses.replace(total(self.core_stats()), requests_finished=dict(self._outputs.finished))

    def recorder(self, *, window: bool = True) -> Recorder:
        """Records of the requests and segments of all cores, for reading; without `window`, only totals."""
        return Recorder.of([core.records(window=window) for core in self.cores])

    def check_health(self) -> None:
        """Raise EngineError if a core has stopped or hangs. (The others still serve.)"""
        for core in self.cores:
            reason = self.failures.get(core.index)
            if reason is None and (seconds := core.status().stalled):
                reason = f"the engine has made no progress for {seconds:.0f} s"
            if reason is not None:
                raise EngineError(reason if len(self.cores) == 1 else f"replica {core.index}: {reason}")

    def _alive(self) -> list[Core]:
        return [core for core in self.cores if core.index not in self.failures]

    def _make_router(self) -> Router:
        if len(self._alive()) <= 1 or not self._caches:
            return LeastLoaded()
        return PrefixAware(block_size=self.served.info.block_size)
