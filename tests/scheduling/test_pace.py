"""What may run beside decoding sequences: as many prompt tokens as keep their pace, and slices of the vision tower that
do not delay a sequence that ranks before their image."""

from omni_jax.cost.published import published_config
from omni_jax.cost.roofline import ModelSizes, Roofline, gpu_named
from omni_jax.memory.block_pool import BlockPool
from omni_jax.requests import Request, SamplingParams
from omni_jax.requests.slo import SLO
from omni_jax.scheduling.blocks import Blocks
from omni_jax.scheduling.buckets import default_buckets
from omni_jax.scheduling.discipline import SLOFirst
from omni_jax.scheduling.limits import SchedulerConfig
from omni_jax.scheduling.scheduler import Scheduler
from tests.scheduling.loop import Loop, image_span

# A step of the loop takes a second.
PACE = SLO(priority=0, tpot_ms=5000)


def test_a_long_prompt_does_not_make_tokens_late():
    """32 sequences decode on an H100 by the roofline; 100 ms a token. The later a chunk, the longer it takes, by its
    query-key pairs: without them in the budget most tokens were late, by up to three seconds."""
    cost = Roofline(
        sizes=ModelSizes.from_config(published_config("Qwen2.5-7B")),
        gpu=gpu_named("h100"),
        devices=1,
        dtype_bytes=2,
        chunk_tokens=8192,
    )
    buckets = default_buckets(max_num_seqs=64, max_num_batched_tokens=8192, overhead=256)
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=8192, max_model_len=131072, buckets=buckets)
    pool = BlockPool(40000, 16)
    scheduler = Scheduler(config, pool, discipline=SLOFirst(), cost=cost, blocks=Blocks(pool))

    def add(name: str, prompt: int, output: int, slo: SLO, now: float):
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        request = Request(id=name, prompt_ids=(1,) * prompt, params=params, slo=slo, arrival=now)
        return scheduler.add(request)[0]

    def step(now: float) -> float:
        plan = scheduler.plan(now)
        assert plan is not None
        now += cost.seconds(plan.shape)
        scheduler.commit(plan, [5 if row.sample else None for row in plan.rows], now)
        return now

    short = [add(str(i), 64, 100_000, SLO(tpot_ms=100.0), 0.0) for i in range(32)]
    now = 0.0
    for _ in range(10):
        now = step(now)
    began, late, tokens = now, 0, 0
    long = add("long", 120_000, 1, SLO(), now)
    while long.finish_reason is None:
        now = step(now)
        due = [s.first_token_at + 0.1 * (s.num_output - 1) for s in short]
        late, tokens = late + sum(now > each + 1e-9 for each in due), tokens + len(due)
    assert (late, tokens > 1000) == (0, True)
    # Smaller steps cost the prompt next to nothing: 120,000 tokens alone take as long.
    assert now - began < 1.03 * cost.prefill_seconds(120_000, 0)


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
