"""Host time of a plan and of a commit: the scheduler alone, with decoding and waiting sequences.

python -m benchmarks.host.plan --running 64 --waiting 64
"""

import argparse
import statistics
import time

from omni_jax.memory import BlockPool
from omni_jax.requests import Request, SamplingParams
from omni_jax.requests.slo import SLO
from omni_jax.scheduling import Blocks, FirstCome, Scheduler, SchedulerConfig, SLOFirst, default_buckets

PROMPT, BLOCK = 200, 16


class Linear:
    """A cost model that is as cheap to call as cost.TableCost."""

    def seconds(self, shape) -> float:
        return 1e-3 + 1e-5 * shape.tokens


def scheduler(running: int, waiting: int, *, by_deadline: bool) -> Scheduler:
    """Return a scheduler with slots for `running` sequences, and `waiting` sequences more than that."""
    config = SchedulerConfig(
        max_num_seqs=running,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        buckets=default_buckets(max_num_seqs=running, max_num_batched_tokens=2048),
    )
    pool = BlockPool(1 + 2 * running * 4096 // BLOCK, BLOCK)
    made = Scheduler(
        config,
        pool,
        discipline=SLOFirst() if by_deadline else FirstCome(),
        cost=Linear(),
        blocks=Blocks(pool, prefix_caching=True),
    )
    for number in range(running + waiting):
        made.add(
            Request(
                id=str(number),
                prompt_ids=tuple((number * 31 + i * 7) % 1000 for i in range(PROMPT)),
                params=SamplingParams(max_tokens=3000),
                slo=SLO(ttft_ms=500, tpot_ms=50),
            )
        )
    return made


def measure(running: int, waiting: int, rounds: int, *, by_deadline: bool) -> tuple[list[float], list[float]]:
    """Return the seconds of each plan and of each commit of decode steps with all `running` sequences."""
    made, now = scheduler(running, waiting, by_deadline=by_deadline), 0.0
    plans, commits = [], []
    while len(plans) < rounds:
        now += 0.02
        began = time.perf_counter()
        plan = made.plan(now)
        planned = time.perf_counter()
        assert plan is not None
        made.commit(plan, [1 if row.sample else None for row in plan.rows], now)
        if plan.decode and len(plan.rows) == running:
            plans.append(planned - began)
            commits.append(time.perf_counter() - planned)
    return plans, commits


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--running", type=int, default=64, help="sequences that decode")
    parser.add_argument("--waiting", type=int, default=64, help="sequences that wait for a slot")
    parser.add_argument("--rounds", type=int, default=1000, help="measured steps")
    given = parser.parse_args()
    for name, by_deadline in (("fcfs", False), ("slo", True)):
        plans, commits = measure(given.running, given.waiting, given.rounds, by_deadline=by_deadline)
        cut = [f"{1e3 * statistics.quantiles(some, n=100)[at]:.3f}" for some in (plans, commits) for at in (49, 94)]
        print(f"{name}: plan {cut[0]} ms (P95 {cut[1]}), commit {cut[2]} ms (P95 {cut[3]})")


if __name__ == "__main__":
    main()
