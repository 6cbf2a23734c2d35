"""Random requests on a scheduler for any number of steps, with cheap checks at each step and thorough ones now and
then: `python -m tests.scheduling.soak --steps 1000000` (make soak).

tests/scheduling/loop.py checks more and takes a hundred times as long, because it computes every token. Here a token,
and whether it ends the sequence, depends only on its index.
"""

import argparse
import collections
import dataclasses
import itertools
import random
import sys
import time

import numpy as np

from omni_jax.cost.model import StepShape
from omni_jax.memory.block_pool import BlockPool
from omni_jax.memory.encoder_cache import EncoderCache
from omni_jax.requests import MediaSpan, Request, SamplingParams, Sequence
from omni_jax.requests.segment import Segment
from omni_jax.requests.slo import SLO
from omni_jax.scheduling.blocks import Blocks
from omni_jax.scheduling.buckets import default_buckets
from omni_jax.scheduling.discipline import FirstCome, Rank, SLOFirst
from omni_jax.scheduling.features import Features
from omni_jax.scheduling.limits import SchedulerConfig
from omni_jax.scheduling.plan import StepPlan
from omni_jax.scheduling.scheduler import Scheduler

EOS = 0
STEPS_PER_ROUND = 2000  # steps with one setting before all requests are drained
STEPS_PER_AUDIT = 200  # steps between thorough checks
SLICES = 3  # slices per call of the vision tower
SLICE_SECONDS = 0.5  # assumed duration of a slice
STEPS_PER_ORDER_CHECK = 8  # steps between checks of the order of service
PRIORITIES = (-1, 0, 1)
_NO_PIXELS = np.zeros((1, 1, 1, 1, 1), np.uint8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of a round.

    Attributes:
        target_live: Approximate number of live sequences.
        urgent: Share of the requests that are of the most urgent class.
        caching: Whether prefixes are cached; most requests share one.
        aging: aging_seconds of the deadline discipline; None is first come, first served. A step takes a second.
    """

    config: SchedulerConfig
    blocks: int
    block_size: int
    images: bool
    target_live: int
    urgent: float
    caching: bool
    aging: float | None
    step_cost: float

    @property
    def bound(self) -> float:
        """Maximum seconds that a sequence may wait for tokens.

        By deadline, it ranks before all sequences served recently once it has waited for aging_seconds times one more
        than the distance of their classes (SLOFirst). From then on, the sequences before it run, as many at a time as
        slots and blocks allow, each at most to its end, and their images are encoded first, in order of arrival.
        """
        longest = -(-self.config.max_model_len // self.block_size)
        at_once = min(self.config.max_num_seqs, self.blocks // longest)
        aging = (PRIORITIES[-1] - PRIORITIES[0] + 1) * (self.aging or 0.0)
        encoding = (SLICES + 1) * self.target_live if self.images else 0
        return aging + (2 + self.target_live / at_once) * self.config.max_model_len + encoding


class TokenCost:
    """A cost model that depends only on the number of tokens."""

    def __init__(self, token: float):
        self.token = token

    def seconds(self, shape: StepShape) -> float:
        return self.token * shape.tokens


@dataclasses.dataclass(kw_only=True)
class Report:
    """Counts over all rounds."""

    steps: int = 0
    rows: int = 0
    max_rows: int = 0
    max_live: int = 0
    requests: int = 0
    ended: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    events: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    encoded: int = 0
    resets: int = 0
    longest_wait: float = 0.0  # share of the bound
    cached: int = 0  # prompt tokens


def random_setting(rng: random.Random) -> Setting:
    """Settings with pools for one sequence or many, and with 1 to 64 rows."""
    rows = rng.choice((1, 4, 16, 64))
    budget = rng.choice((rows, rows + 7, 2 * rows + 16, 256))
    length = rng.choice((24, 64, 160))
    block_size = rng.choice((1, 4, 16))
    longest = -(-length // block_size)
    return Setting(
        config=SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=max(budget, rows),
            max_model_len=length,
            buckets=default_buckets(max_num_seqs=rows, max_num_batched_tokens=max(budget, rows)),
            eos_token_ids=frozenset({EOS}),
        ),
        blocks=max(longest, round(longest * rows * rng.choice((0.1, 0.4, 1.0)))),
        block_size=block_size,
        images=rng.random() < 0.4,
        target_live=rng.choice((rows, rows + 8, 2 * rows)),
        urgent=rng.choice((0.1, 0.5, 0.9)),
        caching=rng.random() < 0.5,
        aging=rng.choice((None, 5.0, 40.0)),
        step_cost=rng.choice((0.0, 0.05)),
    )


class Soak:
    """One round. Raises AssertionError if an invariant does not hold."""

    def __init__(self, setting: Setting, rng: random.Random, report: Report):
        self.setting, self.rng, self.report = setting, rng, report
        self.pool = BlockPool(setting.blocks + 1, setting.block_size)
        self.features = None
        if setting.images:
            self.features = Features(EncoderCache(24, rows_per_block=1), max_patches=16, pack_patches=16)
        discipline = FirstCome() if setting.aging is None else SLOFirst(aging_seconds=setting.aging)
        cost = TokenCost(setting.step_cost) if setting.step_cost else None
        self.scheduler = Scheduler(
            setting.config,
            self.pool,
            self.features,
            discipline=discipline,
            cost=cost,
            blocks=Blocks(self.pool, prefix_caching=setting.caching),
        )
        self.now = 0.0
        self.in_flight: collections.deque[StepPlan] = collections.deque()
        self.encoding: tuple[MediaSpan, ...] = ()
        self.slices_left = 0
        self.computed: dict[Sequence, int] = {}  # computed tokens of live sequences, from the rows
        self.live: set[Sequence] = set()
        self.ends: dict[Sequence, int] = {}  # number of output tokens, EOS included
        self.names = 0

    # -- events -------------------------------------------------------------------------------------------------------

    def add(self) -> None:
        rng, config, name = self.rng, self.setting.config, f"r{self.names}"
        self.names += 1
        prompt = rng.randint(1, config.max_model_len - 1)
        if rng.random() < 0.7:
            prompt = min(prompt, rng.randint(1, 16))
        media, at = [], 0
        while self.features is not None and rng.random() < 0.4:
            length = rng.randint(1, 12)
            at += rng.randint(0, 4)
            if at + length > prompt:
                break
            key = f"{length} {rng.randint(0, 5)}".encode()
            grid = (1, length)
            media.append(MediaSpan(key=key, modality="image", start=at, length=length, grid=grid, patches=_NO_PIXELS))
            at += length
        priority = PRIORITIES[0] if rng.random() < self.setting.urgent else rng.choice(PRIORITIES)
        slo = SLO(priority=priority, tpot_ms=rng.choice((None, 500.0, 3000.0)))
        edges = sorted({0, prompt, *(rng.randrange(prompt) for _ in range(rng.choice((0, 0, 2, 5))))})
        segments = [
            Segment(start=a, stop=b, modality="text", priority=priority, deadline=self.now + 2.0 * b)
            for a, b in itertools.pairwise(edges)
        ]
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 1, 1, 3)),
            max_tokens=min(rng.randint(1, 40), config.max_model_len - prompt),
            prompt_logprobs=rng.choice((None, None, None, None, 0)),
        )
        request = Request(
            id=name,
            prompt_ids=(rng.randint(1, 3),) * (prompt - prompt // 3) + (rng.randint(1, 3),) * (prompt // 3),
            params=params,
            arrival=self.now,
            media=tuple(media),
            segments=tuple(segments),
            slo=slo,
        )
        for sequence in self.scheduler.add(request):
            self.live.add(sequence)
            self.ends[sequence] = rng.choice((rng.randint(1, 40), 10_000))
            self.report.requests += 1

    def step(self) -> bool:
        """Do as Engine._advance does. Returns whether work is left."""
        self.now += 1.0
        scheduler = self.scheduler
        ranks = {}
        if (
            self.report.steps % STEPS_PER_ORDER_CHECK == 0 and not self.setting.caching
        ):  # waiting for a block allows overtaking
            ranks = {
                s: (scheduler.discipline.rank(s, self.now), s.computed) for s in scheduler.waiting if not s.pending
            }
        plan = scheduler.plan(self.now)
        if plan is not None:
            self.check_plan(plan)
            self.check_order(plan, ranks)
            self.in_flight.append(plan)
        for event in scheduler.events:
            self.report.events[event.kind] += 1
        scheduler.events.clear()
        encoded = self.encode()
        if self.in_flight and (plan is None or len(self.in_flight) > 1):
            self.commit(self.in_flight.popleft())
        elif not self.in_flight and not self.encoding and not encoded:
            assert not scheduler.num_live, "deadlock: there is work, but none is done"
        self.report.steps += 1
        return bool(scheduler.num_live or self.in_flight)

    def encode(self) -> bool:
        if self.features is None:
            return False
        if not self.encoding:
            self.encoding, self.slices_left = self.scheduler.next_batch(), SLICES
            return False
        if self.in_flight and not self.scheduler.may_encode(SLICE_SECONDS):
            return False
        self.slices_left -= 1
        if self.slices_left:
            return False
        self.scheduler.encoded(self.encoding)
        self.report.encoded += len(self.encoding)
        self.encoding = ()
        return True

    def commit(self, plan: StepPlan) -> None:
        each = list(zip(plan.rows, self.scheduler.sequences_in(plan), strict=True))
        tokens = [self.token(sequence, row.stop) if row.sample else None for row, sequence in each]
        num_ended = sum(sequence.finish_reason is not None for _, sequence in each)
        accepted = self.scheduler.commit(plan, tokens, self.now)
        assert len(accepted) == len(each) - num_ended, "a row of a sequence that had ended was accepted"
        for one in accepted:
            if one.sequence.finish_reason is not None:
                self.ended(one.sequence)

    def token(self, sequence: Sequence, index: int) -> int:
        """The token at an index of a sequence, however often it is computed."""
        output = index - sequence.num_prompt
        return EOS if output + 1 == self.ends[sequence] else 1 + (index * 31 + sequence.order[0]) % 1000

    def ended(self, sequence: Sequence) -> None:
        """Check a sequence that ended: its output, and that it holds nothing, whatever is in flight (contract b)."""
        assert not sequence.blocks
        assert sequence.slot is None
        output = sequence.output
        assert output == [self.token(sequence, sequence.num_prompt + i) for i in range(len(output))]
        wanted = min(sequence.max_output, self.ends[sequence])
        assert len(output) == wanted or (sequence.finish_reason == "abort" and len(output) <= wanted)
        self.report.ended[sequence.finish_reason] += 1
        self.report.cached += sequence.cached
        self.computed.pop(sequence, None)
        self.live.discard(sequence)

    def disturb(self) -> None:
        """Now and then abort a request, or let a step raise."""
        live = self.scheduler.running or sorted(self.scheduler.waiting, key=lambda sequence: sequence.order)
        if live and self.rng.random() < 0.02:
            for sequence in self.scheduler.abort(self.rng.choice(live).request.id):
                self.ended(sequence)
        if self.rng.random() < 0.0005:
            self.in_flight.clear()
            self.encoding = ()
            self.scheduler.reset()
            self.report.resets += 1

    # -- checks -------------------------------------------------------------------------------------------------------

    def check_plan(self, plan: StepPlan) -> None:
        config, rows, size = self.setting.config, plan.rows, self.setting.block_size
        assert rows
        assert plan.num_tokens <= config.max_num_batched_tokens, "the budget is exceeded"
        assert len(rows) <= config.max_num_seqs
        sequences = self.scheduler.sequences_in(plan)
        assert len({row.slot for row in rows}) == len({*sequences}) == len(rows)
        flying = {row.order for plan in self.in_flight for row in plan.rows if row.sample}
        references = self.pool._references
        for row, sequence in zip(rows, sequences, strict=True):
            stop = row.stop
            assert sequence.finish_reason is None
            assert row.slot == sequence.slot
            assert row.feedback == (row.order in flying)
            before = self.computed.get(sequence)
            if row.admit:
                assert not row.feedback, "contract (d): planned before its token was read"
                assert before is None or row.start <= before or self.setting.caching
            else:
                assert row.start == before, "tokens are skipped or computed twice"
            self.computed[sequence] = stop
            assert 0 < row.count <= stop <= len(sequence.blocks) * size
            known = sequence.num_known + row.feedback
            assert stop <= known, "computes unknown tokens"
            sampled = sequence.num_output + row.feedback
            assert sampled + row.sample <= sequence.max_output, "contract (a): past a foreseeable end"
            assert row.sample == (stop == known and sampled < sequence.max_output)
            if row.start >= sequence.num_prompt:
                assert sampled < sequence.max_output, "contract (a): the row is not needed"
                assert references[sequence.blocks[(stop - 1) // size]] == 1, "contract (c): output in a shared block"
        self.report.rows += len(rows)
        self.report.max_rows = max(self.report.max_rows, len(rows))

    def check_order(self, plan: StepPlan, ranks: dict[Sequence, tuple[Rank, int]]) -> None:
        """Check that each admitted sequence ranked before all that could have been admitted and were not.

        Sequences that lost blocks in this plan start anew with another deadline, so they are left out, as are those
        whose end is in flight.
        """
        each = zip(plan.rows, self.scheduler.sequences_in(plan), strict=True)
        admitted = [(row, ranks[s]) for row, s in each if row.admit and s in ranks]
        last = max((rank for row, (rank, computed) in admitted if row.start == computed), default=None)
        if last is not None:
            starts = (lambda s: True) if self.features is None else self.features.can_start
            could = [s for s, (_, computed) in ranks.items() if s.computed == computed and s.uncomputed and starts(s)]
            parked = self.scheduler._queues.parked  # those wait for a block of one that goes on
            assert all(last < ranks[s][0] for s in could if s.slot is None and s not in parked), "one was overtaken"

    def audit(self) -> None:
        """Check that no block, slot or feature leaked, and that no sequence is lost or starves."""
        scheduler, pool = self.scheduler, self.pool
        running, waiting = scheduler.running, scheduler.waiting
        held = collections.Counter(block for s in (*running, *waiting) for block in s.blocks)
        assert pool.num_used == len(held), "blocks leaked"
        assert all(pool._references[block] == count for block, count in held.items())
        slots = [s.slot for s in running] + scheduler._queues.free_slots
        assert sorted(slots) == list(range(self.setting.config.max_num_seqs)), "slots leaked"
        live = {*running, *waiting}
        assert len(live) == len(running) + len(waiting), "a sequence is in the queues twice"
        assert live == self.live, "a sequence was lost"
        self.report.max_live = max(self.report.max_live, len(live))
        if self.features is not None:
            entries = self.features.cache._entries
            asked = collections.Counter(
                span.key for s in live for span in s.request.media[s.media_passed : s.media_held]
            )
            assert asked == {key: e.references for key, e in entries.items() if e.references}, "features leaked"
        for sequence in (*running, *waiting):
            # Sequences whose last tokens are in flight were served then.
            share = (self.now - sequence.served_at) / self.setting.bound
            assert share <= 1, f"starved for {self.now - sequence.served_at} s, the bound is {self.setting.bound}"
            self.report.longest_wait = max(self.report.longest_wait, share)

    def drain(self) -> None:
        """Run until all live sequences have ended, within a few times the steps that they take alone."""
        limit = 100 + 20 * sum(s.num_prompt + s.max_output for s in self.live)
        for _ in range(limit):
            if not self.step():
                break
        self.audit()
        assert not self.live, "the sequences do not end"
        assert self.pool.num_used == 0
        while self.encoding:
            self.encode()
        assert self.features is None or self.features.cache.usage == 0.0


def play(setting: Setting, rng: random.Random, report: Report, steps: int) -> None:
    """Run a round of `steps` steps, then drain it."""
    soak = Soak(setting, rng, report)
    for number in range(steps):
        # The number of live sequences rises and falls, so that pools are sometimes full and sometimes empty.
        while len(soak.live) < setting.target_live and rng.random() < (0.9 if number % 400 < 300 else 0.1):
            soak.add()
        soak.disturb()
        soak.step()
        if number % STEPS_PER_AUDIT == 0:
            soak.audit()
    soak.drain()


def soak(steps: int, seed: int, *, progress=lambda report: None) -> Report:
    """Run at least `steps` steps, in rounds with random settings."""
    rng, report = random.Random(seed), Report()
    while report.steps < steps:
        play(random_setting(rng), rng, report, min(STEPS_PER_ROUND, steps - report.steps))
        progress(report)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description="Scheduler properties over many seeded steps.")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()

    def progress(report: Report) -> None:
        rate = report.steps / (time.monotonic() - began)
        sys.stdout.write(f"\r{report.steps:,} of {arguments.steps:,} steps, {rate:,.0f} per second")
        sys.stdout.flush()

    sys.stdout.write(f"\n{soak(arguments.steps, arguments.seed, progress=progress)}\n")


if __name__ == "__main__":
    main()
