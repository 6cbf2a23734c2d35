"""The engine's loop around a scheduler for as long as one likes, with what must hold checked cheaply at every step and
thoroughly now and then: `python -m tests.scheduling.soak --steps 1000000` (make soak).

tests/scheduling/loop.py checks more, and takes a hundred times as long: it knows what every token must be. Here a
token is a number that its place in the sequence gives, and so are the ends.
"""

import argparse
import collections
import dataclasses
import itertools
import random
import sys
import time

import numpy as np

from omni_jax.cost import StepShape
from omni_jax.memory import BlockPool, EncoderCache
from omni_jax.requests import MediaSpan, Request, SamplingParams, Sequence
from omni_jax.requests.segment import Segment
from omni_jax.requests.slo import SLO
from omni_jax.scheduling import (
    Blocks,
    Features,
    FirstCome,
    Scheduler,
    SchedulerConfig,
    SLOFirst,
    StepPlan,
    default_buckets,
)
from omni_jax.scheduling.discipline import Rank

EOS = 0
ROUND = 2000  # steps of one setting, before all is drained
AUDIT = 200  # steps from one thorough check to the next
SLICES = 3  # of a call of the vision tower
SLICE_SECONDS = 0.5  # that each is said to take
ORDER = 8  # and from one check of the order of service to the next
PRIORITIES = (-1, 0, 1)
_NO_PIXELS = np.zeros((1, 1, 1, 1, 1), np.uint8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a round is played with.

    Attributes:
        crowd: live sequences are kept at about so many.
        urgent: share of the requests that are of the most urgent class.
        caching: beginnings are shared; most requests then begin like others.
        aging: aging_seconds by deadline; None: first come, first served. A step takes a second.
    """

    config: SchedulerConfig
    blocks: int
    block_size: int
    images: bool
    crowd: int
    urgent: float
    caching: bool
    aging: float | None
    step_cost: float

    @property
    def bound(self) -> float:
        """Seconds that a sequence may go without tokens. By deadline, it stands before everybody who was served lately
        once it has waited for its classes' distance and one more, times aging_seconds (SLOFirst). From then on those
        who were before it are served, as many at a time as slots and blocks allow, each to its end at most; and their
        images are encoded before its own, in order of arrival."""
        longest = -(-self.config.max_model_len // self.block_size)
        at_once = min(self.config.max_num_seqs, self.blocks // longest)
        aging = (PRIORITIES[-1] - PRIORITIES[0] + 1) * (self.aging or 0.0)
        encoding = (SLICES + 1) * self.crowd if self.images else 0
        return aging + (2 + self.crowd / at_once) * self.config.max_model_len + encoding


class Guess:
    """A cost model that knows nothing but the tokens."""

    def __init__(self, token: float):
        self.token = token

    def seconds(self, shape: StepShape) -> float:
        return self.token * shape.tokens


@dataclasses.dataclass(kw_only=True)
class Report:
    """What happened, over all rounds."""

    steps: int = 0
    rows: int = 0
    most_rows: int = 0
    most_live: int = 0
    requests: int = 0
    ended: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    events: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    encoded: int = 0
    resets: int = 0
    longest_wait: float = 0.0  # as a share of the bound
    cached: int = 0  # prompt tokens


def random_setting(rng: random.Random) -> Setting:
    """Pools from one sequence to plenty, and one row to 64."""
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
        crowd=rng.choice((rows, rows + 8, 2 * rows)),
        urgent=rng.choice((0.1, 0.5, 0.9)),
        caching=rng.random() < 0.5,
        aging=rng.choice((None, 5.0, 40.0)),
        step_cost=rng.choice((0.0, 0.05)),
    )


class Soak:
    """One round. Raises AssertionError when something does not hold."""

    def __init__(self, setting: Setting, rng: random.Random, report: Report):
        self.setting, self.rng, self.report = setting, rng, report
        self.pool = BlockPool(setting.blocks + 1, setting.block_size)
        self.features = None
        if setting.images:
            self.features = Features(EncoderCache(24, rows_per_block=1), most_patches=16, pack_patches=16)
        discipline = FirstCome() if setting.aging is None else SLOFirst(aging_seconds=setting.aging)
        cost = Guess(setting.step_cost) if setting.step_cost else None
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
        self.computed: dict[Sequence, int] = {}  # of live sequences, as the rows said
        self.live: set[Sequence] = set()
        self.ends: dict[Sequence, int] = {}  # output tokens after which the model says EOS
        self.names = 0

    # -- what happens -------------------------------------------------------------------------------------------------

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
        """Engine._advance. Whether there is work left."""
        self.now += 1.0
        scheduler = self.scheduler
        ranks = {}
        if self.report.steps % ORDER == 0 and not self.setting.caching:  # else who waits for a block is overtaken
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
            assert not scheduler.num_live, "deadlock: there is work, and it does none"
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
        tokens = [self.token(row.sequence, row.start + row.count) if row.sample else None for row in plan.rows]
        ended_before = {row.sequence for row in plan.rows if row.sequence.finish_reason is not None}
        accepted = self.scheduler.commit(plan, tokens, self.now)
        assert len(accepted) == len(plan.rows) - len(ended_before), "a row of a sequence that had ended was taken"
        for one in accepted:
            if one.row.sequence.finish_reason is not None:
                self.ended(one.row.sequence)

    def token(self, sequence: Sequence, place: int) -> int:
        """The token at a place, whoever computes it and however often."""
        output = place - sequence.num_prompt
        return EOS if output + 1 == self.ends[sequence] else 1 + (place * 31 + sequence.order[0]) % 1000

    def ended(self, sequence: Sequence) -> None:
        """Contract (b): it holds nothing, whatever is still in flight; and it said what it had to."""
        assert not sequence.blocks
        assert sequence.slot is None
        said = sequence.known[sequence.num_prompt :]
        assert said == [self.token(sequence, sequence.num_prompt + i) for i in range(len(said))]
        wanted = min(sequence.max_output, self.ends[sequence])
        assert len(said) == wanted or (sequence.finish_reason == "abort" and len(said) <= wanted)
        self.report.ended[sequence.finish_reason] += 1
        self.report.cached += sequence.cached
        self.computed.pop(sequence, None)
        self.live.discard(sequence)

    def disturb(self) -> None:
        """A client leaves, or a step raises."""
        live = self.scheduler.running or self.scheduler.waiting
        if live and self.rng.random() < 0.02:
            for sequence in self.scheduler.abort(self.rng.choice(live).request.id):
                self.ended(sequence)
        if self.rng.random() < 0.0005:
            self.in_flight.clear()
            self.encoding = ()
            self.scheduler.reset()
            self.report.resets += 1

    # -- what must hold -----------------------------------------------------------------------------------------------

    def check_plan(self, plan: StepPlan) -> None:
        config, rows, size = self.setting.config, plan.rows, self.setting.block_size
        assert rows
        assert plan.num_tokens <= config.max_num_batched_tokens, "the budget is exceeded"
        assert len(rows) <= config.max_num_seqs
        assert len({row.slot for row in rows}) == len({row.sequence for row in rows}) == len(rows)
        flying = {row.sequence for plan in self.in_flight for row in plan.rows if row.sample}
        references = self.pool._references
        for row in rows:
            sequence, stop = row.sequence, row.start + row.count
            assert sequence.finish_reason is None
            assert row.slot == sequence.slot
            assert row.feedback == (sequence in flying)
            before = self.computed.get(sequence)
            if row.admit:
                assert not row.feedback, "contract (d): planned anew before its token was read"
                assert before is None or row.start <= before or self.setting.caching
            else:
                assert row.start == before, "tokens are left out, or computed twice"
            self.computed[sequence] = stop
            assert 0 < row.count <= stop <= len(sequence.blocks) * size
            known = len(sequence.known) + row.feedback
            assert stop <= known, "computes what nobody knows"
            sampled = sequence.num_output + row.feedback
            assert sampled + row.sample <= sequence.max_output, "contract (a): past a foreseeable end"
            assert row.sample == (stop == known and sampled < sequence.max_output)
            if row.start >= sequence.num_prompt:
                assert sampled < sequence.max_output, "contract (a): nobody needs the row"
                assert references[sequence.blocks[(stop - 1) // size]] == 1, "contract (c): output in a shared block"
        self.report.rows += len(rows)
        self.report.most_rows = max(self.report.most_rows, len(rows))

    def check_order(self, plan: StepPlan, ranks: dict[Sequence, tuple[Rank, int]]) -> None:
        """Who gets a slot stood before all who could have got it and did not: so whoever stands first is next. Those
        that the plan took blocks from are left out: they begin anew, and by another deadline; and those whose end is in
        flight."""
        admitted = [row for row in plan.rows if row.admit and row.sequence in ranks]
        last = max((ranks[r.sequence][0] for r in admitted if r.start == ranks[r.sequence][1]), default=None)
        if last is not None:
            starts = (lambda s: True) if self.features is None else self.features.starts
            could = [s for s, (_, computed) in ranks.items() if s.computed == computed and s.uncomputed and starts(s)]
            assert all(last < ranks[s][0] for s in could if s.slot is None), "overtaken"

    def audit(self) -> None:
        """Nothing leaked, nobody lost, nobody starved."""
        scheduler, pool = self.scheduler, self.pool
        running, waiting = scheduler.running, scheduler.waiting
        held = collections.Counter(block for s in (*running, *waiting) for block in s.blocks)
        assert pool.num_used == len(held), "blocks leaked"
        assert all(pool._references[block] == count for block, count in held.items())
        slots = [s.slot for s in running] + scheduler._free_slots
        assert sorted(slots) == list(range(self.setting.config.max_num_seqs)), "slots leaked"
        hidden = [c for s in (*running, *waiting) for c in s.children if c.finish_reason is None]
        live = {*running, *waiting, *hidden}
        assert len(live) == len(running) + len(waiting) + len(hidden), "twice in the queues"
        assert live == self.live, "lost"
        self.report.most_live = max(self.report.most_live, len(live))
        if self.features is not None:
            entries = self.features.cache._entries
            asked = collections.Counter(
                span.key for s in live for span in s.request.media[s.media_passed : s.media_held]
            )
            assert asked == {key: e.references for key, e in entries.items() if e.references}, "features leaked"
        for sequence in (*running, *waiting):
            # A sequence whose last tokens are in flight, or that decoded lately, was served then.
            share = (self.now - sequence.served_at) / self.setting.bound
            assert share <= 1, f"starved for {self.now - sequence.served_at} s, the bound is {self.setting.bound}"
            self.report.longest_wait = max(self.report.longest_wait, share)

    def drain(self) -> None:
        """To the end of all that is live, which takes no longer than computing everybody alone a few times."""
        most = 100 + 20 * sum(s.num_prompt + s.max_output for s in self.live)
        for _ in range(most):
            if not self.step():
                break
        self.audit()
        assert not self.live, "it goes on and on"
        assert self.pool.num_used == 0
        while self.encoding:
            self.encode()
        assert self.features is None or self.features.cache.usage == 0.0


def play(setting: Setting, rng: random.Random, report: Report, steps: int) -> None:
    """A round of so many steps, and those that it takes to drain it."""
    soak = Soak(setting, rng, report)
    for number in range(steps):
        # A crowd that comes together and thins out again, so that pools are full at times and empty at others.
        while len(soak.live) < setting.crowd and rng.random() < (0.9 if number % 400 < 300 else 0.1):
            soak.add()
        soak.disturb()
        soak.step()
        if number % AUDIT == 0:
            soak.audit()
    soak.drain()


def soak(steps: int, seed: int, *, say=lambda report: None) -> Report:
    """So many steps at least, in rounds of random settings."""
    rng, report = random.Random(seed), Report()
    while report.steps < steps:
        play(random_setting(rng), rng, report, min(ROUND, steps - report.steps))
        say(report)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description="Scheduler properties over many seeded steps.")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()

    def say(report: Report) -> None:
        rate = report.steps / (time.monotonic() - began)
        sys.stdout.write(f"\r{report.steps:,} of {arguments.steps:,} steps, {rate:,.0f} a second")
        sys.stdout.flush()

    sys.stdout.write(f"\n{soak(arguments.steps, arguments.seed, say=say)}\n")


if __name__ == "__main__":
    main()
