"""The order of service: small schedules in which it was broken once, and how long a sequence waits at most.

Random schedules check the order at each step, see service.py.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_jax.requests.segment import Segment
from omni_jax.requests.slo import SLO
from omni_jax.scheduling.discipline import SLOFirst
from tests.scheduling.loop import Loop


def loop(**options) -> Loop:
    """A loop by deadline, in which nobody rises by aging."""
    known = {"blocks": 100, "block_size": 2, "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 8}
    return Loop(**{**known, "discipline": SLOFirst(aging_seconds=1000), **options})


def segments(*classes: tuple[int, int]) -> tuple[Segment, ...]:
    """Segments of a prompt from (number of tokens, class)."""
    found, start = [], 0
    for tokens, priority in classes:
        found.append(Segment(start=start, stop=start + tokens, modality="text", priority=priority))
        start += tokens
    return tuple(found)


def test_later_segments_of_a_less_urgent_class_do_not_delay_a_waiting_sequence():
    run = loop()
    (mixed,) = run.add(30, max_tokens=1, segments=segments((2, 0), (28, 5)))
    (other,) = run.add(4, max_tokens=1, slo=SLO(priority=3))
    run.step()
    assert (mixed.computed, other.computed) == (4, 4)


def test_later_segments_of_a_less_urgent_class_do_not_keep_a_slot_from_a_waiting_sequence():
    run = loop()
    run.add(2, max_tokens=40, ignore_eos=True, slo=SLO(priority=9))
    for _ in range(2):
        run.step()
    (mixed,) = run.add(50, max_tokens=1, segments=segments((10, 0), (40, 5)))
    run.step()
    (other,) = run.add(4, max_tokens=1, slo=SLO(priority=3))
    run.step()
    assert (mixed.computed, other.computed) == (7 + 4, 4)


def test_nothing_is_taken_for_a_sequence_behind_one_that_waits_for_room():
    """The first one has risen by aging, but takes only by its class; the second would take for the first."""
    run = loop(blocks=32, discipline=SLOFirst(aging_seconds=3))
    (victim,) = run.add(20, max_tokens=20, ignore_eos=True, slo=SLO(priority=0))
    (aged,) = run.add(60, max_tokens=1, slo=SLO(priority=1))
    for _ in range(9):
        run.step()
    (urgent,) = run.add(40, max_tokens=1, slo=SLO(priority=-1))
    while aged.slot is None:
        run.step()
        assert urgent.slot is None
    assert victim.num_output == 20
    assert run.scheduler.num_preemptions == 0
    run.run()


def test_a_preempted_sequence_does_not_take_from_itself():
    """Its first segment was of a less urgent class than its next one."""
    run = loop(blocks=32, max_num_seqs=3)
    (first,) = run.add(20, max_tokens=30, ignore_eos=True, segments=segments((10, 5), (10, 0)), slo=SLO(priority=5))
    while first.num_output < 3:
        run.step()
    run.add(50, max_tokens=4, ignore_eos=True, slo=SLO(priority=-1))
    run.run()
    taken = [(event.sequence.name, event.by) for event in run.scheduler.events if event.kind == "preempt"]
    assert taken == [("r0[0]", "r1[0]")]


def test_blocks_that_others_share_are_not_taken_in_vain():
    run = loop(blocks=32, max_num_seqs=4, max_num_batched_tokens=64)
    run.add(40, n=2, max_tokens=12, ignore_eos=True, slo=SLO(priority=5))
    for _ in range(4):
        run.step()
    run.add(28, max_tokens=1, slo=SLO(priority=0))  # 14 blocks, where 13 can be freed
    run.step()
    assert not [event for event in run.scheduler.events if event.kind == "preempt"]
    run.run()


@pytest.mark.parametrize("tpot", [100.0, 3000.0])
def test_a_step_beside_a_first_token_in_flight_lasts_an_interval_at_most(tpot):
    class TokenCost:
        def seconds(self, shape):
            return 0.1 * shape.tokens

    run = loop(max_num_batched_tokens=64, cost=TokenCost())
    run.add(2, max_tokens=20, ignore_eos=True, slo=SLO(tpot_ms=tpot))
    run.step()
    run.add(60, max_tokens=1, slo=SLO())
    run.step()
    smallest = run.config.buckets.mixed[0]
    assert 1 < run.plans[-1].num_tokens <= max(smallest, tpot / 100)


@st.composite
def flows(draw):
    """(slots, aging seconds, steps between urgent arrivals, tokens of each, classes between, prompt of the other)."""
    return (
        draw(st.integers(1, 4)),
        draw(st.sampled_from([2, 5, 10])),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 8)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 12)),
    )


@settings(max_examples=40, deadline=None)
@given(flows())
def test_no_class_starves(flow):
    """More work of a more urgent class arrives than the slots can do, for ever. A sequence that waits longer than
    (distance of the classes + 1) x aging seconds ranks before all that arrive from then on: it waits for those before
    it, each of which takes its prompt and output in steps. It falls back to its class with each step that serves it."""
    slots, aging, every, output, distance, prompt = flow
    run = Loop(
        blocks=8 * slots + 8,
        block_size=4,
        max_model_len=20,
        max_num_seqs=slots,
        max_num_batched_tokens=slots + 1,
        discipline=SLOFirst(aging_seconds=aging),
    )
    run.watched = False
    run.check = lambda: None  # quadratic in the number that wait
    rises = (distance + 1) * aging  # seconds, which are steps

    def step(number: int) -> None:
        if number % every == 0:
            run.add(2, max_tokens=output, ignore_eos=True, slo=SLO(priority=0))
        run.step()

    for number in range(12):
        step(number)
    (low,) = run.add(prompt, max_tokens=2, ignore_eos=True, slo=SLO(priority=distance))
    before = run.scheduler.num_live - 1 + math.ceil(rises / every)
    chunks = prompt  # at worst a token at a time
    bound = rises + before * (2 + output + 1) + chunks * (rises + slots * (2 + output + 1)) + 2
    for number in range(bound):
        if low.num_output:
            return
        step(number)
    raise AssertionError(f"no token within {bound} steps")
