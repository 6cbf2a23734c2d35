"""The simulator, compared with arithmetic by hand and queueing theory, and its invariants."""

import bisect
import collections
import dataclasses
import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_jax.cost.model import StepShape
from omni_jax.cost.table import TableCost
from omni_jax.requests import InvalidRequest, MediaSpan, Request, SamplingParams
from omni_jax.requests.segment import Segment
from omni_jax.requests.slo import SLO
from omni_jax.routing.router import LeastLoaded, PrefixAware
from omni_jax.scheduling.buckets import Buckets
from omni_jax.scheduling.discipline import SLOFirst
from omni_jax.simulation.gpu import gpu_replica
from omni_jax.simulation.replica import Replica, ReplicaConfig
from omni_jax.simulation.simulator import SimulationResult, simulate, simulate_requests
from omni_jax.simulation.workload import Arrival, Lengths, Load, Mix, generate
from omni_jax.telemetry.recorder import Recorder
from tests.cost.test_roofline import QWEN2_7B, QWEN2_VL_7B
from tests.scheduling.loop import Loop


@dataclasses.dataclass(frozen=True)
class Linear:
    """A linear cost model, for arithmetic by hand."""

    step: float = 1.0
    token: float = 0.125
    patch: float = 0.5

    def seconds(self, shape: StepShape) -> float:
        return shape.tokens * self.patch if shape.kind == "encode" else self.step + shape.tokens * self.token

    def prefill_seconds(self, tokens: int, context: int) -> float:
        return tokens * self.token

    def decode_seconds(self, rows: int, context: int) -> float:
        return self.step + rows * self.token

    def encode_seconds(self, patches: int) -> float:
        return patches * self.patch


SMALL = ReplicaConfig(
    max_num_seqs=4,
    max_num_batched_tokens=8,
    max_model_len=64,
    block_size=4,
    buckets=Buckets(decode=(1, 2, 4), mixed=(4, 8), overhead=0),
    encoder_cache_tokens=0,
    host_seconds=0.25,
    prefix_caching=False,
)


def text(at: float, prompt: int, output: int, name: str = "a", **more) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    return Request(id=name, prompt_ids=tuple(range(prompt)), params=params, arrival=at, **more)


def image(name: str, start: int, patches: int) -> MediaSpan:
    zeros = np.broadcast_to(np.zeros((), np.uint8), (patches, 3, 1, 2, 2))
    return MediaSpan(
        key=name.encode(), modality="image", start=start, length=patches // 4, grid=(2, patches // 2), patches=zeros
    )


# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_one_request_takes_the_sum_of_its_steps():
    """8 + 2 prompt tokens, then 3 decode steps. Only the first step waits for the host; the others are planned while
    their predecessors run."""
    result = simulate_requests([text(5.0, 10, 4)], SMALL, Linear())
    (record,) = result.requests
    prompt, decode = (1 + 8 / 8) + (1 + 2 / 8), 1 + 1 / 8
    assert record.scheduled_at == 5.0
    assert record.first_token_at == 5.25 + prompt
    assert record.ended_at == 5.25 + prompt + 3 * decode == result.seconds
    assert result.busy_seconds == (prompt + 3 * decode,)
    assert [(s.kind, s.size, sum(p.count for p in s.pieces)) for s in result.steps] == [
        ("mixed", 8, 8),
        ("mixed", 4, 2),
        *[("decode", 1, 1)] * 3,
    ]


def test_a_slow_host_determines_the_pace():
    """If the host takes longer than a step, step k is dispatched at k times the host's seconds."""
    config = dataclasses.replace(SMALL, host_seconds=5.0)
    (record,) = simulate_requests([text(0.0, 8, 4)], config, Linear()).requests
    assert record.ended_at == 4 * 5.0 + (1 + 1 / 8)


def test_an_image_is_encoded_before_its_prompt_is_computed():
    config = dataclasses.replace(SMALL, encoder_cache_tokens=16, max_patches=32, encoder_slices=4)
    request = text(1.0, 8, 1, media=(image("p", 2, 16),))
    result = simulate_requests([request], config, Linear())
    (record,) = result.requests
    # The step is planned while the last slice runs, so the host's time does not count.
    assert record.first_token_at == 1.0 + 16 * 0.5 + (1 + 8 / 8)
    slices = [step for step in result.steps if step.kind == "encode"]
    assert [step.seconds for step in slices] == [2.0] * 4
    assert {piece for step in slices for piece in step.pieces} == {("a", 0, 0, 2, 16)}


