"""RunRecorder, tiny-vl, and the simulated backend."""

import dataclasses
import json
import math
import re
import sys

import pytest

from checkpoints.reader import faults
from omni_jax.cost.table import TableCost
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.lab.experiment import Arm, parse_experiment, with_fleet, workload
from omni_jax.lab.model import tiny_vl
from omni_jax.lab.records import RunRecorder, make_run
from omni_jax.lab.run import run_experiment
from omni_jax.lab.simulated import SimulatedBackend
from omni_jax.memory.block_pool import BlockPool
from omni_jax.requests import Request, SamplingParams
from omni_jax.requests.segment import Segment
from omni_jax.scheduling.buckets import default_buckets
from omni_jax.scheduling.discipline import SLOFirst
from omni_jax.scheduling.limits import SchedulerConfig
from omni_jax.scheduling.scheduler import Scheduler
from tests.command_line import run_command
from tests.lab.made import EXPERIMENT, experiment

GPU = {"backend": "simulated", "gpu": "a100", "engine": {"max_num_seqs": 16, "max_model_len": 2048}}


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def test_tiny_vl_is_complete_and_its_tokenizer_fits_the_workloads():
    directory = tiny_vl()
    assert not faults(directory)
    assert tiny_vl() == directory
    tokenizer = Tokenizer.from_directory(directory)
    text = "The committee found a new bridge before the rain began. | north 5 | 1234 |\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text) / 3  # words, not letters
    config = json.loads((directory / "config.json").read_text())
    assert tokenizer.encode("<|image_pad|>") == [config["image_token_id"]]
    assert 1e6 < (directory / "model.safetensors").stat().st_size / 4 < 5e6


def test_the_recorder_gives_each_segment_its_steps():
    """A prompt of segments of 24 and 16 tokens takes three steps of 16."""
    pool = BlockPool(32, 8)
    buckets = default_buckets(max_num_seqs=2, max_num_batched_tokens=16)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, buckets=buckets), pool
    )
    segments = (
        Segment(start=0, stop=24, modality="text", label="text 1"),
        Segment(start=24, stop=40, modality="table", label="table 1", deadline=107.0),
    )
    request = Request(
        id="table-0",
        prompt_ids=(1,) * 40,
        params=SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
        arrival=100.5,
        segments=segments,
    )
    recorder, now = RunRecorder(), 101.0
    scheduler.add(request)
    while scheduler.num_live:
        plan = scheduler.plan(now)
        recorder.planned(plan, scheduler.sequences_in(plan), now)
        now += 1.0  # each step takes a second
        accepted = scheduler.commit(plan, [7 if row.sample else None for row in plan.rows], now)
        recorder.committed(plan, accepted, now)
        for one in accepted:
            if one.sequence.finish_reason is not None:
                recorder.finished(one.sequence, now)
    run = make_run(recorder.records, recorder.steps, recorder.requests, start=100.0)
    (row,) = run.requests
    assert (row.kind, row.arrival, row.prompt_tokens, row.output_tokens) == ("table", 0.5, 40, 3)
    assert (row.scheduled_at, row.first_token_at, row.ended_at) == (1.0, 4.0, 6.0)
    first, second = run.segments
    assert (first.label, first.started_at, first.ended_at, first.steps) == ("text 1", 1.0, 3.0, 2)
    assert (second.label, second.started_at, second.ended_at, second.steps) == ("table 1", 2.0, 4.0, 2)
    assert (first.seconds, second.seconds) == (1.5, 1.5)  # half of the shared step each
    assert (first.deadline, second.deadline) == (None, 7.0)
    found = [(step.step, step.compute, step.segment, step.tokens) for step in run.steps]
    assert found == [
        (0, "prefill", 0, 16),
        (1, "prefill", 0, 8),
        (1, "prefill", 1, 8),
        (2, "prefill", 1, 8),
        (3, "decode", -1, 1),
        (4, "decode", -1, 1),
    ]
    assert run.busy_seconds == 5.0


def test_two_steps_in_flight_do_not_count_twice():
    """Step 2 is planned while step 1 runs, and begins when step 1 has ended."""
    pool = BlockPool(32, 8)
    buckets = default_buckets(max_num_seqs=2, max_num_batched_tokens=16)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, buckets=buckets), pool
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    request = Request(id="text-0", prompt_ids=(1,) * 32, params=params)
    scheduler.add(request)
    recorder = RunRecorder()
    one = scheduler.plan(0.0)
    recorder.planned(one, scheduler.sequences_in(one), 0.0)
    two = scheduler.plan(0.25)
    recorder.planned(two, scheduler.sequences_in(two), 0.25)
    recorder.committed(one, scheduler.commit(one, [None], 1.0), 1.0)
    recorder.committed(two, scheduler.commit(two, [7], 1.5), 1.5)
    assert [(step.start, step.seconds) for step in recorder.steps] == [(0.0, 1.0), (1.0, 0.5)]


