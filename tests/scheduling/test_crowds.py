"""What a plan costs does not grow with the number of sequences that wait. Nothing here measures time."""

import gc
import weakref

import pytest

from omni_jax.memory.prefix import prompt_digests
from omni_jax.requests import Request, SamplingParams, Sequence
from omni_jax.requests.slo import SLO
from omni_jax.scheduling.discipline import SLOFirst
from omni_jax.scheduling.queues import MAX_CANDIDATES, Line
from tests.scheduling.loop import Loop, image_span


@pytest.fixture
def looks(monkeypatch):
    """Counts how often the scheduler asks what it must know of a sequence to sort or admit it."""
    count = [0]

    def counted(function):
        def call(*arguments, **named):
            count[0] += 1
            return function(*arguments, **named)

        return call

    from omni_jax.scheduling import admission, features, preemption

    monkeypatch.setattr(Line, "key", counted(Line.key))
    monkeypatch.setattr(SLOFirst, "rank", counted(SLOFirst.rank))
    monkeypatch.setattr(SLOFirst, "level", counted(SLOFirst.level))
    monkeypatch.setattr(features.Features, "can_start", counted(features.Features.can_start))
    monkeypatch.setattr(features.Features, "track", counted(features.Features.track))
    for module in (admission, preemption):
        monkeypatch.setattr(module, "can_start", counted(module.can_start))
        monkeypatch.setattr(module, "computable", counted(module.computable))
    monkeypatch.setattr(Sequence, "priority", property(counted(Sequence.priority.fget)))
    return count


def crowd(kind: str, waiting: int) -> Loop:
    """Sequences that decode in all 8 slots or nearly so, and `waiting` that wait."""
    slo = kind.startswith("slo")
    options = {"discipline": SLOFirst(aging_seconds=10)} if slo else {}
    if "pictures" in kind:
        options["feature_rows"] = 12
    if "compression" in kind:
        options["ratio"] = lambda step, total: 0.5
    if "swap" in kind:
        options["swap"] = 1
    run = Loop(blocks=400, block_size=4, max_model_len=64, prefix_caching="shared" in kind, **options)
    run.watched, run.check = False, lambda: None  # they look at all of them
    for number in range(8):
        run.add(8, max_tokens=4 + number % 7, ignore_eos=True, slo=SLO(priority=5))
    for _ in range(3):
        run.step()
    for number in range(waiting):
        media = [image_span(f"i{number if 'same' not in kind else 0}", 1, 6)] if "pictures" in kind else []
        prompt = [i % 7 for i in range(24)] if "shared" in kind else 8
        run.add(prompt, max_tokens=4, ignore_eos=True, media=media, slo=SLO(priority=3 + number % 3))
    return run


KINDS = ["text", "shared", "pictures", "same pictures", "compression", "swap"]


@pytest.mark.parametrize("kind", [f"{name} {kind}" for name in ("fcfs", "slo") for kind in KINDS])
def test_a_plan_looks_at_no_more_sequences_when_more_wait(kind, looks):
    most = {}
    for waiting in (1000, 3000):
        run, seen = crowd(kind, waiting), []
        plan = run.scheduler.plan

        def counted(now, plan=plan, seen=seen):
            before = looks[0]
            try:
                return plan(now)
            finally:
                seen.append(looks[0] - before)

        run.scheduler.plan = counted
        for _ in range(12):
            run.step()
        assert sum(s.finish_reason is not None for s in run.sequences) >= 4
        most[waiting] = max(seen)
    assert most[3000] <= 1.1 * most[1000] + 10


def test_sequences_that_wait_for_a_block_are_looked_at_once(monkeypatch):
    """200 that share a prompt: while the first computes it in many steps, no step looks at all of the others."""
    run = Loop(blocks=400, block_size=4, max_model_len=64, max_num_batched_tokens=8, prefix_caching=True)
    looked = []
    match = run.blocks.match
    monkeypatch.setattr(run.blocks, "match", lambda sequence: looked.append(sequence) or match(sequence))
    common = [i % 7 for i in range(40)]
    family = [run.add([*common, n % 7], max_tokens=2)[0] for n in range(200)]
    for _ in range(4):
        run.step()
    assert len(looked) == len(set(looked)) <= 200
    assert family[0].computed == 32
    run.run()
    run.check_endings()
    assert sum(s.cached == 40 for s in family) == 199


def test_an_image_that_thousands_share_lets_them_start_in_turn():
    run = Loop(blocks=400, block_size=4, max_model_len=64, feature_rows=12)
    run.watched, run.check = False, lambda: None
    family = [run.add(9, media=[image_span("a", 1, 6)], max_tokens=1)[0] for _ in range(3 * MAX_CANDIDATES)]
    for _ in range(20):
        if not any(s.computed for s in family):
            run.step()
    del run.check
    assert any(s.computed for s in family)
    run.check()
    run.run()
    run.check_endings()
    assert run.encoded == {b"a": 1}


