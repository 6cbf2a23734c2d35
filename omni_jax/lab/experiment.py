"""The experiment file: YAML -> frozen dataclasses, and the cells that they ask for."""

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from omni_jax.lab.settings import check_keys, read
from omni_jax.memory import make_recycling
from omni_jax.requests.slo import SLO
from omni_jax.segments import make_policy
from omni_jax.simulation.workload import KINDS, Arrival, Bursts, Mix, generate, read_trace
from omni_jax.yaml_file import read_mapping

TINY_VL = "tiny-vl"
RECORDED = "recorded"  # a trace's own rate
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What all arms have in common, by EngineConfig's names. None is its default; for a simulated GPU that is the
    default on a GPU."""

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
    """One way of scheduling, to be compared with others.

    Attributes:
        name: short; it names files and lines.
        about: a sentence for the report.
        segment_policy: as --segment-policy takes it; a function of one's own is allowed.
        scheduling_policy: fcfs, or slo.
        enable_chunked_prefill: whether a prompt may be computed over several steps.
        max_num_batched_tokens: tokens of a step at most; the engine's where None.
        enable_prefix_caching: requests that begin alike share blocks of the cache.
        recycling_policy: which cached block goes first, as --recycling-policy takes it.
        aging_seconds: with slo, how long a request waits until it moves up by a class.
        slo: what the scheduler is told of a class's objectives, where that is not what the experiment says. Requests
            are judged by the experiment's in every arm.
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
    slo: Mapping[str, SLO] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        _check_name(self.name)
        make_policy(self.segment_policy, allow_custom=True)
        make_recycling(self.recycling_policy)
        check_keys(self.slo, KINDS, "slo")
        if not self.aging_seconds > 0:
            raise ValueError(f"aging_seconds must be above 0, got {self.aging_seconds}")
        if self.scheduling_policy == "slo" and not self.enable_chunked_prefill:
            raise ValueError("scheduling_policy slo needs enable_chunked_prefill: segments are chunks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Who comes. In the file: the fields of simulation.Mix, each of which replaces the default; `scaled`, which
    shortens the defaults first; `bursts`; or `trace` alone.

    Attributes:
        mix: lengths and shares by kind of request.
        bursts: Poisson arrivals where None.
        trace: JSONL, see simulation.workload.read_trace; in place of mix.
    """

    mix: Mix = dataclasses.field(default_factory=Mix)
    bursts: Bursts | None = None
    trace: Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """How many requests a second.

    Attributes:
        name: as it was written.
        per_second: None where it is a share of the capacity, or a trace's own.
        of_capacity: share of what the baseline can serve of this traffic.
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
    """What is to be found out.

    Attributes:
        name, about: for the report.
        backend: real is this process's engine; simulated is the scheduler on a virtual clock.
        model: a directory in Hugging Face layout, or tiny-vl, which is made when it is needed. For a simulation a
            config.json will do.
        gpu: simulated: a GPU of omni_jax.cost.GPUS, by its roofline.
        devices: simulated: GPUs that share the model.
        step_times: simulated: measured step times in place of a GPU's: step-times.json of an earlier run's results.
        engine: what all arms have in common.
        slo: objectives by kind of request, by which all arms are judged.
        arms: at least one.
        baseline: the arm that the others are compared with; the first where None.
        mixes: by name.
        rates: each mix at each rate.
        requests: of a cell.
        seeds: each is a workload of its own.
        capacity_requests: requests of the run that measures the capacity; a multiple of the batch where None.
        slowdown: whether requests are also measured alone.
        resamples: of the bootstrap.
    """

    name: str
    about: str = ""
    backend: Literal["real", "simulated"] = "real"
    model: str = TINY_VL
    gpu: str | None = None
    devices: int = 1
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
    resamples: int = 1000

    def __post_init__(self):
        names = [arm.name for arm in self.arms]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"arms need names, each its own; got {', '.join(names) or 'none'}")
        if self.baseline is not None and self.baseline not in names:
            raise ValueError(f"baseline {self.baseline!r} is no arm; arms are {', '.join(names)}")
        check_keys(self.slo, KINDS, "slo")
        for name in self.mixes:
            _check_name(name)
        for what in ("mixes", "rates", "seeds"):
            if not getattr(self, what):
                raise ValueError(f"{what} must not be empty")
        if len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds must differ and be at least 0, got {list(self.seeds)}")
        for what in ("requests", "devices", "resamples"):
            if getattr(self, what) < 1:
                raise ValueError(f"{what} must be at least 1, got {getattr(self, what)}")
        if self.backend == "simulated" and (self.gpu is None) == (self.step_times is None):
            raise ValueError("a simulation needs either gpu or step_times")
        if self.backend == "real" and (self.gpu is not None or self.step_times is not None or self.devices != 1):
            raise ValueError("gpu, devices and step_times are for backend: simulated")

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
        """Of its file."""
        return f"{self.arm.name}--{self.mix}--{self.rate.name.replace('%', 'pct')}--{self.seed}"


def load_experiment(path: Path) -> Experiment:
    """Read a YAML or JSON file. Paths in it are relative to its directory.

    Raises:
        ValueError: no such file format, repeated or unknown keys (with the nearest valid one), or invalid values. The
            message begins with the file and the key's path.
        OSError: the file cannot be read.
    """
    return parse_experiment(read_mapping(path), str(path), base=path.parent)


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
            raise ValueError(f"{where}.rates: {RECORDED!r} is for traces, and the mix {name} is generated")
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
        raise ValueError(f"names are letters, digits, and any of _ . + - behind the first; got {name!r}")


# -- cells ------------------------------------------------------------------------------------------------------------


def cells(experiment: Experiment) -> Iterator[Cell]:
    """All runs, the arms of a workload one right after another, each seed beginning with another arm, so that what
    changes about the machine meanwhile touches all of them alike."""
    for mix, rate, (turn, seed) in itertools.product(experiment.mixes, experiment.rates, enumerate(experiment.seeds)):
        first = turn % len(experiment.arms)
        for arm in experiment.arms[first:] + experiment.arms[:first]:
            yield Cell(arm=arm, mix=mix, rate=rate, seed=seed)


def workload(
    experiment: Experiment, mix: str, seed: int, *, rate: float | None, count: int | None = None
) -> tuple[Arrival, ...]:
    """The arrivals of a cell: the same for each arm.

    Args:
        rate: requests a second; None keeps a trace's times.
        count: the experiment's where None.
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


def told(arrivals: tuple[Arrival, ...], arm: Arm) -> tuple[Arrival, ...]:
    """The arrivals as an arm's scheduler is told of them."""
    return tuple(
        dataclasses.replace(arrival, slo=arm.slo.get(arrival.kind, arrival.slo)) if arm.slo else arrival
        for arrival in arrivals
    )


def settings_of(experiment: Experiment, cell: Cell) -> dict[str, Any]:
    """All that a cell's numbers depend on, as plain values. What is only said about it is left out."""
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
    """What every number of an experiment depends on."""
    names = ("backend", "model", "gpu", "devices", "step_times", "engine", "slo")
    shared = {name: plain(getattr(experiment, name)) for name in names}
    del shared["engine"]["compilation_cache_dir"]
    return shared


def plain(value: Any) -> Any:
    """Dataclasses and paths as what JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def digest(settings: Mapping[str, Any]) -> str:
    """The same settings, the same 16 characters."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
