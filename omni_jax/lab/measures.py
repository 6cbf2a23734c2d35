"""What is measured before the cells: how much the baseline can serve, and what each request takes alone."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from omni_jax.lab.backend import Backend
from omni_jax.lab.experiment import Experiment, workload
from omni_jax.lab.records import RequestRow, Run
from omni_jax.simulation.workload import Arrival

CAPACITY_SEED = 10**9 + 1
PER_OCTAVE = 8  # lengths that are told apart where requests are measured alone
ALONE_TOKENS = 8  # output of a request alone; what more there is goes on at its pace


def capacity(experiment: Experiment, backend: Backend, mix: str, done: Callable[[], None] | None = None) -> float:
    """Requests a second of a mix that the baseline completes while there is always somebody waiting.

    All requests come at once. With c that run at once, the first c and the last c that end are left out: before, not
    everybody has begun; after, some places are empty.
    """
    arm = experiment.baseline_arm
    most = backend.most_running(arm)
    count = experiment.capacity_requests or max(48, 4 * most)
    arrivals = workload(experiment, mix, CAPACITY_SEED, rate=1.0, count=count)
    burst = [dataclasses.replace(arrival, at=0.0) for arrival in arrivals]
    run = backend.replay(arm, burst, tag=f"capacity {mix}", done=done)
    return rate_of_completion(run, most)


def rate_of_completion(run: Run, most_running: int) -> float:
    """See capacity. Where there are few requests, the first and the last third are left out."""
    ends = sorted(row.ended_at for row in run.requests)
    aside = min(most_running, len(ends) // 3)
    first, last = aside, len(ends) - 1 - aside
    if last <= first or ends[last] <= ends[first]:
        return len(ends) / max(ends[-1], 1e-9)
    return (last - first) / (ends[last] - ends[first])


Shape = tuple[str, int, int]  # kind, octaves of text tokens and of pixels, each in steps of 1 / PER_OCTAVE


def shape_of(arrival: Arrival) -> Shape:
    """What is taken to be the same length: texts and images within 9 % of each other."""
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
    """Seconds to the first token, and from token to token, of a request of each shape on an idle engine: the first of
    its shape stands for all.

    Args:
        known: what was measured before, and is not measured again.
        done: called after each shape.
    """
    found = dict(known)
    for arrival in arrivals:
        shape = shape_of(arrival)
        if shape in found:
            continue
        one = dataclasses.replace(arrival, at=0.0, output_tokens=ALONE_TOKENS)
        (row,) = backend.replay(experiment.baseline_arm, [one], tag=f"alone {shape}").requests
        found[shape] = _pace(row)
        if done is not None:
            done()
    return found


def _pace(row: RequestRow) -> tuple[float, float]:
    assert row.first_token_at is not None
    return row.first_token_at - row.arrival, (row.ended_at - row.first_token_at) / (ALONE_TOKENS - 1)


def seconds_alone(arrivals: Sequence[Arrival], measured: Mapping[Shape, tuple[float, float]]) -> dict[str, float]:
    """By id, what each arrival takes on an idle engine."""
    return {
        arrival.id: measured[shape_of(arrival)][0] + (arrival.output_tokens - 1) * measured[shape_of(arrival)][1]
        for arrival in arrivals
        if shape_of(arrival) in measured
    }
