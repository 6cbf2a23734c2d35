"""Weak scaling of the host: its time for a step at 1, 2 and 4 replicas.

Each replica is a thread with its own scheduler and batch, as in the engine. The host plans, packs and commits steps;
there is no device, and nothing is computed.

    python -m benchmarks.host.scaling --replicas 1 2 4 --running 64 --step-ms 20 --json OUT.json

- CPU: CPU time of one thread for a step: plan, pack, commit.
- busy: replicas never wait for a device, the worst case. Python runs one thread at a time, so the wall time of a step
  grows with the number of replicas, and the steps per second of all replicas together should stay the same.
- paced: each replica begins a step every --step-ms, as if a device computed for so long; replicas are evenly staggered.
  The wall time of the host's part should grow little as long as the parts of all replicas fit into a step's time.
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

from benchmarks.host.plan import packer, scheduler
from omni_jax.scheduling.scheduler import Scheduler

WARM_UP = 50


class Replica:
    """The host's part of a replica: a scheduler with `running` decoding sequences, and a packer."""

    def __init__(self, running: int):
        self._running, self._now = running, 0.0
        self._scheduler: Scheduler = scheduler(running, 0, by_deadline=False)
        self._packer = packer(self._scheduler)
        while not self.step():  # until all sequences decode
            pass

    def step(self) -> bool:
        """Plan, pack and commit a step. Returns whether all sequences decoded in it."""
        self._now += 0.02
        plan = self._scheduler.plan(self._now)
        assert plan is not None
        for _ in self._packer.calls(plan):
            pass
        self._scheduler.commit(plan, [1 if sample else None for sample in plan.samples.tolist()], self._now)
        return plan.decode and plan.num_rows == self._running


def run(count: int, running: int, steps: int, period: float) -> tuple[list[float], list[float], float]:
    """Run `count` replicas at once.

    Args:
        running: sequences of each replica.
        steps: measured steps of each replica.
        period: seconds from the beginning of a step to the next; 0: no wait between steps.

    Returns:
        wall seconds and CPU seconds of the host's part of each step, and wall seconds of the whole run.
    """
    replicas = [Replica(running) for _ in range(count)]
    walls: list[list[float]] = [[] for _ in replicas]
    cpus: list[list[float]] = [[] for _ in replicas]
    together = threading.Barrier(count + 1)

    def loop(number: int) -> None:
        replica, wall, cpu = replicas[number], walls[number], cpus[number]
        together.wait()
        due = time.perf_counter() + period * number / count
        for _ in range(WARM_UP + steps):
            if period:
                time.sleep(max(0.0, due - time.perf_counter()))
                due += period
            began, used = time.perf_counter(), time.thread_time()
            replica.step()
            cpu.append(time.thread_time() - used)
            wall.append(time.perf_counter() - began)

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(count)]
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
    """Measure each number of replicas."""
    found = []
    for count in counts:
        busy, cpu, whole = run(count, running, steps, 0.0)
        paced, _, _ = run(count, running, steps, period)
        found.append(
            {
                "replicas": count,
                "cpu_ms": 1e3 * statistics.median(cpu),
                "busy_ms": 1e3 * statistics.median(busy),
                "busy_steps_per_second": count * (WARM_UP + steps) / whole,
                "paced_ms": 1e3 * statistics.median(paced),
                "paced_p95_ms": 1e3 * statistics.quantiles(paced, n=20)[-1],
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4], help="numbers of replicas to measure")
    parser.add_argument("--running", type=int, default=64, help="sequences of a replica")
    parser.add_argument("--steps", type=int, default=500, help="measured steps of a replica")
    parser.add_argument("--step-ms", type=float, default=20.0, help="milliseconds between steps where paced")
    parser.add_argument("--json", type=Path, help="file for all figures")
    given = parser.parse_args()
    found = measure(given.replicas, given.running, given.steps, given.step_ms / 1e3)
    print(f"{given.running} sequences a replica, {os.cpu_count()} cores, a step every {given.step_ms:g} ms where paced")
    print("| replicas | CPU ms a step | busy, ms a step | busy, steps/s of all | paced, ms a step | paced, P95 |")
    print("|---|---|---|---|---|---|")
    for line in found:
        print(
            f"| {line['replicas']} | {line['cpu_ms']:.2f} | {line['busy_ms']:.2f} | "
            f"{line['busy_steps_per_second']:.0f} | {line['paced_ms']:.2f} | {line['paced_p95_ms']:.2f} |"
        )
    if given.json:
        settings = {"running": given.running, "steps": given.steps, "step_ms": given.step_ms, "cores": os.cpu_count()}
        given.json.write_text(json.dumps({"settings": settings, "measured": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