def test_at_most_one_slice_runs_between_two_steps():
    """A decoding sequence waits for a slice at most, not for a whole image."""
    config = dataclasses.replace(SMALL, encoder_cache_tokens=64, max_patches=64, encoder_slices=5)
    requests = [
        text(0.0, 4, 40, "stream"),
        *(text(10.0 + i, 20, 2, f"p{i}", media=(image(f"p{i}", 1, 40),)) for i in range(3)),
    ]
    result = simulate_requests(requests, config, Linear())
    kinds = "".join("e" if step.kind == "encode" else "s" for step in result.steps)
    ended = kinds.rindex("s")
    during_decode = kinds[: [i for i, s in enumerate(result.steps) if any(p[0] == "stream" for p in s.pieces)][-1]]
    assert "e" in during_decode
    assert "ee" not in during_decode
    assert kinds.count("e") == 3 * 5
    assert ended == len(kinds) - 1


def test_equal_images_are_encoded_once():
    config = dataclasses.replace(SMALL, encoder_cache_tokens=64, max_patches=64, encoder_slices=2)
    requests = [text(0.1 * i, 20, 2, f"p{i}", media=(image("same", 1, 40),)) for i in range(3)]
    result = simulate_requests(requests, config, Linear())
    assert sum(step.kind == "encode" for step in result.steps) == 2
    assert {r.finish_reason for r in result.requests} == {"length"}


def test_a_waiting_request_is_admitted_when_another_ends():
    config = dataclasses.replace(SMALL, max_num_seqs=1, buckets=Buckets(decode=(1,), mixed=(8,)), host_seconds=0.0)
    result = simulate_requests([text(0.0, 8, 1, "a"), text(0.5, 8, 1, "b")], config, Linear())
    assert [(r.request_id, r.scheduled_at, r.ended_at) for r in result.requests] == [("a", 0.0, 2.0), ("b", 2.0, 4.0)]


def test_queueing_theory():
    """One server, Poisson arrivals and equal service times (M/D/1) have a mean wait of rho s / (2 (1 - rho))
    (Pollaczek-Khinchine)."""
    config = dataclasses.replace(SMALL, max_num_seqs=1, buckets=Buckets(decode=(1,), mixed=(8,)), host_seconds=0.0)
    service, load = 2.0, 0.7
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(service / load, 12_000))
    requests = (text(float(at), 8, 1, str(i)) for i, at in enumerate(times))
    result = simulate_requests(requests, config, Linear(), segments=False, timeline=False)
    waits = [record.scheduled_at - record.arrival for record in result.requests]
    assert statistics.fmean(waits) == pytest.approx(load * service / (2 * (1 - load)), rel=0.08)
    assert result.utilisation == pytest.approx(load, rel=0.03)


# -- invariants -------------------------------------------------------------------------------------------------------


@st.composite
def fleets(draw):
    """(requests, config, replicas, router, seed). Pools are small, so that sequences are preempted and images wait."""
    requests, at = [], 0.0
    for number in range(draw(st.integers(1, 12))):
        at += draw(st.sampled_from([0.0, 0.0, 0.3, 2.0, 40.0]))
        prompt = draw(st.integers(1, 40))
        media = ()
        if prompt >= 12 and draw(st.booleans()):
            media = (image(f"p{draw(st.integers(0, 3))}", draw(st.integers(0, prompt - 12)), 24),)
        edges = sorted({0, prompt} | draw(st.sets(st.integers(0, prompt), max_size=3)))
        slo = SLO(priority=draw(st.integers(-1, 1)), tpot_ms=draw(st.sampled_from([None, 900.0])))
        requests.append(
            text(
                at,
                prompt,
                draw(st.integers(1, 20)),
                str(number),
                media=media,
                slo=slo,
                segments=tuple(
                    Segment(start=a, stop=b, modality="text", priority=slo.priority, deadline=at + 10.0 * b)
                    for a, b in itertools.pairwise(edges)
                ),
            )
        )
    config = dataclasses.replace(
        SMALL,
        num_blocks=draw(st.integers(16, 24)),
        encoder_cache_tokens=draw(st.sampled_from([16, 32])),
        max_patches=32,
        encoder_slices=draw(st.integers(1, 4)),
        host_seconds=draw(st.sampled_from([0.0, 0.25, 3.0])),
        noise=draw(st.sampled_from([0.0, 0.3])),
    )
    if draw(st.booleans()):
        config = dataclasses.replace(config, discipline=SLOFirst(aging_seconds=draw(st.sampled_from([1.0, 50.0]))))
    router = draw(st.sampled_from(["round_robin", "least_loaded", "prefix_aware"]))
    return requests, config, draw(st.integers(1, 3)), router, draw(st.integers(0, 9))