WAITING = {  # why a sequence waits: whether one does, of these queues
    "in line": lambda queues, sequence: sequence in queues.line,
    "parked": lambda queues, sequence: sequence in queues.parked,
    "without features": lambda queues, sequence: not sequence.media_held,
    "with features": lambda queues, sequence: sequence.media_held > 0,
    "returning": lambda queues, sequence: sequence in queues.returning,
    "swapped": lambda queues, sequence: sequence.swapped is not None,
    "with blocks": lambda queues, sequence: bool(sequence.blocks),
}


@pytest.mark.parametrize("why", WAITING)
def test_an_abort_keeps_nothing_of_a_sequence_that_waits(why):
    pictures = why in ("without features", "with features", "returning")
    run = Loop(
        blocks=400,
        block_size=4,
        max_model_len=64,
        discipline=SLOFirst(aging_seconds=1000),
        prefix_caching=why == "parked",
        feature_rows=12 if pictures else 0,
        swap=1 if why == "swapped" else None,
    )
    queues = run.scheduler._queues
    for number in range(3 * MAX_CANDIDATES if why == "returning" else 40):
        media = [image_span("a" if why == "returning" else f"i{number}", 1, 6)] if pictures else []
        prompt = [i % 7 for i in range(60)] if why == "parked" else 9
        run.add(prompt, media=media, max_tokens=3, ignore_eos=True)
    for _ in range(200):
        if any(WAITING[why](queues, sequence) for sequence in queues.waiting):
            break
        run.step()
        while why in ("swapped", "with blocks") and queues.running:
            run.preempt(queues.running[0], keep=why == "with blocks")
    names = sorted({s.request.id for s in queues.waiting if WAITING[why](queues, s)})[::2]
    ended = [weakref.ref(sequence) for name in names for sequence in run.scheduler.abort(name)]
    assert ended
    run.check()
    for _ in range(2):  # those in flight hold sequences
        run.step()
    run.sequences = [s for s in run.sequences if s.finish_reason is None]
    for record in (run.computed, run.admitted, run.plans, run.device.streams, run.scheduler.events):
        record.clear()
    gc.collect()
    assert not [sequence() for sequence in ended if sequence() is not None]
    run.run()


# -- nothing is taken for a sequence that could not run ---------------------------------------------------------------


def decoding_and_prefilling() -> tuple[Loop, Sequence]:
    """A sequence of class 5 decodes, and one of class 0 has a long prompt that uses the whole budget of each step."""
    run = Loop(
        blocks=200,
        block_size=4,
        max_model_len=400,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        prefix_caching=True,
        discipline=SLOFirst(aging_seconds=1000),
    )
    (victim,) = run.add(3, max_tokens=60, ignore_eos=True, slo=SLO(priority=5))
    for _ in range(3):
        run.step()
    run.add([i % 7 for i in range(300)], max_tokens=2, slo=SLO(priority=0))
    run.step()
    return run, victim


def test_a_sequence_that_would_get_no_tokens_takes_no_slot():
    run, victim = decoding_and_prefilling()
    (waiting,) = run.add(30, max_tokens=2, slo=SLO(priority=3))
    before = victim.num_output
    for _ in range(30):
        run.step()
    assert victim.num_output == before + 30
    assert waiting.scheduled_at is None
    run.run()
    run.check_endings()


def test_a_sequence_whose_next_block_is_being_computed_takes_no_slot():
    run, victim = decoding_and_prefilling()
    run.add([*(i % 7 for i in range(300)), 1], max_tokens=2, slo=SLO(priority=-1))
    before = victim.num_output
    for _ in range(30):
        run.step()
    assert victim.num_output == before + 30
    run.run()
    run.check_endings()


def test_a_more_urgent_sequence_still_takes_a_slot_of_a_sequence_that_uses_the_whole_budget():
    """The budget is as large as the number of slots: it has room for the taker once its victim does not decode."""
    run = Loop(
        blocks=60,
        block_size=4,
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=2,
        discipline=SLOFirst(aging_seconds=1000),
    )
    for _ in range(2):
        run.add(2, max_tokens=50, ignore_eos=True, slo=SLO(priority=5))
    for _ in range(6):
        run.step()
    (urgent,) = run.add(3, max_tokens=2, slo=SLO(priority=0))
    run.step()
    assert urgent.slot is not None
    run.run()
    run.check_endings()


def test_digests_that_come_with_a_request_are_used():
    run = Loop(blocks=60, block_size=4, max_model_len=64, prefix_caching=True)
    request = Request(id="r", prompt_ids=tuple(i % 7 for i in range(30)), params=SamplingParams(max_tokens=1))
    digests = prompt_digests(request, 4)
    assert len(digests) == 7
    (sequence,) = run.scheduler.add(Request(**{**vars(request), "digests": digests}))
    assert sequence.digests == list(digests)
