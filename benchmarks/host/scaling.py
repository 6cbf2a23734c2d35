"""Weak scaling of the host: what a step costs it at 1, 2 and 4 replicas, each a thread with a scheduler and a batch of
its own, as in the engine. No device: plans are packed and committed, and nothing is computed.

python -m benchmarks.host.scaling --rows 1 2 4 --running 64 --step-ms 20 --json OUT.json

- alone: CPU time of one thread for a step: plan, pack, commit.
- busy: rows that never wait for a device, the worst case. Python runs one thread at a time, so a step's wall time grows
  with the rows, and the steps a second of all rows together should stay the same.
- paced: each row begins a step every --step-ms, as a device that computes so long would have it, rows evenly apart. The
  wall time of the host's part is what is left of the step's time for others; it should grow little as long as all rows'
  parts fit into a step's time.
"""

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.host.plan import scheduler
from omni_jax.models import abstract_weights, model_config
from omni_jax.runtime import Runner, RunnerConfig
from omni_jax.runtime.sharding import make_mesh, sharding_of
from omni_jax.scheduling import Scheduler, default_buckets

WARM_UP = 50
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Row:
    """The host's part of a replica: a scheduler with `running` sequences that decode, and a runner that packs."""

    def __init__(self, running: int):
        self._running, self._now = running, 0.0
        self._scheduler: Scheduler = scheduler(running, 0, by_deadline=False)
        mesh, dtype = make_mesh(jax.devices()), np.dtype(np.float32)
        model = model_config(MODEL)
        config = RunnerConfig(
            max_num_seqs=running,
            max_model_len=4096,
            block_size=16,
            num_pages=1024,
            buckets=default_buckets(max_num_seqs=running, max_num_batched_tokens=2048),
            dtype=dtype,
        )
        self._runner = Runner(model, abstract_weights(model, dtype, sharding_of(mesh)), config, mesh)
        while not self.step():  # until all decode
            pass

    def step(self) -> bool:
        """Plans, packs and commits a step; whether all sequences decoded in it."""
        self._now += 0.02
        plan = self._scheduler.plan(self._now)
        assert plan is not None
        self._runner._pack_body(("decode" if plan.decode else "mixed", plan.size), plan)
        self._scheduler.commit(plan, [1 if row.sample else None for row in plan.rows], self._now)
        return plan.decode and len(plan.rows) == self._running


def run(rows: int, running: int, steps: int, period: float) -> tuple[list[float], list[float], float]:
    """Wall seconds of each step's host part, CPU seconds of the same, and wall seconds of the whole. A period of 0 does
    not wait between steps."""
    made = [Row(running) for _ in range(rows)]
    walls: list[list[float]] = [[] for _ in made]
    cpus: list[list[float]] = [[] for _ in made]
    together = threading.Barrier(rows + 1)

    def loop(number: int) -> None:
        row, wall, cpu = made[number], walls[number], cpus[number]
        together.wait()
        due = time.perf_counter() + period * number / rows
        for _ in range(WARM_UP + steps):
            if period:
                time.sleep(max(0.0, due - time.perf_counter()))
                due += period
            began, used = time.perf_counter(), time.thread_time()
            row.step()
            cpu.append(time.thread_time() - used)
            wall.append(time.perf_counter() - began)

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(rows)]
    for thread in threads:
        thread.start()
    together.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    whole = time.perf_counter() - began
    return (
        [seconds for each in walls for seconds in each[WARM_UP:]],
        [seconds for each in cpus for seconds in each[WARM_UP:]],
        whole,
    )


def measure(counts: Sequence[int], running: int, steps: int, period: float) -> list[dict[str, Any]]:
    """A line of figures for each number of rows."""
    found = []
    for rows in counts:
        busy, cpu, whole = run(rows, running, steps, 0.0)
        paced, _, _ = run(rows, running, steps, period)
        found.append(
            {
                "rows": rows,
                "cpu_ms": 1e3 * statistics.median(cpu),
                "busy_ms": 1e3 * statistics.median(busy),
                "busy_steps_per_second": rows * (WARM_UP + steps) / whole,
                "paced_ms": 1e3 * statistics.median(paced),
                "paced_p95_ms": 1e3 * statistics.quantiles(paced, n=20)[-1],
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--running", type=int, default=64, help="sequences of a row")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = measure(given.rows, given.running, given.steps, given.step_ms / 1e3)
    print(f"{given.running} sequences a row, {os.cpu_count()} cores, a step every {given.step_ms:g} ms where paced")
    print("| rows | CPU ms a step | busy, ms a step | busy, steps/s of all | paced, ms a step | paced, P95 |")
    print("|---|---|---|---|---|---|")
    for line in found:
        print(
            f"| {line['rows']} | {line['cpu_ms']:.2f} | {line['busy_ms']:.2f} | {line['busy_steps_per_second']:.0f} | "
            f"{line['paced_ms']:.2f} | {line['paced_p95_ms']:.2f} |"
        )
    if given.json:
        settings = {"running": given.running, "steps": given.steps, "step_ms": given.step_ms, "cores": os.cpu_count()}
        given.json.write_text(json.dumps({"settings": settings, "rows": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