@settings(max_examples=150, deadline=None)
@given(fleets())
def test_no_request_is_lost_and_time_never_decreases(fleet):
    requests, config, replicas, router, seed = fleet
    result = simulate_requests(requests, config, Linear(), replicas=replicas, router=router, seed=seed)
    _check(result, requests, replicas)
    again = simulate_requests(requests, config, Linear(), replicas=replicas, router=router, seed=seed)
    assert again == result, "the same seed gave another result"
    for name in {r.id for r in requests} - {requests[0].id}:
        assert result.replica_of[name] < replicas


def _check(result: SimulationResult, requests: list[Request], replicas: int) -> None:
    by_id = {r.id: r for r in requests}
    assert sorted(r.request_id for r in result.requests) == sorted(by_id), "each request must end once"
    preempted = {r.request_id for r in result.requests if r.preemptions}
    for record in result.requests:
        request = by_id[record.request_id]
        assert record.finish_reason == "length"
        assert record.prompt_tokens == len(request.prompt_ids)
        assert record.output_tokens == request.params.max_tokens
        assert request.arrival <= record.scheduled_at < record.first_token_at <= record.ended_at
    ends = [record.ended_at for record in result.requests]
    assert ends == sorted(ends), "the clock went backwards"
    assert result.seconds == ends[-1]

    computed: collections.Counter[str] = collections.Counter()
    for replica in range(replicas):
        steps = [step for step in result.steps if step.replica == replica]
        for earlier, later in itertools.pairwise(steps):
            assert earlier.start + earlier.seconds <= later.start + 1e-9, "steps of a device must not overlap"
        assert sum(step.seconds for step in steps) == pytest.approx(result.busy_seconds[replica])
        for step in steps:
            for piece in step.pieces if step.kind != "encode" else ():
                computed[piece.request_id] += piece.count
                assert result.replica_of[piece.request_id] == replica
                stops = by_id[piece.request_id].segment_stops
                assert piece.segment == bisect.bisect_right(stops, piece.start)
    for name, request in by_id.items():
        needed = len(request.prompt_ids) + request.params.max_tokens - 1
        assert computed[name] == needed or (name in preempted and computed[name] > needed)

    cut = collections.defaultdict(list)
    for record in result.segments:
        if record.compute == "prefill":
            cut[record.request_id].append((record.start, record.stop))
    assert {name: sorted(found) for name, found in cut.items()} == {
        name: [(s.start, s.stop) for s in request.segments] for name, request in by_id.items()
    }


def test_noise_depends_only_on_the_seed():
    config = dataclasses.replace(SMALL, noise=0.2)
    requests = [text(float(i), 9, 8, str(i)) for i in range(6)]
    first, other = (simulate_requests(requests, config, Linear(), seed=seed) for seed in (1, 2))
    assert [r.ended_at for r in first.requests] != [r.ended_at for r in other.requests]
    assert simulate_requests(requests, config, Linear(), seed=1) == first


def test_a_replica_is_idle_at_the_end():
    config = dataclasses.replace(SMALL, num_blocks=16, encoder_cache_tokens=32, max_patches=32)
    replica = Replica(0, config, Linear(), Recorder())
    for number in range(7):
        replica.add(text(0.0, 30, 12, str(number), media=(image(str(number), 3, 24),)))
    now, wakes = 0.0, 0
    assert replica.load == 7 * 30
    while (again := replica.wake(now)) is not None:
        assert again >= now
        now, wakes = again, wakes + 1
    assert replica.idle
    assert replica.load == 0
    assert replica.scheduler.num_live == 0
    assert replica.scheduler.pool.num_used == 0
    assert replica.scheduler.features is not None
    assert replica.scheduler.features.cache.usage == 0.0
    assert wakes < 2000