def test_a_simulated_experiment_is_deterministic(tmp_path):
    spec = experiment(**GPU, requests=12, seeds=[1], rates=["90%"])
    report = run_experiment(spec, tmp_path / "one", quiet=True)
    text = report.read_text()
    assert "A simulation" in text
    assert "nothing ran on such a GPU" in text
    again = run_experiment(spec, tmp_path / "two", quiet=True)
    for name in ("requests.csv", "segments.csv", "steps.csv", "summary.csv"):
        assert (report.parent / name).read_bytes() == (again.parent / name).read_bytes()
    assert (report.parent / "timeline-usual.png").exists()


def test_a_simulated_run_has_all_tokens():
    spec = experiment(**GPU)
    backend = SimulatedBackend(spec)
    arrivals = workload(spec, "usual", 1, rate=20.0)
    for arm in spec.arms:
        run = backend.replay(arm, arrivals)
        assert [row.id for row in run.requests] == [arrival.id for arrival in arrivals]
        assert all(row.finish_reason == "length" for row in run.requests)
        prompts = sum(row.prompt_tokens for row in run.requests)
        assert sum(step.tokens for step in run.steps if step.compute == "prefill") == prompts
        outputs = sum(row.output_tokens - 1 for row in run.requests)  # the first comes with the prompt's last step
        assert sum(step.tokens for step in run.steps if step.compute == "decode") == outputs
        assert sum(segment.stop - segment.start for segment in run.segments) == prompts
        assert all(0 <= segment.started_at < segment.ended_at for segment in run.segments)
    hybrid = {segment.modality for segment in run.segments}
    assert hybrid == {"text", "image", "table"}


def test_a_fleet_serves_what_one_replica_would_queue():
    """Requests all arrive at once: four replicas end sooner than one, and each request runs once."""
    arrivals = [dataclasses.replace(arrival, at=0.0) for arrival in workload(experiment(**GPU), "usual", 1, rate=1.0)]
    ends = {}
    for replicas, router in ((1, None), (4, "round_robin"), (4, "least_loaded"), (4, None)):
        spec = with_fleet(experiment(**GPU), replicas=replicas, router=router)
        backend = SimulatedBackend(spec)
        run = backend.replay(spec.arms[0], arrivals)
        assert sorted(row.id for row in run.requests) == sorted(arrival.id for arrival in arrivals)
        assert backend.max_running(spec.arms[0]) == 16 * replicas
        ends[replicas, router] = max(row.ended_at for row in run.requests)
    assert max(end for (replicas, _), end in ends.items() if replicas == 4) < ends[1, None]
    assert ends[4, "round_robin"] != ends[4, "least_loaded"]


def test_the_command_line_sets_the_fleet(tmp_path):
    file = tmp_path / "fleet.yaml"
    file.write_text(json.dumps(EXPERIMENT | GPU | {"requests": 8, "seeds": [1], "rates": ["90%"], "slowdown": False}))
    ended = run_command("ablate", file, "-o", tmp_path / "out", "--replicas", "3", "--router", "round_robin")
    assert ended.exit_code == 0, ended.stderr
    report = (tmp_path / "out" / "report.md").read_text()
    assert "replicas: 3" in report
    assert "fcfs, round_robin" in report
    one = run_command("ablate", file, "-o", tmp_path / "out", "--router", "round_robin")
    assert one.exit_code == 2
    assert "router needs replicas above 1" in one.stderr


def test_no_request_is_faster_in_company_than_alone():
    spec = experiment(**GPU)
    backend = SimulatedBackend(spec)
    arrivals = workload(spec, "usual", 1, rate=200.0)
    together = {row.id: row.ended_at - row.arrival for row in backend.replay(spec.arms[0], arrivals).requests}
    for arrival in arrivals[:5]:
        (alone,) = backend.replay(spec.arms[0], [dataclasses.replace(arrival, at=0.0)]).requests
        assert together[arrival.id] >= alone.ended_at - 1e-9


def test_measured_step_times_drive_a_simulation(tmp_path):
    table = TableCost({"mixed": [16, 64, 256], "decode": [1, 2, 4, 8, 16], "encode": [256, 512, 1024]})
    (tmp_path / "times.json").write_text(table.to_json())
    spec = parse_experiment(
        EXPERIMENT
        | {
            "backend": "simulated",
            "step_times": "times.json",
            "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 256, "max_model_len": 2048, "max_pixels": 200704},
        },
        base=tmp_path,
    )
    backend = SimulatedBackend(spec)
    run = backend.replay(spec.arms[0], workload(spec, "usual", 1, rate=5.0))
    assert len(run.requests) == 24
    assert backend.max_running(spec.arms[0]) == 4


