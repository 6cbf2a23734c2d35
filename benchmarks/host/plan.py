"""Host time of a step: plan, pack and commit, with decoding and waiting sequences. There is no device, and nothing is
computed.

python -m benchmarks.host.plan --running 64 --waiting 64
python -m benchmarks.host.plan --running 64 256 1024 --busy    # with stop ids, penalties and so on
python -m benchmarks.host.plan --cases       # crowds: bursts, classes, pictures, continuations, a long prompt
python -m benchmarks.host.plan --grid --json OUT.json    # 64 to 1,024 running x 0 to 100,000 waiting; takes minutes

Times are CPU times of this process in milliseconds. A row of the grid has the order of service, what requests have
(text: 200 tokens; pictures: one more of 64 tokens each; shared: the first 160 tokens are the same; swap: so few blocks
that sequences are preempted and swapped out; compression: half of the tokens are dropped), how many sequences run and
how many wait, and then p50 and maximum of plan and commit in two states. Steady: sequences in all slots decode, and the
others wait. Turnover: about 8 sequences end in each step, as many start, and as many arrive.
"""

import argparse
import copy
import dataclasses
import functools
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from omni_jax.memory.block_pool import BlockPool
from omni_jax.memory.encoder_cache import EncoderCache
from omni_jax.memory.prefix import prompt_digests
from omni_jax.requests import MediaSpan, Request, SamplingParams
from omni_jax.requests.slo import SLO
from omni_jax.runtime.functions import StepSizes
from omni_jax.runtime.packer import Packer
from omni_jax.scheduling.blocks import Blocks, Compression
from omni_jax.scheduling.buckets import default_buckets
from omni_jax.scheduling.discipline import FirstCome, SLOFirst
from omni_jax.scheduling.features import Features
from omni_jax.scheduling.limits import SchedulerConfig
from omni_jax.scheduling.scheduler import Scheduler

PROMPT, BLOCK = 200, 16
IMAGE = 64  # tokens of a picture


class Linear:
    """A cost model that is as cheap to call as cost.TableCost."""

    def seconds(self, shape) -> float:
        return 1e-3 + 1e-5 * shape.tokens


class NoSwap:
    """A swap whose blocks need a while to come back."""

    def __init__(self) -> None:
        self._polls: dict[object, int] = {}

    def store(self, sequence, blocks, tokens, cached) -> object:
        parcel = object()
        self._polls[parcel] = 3
        return parcel

    def is_ready(self, parcel) -> bool:
        self._polls[parcel] -= 1
        return self._polls[parcel] < 0

    def load(self, parcel, blocks) -> bool:
        self._polls.pop(parcel)
        return True

    def drop(self, parcel) -> None:
        self._polls.pop(parcel)