def test_an_empty_workload_takes_no_time():
    result = simulate_requests([], SMALL, Linear())
    assert (result.requests, result.seconds, result.utilisation) == ((), 0.0, 0.0)


def test_the_simulator_plans_the_same_steps_as_the_engines_loop():
    """All requests arrive at once, so that no step depends on the clock. Compared row by row, with preemptions."""
    lengths = [(n * 7 % 29 + 1, n * 5 % 17 + 1) for n in range(25)]
    config = dataclasses.replace(SMALL, num_blocks=16)
    result = simulate_requests([text(0.0, *pair, str(n)) for n, pair in enumerate(lengths)], config, Linear())
    loop = Loop(
        blocks=16,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        buckets=config.buckets,
    )
    for number, (prompt, output) in enumerate(lengths):
        loop.add(prompt, id=str(number), max_tokens=output, ignore_eos=True)
    loop.run()
    assert sum(r.preemptions for r in result.requests) == loop.scheduler.num_preemptions > 0
    planned = [{(r.request_id, r.start, r.count) for r in plan.rows} for plan in loop.plans]
    simulated = []
    for step in result.steps:
        pieces = collections.defaultdict(list)
        for piece in step.pieces:
            pieces[piece.request_id].append(piece)
        simulated.append({(name, own[0].start, sum(p.count for p in own)) for name, own in pieces.items()})
    assert simulated == planned


def test_a_shared_prefix_is_computed_once():
    requests = [text(float(10 * n), 40, 2, str(n)) for n in range(3)]  # equal prompts
    ttft = {}
    for caching in (False, True):
        result = simulate_requests(requests, dataclasses.replace(SMALL, prefix_caching=caching), Linear())
        ttft[caching] = [r.first_token_at - r.arrival for r in result.requests]
    assert ttft[True][0] == ttft[False][0]
    assert all(on < off / 3 for on, off in zip(ttft[True][1:], ttft[False][1:], strict=True))


# -- disciplines and policies -----------------------------------------------------------------------------------------


def test_slo_first_lowers_the_tail_of_short_requests():
    """Long documents are mixed with short questions that have an objective. First come, first served, a question waits
    for the documents before it."""
    load = Lengths(median=8)
    long = Load(share=0.3, text=Lengths(median=600), output=load)
    short = Load(share=0.7, text=Lengths(median=16), output=load, slo=SLO(ttft_ms=300.0, priority=-1))
    mix = Mix(text=short, table=long, image=Load(share=0.0, text=load, output=load))
    arrivals = generate(mix, rate=4.0, count=150, seed=3)
    config = ReplicaConfig(
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=1024,
        encoder_cache_tokens=0,
        segment_policy="by_sentence",
    )
    cost = Linear(step=0.005, token=0.0008)
    tails, ends = {}, {}
    for discipline in (ReplicaConfig().discipline, SLOFirst()):
        result = simulate(arrivals, dataclasses.replace(config, discipline=discipline), cost)
        asked = [r.ttft for r in result.requests if r.priority < 0]
        tails[discipline] = np.percentile(asked, 95)
        ends[discipline] = result.seconds
    first_come, slo_first = tails.values()
    assert slo_first < 0.3 * first_come
    assert np.divide(*ends.values()) == pytest.approx(1.0, abs=0.05), "throughput must not change"


def test_arrivals_get_segments_and_deadlines():
    arrivals = generate(Mix(image=Load(share=0.0, text=Lengths(median=1), output=Lengths(median=1))), **WORKLOAD)
    config = ReplicaConfig(segment_policy={"policy": "by_length", "max_length": 50}, encoder_cache_tokens=0)
    result = simulate(arrivals, config, Linear(step=0.01, token=1e-4))
    prefill = [s for s in result.segments if s.compute == "prefill"]
    assert max(s.stop - s.start for s in prefill) == 50
    assert {s.deadline for s in prefill} == {np.inf}
    due = [dataclasses.replace(a, slo=SLO(ttft_ms=500.0)) for a in arrivals]
    result = simulate(due, config, Linear(step=0.01, token=1e-4))
    last = {s.request_id: s.deadline for s in result.segments if s.compute == "prefill"}
    assert last == pytest.approx({a.id: a.at + 0.5 for a in due})
    assert simulate(due, config, Linear(step=0.01, token=1e-4), tokenizer=None) == result


