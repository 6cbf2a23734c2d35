"""An error of ours while a request is added ends that request alone: in an engine, and in the loop of a core."""

import pytest

from omni_jax.engine import core as core_module
from omni_jax.engine.core_loop import CoreLoop
from omni_jax.engine.input_processor import InputProcessor
from omni_jax.engine.messages import Add, Outputs, Stop
from omni_jax.engine.output_processor import OutputProcessor
from omni_jax.requests import Delta
from omni_jax.scheduling.preemption import Preemption
from omni_jax.scheduling.queues import Line, Queues
from omni_jax.scheduling.scheduler import Scheduler
from tests.engines import assert_idle, greedy, load_tiny, make_engine, request, run

INSIDE = [(Scheduler, "add"), (core_module, "with_deadlines"), (Preemption, "requeue"), (Queues, "add"), (Line, "put")]
BEFORE = [(InputProcessor, "check"), (InputProcessor, "cut"), (OutputProcessor, "add")]


@pytest.fixture(scope="module")
def main():
    return load_tiny("main")


def ids(calls):
    return [f"{getattr(owner, '__name__', owner)}.{name}" for owner, name in calls]


def broken(*arguments, **named):
    raise RuntimeError("a fault")


@pytest.mark.parametrize(("owner", "name"), [*INSIDE, *BEFORE], ids=ids([*INSIDE, *BEFORE]))
def test_an_error_while_a_request_is_added_leaves_nothing_of_it(main, monkeypatch, owner, name):
    engine = make_engine(main)
    engine.add(request("good", 40, greedy(max_tokens=6)))
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, broken)
        with pytest.raises(RuntimeError, match="a fault"):
            engine.add(request("bad", 20, greedy(max_tokens=4, n=2, prompt_logprobs=0)))
    assert not engine.core.has("bad")
    deltas: list[Delta] = []
    while engine.has_work:
        deltas += engine.step()
    assert {delta.request_id for delta in deltas} == {"good"}
    assert_idle(engine)
    again = run(engine, request("bad", 20, greedy(max_tokens=4, n=2, prompt_logprobs=0)))  # the id is free
    assert [len(again["bad", index].tokens) for index in range(2)] == [4, 4]


@pytest.mark.parametrize(("owner", "name"), INSIDE, ids=ids(INSIDE))
def test_a_core_ends_only_the_request_that_it_could_not_take(main, monkeypatch, owner, name):
    engine, sent = make_engine(main), []
    loop = CoreLoop(engine.core, lambda client, message: sent.append(message))
    function = getattr(owner, name)

    def broken_once(*arguments, **named):
        monkeypatch.setattr(owner, name, function)
        return broken()

    monkeypatch.setattr(owner, name, broken_once)
    for each in (request("bad", 20, greedy(max_tokens=4, n=2)), request("good", 20, greedy(max_tokens=4))):
        loop.put(0, Add(engine._inputs.process(each)))
    while loop.busy:
        loop._turn()
    loop.put(0, Stop())
    loop._turn()
    outputs = [output for message in sent if isinstance(message, Outputs) for output in message.outputs]
    ended = {(o.request_id, o.index): (o.finish_reason, o.error) for o in outputs if o.finish_reason is not None}
    failed = ("error", "the engine could not take this request")
    assert ended == {("bad", 0): failed, ("bad", 1): failed, ("good", 0): ("length", None)}
    assert not engine.core.has("bad")
