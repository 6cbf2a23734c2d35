"""Statistics of an experiment: what an interval is over, what is paired with what, and what failed requests do."""

import math

import numpy as np
import pytest

from omni_jax.lab.experiment import Experiment, cells
from omni_jax.lab.records import RequestRow, Run
from omni_jax.lab.report import write_report
from omni_jax.lab.summary import Line, judge, summarise
from omni_jax.requests.slo import SLO
from tests.lab.made import experiment

OBJECTIVES = SLO(e2e_ms=1500)


def rows(latencies, *, kind="text", failed=()):
    """Return requests that arrive one second apart and take these seconds."""
    return [
        RequestRow(
            id=f"{kind}-{number}",
            kind=kind,
            priority=0,
            arrival=float(number),
            prompt_tokens=10,
            image_tokens=0,
            output_tokens=5,
            scheduled_at=float(number),
            first_token_at=None if number in failed else number + seconds / 2,
            ended_at=number + float(seconds),
            finish_reason="error" if number in failed else "length",
        )
        for number, seconds in enumerate(latencies)
    ]


def summary_of(spec: Experiment, requests) -> dict[tuple[str, str, str, str], Line]:
    """Return lines by arm, kind, metric and statistic.

    Args:
        requests: rows by name of the arm and seed; a cell that is not in it has not run.
    """
    runs = {}
    for cell in cells(spec):
        if (found := requests.get((cell.arm.name, cell.seed))) is not None:
            judged = tuple(judge(row, OBJECTIVES, 0.5) for row in found)
            runs[cell.name] = cell, Run(requests=tuple(found), busy_seconds=1.0), judged
    return {(line.arm, line.kind, line.metric, line.statistic): line for line in summarise(spec, runs)}


def spec_of(seeds) -> Experiment:
    return experiment(seeds=list(seeds), rates=[3])


def test_identical_arms_with_noise_between_runs_differ_in_five_percent_of_trials():
    """The noise of a run, a busy machine, moves all its requests. tests/stats has the same with more of everything."""
    rng, trials = np.random.default_rng(5), 60
    spec = spec_of([1, 2, 3])
    different = 0
    for _ in range(trials):
        runs = {}
        for seed in spec.seeds:
            latencies = rng.lognormal(0, 0.5, 8)
            for arm in "AC":
                runs[arm, seed] = rows(latencies * math.exp(0.03 * rng.standard_normal()))
        found = summary_of(spec, runs)["C", "text", "latency_ms", "p95"]
        different += found.against.ratio.excludes(1)
    assert 0 < different <= 0.1 * trials


def test_a_statistic_is_the_mean_over_seeds_of_each_seeds():
    found = summary_of(spec_of([1, 2]), {("A", 1): rows([1, 2, 3]), ("A", 2): rows([4, 5, 9])})
    line = found["A", "text", "latency_ms", "p50"]
    assert (line.value.value, line.value.runs, line.requests) == (3500, 2, 6)
    assert found["A", "all", "slo_attainment", "share"].value.value == pytest.approx(1 / 6)
    assert found["A", "all", "requests_per_second", "mean"].value.value == pytest.approx((3 / 5 + 3 / 11) / 2)


def test_a_failed_request_is_no_fast_one():
    """It ended after a hundredth of a second. It has no latency, misses its objectives, and gives no tokens."""
    whole, failed = rows([1, 1, 1, 2]), rows([1, 1, 0.01, 2], failed=[2])
    found = summary_of(spec_of([1]), {("A", 1): whole, ("C", 1): failed})
    line = found["C", "text", "latency_ms", "mean"]
    assert (line.value.value, line.requests) == (pytest.approx(4000 / 3), 3)
    assert found["C", "text", "failed", "count"].value.value == 1
    assert found["A", "text", "failed", "count"].value.value == 0
    assert found["C", "text", "slo_attainment", "share"].value.value == 0.5
    assert found["A", "text", "slo_attainment", "share"].value.value == 0.75
    rate = ("requests_per_second", "mean")
    assert found["C", "all", *rate].against.ratio.value == pytest.approx(3 / 4)


def test_requests_are_paired_by_id_and_not_by_place():
    """Each arm fails another request. By place, the long request would be compared with a short one."""
    mine, theirs = rows([9, 1, 1, 5], failed=[1]), rows([9, 1, 1, 5], failed=[3])
    found = summary_of(spec_of([1]), {("A", 1): theirs, ("C", 1): mine})
    for statistic in ("mean", "p95", "sd"):
        line = found["C", "text", "latency_ms", statistic]
        assert line.paired == 2
        assert line.requests == 3
        assert line.against.difference.value == 0
        assert line.against.ratio.value == 1


