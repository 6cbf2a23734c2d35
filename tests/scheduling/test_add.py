"""An error of ours while a request is added ends that request alone, and leaves nothing of it."""

import pytest

from omni_jax.memory.block_pool import BlockPool
from omni_jax.requests.slo import SLO
from omni_jax.scheduling.blocks import Blocks
from omni_jax.scheduling.discipline import SLOFirst
from omni_jax.scheduling.features import Features
from omni_jax.scheduling.preemption import Preemption
from omni_jax.scheduling.queues import Line, Queues
from tests.scheduling.loop import Loop, image_span

CALLS = [
    *((Blocks, name) for name in ("match", "take_hits")),
    *((BlockPool, name) for name in ("find", "share")),
    *((Features, name) for name in ("track", "can_start", "_pass", "_file")),
    (Preemption, "requeue"),
    *((Queues, name) for name in ("remove", "add", "file")),
    *((Line, name) for name in ("key", "put")),
    (SLOFirst, "cohort"),
]


@pytest.mark.parametrize(("owner", "name"), CALLS, ids=[f"{owner.__name__}.{name}" for owner, name in CALLS])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", [1, 2], ids=["first", "second"])
def test_a_request_is_added_wholly_or_not_at_all(owner, name, call, after, monkeypatch):
    if after and name == "share":
        pytest.skip("it changes nothing where it raises")
    run = Loop(
        blocks=40,
        block_size=4,
        max_model_len=64,
        feature_rows=12,
        prefix_caching=True,
        discipline=SLOFirst(aging_seconds=1000),
    )
    prompt = [i % 7 for i in range(20)]
    images = [image_span("a", 2, 3), image_span("b", 14, 3)]
    run.add(prompt, media=images[:1], max_tokens=1)
    run.run()  # its blocks are found by the next one
    run.add(9, media=[image_span("c", 1, 6)], max_tokens=8, slo=SLO(priority=1))
    run.step()
    function, calls = getattr(owner, name), [0]

    def failing(*arguments, **named):
        calls[0] += 1
        found = function(*arguments, **named) if after or calls[0] != call else None
        if calls[0] == call:
            raise RuntimeError("a fault")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failing)
        with pytest.raises(RuntimeError, match="a fault"):
            run.add(prompt, id="broken", media=images, max_tokens=2, n=2)
    assert not run.scheduler.has("broken")
    assert run.scheduler.sequences("broken") == []
    run.check()
    run.add(prompt, id="broken", media=images, max_tokens=2, n=2)  # the id is free
    run.run()
    run.check_endings()
