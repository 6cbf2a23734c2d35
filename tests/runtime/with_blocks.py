"""Runners that can copy and compact blocks, and helpers to plan rows by hand."""

import dataclasses
import functools

from omni_jax import compat
from omni_jax.requests import Sequence
from omni_jax.runtime.executables import compile_all
from omni_jax.runtime.runner import Runner
from omni_jax.scheduling.plan import StepPlan
from tests import tiny
from tests.compilation_cache import CACHE, one_process_at_a_time
from tests.engines import greedy, load_tiny, request
from tests.plans import HandRow, plan_of


@functools.cache
def block_runner(name: str, **changes) -> Runner:
    """The runner of load_tiny(name) with block programs added. `changes` to RunnerConfig recompile mixed steps only."""
    shared = load_tiny(name).runner
    config = dataclasses.replace(shared.config, swap=True, compression=True, **changes)
    runner = Runner(shared._model, shared._weights, config, shared.mesh)
    new = [job for job in runner.jobs() if job.key not in shared._executables or (changes and job.key[0] == "mixed")]
    with one_process_at_a_time((name, changes)):
        compat.use_compilation_cache(CACHE)
        runner._executables = shared._executables | compile_all(new)
    return runner


def make_sequence(prompt: list[int], blocks: list[int], *, slot: int = 0) -> Sequence:
    item = request(f"slot {slot}", prompt, greedy())
    sequence = Sequence(request=item, index=0, order=(slot, 0), max_output=99, slot=slot)
    sequence.blocks = list(blocks)
    return sequence


def make_row(
    sequence: Sequence, start: int, count: int, *, admit: bool = False, sample: bool = False, score: bool = False
) -> HandRow:
    return HandRow(sequence=sequence, start=start, count=count, sample=sample, score=score, new_slot=admit)


def mixed(*rows: HandRow, size: int = 64) -> StepPlan:
    return plan_of(*rows, size=size)


def prefill(runner: Runner, sequence: Sequence, count: int) -> None:
    """Compute the first `count` tokens in chunks."""
    chunk = runner.config.buckets.mixed[-1]
    for start in range(0, count, chunk):
        runner.dispatch(mixed(make_row(sequence, start, min(chunk, count - start), admit=start == 0))).read()


def prompt(length: int) -> list[int]:
    return tiny.prompt(length)
