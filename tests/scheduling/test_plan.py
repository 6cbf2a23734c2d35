"""Plans are plain data, on random schedules, and pickled copies of them are worth the same."""

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from omni_jax.scheduling.discipline import SLOFirst
from omni_jax.scheduling.plan import MediaInputs, NewBlock, Score, SlotWrite, StepPlan
from tests.engine.test_vision import vision_request
from tests.engines import greedy, load_tiny, make_engine, request, run
from tests.scheduling.loop import Loop, image_span
from tests.scheduling.test_schedules import play, scenarios

PARTS = (StepPlan, SlotWrite, MediaInputs)


def check_plain(value) -> None:
    """Only numbers, strings, None, arrays of numbers, tuples, and the parts of a plan."""
    if type(value) in PARTS:
        for field in dataclasses.fields(value):
            check_plain(getattr(value, field.name))
    elif type(value) in (tuple, NewBlock, Score):
        for item in value:
            check_plain(item)
    elif type(value) is np.ndarray:
        assert value.dtype in (np.int32, np.int64, np.bool_)
    else:
        assert type(value) in (int, float, bool, str, type(None)), value


class PicklingLoop(Loop):
    """A loop whose device gets pickled copies of the plans, and that commits copies, too."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        dispatch, commit = self.device.dispatch, self.scheduler.commit

        def dispatching(plan, cases, may_write):
            check_plain(plan)
            return dispatch(pickle.loads(pickle.dumps(plan)), cases, may_write)

        self.device.dispatch = dispatching
        self.scheduler.commit = lambda plan, tokens, now: commit(pickle.loads(pickle.dumps(plan)), tokens, now)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(scenarios(images=True, slo=True, memory=True))
def test_plans_of_any_schedule_are_plain_and_pickled_copies_give_the_same(scenario):
    arguments, events = scenario
    loop = PicklingLoop(**arguments)
    play(loop, events)
    loop.check_endings()


def test_a_live_sequence_is_not_plain():
    loop = Loop(blocks=4, block_size=4, max_model_len=16)
    [sequence] = loop.add(3)
    with pytest.raises(AssertionError):
        check_plain((1, sequence))


def test_plans_name_the_rows_and_columns_agree():
    loop = Loop(blocks=40, block_size=4, max_model_len=40, feature_rows=8, discipline=SLOFirst())
    loop.add(9, id="p", media=[image_span("a", 2, 3)], max_tokens=3)
    loop.add(6, id="t", n=2, max_tokens=3, prompt_logprobs=0)
    loop.run()
    for plan in loop.plans:
        assert [row.name for row in plan.rows] == [
            f"{name}[{index}]" for name, (_, index) in zip(plan.request_ids, plan.orders, strict=True)
        ]
        assert plan.num_tokens == plan.counts.sum() == sum(len(row.tokens) for row in plan.rows)
        assert plan.shape.attended == sum(
            sum(range(row.start - row.dropped + 1, row.stop - row.dropped + 1)) for row in plan.rows
        )
    assert [plan.number for plan in loop.plans] == list(range(1, len(loop.plans) + 1))


def test_the_runner_gives_the_same_tokens_for_pickled_plans(monkeypatch):
    """With a picture, and with every sampling parameter that a slot holds."""
    loaded = load_tiny("qwen2_vl")
    busy = greedy(temperature=0.9, seed=4, min_tokens=5, stop_token_ids=(7, 9), logit_bias={3: 2.0}, logprobs=2)
    items = [vision_request(loaded, "one_image"), request("busy", 40, dataclasses.replace(busy, prompt_logprobs=1))]
    expected = run(make_engine(loaded), *items)
    engine, dispatch, plans = make_engine(loaded), loaded.runner.dispatch, []

    def dispatching(plan):
        check_plain(plan)
        plans.append(plan)
        return dispatch(pickle.loads(pickle.dumps(plan)))

    monkeypatch.setattr(loaded.runner, "dispatch", dispatching)
    assert run(engine, *items) == expected
    assert any(plan.media is not None and plan.media.features for plan in plans)
    assert any(plan.suppressed for plan in plans)
    assert any(plan.scores for plan in plans)