def test_seeds_are_paired_and_those_of_one_arm_alone_are_left_out():
    runs = {("A", 1): rows([1, 2]), ("A", 2): rows([3, 4]), ("C", 2): rows([6, 8]), ("C", 3): rows([70, 80])}
    line = summary_of(spec_of([1, 2, 3]), runs)["C", "text", "latency_ms", "mean"]
    assert (line.value.runs, line.against.ratio.runs) == (2, 1)
    assert line.against.ratio.value == 2


def test_a_kind_that_a_seed_lacks_leaves_that_seed_out():
    runs = {
        (arm, seed): rows([1 + seed, 2]) + (rows([3], kind="table") if seed == 1 else [])
        for arm in ("A", "C")
        for seed in (1, 2)
    }
    found = summary_of(spec_of([1, 2]), runs)
    assert found["C", "table", "latency_ms", "mean"].against.ratio.runs == 1
    assert found["C", "all", "latency_ms", "mean"].against.ratio.runs == 2
    assert math.isnan(found["C", "table", "latency_ms", "sd"].value.value)  # of one request


def report_of(spec, requests, **others):
    lines = list(summary_of(spec, requests).values())
    facts = others.pop("facts", [{"CPU": "made up", "omni-jax": "0.0"}])
    return write_report(spec, lines, capacities={}, figures={}, facts=facts, **others)


def test_a_report_of_one_seed_has_no_intervals_and_says_so():
    text = report_of(spec_of([1]), {(arm, 1): rows([1, 2, 3]) for arm in "AC"})
    assert "**One seed: no intervals.**" in text
    results = text.split("## How to read this")[0]
    assert not [line for line in results.splitlines() if line.startswith("|") and "[" in line]
    assert "**-" not in results  # nothing is called different


def test_a_report_has_unit_test_numbers_versions_and_machines():
    runs = {(arm, seed): rows([1, 2, seed]) for arm in "AC" for seed in (1, 2, 3)}
    facts = [{"CPU": "made up", "omni-jax": "0.0"}, {"CPU": "another", "omni-jax": "0.1"}]
    text = report_of(spec_of([1, 2, 3]), runs, facts=facts)
    assert "**Only 3 seeds:**" in text
    assert "The unit is the seed" in text
    assert "Student's t" in text
    assert "The cells ran on 2 machines or versions" in text
    assert "CPU: another; omni-jax: 0.1." in text
    assert "| arm | kind | metric | seeds | requests | difference | ratio |" in text
    assert "| C | text | latency P95 | 3 | 9 | 0 ms [0, 0] | 1.00 [1.00, 1.00] |" in text


def test_a_report_counts_failed_requests():
    runs = {(arm, seed): rows([1, 2, 3, seed], failed=[seed] * (arm == "C")) for arm in "AC" for seed in (1, 2)}
    text = report_of(spec_of([1, 2]), runs, failing=["1 of 4 requests of C--usual--3--1 (error)"])
    assert "**Failed requests:** 1 of 4 requests of C--usual--3--1 (error)." in text
    latency = text.split("### Latency")[1].splitlines()
    assert next(line for line in latency if line.startswith("| all | A | 8 | 0 | "))
    assert next(line for line in latency if line.startswith("|  | C | 6 | 2 | "))


def test_attainment_changes_in_points_also_from_nothing():
    """From 0 % there is no ratio."""
    runs = {("A", seed): rows([5, 5]) for seed in (1, 2)} | {("C", seed): rows([1, 5]) for seed in (1, 2)}
    text = report_of(spec_of([1, 2]), runs)
    summary = text.split("## Summary")[1].split("## Setup")[0]
    assert "SLO attainment, points" in summary
    assert "**+50.0 [+50.0, +50.0]**" in summary


def test_bounds_below_zero_are_never_printed():
    """Two seeds that differ widely: mean - t * se is far below zero."""
    runs = {(arm, seed): rows([1, 2 * seed**3]) for arm in "AC" for seed in (1, 4)}
    text = report_of(spec_of([1, 4]), runs)
    throughput = text.split("### Throughput")[1].split("###")[0]
    assert "[" in throughput
    assert "[-" not in throughput
    latency = text.split("### Latency")[1].split("###")[0]
    assert "[-" not in latency
