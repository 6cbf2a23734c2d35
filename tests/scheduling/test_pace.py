"""When a slice of the vision tower may run: not if it delays a decoding sequence that ranks before its image."""

from omni_jax.requests.slo import SLO
from omni_jax.scheduling import SLOFirst
from tests.scheduling.loop import Loop, image_span

# A step of the loop takes a second.
PACE = SLO(priority=0, tpot_ms=5000)


def decoding(discipline, **options) -> Loop:
    """A loop with a sequence that decodes a token per second, with an objective of one per five seconds."""
    run = Loop(
        blocks=60,
        block_size=4,
        max_model_len=64,
        max_num_batched_tokens=16,
        feature_rows=12,
        discipline=discipline,
        **options,
    )
    (run.text,) = run.add(3, max_tokens=40, slo=PACE)
    while run.text.num_output < 2:
        run.step()
    return run


def add_image(run: Loop, **slo):
    (sequence,) = run.add(8, media=[image_span("a", 1, 6)], max_tokens=2, slo=SLO(**slo))
    run.step()
    return sequence


def test_first_come_first_served_slices_always_run():
    run = decoding(None)
    add_image(run)
    assert run.scheduler.may_encode(1e6)


def test_a_slice_waits_until_decoding_sequences_have_enough_lead():
    run = decoding(SLOFirst(aging_seconds=1000))
    add_image(run, priority=1)
    lead = run.text.first_token_at + 5.0 * (run.text.num_output + run.text.pending) - run.pool.step
    assert run.scheduler.may_encode(lead - 0.1)
    assert not run.scheduler.may_encode(lead + 6.0)
    for _ in range(4):
        run.step()  # each step adds four seconds of lead
    assert run.scheduler.may_encode(lead + 6.0)


def test_a_more_urgent_image_does_not_wait():
    run = decoding(SLOFirst(aging_seconds=1000))
    add_image(run, priority=-1)
    assert run.scheduler.may_encode(1e6)


def test_aging_raises_a_sequence_that_waits_for_its_image():
    run = decoding(SLOFirst(aging_seconds=4), slices=1000)
    sequence = add_image(run, priority=1)
    assert not run.scheduler.may_encode(1e6)
    began = run.pool.step
    while not run.scheduler.may_encode(1e6):
        run.step()
        assert run.pool.step - began < 20, "the image is delayed for ever"
    assert sequence.finish_reason is None


def test_slices_always_run_without_a_tpot_objective():
    run = decoding(SLOFirst(aging_seconds=1000))
    run.scheduler.abort(run.text.request.id)
    run.add(3, max_tokens=30, slo=SLO(priority=0))
    run.step()
    add_image(run, priority=1)
    assert run.scheduler.may_encode(1e6)