WORKLOAD = {"rate": 2.0, "count": 20, "seed": 0}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"replicas": 0}, ValueError, "at least one replica"),
        ({"router": "random"}, ValueError, "unknown router 'random'; expected one of round_robin, least_loaded"),
        ({"replica": dataclasses.replace(SMALL, segment_policy="halves")}, ValueError, "unknown segment policy"),
        ({"arrivals": [Arrival(at=0, id="a", kind="text", text_tokens=65, output_tokens=1)]}, InvalidRequest, "65"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, error, message):
    given = {"arrivals": (), "replica": SMALL, "cost": Linear()} | arguments
    with pytest.raises(error, match=message):
        simulate(**given)


@pytest.mark.parametrize(("cache", "max_patches", "message"), [(0, 64, "encoder cache"), (64, 16, "max_patches")])
def test_an_image_that_can_never_fit_is_rejected(cache, max_patches, message):
    config = dataclasses.replace(SMALL, encoder_cache_tokens=cache, max_patches=max_patches)
    with pytest.raises(InvalidRequest, match=message):
        simulate_requests([text(0.0, 20, 2, media=(image("p", 1, 40),))], config, Linear())


# -- routers ----------------------------------------------------------------------------------------------------------


def test_round_robin_takes_turns():
    result = simulate_requests([text(float(i), 4, 2, str(i)) for i in range(6)], SMALL, Linear(), replicas=3)
    assert [result.replica_of[str(i)] for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_least_loaded_avoids_the_replica_with_a_long_prompt():
    requests = [text(0.0, 50, 10, "long"), *(text(0.01 * i, 4, 2, str(i)) for i in range(1, 8))]
    result = simulate_requests(requests, SMALL, Linear(), replicas=2, router=LeastLoaded())
    assert {result.replica_of[str(i)] for i in range(1, 8)} == {1}
    assert result.replica_of["long"] == 0


def test_prefix_aware_follows_the_prefix_unless_its_replica_is_overloaded():
    router = PrefixAware(block_size=4, max_load=1.5)
    shared, other = text(0.0, 12, 1), dataclasses.replace(text(0.0, 12, 1), prompt_ids=tuple(range(50, 62)))
    assert router.route(shared, [0, 0, 0]) == 0
    assert router.route(other, [9, 0, 0]) == 1
    longer = dataclasses.replace(shared, prompt_ids=(*shared.prompt_ids, 7, 7, 7, 7))
    assert router.route(longer, [12, 12, 0]) == 0, "the first blocks are equal"
    assert router.route(other, [12, 12, 0]) == 1
    assert router.route(shared, [1000, 12, 5]) == 2, "its replica is overloaded"
    assert router.route(shared, [0, 12, 17]) == 2, "the prefix was served there last"
    imaged = [dataclasses.replace(shared, prompt_ids=(9,) * 12, media=(image(name, 0, 16),)) for name in ("cat", "dog")]
    assert router.route(imaged[0], [0, 0, 0]) == 0
    assert router.route(imaged[1], [50, 0, 60]) == 1, "placeholders are equal, images differ"
    assert router.route(imaged[0], [20, 20, 20]) == 0


def test_prefix_aware_uses_the_longest_prefix():
    router = PrefixAware(block_size=4)
    long, short = (dataclasses.replace(text(0.0, 8, 1), prompt_ids=(1, 2, 3, 4, *rest)) for rest in ([5] * 4, [6] * 4))
    assert router.route(long, [0, 0]) == 0
    assert router.route(short, [1000, 0]) == 1
    assert router.route(long, [4, 4]) == 0, "only the first block was served elsewhere since"


def test_a_conversation_returns_to_its_replica_whatever_all_conversations_begin_with():
    """Blocks of 16 tokens: the common beginning is longer than 16 blocks, and the next turn shares more than it."""
    router, common = PrefixAware(block_size=16), tuple(range(400))
    turns = {n: (*common, *((1000 + n),) * 60) for n in range(4)}
    for n, ids in turns.items():
        loads = [10_000 if replica == n - 1 else int(replica != n) for replica in range(4)]
        assert router.route(dataclasses.replace(text(0.0, 4, 1), prompt_ids=ids), loads) == n
    for n, ids in turns.items():
        longer = dataclasses.replace(text(0.0, 4, 1), prompt_ids=(*ids, *((2000 + n),) * 100))
        assert router.route(longer, [50] * 4) == n


def test_prefix_aware_forgets_the_least_recently_used_prefixes():
    router = PrefixAware(block_size=4, max_prefixes=2)
    prompts = [dataclasses.replace(text(0.0, 4, 1), prompt_ids=(n,) * 4) for n in range(3)]
    for prompt, loads in zip(prompts, ([0, 9, 9], [9, 0, 9], [9, 9, 0]), strict=True):
        router.route(prompt, loads)
    assert router.route(prompts[1], [5, 5, 0]) == 1
    assert router.route(prompts[0], [5, 5, 0]) == 2, "the oldest of three was forgotten"


def test_least_loaded_balances_requests_of_different_lengths():
    """Round robin gives all long requests to one replica."""
    lengths = itertools.cycle([60, 4, 4, 4])
    requests = [text(1.3 * i, next(lengths), 3, str(i)) for i in range(200)]
    tails = {}
    for router in ("round_robin", "least_loaded"):
        result = simulate_requests(requests, SMALL, Linear(), replicas=4, router=router)
        tails[router] = np.percentile([r.e2e for r in result.requests], 95)
    assert tails["least_loaded"] < 0.7 * tails["round_robin"]


# -- costs ------------------------------------------------------------------------------------------------------------


def test_a_measured_table_as_cost_model():
    """The table has observed one duration per size, and the simulation adds these up."""
    table = TableCost({"decode": (1, 2, 4), "mixed": (4, 8), "encode": ()})
    for size, seconds in ((4, 0.03), (8, 0.05)):
        for _ in range(10):
            table.observe(StepShape(kind="mixed", size=size, rows=1, tokens=size, context=8, attended=8), seconds)
    for _ in range(10):
        table.observe(StepShape(kind="decode", size=1, rows=1, tokens=1, context=8, attended=8), 0.02)
    table = TableCost.from_json(table.to_json())
    config = dataclasses.replace(SMALL, host_seconds=0.0)
    (record,) = simulate_requests([text(0.0, 12, 6)], config, table).requests
    assert record.e2e == pytest.approx(0.05 + 0.03 + 5 * 0.02, rel=0.02)


def test_a_named_gpu():
    setup = gpu_replica(QWEN2_VL_7B | {"max_position_embeddings": 32768}, "a100")
    sizes = setup.cost.sizes
    held = setup.config.usable_blocks * 16 * sizes.kv_bytes_per_token() + sizes.parameter_bytes()
    assert 0.9 * 80e9 < held < 0.92 * 80e9
    assert setup.config.encoder_slices == 32 // 8 + 1
    assert setup.config.max_patches == 5120
    assert setup.vision is not None
    result = simulate(generate(Mix(), rate=3.0, count=40, seed=0), setup.config, setup.cost, vision=setup.vision)
    assert {r.finish_reason for r in result.requests} == {"length"}
    assert {r.modality for r in result.requests} >= {"text", "image"}
    # Reading 15 GB of weights takes 7.5 ms at 2,039 GB/s, and 10.7 ms at 70 % of that: a lower bound of tpot.
    floor = 2 * (sizes.parameters - sizes.vision.parameters - sizes.vocab_parameters) / 2.039e12 / 0.7
    assert all(r.tpot >= floor for r in result.requests if r.tpot is not None)
    assert min(r.tpot for r in result.requests if r.tpot is not None) < 2 * floor


def test_a_gpu_that_is_too_small_is_an_error():
    with pytest.raises(ValueError, match=r"A100 40GB SXM hold 4.0 GB at 10%, and the weights take 15"):
        gpu_replica(QWEN2_7B | {"max_position_embeddings": 32768}, "a100-40gb", gpu_memory_utilization=0.1)
    text_only = gpu_replica(QWEN2_7B | {"max_position_embeddings": 4096}, "h100", devices=2, max_num_seqs=8)
    assert text_only.vision is None
    assert text_only.config.encoder_cache_tokens == 0
    assert text_only.config.max_model_len == 4096
    assert text_only.config.usable_blocks == 8 * 256