def test_requests_that_can_never_run_are_named():
    spec = experiment(**GPU | {"engine": {"max_model_len": 64}})
    backend = SimulatedBackend(spec)
    with pytest.raises(ValueError, match=r"arm A: a request of the workload can never run.*64"):
        backend.replay(spec.arms[0], workload(spec, "usual", 1, rate=5.0))


def test_a_missing_model_is_named():
    with pytest.raises(FileNotFoundError, match="no model at nowhere"):
        SimulatedBackend(experiment(**GPU, model="nowhere"))


def test_the_arm_configures_the_replica():
    backend = SimulatedBackend(experiment(**GPU))
    arm = Arm(name="x", scheduling_policy="slo", aging_seconds=3.0, max_num_batched_tokens=96)
    config, cost, vision = backend._parts(arm)
    assert (config.max_num_batched_tokens, config.discipline.aging_seconds) == (96, 3.0)
    assert isinstance(config.discipline, SLOFirst)
    assert vision is not None
    assert math.isfinite(cost.prefill_seconds(10, 0))


def test_the_ablate_command(tmp_path):
    file = tmp_path / "x.yaml"
    tree = EXPERIMENT | GPU | {"requests": 6, "seeds": [1], "rates": [9]}
    file.write_text(json.dumps(tree))  # JSON is YAML
    done = run_command("ablate", str(file), "-o", str(tmp_path / "out"), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1]) == {"report": str(tmp_path / "out" / "report.md")}
    file.write_text(json.dumps(tree | {"requets": 6}))
    refused = run_command("ablate", str(file), "-o", str(tmp_path / "out"))
    assert refused.exit_code == 2
    assert "requests" in refused.output
    file.write_text(json.dumps(tree | {"requests": 7}))
    assert run_command("ablate", str(file), "-o", str(tmp_path / "out")).exit_code == 2
    file.write_text(json.dumps(tree | {"engine": {"max_model_len": 64}}))
    never = run_command("ablate", str(file), "-o", str(tmp_path / "other"))
    assert never.exit_code == 1


SIMULATED = EXPERIMENT | GPU | {"requests": 6, "rates": [9]}


def write_policy(folder, body):
    """Write policy.py, as a user does in the directory in which the command runs."""
    (folder / "policy.py").write_text(f"def cut(view):\n    return {body}\n")
    (folder / "x.json").write_text(
        json.dumps(SIMULATED | {"arms": [{"name": "A"}, {"name": "mine", "segment_policy": "policy:cut"}]})
    )


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory that is not on the path of modules, and no module `policy`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path not in ("", str(tmp_path))])
    monkeypatch.delitem(sys.modules, "policy", raising=False)
    yield tmp_path
    sys.modules.pop("policy", None)


def test_ablate_finds_a_policy_in_the_working_directory(here):
    """As serve does, without PYTHONPATH."""
    write_policy(here, "[(0, 1), (1, view.length)] if view.length > 1 else [(0, 1)]")
    done = run_command("ablate", "x.json", "-o", "out")
    assert done.exit_code == 0, done.output
    assert "| mine | policy:cut | fcfs |" in (here / "out" / "report.md").read_text()


def test_a_policy_that_leaves_a_gap_is_named_with_arm_request_and_tokens(here):
    write_policy(here, "[(0, 1), (3, view.length)]")
    done = run_command("ablate", "x.json", "-o", "out")
    assert done.exit_code == 1
    message = " ".join(done.stderr.split())
    assert re.search(r"arm mine, request (text|image|table)-\d+ of the workload", message)
    assert "segment policy policy:cut: segments must cover the prompt exactly once" in message
    assert "tokens [1, 3) are in no segment" in message


def test_an_interrupted_ablate_says_how_to_resume(here, monkeypatch):
    write_policy(here, "[(0, view.length)]")
    replay = SimulatedBackend.replay

    def interrupt(self, arm, *rest, tag="", **more):
        if tag == "mine--usual--9--1":
            raise KeyboardInterrupt
        return replay(self, arm, *rest, tag=tag, **more)

    monkeypatch.setattr(SimulatedBackend, "replay", interrupt)
    stopped = run_command("ablate", "x.json", "-o", "out")
    assert stopped.exit_code == 130
    assert "interrupted; repeat the command to resume: finished cells are in" in " ".join(stopped.stderr.split())
    assert len(list((here / "out" / "cells").iterdir())) == 1
    partial = run_command("ablate", "x.json", "-o", "out", "--report-only")
    assert partial.exit_code == 0
    assert "**Incomplete:** 3 of 4 cells have not run" in (here / "out" / "report.md").read_text()
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert run_command("ablate", "x.json", "-o", "out").exit_code == 0
    assert "Incomplete" not in (here / "out" / "report.md").read_text()
