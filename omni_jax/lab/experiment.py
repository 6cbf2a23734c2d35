"""The experiment file, read into frozen dataclasses; its cells and their workloads."""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from omni_jax.lab.fingerprint import model_digest
from omni_jax.lab.settings import check_keys, read
from omni_jax.memory.recycling import make_recycling
from omni_jax.requests import InvalidRequest
from omni_jax.requests.slo import SLO
from omni_jax.routing.router import make_router
from omni_jax.segments.policies import make_policy
from omni_jax.simulation.workload import KINDS, Arrival, Bursts, Mix, generate, read_trace
from omni_jax.yaml_file import read_mapping

TINY_VL = "tiny-vl"
RECORDED = "recorded"  # the rate of a trace as it was recorded
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of EngineConfig that all arms share. None: its default; for a simulated GPU, the default on a GPU."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    dtype: str | None = None
    max_pixels: int | None = None
    encoder_cache_tokens: int | None = None
    encoder_layers_per_slice: int | None = None
    compilation_cache_dir: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """A configuration of the scheduler that is compared with others.

    Attributes:
        name: short name, used in file names and tables.
        about: description for the report.
        segment_policy: value of --segment-policy; custom functions are allowed.
        scheduling_policy: fcfs or slo.
        enable_chunked_prefill: whether a prompt may be computed over several steps.
        max_num_batched_tokens: maximum number of tokens in a step; None: the engine's.
        enable_prefix_caching: whether requests with a common prefix share cached blocks.
        recycling_policy: value of --recycling-policy: the order in which cached blocks are evicted.
        aging_seconds: with slo, seconds after which a waiting request rises by one class.
        router: with replicas, which of them gets a request: round_robin, least_loaded or prefix_aware; None: the
            engine's, prefix_aware with a prefix cache and least_loaded without one.
        slo: objectives by kind of request that this arm's scheduler gets instead of the experiment's. Requests are
            judged by the experiment's objectives in every arm.
    """

    name: str
    about: str = ""
    segment_policy: str | Mapping = "request"
    scheduling_policy: Literal["fcfs", "slo"] = "fcfs"
    enable_chunked_prefill: bool = True
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    recycling_policy: str = "by_modality"
    aging_seconds: float = 10.0
    router: str | None = None
    slo: Mapping[str, SLO] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        _check_name(self.name)
        make_policy(self.segment_policy, allow_custom=True)
        make_recycling(self.recycling_policy)
        if self.router is not None:
            make_router(self.router)
        check_keys(self.slo, KINDS, "slo")
        if not self.aging_seconds > 0:
            raise ValueError(f"aging_seconds must be above 0, got {self.aging_seconds}")
        if self.scheduling_policy == "slo" and not self.enable_chunked_prefill:
            raise ValueError("scheduling_policy slo needs enable_chunked_prefill: it schedules segments as chunks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """The requests of a workload.

    An entry of `mixes` in the file has fields of simulation.Mix, each of which replaces the default's; `scaled`, which
    scales the default's lengths first; and `bursts`. Or it has `trace` alone.

    Attributes:
        mix: lengths and shares by kind of request.
        bursts: None: Poisson arrivals.
        trace: JSONL file that replaces `mix`, see simulation.workload.read_trace.
    """

    mix: Mix = dataclasses.field(default_factory=Mix)
    bursts: Bursts | None = None
    trace: Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """An arrival rate. Without either number it is the recorded rate of a trace.

    Attributes:
        name: the rate as the file has it.
        per_second: requests per second.
        of_capacity: share of the baseline's capacity for this traffic.
    """

    name: str
    per_second: float | None = None
    of_capacity: float | None = None


def _rate(value: Any) -> Rate:
    if value == RECORDED:
        return Rate(name=RECORDED)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf"):
        return Rate(name=f"{value:g}", per_second=float(value))
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?) ?%", value)) and float(match[1]) > 0:
        return Rate(name=f"{float(match[1]):g}%", of_capacity=float(match[1]) / 100)
    raise ValueError(
        f"expected requests a second (4.5), a share of the capacity ('80%'), or {RECORDED!r}; got {value!r}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment: every arm under every mix, rate and seed.

    Attributes:
        name, about: title and description for the report.
        backend: real: the engine, in this process; simulated: its scheduler on a virtual clock.
        model: a directory in Hugging Face layout, or tiny-vl, which is written when needed. A simulation also accepts
            a config.json.
        gpu: simulated: name in omni_jax.cost.GPUS; its roofline gives the step times.
        devices: simulated: number of GPUs that share one copy of the model.
        replicas: simulated: number of replicas behind a router, each with its own devices.
        step_times: simulated: measured step times instead of a GPU: step-times.json of an earlier run.
        engine: settings that all arms share.
        slo: objectives by kind of request, by which all arms are judged.
        arms: at least one.
        baseline: name of the arm that the others are compared with; None: the first.
        mixes: traffic by name.
        rates: arrival rates; each mix runs at each of them.
        requests: number of requests in a cell.
        seeds: each gives another workload, or, with a trace on the engine, repeats it. Intervals are over seeds.
        capacity_requests: number of requests in the run that measures the capacity; None: a multiple of the batch.
        slowdown: whether requests are also measured on an idle engine.
    """

    name: str
    about: str = ""
    backend: Literal["real", "simulated"] = "real"
    model: str = TINY_VL
    gpu: str | None = None
    devices: int = 1
    replicas: int = 1
    step_times: Path | None = None
    engine: EngineSettings = dataclasses.field(default_factory=EngineSettings)
    slo: Mapping[str, SLO] = dataclasses.field(default_factory=dict)
    arms: tuple[Arm, ...]
    baseline: str | None = None
    mixes: Mapping[str, Traffic] = dataclasses.field(default_factory=lambda: {"default": Traffic()})
    rates: tuple[Annotated[Rate, PlainValidator(_rate)], ...] = (Rate(name="80%", of_capacity=0.8),)
    requests: int = 400
    seeds: tuple[int, ...] = (1, 2, 3)
    capacity_requests: int | None = None
    slowdown: bool = True

    def __post_init__(self):
        names = [arm.name for arm in self.arms]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"arms need distinct names, got {', '.join(names) or 'none'}")
        if self.baseline is not None and self.baseline not in names:
            raise ValueError(f"baseline {self.baseline!r} is not an arm; expected one of {', '.join(names)}")
        check_keys(self.slo, KINDS, "slo")
        for name in self.mixes:
            _check_name(name)
        for what in ("mixes", "rates", "seeds"):
            if not getattr(self, what):
                raise ValueError(f"{what} must not be empty")
        if len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds must differ and be at least 0, got {list(self.seeds)}")
        for what in ("requests", "devices", "replicas"):
            if getattr(self, what) < 1:
                raise ValueError(f"{what} must be at least 1, got {getattr(self, what)}")
        if self.backend == "simulated" and (self.gpu is None) == (self.step_times is None):
            raise ValueError("backend: simulated needs either gpu or step_times")
        if self.backend == "real" and (self.gpu, self.step_times, self.devices, self.replicas) != (None, None, 1, 1):
            raise ValueError("gpu, devices, replicas and step_times need backend: simulated")
        if self.replicas == 1 and any(arm.router is not None for arm in self.arms):
            raise ValueError("router needs replicas above 1: a single replica gets every request")

    def router(self, arm: Arm) -> str:
        """The router of an arm; without one, the engine's for several replicas."""
        return arm.router or ("prefix_aware" if arm.enable_prefix_caching else "least_loaded")

    @property
    def baseline_arm(self) -> Arm:
        """The arm that the others are compared with."""
        return next(arm for arm in self.arms if arm.name == self.baseline) if self.baseline else self.arms[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: an arm under one workload."""

    arm: Arm
    mix: str
    rate: Rate
    seed: int

    @property
    def name(self) -> str:
        """Name of the cell's file, without suffix."""
        return f"{self.arm.name}--{self.mix}--{self.rate.name.replace('%', 'pct')}--{self.seed}"


def load_experiment(path: Path) -> Experiment:
    """Read a YAML or JSON file. Paths in it are relative to its directory.

    Raises:
        ValueError: no such file format, repeated or unknown keys (with the nearest valid one), or invalid values. The
            message begins with the file and the key's path.
        OSError: the file cannot be read.
    """
    return parse_experiment(read_mapping(path), str(path), base=path.parent)


def with_fleet(experiment: Experiment, *, replicas: int | None = None, router: str | None = None) -> Experiment:
    """Return the experiment with another number of replicas, and with one router for all arms; None: no change.

    Raises:
        ValueError: the experiment does not simulate, or the router is unknown.
    """
    arms = experiment.arms
    if router is not None:
        arms = tuple(dataclasses.replace(arm, router=router) for arm in arms)
    return dataclasses.replace(experiment, replicas=replicas or experiment.replicas, arms=arms)


def parse_experiment(tree: Mapping[str, Any], where: str = "experiment", *, base: Path = Path()) -> Experiment:
    """Return the experiment that a file's content describes.

    Args:
        tree: plain values, as JSON has them.
        where: what each line of an error message begins with.
        base: the directory that paths are relative to.

    Raises:
        ValueError: see load_experiment.
    """
    experiment = read(Experiment, {key: value for key, value in tree.items() if key != "mixes"}, where)
    if "mixes" in tree:
        mixes = read(dict[str, dict[str, Any] | None], tree["mixes"], f"{where}.mixes")
        found = {name: _traffic(mix or {}, f"{where}.mixes.{name}", base) for name, mix in mixes.items()}
        try:
            experiment = dataclasses.replace(experiment, mixes=found)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    model = base / experiment.model
    if experiment.model != TINY_VL and model.exists():
        experiment = dataclasses.replace(experiment, model=str(model))
    if experiment.step_times is not None:
        experiment = dataclasses.replace(experiment, step_times=base / experiment.step_times)
    for name, traffic in experiment.mixes.items():
        if traffic.trace is None and any(rate.name == RECORDED for rate in experiment.rates):
            raise ValueError(f"{where}.rates: {RECORDED!r} needs a trace, and the mix {name} is generated")
        if traffic.trace is not None and experiment.backend == "simulated" and len(experiment.seeds) > 1:
            raise ValueError(
                f"{where}.seeds: the trace of the mix {name} is the same for every seed, and so is its simulation: "
                f"give one seed, got {list(experiment.seeds)}"
            )
    return experiment


def _traffic(tree: Mapping[str, Any], where: str, base: Path) -> Traffic:
    if tree.get("trace") is not None and len(tree) > 1:
        others = ", ".join(key for key in tree if key != "trace")
        raise ValueError(f"{where}: a mix with a trace takes no other keys, got {others}")
    scaled = read(_Scaled, tree.get("scaled", {}), f"{where}.scaled")
    defaults = Mix().scaled(text=scaled.text, output=scaled.output, side=scaled.side)
    found = read(_TrafficFile, _merged(plain(defaults), tree), where)
    return Traffic(
        mix=Mix(**{field.name: getattr(found, field.name) for field in dataclasses.fields(Mix)}),
        bursts=found.bursts,
        trace=None if found.trace is None else base / found.trace,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scaled:
    """Factors on the default mix's lengths of texts and outputs, and on the sides of its images."""

    text: float = 1.0
    output: float = 1.0
    side: float = 1.0

    def __post_init__(self):
        if min(self.text, self.output, self.side) <= 0:
            raise ValueError(f"factors must be above 0, got {self}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TrafficFile(Mix):
    """The keys that an entry of `mixes` may have."""

    scaled: _Scaled = _Scaled()
    bursts: Bursts | None = None
    trace: Path | None = None


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, mapping by mapping."""
    nested = {
        key: _merged(base[key], value)
        for key, value in over.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **over, **nested}


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"a name needs letters, digits and _ . + -, and a letter or digit first; got {name!r}")


# -- cells ------------------------------------------------------------------------------------------------------------


def cells(experiment: Experiment) -> Iterator[Cell]:
    """Yield all cells. The arms of a workload follow one another, and each seed begins with another arm, so that slow
    changes of the machine affect all arms alike."""
    for mix, rate, (turn, seed) in itertools.product(experiment.mixes, experiment.rates, enumerate(experiment.seeds)):
        first = turn % len(experiment.arms)
        for arm in experiment.arms[first:] + experiment.arms[:first]:
            yield Cell(arm=arm, mix=mix, rate=rate, seed=seed)


def workload(
    experiment: Experiment, mix: str, seed: int, *, rate: float | None, count: int | None = None
) -> tuple[Arrival, ...]:
    """Return the arrivals of a cell: the same for each arm.

    Args:
        rate: requests per second; None: the times of the trace.
        count: number of requests; None: the experiment's.
    """
    traffic = experiment.mixes[mix]
    count = experiment.requests if count is None else count
    if traffic.trace is None:
        if rate is None:
            raise ValueError("a generated workload needs a rate")
        arrivals = generate(traffic.mix, rate=rate, count=count, seed=seed, bursts=traffic.bursts)
    else:
        arrivals = read_trace(traffic.trace)[:count]
        if rate is not None and arrivals[-1].at > 0:
            factor = len(arrivals) / (rate * arrivals[-1].at)
            arrivals = tuple(dataclasses.replace(arrival, at=arrival.at * factor) for arrival in arrivals)
    return tuple(
        dataclasses.replace(arrival, slo=arrival.slo or experiment.slo.get(arrival.kind)) for arrival in arrivals
    )


def with_slo_of(arm: Arm, arrivals: tuple[Arrival, ...]) -> tuple[Arrival, ...]:
    """Return the arrivals with the objectives that the arm's scheduler gets."""
    return tuple(
        dataclasses.replace(arrival, slo=arm.slo.get(arrival.kind, arrival.slo)) if arm.slo else arrival
        for arrival in arrivals
    )


@contextlib.contextmanager
def naming(arm: Arm, arrival: Arrival) -> Iterator[None]:
    """Add the arm and the request to the error of one that can never run, or whose segments are wrong."""
    try:
        yield
    except InvalidRequest as error:
        raise ValueError(f"arm {arm.name}, request {arrival.id} of the workload can never run: {error}") from error


def settings_of(experiment: Experiment, cell: Cell) -> dict[str, Any]:
    """Return everything that a cell's numbers depend on, as plain values, so without descriptions."""
    traffic = experiment.mixes[cell.mix]
    arm = plain(cell.arm)
    del arm["about"]
    return {
        **shared_settings(experiment),
        "arm": arm,
        "traffic": plain(traffic) | ({"mix": None} if traffic.trace else {}),
        "rate": plain(cell.rate),
        "seed": cell.seed,
        "requests": experiment.requests,
        "baseline": experiment.baseline_arm.name if cell.rate.of_capacity else None,
    }


def shared_settings(experiment: Experiment) -> dict[str, Any]:
    """Return the settings that all numbers of an experiment depend on."""
    names = ("backend", "model", "gpu", "devices", "replicas", "step_times", "engine", "slo")
    shared = {name: plain(getattr(experiment, name)) for name in names}
    del shared["engine"]["compilation_cache_dir"]
    shared["model_files"] = model_digest(Path(experiment.model))
    return shared


def plain(value: Any) -> Any:
    """Convert dataclasses and paths to values that JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
