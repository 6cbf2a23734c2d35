"""Measurements before the cells: the capacity of the baseline, and the latency of each request on an idle engine."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from omni_jax.lab.backend import Backend
from omni_jax.lab.experiment import Experiment, workload
from omni_jax.lab.records import RequestRow, Run
from omni_jax.requests import EngineError
from omni_jax.simulation.workload import Arrival

CAPACITY_SEED = 10**9 + 1
PER_OCTAVE = 8  # classes of lengths in each doubling; a class is measured once
ALONE_TOKENS = 8  # output tokens measured on an idle engine; further ones are extrapolated


def capacity(experiment: Experiment, backend: Backend, mix: str, done: Callable[[], None] | None = None) -> float:
    """Return the requests per second of a mix that the baseline completes while requests are always waiting.

    All requests arrive at once. If at most c run at once, the first c and the last c completions are left out: the
    batch is not full during them.

    Raises:
        EngineError: a request failed.
    """
    arm = experiment.baseline_arm
    max_running = backend.max_running(arm)
    count = experiment.capacity_requests or max(48, 4 * max_running)
    arrivals = workload(experiment, mix, CAPACITY_SEED, rate=1.0, count=count)
    burst = [dataclasses.replace(arrival, at=0.0) for arrival in arrivals]
    run = backend.replay(arm, burst, tag=f"capacity {mix}", done=done)
    _check_ended_well(run, f"the capacity of {mix}")
    return rate_of_completion(run, max_running)


def rate_of_completion(run: Run, max_running: int) -> float:
    """Return the completions per second of a run, see capacity. At most the first and the last third are left out."""
    ends = sorted(row.ended_at for row in run.requests)
    aside = min(max_running, len(ends) // 3)
    first, last = aside, len(ends) - 1 - aside
    if last <= first or ends[last] <= ends[first]:
        return len(ends) / max(ends[-1], 1e-9)
    return (last - first) / (ends[last] - ends[first])


def _check_ended_well(run: Run, what: str) -> None:
    for row in run.requests:
        if row.failed:
            raise EngineError(f"{what} cannot be measured: request {row.id} ended with {row.finish_reason!r}")


Shape = tuple[str, int, int]  # kind, octaves of text tokens and of pixels, each in steps of 1 / PER_OCTAVE


def shape_of(arrival: Arrival) -> Shape:
    """Return the class of lengths: texts and images of one class are within 9 % of each other."""
    pixels = 0 if arrival.image is None else arrival.image[0] * arrival.image[1]
    return arrival.kind, _octaves(arrival.text_tokens), _octaves(pixels) if pixels else 0


def _octaves(value: int) -> int:
    return round(PER_OCTAVE * math.log2(value))


def alone(
    experiment: Experiment,
    backend: Backend,
    arrivals: Iterable[Arrival],
    known: Mapping[Shape, tuple[float, float]],
    done: Callable[[], None] | None = None,
) -> dict[Shape, tuple[float, float]]:
    """Measure the first request of each shape on an idle engine.

    Args:
        known: earlier measurements, which are not repeated.
        done: called after each shape.

    Returns:
        by shape, seconds to the first token and from token to token.

    Raises:
        EngineError: a request failed.
    """
    found = dict(known)
    for arrival in arrivals:
        shape = shape_of(arrival)
        if shape in found:
            continue
        one = dataclasses.replace(arrival, at=0.0, output_tokens=ALONE_TOKENS)
        run = backend.replay(experiment.baseline_arm, [one], tag=f"alone {shape}")
        _check_ended_well(run, f"the latency of {arrival.id} on an idle engine")
        found[shape] = _pace(run.requests[0])
        if done is not None:
            done()
    return found


def _pace(row: RequestRow) -> tuple[float, float]:
    assert row.first_token_at is not None
    return row.first_token_at - row.arrival, (row.ended_at - row.first_token_at) / (ALONE_TOKENS - 1)


def seconds_alone(arrivals: Sequence[Arrival], measured: Mapping[Shape, tuple[float, float]]) -> dict[str, float]:
    """Return by id the seconds that each arrival takes on an idle engine."""
    return {
        arrival.id: measured[shape_of(arrival)][0] + (arrival.output_tokens - 1) * measured[shape_of(arrival)][1]
        for arrival in arrivals
        if shape_of(arrival) in measured
    }