def empty(
    running: int,
    *,
    by_deadline: bool,
    budget: int = 2048,
    max_model_len: int = 4096,
    num_blocks: int | None = None,
    pictures: int = 0,
    swap: bool = False,
    ratio: float = 0.0,
) -> Scheduler:
    """Return a scheduler with slots for `running` sequences.

    Args:
        budget: Tokens of a step.
        num_blocks: Blocks of the pool; enough for twice max_model_len of each running sequence by default.
        pictures: Pictures that the encoder cache holds; 0 for a model that reads text only.
        swap: Whether blocks are swapped out.
        ratio: Share of the tokens that compression drops; 0 for none.
    """
    config = SchedulerConfig(
        max_num_seqs=running,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        buckets=default_buckets(max_num_seqs=running, max_num_batched_tokens=budget),
    )
    pool = BlockPool(1 + (num_blocks or 2 * running * max_model_len // BLOCK), BLOCK)
    features = None
    if pictures:
        features = Features(EncoderCache(pictures * IMAGE), max_patches=4 * IMAGE, pack_patches=4 * IMAGE)
    compression = Compression(ratio=lambda step, total: ratio, compact=lambda *_: None) if ratio else None
    return Scheduler(
        config,
        pool,
        features,
        discipline=SLOFirst() if by_deadline else FirstCome(),
        cost=Linear(),
        blocks=Blocks(pool, prefix_caching=True, swap=NoSwap() if swap else None, compression=compression),
    )


def scheduler(running: int, waiting: int, *, by_deadline: bool, params: SamplingParams | None = None) -> Scheduler:
    """Return a scheduler with slots for `running` sequences, and `waiting` sequences more than that."""
    made = empty(running, by_deadline=by_deadline)
    for number in range(running + waiting):
        made.add(request(str(number), prompt(number), slo=SLO(ttft_ms=500, tpot_ms=50), params=params))
    return made


def packer(made: Scheduler) -> Packer:
    """Return a packer for the plans of a scheduler."""
    config = made.config
    sizes = StepSizes(
        rows=config.buckets.rows,
        slots=config.max_num_seqs + 1,
        pages_per_row=config.max_model_len // BLOCK,
        block_size=BLOCK,
        vocab_size=1024,
        reads_media=made.features is not None,
    )
    return Packer(sizes, config.buckets)


def prompt(number: int, length: int = PROMPT) -> tuple[int, ...]:
    return tuple((number * 31 + i * 7) % 1000 for i in range(length))


def request(
    name: str, prompt_ids: tuple[int, ...], *, arrival=0.0, picture="", max_tokens=3000, n=1, slo=None, params=None
):
    """A request, with a picture named `picture` at the start of its prompt if one is named."""
    media = ()
    if picture:
        patches = np.zeros((IMAGE, 1, 1, 1, 1), np.uint8)
        span = MediaSpan(
            key=picture.encode(), modality="image", start=0, length=IMAGE, grid=(1, IMAGE), patches=patches
        )
        media = (span,)
    params = params or SamplingParams(max_tokens=max_tokens, n=n)
    made = Request(id=name, prompt_ids=prompt_ids, params=params, arrival=arrival, slo=slo, media=media)
    return dataclasses.replace(made, digests=prompt_digests(made, BLOCK))  # as the server does, in another thread


class Steps:
    """Runs steps of a scheduler, and measures plans, packing and commits in seconds of CPU time."""

    def __init__(self, made: Scheduler, seconds: float = 0.02):
        self.made, self.now, self._seconds = made, 0.0, seconds
        self._packer = packer(made)
        self.plans: list[float] = []
        self.packs: list[float] = []
        self.commits: list[float] = []

    def step(self) -> bool:
        """Run a step, and a call of the encoder if there is one. Returns whether it is a decode step of all slots."""
        made = self.made
        self.now += self._seconds
        began = time.process_time()
        plan = made.plan(self.now)
        batch = made.next_batch()
        planned = time.process_time()
        made.encoded(batch) if batch else None
        self.plans.append(planned - began)
        if plan is None:
            return False
        began = time.process_time()
        for _ in self._packer.calls(plan):
            pass
        self.packs.append(time.process_time() - began)
        tokens = [1 if sample else None for sample in plan.samples.tolist()]
        began = time.process_time()
        made.commit(plan, tokens, self.now)
        self.commits.append(time.process_time() - began)
        return plan.decode and plan.num_rows == made.config.max_num_seqs

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.step()

    def measured(self, rounds: int, between: Callable[[], None]) -> "Steps":
        """Run steps, with a call of `between` before each, and return a copy that has only their times."""
        self.plans, self.packs, self.commits = [], [], []
        for _ in range(rounds):
            between()
            self.step()
        return copy.copy(self)


BUSY = SamplingParams(
    max_tokens=3000,
    min_tokens=2999,
    temperature=0.7,
    frequency_penalty=0.5,
    logit_bias={7: 1.0},
    stop_token_ids=(3, 4, 5),
    logprobs=5,
)


def measure(running: int, waiting: int, rounds: int, *, by_deadline: bool, busy: bool) -> Steps:
    """Measure decode steps with all `running` sequences; with `busy`, of requests that use every parameter."""
    steps = Steps(scheduler(running, waiting, by_deadline=by_deadline, params=BUSY if busy else None))
    while not steps.step():
        pass
    for times in (steps.plans, steps.packs, steps.commits):
        times.clear()
    steps.run(rounds)
    return steps


# -- cases ------------------------------------------------------------------------------------------------------------


def crowd(number: int, *, by_deadline: bool, **options) -> Steps:
    """Short answers in 256 slots: each step some end and others start, with `number` that wait."""
    steps = Steps(empty(256, by_deadline=by_deadline, max_model_len=512, **options))
    for i in range(256 + number):
        name = "" if "pictures" not in options else f"p{i}"
        steps.made.add(request(f"c{i}", prompt(i), arrival=i * 1e-3, max_tokens=1 + i % 60, picture=name))
    steps.now = 1e-3 * number
    return steps


def shared_burst(number: int, *, by_deadline: bool) -> Steps:
    """A burst of requests that share 2,048 prompt tokens."""
    steps = Steps(empty(256, by_deadline=by_deadline, budget=8192))
    common = prompt(1, 2048)
    for i in range(number):
        steps.made.add(request(f"s{i}", (*common, *prompt(i, 40)), max_tokens=50, slo=SLO()))
    return steps


def urgent_crowd(number: int) -> Steps:
    """Sequences of class 5 run, and `number` of class 3 wait."""
    steps = Steps(empty(64, by_deadline=True))
    for i in range(64):
        steps.made.add(request(f"low{i}", prompt(i), slo=SLO(priority=5)))
    steps.run(10)
    for i in range(number):
        steps.made.add(request(f"high{i}", prompt(64 + i), slo=SLO(priority=3), arrival=steps.now))
    steps.plans.clear()
    return steps


def pictures(number: int, *, by_deadline: bool, same: bool) -> Steps:
    """A burst of requests with pictures, all different or all the same."""
    steps = Steps(empty(256, by_deadline=by_deadline, pictures=64, max_model_len=512))
    for i in range(number):
        ids = (5,) * IMAGE + prompt(i)
        steps.made.add(request(f"p{i}", ids, max_tokens=100, slo=SLO(), picture="p" if same else f"p{i}"))
    return steps


def compressed(running: int, ratio: float) -> Steps:
    """Decoding sequences with compression."""
    made = empty(running, by_deadline=False, ratio=ratio, max_model_len=512, num_blocks=running * 64)
    for i in range(running):
        made.add(request(f"k{i}", prompt(i), max_tokens=300))
    steps = Steps(made)
    steps.run(20)
    steps.plans.clear()
    return steps


def continuations(number: int) -> Steps:
    """Continuations wait with the blocks of their prompts, and the running sequences need blocks."""
    running = -(-number // 127)
    blocks, budget = running * 14, running * 208  # all prompts are computed in a step
    made = empty(running, by_deadline=False, budget=budget, max_model_len=blocks * BLOCK, num_blocks=blocks)
    for i in range(running):
        made.add(request(f"n{i}", prompt(i), max_tokens=200, n=128))
    steps = Steps(made)
    steps.run(3)
    steps.plans.clear()
    return steps


def long_prompt(cached: bool) -> Steps:
    """A prompt of 128k tokens arrives while 64 sequences decode."""
    made = empty(65, by_deadline=False, max_model_len=131_072, num_blocks=20_000)
    ids = prompt(7, 130_000)
    steps = Steps(made)
    if cached:
        made.add(request("before", ids, max_tokens=1))
        while made.num_live:
            steps.step()
    for i in range(64):
        made.add(request(f"d{i}", prompt(i)))
    steps.run(20)
    steps.plans.clear()
    made.add(request("long", ids, max_tokens=10))
    return steps


def cases() -> Iterator[tuple[str, Callable[[], Steps], int]]:
    """The name of each case, a function that makes it, and the number of steps to measure."""
    for by_deadline in (False, True):
        kind = "slo" if by_deadline else "fcfs"
        some = functools.partial(crowd, by_deadline=by_deadline)
        for number in (1000, 10_000, 100_000):
            yield f"{kind}, {number:,} wait, some end in each step", functools.partial(some, number), 60
        yield f"{kind}, 10,000 wait, swap", functools.partial(some, 10_000, swap=True, num_blocks=4000), 60
        yield f"{kind}, 10,000 wait, compression", functools.partial(some, 10_000, ratio=0.5), 60
        shared = functools.partial(shared_burst, 4000, by_deadline=by_deadline)
        yield f"{kind}, burst of 4,000 that share 2,048 tokens", shared, 30
        for same in (False, True):
            name = "the same picture" if same else "pictures"
            burst = functools.partial(pictures, 10_000, by_deadline=by_deadline, same=same)
            yield f"{kind}, burst of 10,000 with {name}", burst, 30
    yield "slo, class 5 runs, 10,000 of class 3 wait", functools.partial(urgent_crowd, 10_000), 30
    for running, ratio in itertools.product((64, 128, 256), (0.0, 0.5)):
        yield f"fcfs, {running} decode, compression {ratio}", functools.partial(compressed, running, ratio), 60
    for number in (2000, 4000, 8000):
        yield f"fcfs, {number:,} continuations wait, one needs a block", functools.partial(continuations, number), 60
    for cached in (False, True):
        yield f"fcfs, 128k tokens arrive, {'cached' if cached else 'new'}", functools.partial(long_prompt, cached), 70


# -- grid -------------------------------------------------------------------------------------------------------------

KINDS = ("text", "pictures", "shared", "swap", "compression")
GRID = ((64, 256, 1024), (0, 1000, 10_000, 100_000))  # running, waiting
GRID_STEPS = 40  # measured in each state


def grid_request(kind: str, number: int) -> Request:
    """Request number `number` of a row of the grid. No two prompts are the same."""
    ids = (number, *prompt(number, PROMPT - 1))
    if kind == "pictures":
        ids = (5,) * IMAGE + ids
    elif kind == "shared":
        ids = prompt(0, 160) + ids[:40]
    slo = SLO(ttft_ms=500, tpot_ms=50)
    picture = f"p{number}" if kind == "pictures" else ""
    return request(f"g{number}", ids, arrival=number * 1e-3, max_tokens=700, slo=slo, picture=picture)


def grid_steps(
    requests: Iterator[Request], kind: str, running: int, waiting: int, *, by_deadline: bool
) -> dict[str, Steps]:
    """Measure both states with the given number of running and waiting sequences."""
    made = empty(
        running,
        by_deadline=by_deadline,
        max_model_len=1024,
        num_blocks=max(15 * running, 1024 // BLOCK) if kind == "swap" else None,
        pictures=64 if kind == "pictures" else 0,
        swap=kind == "swap",
        ratio=0.5 if kind == "compression" else 0.0,
    )
    lives = itertools.cycle(range(1, running * 60 // 256 + 1))  # lengths of outputs: about 8 end in each step

    def arrive(count: int) -> None:
        for one in itertools.islice(requests, count):
            for sequence in made.add(one):
                sequence.max_output = next(lives)

    for one in itertools.islice(requests, running):
        made.add(one)
    steps = Steps(made)
    for _ in range(running // 2 + 50):
        if steps.step():
            break
    arrive(waiting)
    steps.now = max(steps.now, 1e-3 * (running + waiting))
    gc.collect()  # of what was made here
    found = {}
    for state in ("steady", "turnover"):
        if state == "turnover":
            for sequence in made.running:
                sequence.max_output = sequence.num_output + sequence.pending + next(lives)
        found[state] = steps.measured(GRID_STEPS, lambda: arrive(max(waiting - len(made.waiting), 8 * (not waiting))))
    return found


def grid(write: Callable[[dict], None]) -> None:
    """Measure all rows of the grid."""
    for kind in KINDS:
        most = GRID[0][-1] + GRID[1][-1] + 2000
        requests = [grid_request(kind, number) for number in range(most)]
        for by_deadline, running, waiting in itertools.product((False, True), *GRID):
            found = grid_steps(iter(requests), kind, running, waiting, by_deadline=by_deadline)
            row = {"order": "slo" if by_deadline else "fcfs", "requests": kind, "running": running, "waiting": waiting}
            for state, steps in found.items():
                for part, times in (("plan", steps.plans), ("commit", steps.commits)):
                    row[f"{state} {part} p50"] = 1e3 * statistics.median(times)
                    row[f"{state} {part} max"] = 1e3 * max(times)
            write(row)


def print_row(row: dict) -> None:
    figures = [value for name, value in row.items() if name.split()[0] in ("steady", "turnover")]
    print(
        f"{row['order']:5}{row['requests']:12}{row['running']:6,}{row['waiting']:9,} ",
        *(f"{figure:7.2f}" for figure in figures),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--running", type=int, nargs="+", default=[64], help="sequences that decode")
    parser.add_argument("--waiting", type=int, default=64, help="sequences that wait for a slot")
    parser.add_argument("--rounds", type=int, default=1000, help="measured steps")
    parser.add_argument("--busy", action="store_true", help="requests with stop ids, penalties, biases and logprobs")
    parser.add_argument("--cases", nargs="?", const="", help="measure crowds instead: those whose names contain this")
    parser.add_argument("--grid", action="store_true", help="measure the grid instead, see above")
    parser.add_argument("--json", type=Path, help="file for the rows of the grid")
    given = parser.parse_args()
    if given.grid:
        rows: list[dict] = []
        print(f"{'':34}{'steady':^31} {'turnover':^31}")
        print(f"{'order requests     run  waiting':34}" + f"{'plan p50   max commit p50 max':31} " * 2)

        def write(row: dict) -> None:
            rows.append(row)
            print_row(row)

        grid(write)
        if given.json:
            given.json.write_text(json.dumps(rows, indent=1) + "\n")
        return
    if given.cases is not None:
        for name, make, rounds in cases():
            if given.cases not in name:
                continue
            steps = make()
            steps.run(rounds)
            plans = [1e3 * seconds for seconds in steps.plans]
            first, median, most = plans[0], statistics.median(plans), max(plans[1:])
            print(f"{name}: first plan {first:.2f} ms, then median {median:.2f}, most {most:.2f}", flush=True)
        return
    for running, (name, by_deadline) in itertools.product(given.running, (("fcfs", False), ("slo", True))):
        steps = measure(running, given.waiting, given.rounds, by_deadline=by_deadline, busy=given.busy)
        whole = [sum(each) for each in zip(steps.plans, steps.packs, steps.commits, strict=True)]
        parts = {"plan": steps.plans, "pack": steps.packs, "commit": steps.commits, "all": whole}
        texts = []
        for part, times in parts.items():
            cuts = statistics.quantiles(times, n=100)
            texts.append(f"{part} {1e3 * cuts[49]:.3f} ms (P95 {1e3 * cuts[94]:.3f})")
        print(f"{name}, {running} run, {given.waiting:,} wait: {', '.join(texts)}", flush=True)


if __name__ == "__main__":
    main()
