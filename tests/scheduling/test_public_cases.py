"""Publicly reported faults of other engines, and the behaviour required here."""

import pytest

from omni_jax.memory.block_pool import BlockPool
from omni_jax.requests import InvalidRequest, Request, SamplingParams
from omni_jax.scheduling.buckets import Buckets, default_buckets
from omni_jax.scheduling.limits import SchedulerConfig, output_room
from omni_jax.scheduling.scheduler import Scheduler
from tests.scheduling.loop import Loop, image_span


def config(**changes) -> SchedulerConfig:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64} | changes
    sizes = {name: limits[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
    return SchedulerConfig(**{"buckets": default_buckets(**sizes)} | limits)


# -- SCH-01: requests that can never fit ------------------------------------------------------------------------------


def test_sch_01_a_prompt_that_can_never_fit_is_rejected_and_blocks_no_other():
    loop = Loop(blocks=50, block_size=16, max_model_len=800, max_num_batched_tokens=256)
    with pytest.raises(InvalidRequest, match=r"800 tokens, but the prompt has 1008 tokens and asks for 16 more"):
        loop.add(63 * 16)
    assert loop.scheduler.num_live == 0
    loop.add(5, max_tokens=3)
    loop.run(steps=10)
    loop.check_endings()


@pytest.mark.parametrize(("prompt", "max_tokens"), [(800, 0), (799, 1), (784, 16), (1, 799)])
def test_sch_01_a_request_that_fits_exactly_runs_and_so_does_the_next(prompt, max_tokens):
    loop = Loop(blocks=50, block_size=16, max_model_len=800, max_num_batched_tokens=256)
    loop.add(prompt, max_tokens=max_tokens)
    (short,) = loop.add(5, max_tokens=3)
    loop.run(steps=prompt // 256 + max_tokens + 20)
    loop.check_endings()
    assert loop.scheduler.num_preemptions <= 1
    assert short.num_output == 3


@pytest.mark.parametrize("max_tokens", [None, 10**6])
def test_sch_01_max_tokens_beyond_the_context_end_at_the_context(max_tokens):
    loop = Loop(blocks=4, block_size=4, max_model_len=16)
    (sequence,) = loop.add(5, max_tokens=max_tokens)
    loop.run(steps=20)
    assert (sequence.num_output, sequence.finish_reason) == (11, "length")


@pytest.mark.parametrize("blocks", [49, 50])
def test_sch_01_a_pool_smaller_than_the_context_is_rejected(blocks):
    pool = BlockPool(blocks + 1, 16)
    if blocks == 50:
        Scheduler(config(max_model_len=800), pool)
    else:
        with pytest.raises(ValueError, match=r"49 blocks of 16 tokens, less than one sequence of max_model_len 800"):
            Scheduler(config(max_model_len=800), pool)


def test_inconsistent_limits_are_rejected():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(3\) must be at least max_num_seqs \(4\)"):
        config(max_num_batched_tokens=3)
    for buckets in (Buckets(decode=(1, 3), mixed=(64,)), Buckets(decode=(1, 4), mixed=(16, 63))):
        with pytest.raises(ValueError, match=f"{buckets.rows} rows, {buckets.mixed[-1]} tokens.*full step"):
            config(buckets=buckets)


def test_api_10_a_duplicate_of_a_live_id_is_rejected():
    loop = Loop(blocks=8, block_size=4, max_model_len=16)
    loop.add(4, id="same", max_tokens=4)
    loop.step()
    with pytest.raises(InvalidRequest, match="'same' is in use"):
        loop.scheduler.add(Request(id="same", prompt_ids=(1, 2), params=SamplingParams()))
    loop.run(steps=20)
    loop.check_endings()
    loop.add(3, id="same", max_tokens=2)
    loop.run(steps=20)
    loop.check_endings()


# -- API-14: at the edge of the context -------------------------------------------------------------------------------

L = 32


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "room"),
    [
        *((L - 1, 0, 0), (L - 1, 1, 1), (L - 1, None, 1), (L - 1, 9, 1), (L, 0, 0)),
        *((L, 1, None), (L, None, None), (L + 1, 0, None), (L + 1, 1, None), (L + 1, None, None)),
    ],
)
def test_api_14_prompts_at_the_edge_of_the_context(prompt, max_tokens, room):
    loop = Loop(blocks=L // 4, block_size=4, max_model_len=L)
    if room is None:
        more = f" and asks for {max_tokens} more" if max_tokens is not None else ""
        with pytest.raises(InvalidRequest, match=f"length is {L} tokens, but the prompt has {prompt} tokens{more}[.]"):
            loop.add(prompt, max_tokens=max_tokens)
    else:
        (sequence,) = loop.add(prompt, max_tokens=max_tokens)
        assert sequence.max_output == room
    loop.add(3, max_tokens=2)
    loop.run(steps=20)
    loop.check_endings()


def test_an_empty_prompt_is_rejected():
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        output_room(Request(id="r", prompt_ids=(), params=SamplingParams()), 16)


# -- SCH-03: no livelock ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [8, 24, 512])
@pytest.mark.parametrize("long_comes", ["first", "last", "while they decode"])
@pytest.mark.parametrize("long", [18 * 16, 12 * 16, 9 * 16])
def test_sch_03_a_long_prompt_and_decoding_sequences_in_a_small_pool_make_progress(long, long_comes, budget):
    loop = Loop(blocks=20, block_size=16, max_model_len=320, max_num_batched_tokens=budget)
    prompts = [long, 10, 10, 10, 10] if long_comes == "first" else [10, 10, 10, 10, long]
    for i, prompt in enumerate(prompts):
        if long_comes == "while they decode" and i == 4:
            for _ in range(20):
                loop.step()
        loop.add(prompt, max_tokens=30 if prompt == long else 100)
    loop.run(steps=600)
    loop.check_endings()
    needed = sum(s.num_prompt + s.max_output for s in loop.sequences)
    assert sum(loop.computed.values()) < 3 * needed
    assert 0 < loop.scheduler.num_preemptions <= 12
    assert max(loop.admitted.values()) <= 6


def test_sch_03_admission_leaves_a_block_for_each_running_sequence():
    """Three decoding sequences need their next block while the fourth prefills, which would be preempted repeatedly."""
    loop = Loop(blocks=10, block_size=4, max_model_len=40, max_num_batched_tokens=8)
    for _ in range(3):
        loop.add(4, max_tokens=5)
    loop.step()
    loop.add(28, max_tokens=2)
    loop.run(steps=40)
    loop.check_endings()
    assert loop.scheduler.num_preemptions == 0


# -- SCH-06: a budget that is no bucket size --------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [300, 301, 304, 316, 317, 318, 640])
def test_sch_06_a_budget_of_317_has_a_bucket_that_covers_it(tokens):
    loop = Loop(blocks=100, block_size=16, max_model_len=800, max_num_batched_tokens=317, max_num_seqs=5)
    assert loop.config.buckets.mixed[-1] == 320
    loop.add(tokens - 7, max_tokens=4)
    loop.add(7, max_tokens=4)
    loop.run(steps=20)
    loop.check_endings()
    assert max(plan.num_tokens for plan in loop.plans) == min(tokens, 317)
    assert all(plan.size >= plan.num_tokens for plan in loop.plans)


# -- PRE: preemption changes nothing ----------------------------------------------------------------------------------


def test_pre_01_two_requests_give_the_same_output_in_7_blocks_and_in_64():
    endings = []
    for blocks in (7, 64):
        loop = Loop(blocks=blocks, block_size=16, max_model_len=70)
        for _ in range(2):
            loop.add(34, max_tokens=35)
        loop.run(steps=200)
        loop.check_endings()
        assert (loop.scheduler.num_preemptions > 0) == (blocks == 7)
        endings.append([loop.ending(sequence) for sequence in loop.sequences])
    assert endings[0] == endings[1]


@pytest.mark.parametrize(
    "after",
    [(0,), (1,), (4,), (4, 8, 12), (0, 1, 2), (2, 3, 5)],
    ids=["in the prefill", "before the first decode", "after 3 tokens", "3 times", "3 times at once", "in between"],
)
@pytest.mark.parametrize("wanted", [{}, {"n": 3}, {"prompt_logprobs": 0}, {"min_tokens": 12, "ignore_eos": False}])
def test_pre_03_a_preempted_sequence_gives_the_output_it_gives_alone(after, wanted):
    loop = Loop(blocks=40, block_size=4, max_model_len=48, max_num_batched_tokens=8, eos={3})
    loop.add(8, max_tokens=20, **{"ignore_eos": True} | wanted)
    loop.add(9, max_tokens=20, ignore_eos=True)
    forced = 0
    for step in range(30):
        if step in after:
            for sequence in reversed(list(loop.scheduler.running)):
                loop.preempt(sequence)
                forced += 1
        loop.step()
    assert forced or after == (0,)
    loop.run(steps=200)
    loop.check_endings()


@pytest.mark.parametrize("what", ["preempt", "raise"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_pre_03_prompt_logprobs_are_returned_once_after_recomputation(what, steps):
    loop = Loop(blocks=40, block_size=4, max_model_len=48, max_num_batched_tokens=8)
    (sequence,) = loop.add(22, max_tokens=5, prompt_logprobs=0)
    for _ in range(steps):
        loop.step()
    returned = sequence.scored
    assert returned == 8 * (steps - 1)
    if what == "preempt":
        loop.preempt(sequence)
    else:
        loop.fail_step(dispatched=True)
    loop.step()
    loop.step()
    assert sequence.scored >= returned
    loop.run(steps=20)
    loop.check_endings()


def test_pre_03_a_preempted_sequence_waits_for_its_token_and_stops_no_other():
    loop = Loop(blocks=40, block_size=4, max_model_len=48)
    (first,) = loop.add(8, max_tokens=20)
    loop.step()
    loop.preempt(first)
    (second,) = loop.add(8, max_tokens=20)
    assert first.pending == 1
    loop.step()
    assert loop.scheduler.running == [second]
    loop.step()
    assert loop.scheduler.running == [first, second]
    loop.run(steps=40)
    loop.check_endings()


def test_pre_03_a_preempted_sequence_is_overtaken_by_none_that_could_not_start_while_its_token_was_read():
    """First come, first served: of many later ones, only those that start in one step pass it."""
    loop = Loop(blocks=16, block_size=4, max_model_len=64, max_num_seqs=2)
    (first,) = loop.add(40, max_tokens=20, ignore_eos=True)
    loop.step()
    later = [loop.add(28, max_tokens=20, ignore_eos=True)[0] for _ in range(8)]
    loop.preempt(first)
    while first.slot is None:
        assert loop.step()
    assert sum(s.scheduled_at is not None for s in later) <= 2
    loop.run()
    loop.check_endings()


# -- n continuations of one prompt ------------------------------------------------------------------------------------

CACHING = pytest.mark.parametrize("caching", [False, True], ids=["alone", "prefix caching"])


@CACHING
@pytest.mark.parametrize(("prompt", "tail"), [(1, 1), (4, 4), (5, 1), (8, 4), (17, 1), (19, 3)])
@pytest.mark.parametrize("budget", [8, 64])
def test_continuations_wait_for_the_blocks_of_the_prompt_and_compute_only_the_tail(prompt, tail, budget, caching):
    loop = Loop(blocks=64, block_size=4, max_model_len=32, max_num_batched_tokens=budget, prefix_caching=caching)
    first, *others = loop.add(prompt, n=4, max_tokens=3)
    shared = (prompt - 1) // 4 * 4
    assert list(loop.scheduler.waiting) == [first, *others]
    while any(other.scheduled_at is None for other in others):
        before = first.computed
        loop.step()
        assert before >= shared or all(other.scheduled_at is None for other in others)
    for other in others:
        assert other.blocks[: shared // 4] == first.blocks[: shared // 4]
    loop.run(steps=20)
    loop.check_endings()
    assert loop.computed[first] == prompt + 2
    assert [loop.computed[other] for other in others] == [tail + 2] * 3


@CACHING
def test_continuations_wait_for_a_first_one_whose_prompt_is_scored(caching):
    loop = Loop(blocks=64, block_size=4, max_model_len=32, max_num_batched_tokens=8, prefix_caching=caching)
    first, *others = loop.add(18, n=3, max_tokens=2, prompt_logprobs=1)
    loop.run(steps=20)
    loop.check_endings()
    assert loop.computed[first] == 18 + 1
    assert [loop.computed[other] for other in others] == [2 + 1] * 2


def test_without_prefix_caching_requests_share_nothing():
    loop = Loop(blocks=64, block_size=4, max_model_len=32)
    prompt = [1, 2, 3, 4, 5, 6, 0, 1, 2]
    families = [loop.add(prompt, n=2, max_tokens=2) for _ in range(2)]
    loop.run(steps=20)
    again = loop.add(prompt, n=2, max_tokens=2)
    (single,) = loop.add(prompt, max_tokens=2)
    loop.run(steps=20)
    loop.check_endings()
    for first, second in (*families, again):
        assert (loop.computed[first], loop.computed[second]) == (9 + 1, 1 + 1)
    assert loop.computed[single] == 9 + 1
    assert not loop.blocks.hits


def test_continuations_of_a_request_that_only_scores_end_with_it():
    loop = Loop(blocks=64, block_size=4, max_model_len=32)
    loop.add(9, n=3, max_tokens=0, prompt_logprobs=1)
    loop.run(steps=10)
    loop.check_endings()


@pytest.mark.parametrize("steps", range(6))
def test_all_continuations_of_a_request_are_aborted(steps):
    loop = Loop(blocks=64, block_size=4, max_model_len=32, max_num_batched_tokens=8)
    family = loop.add(18, n=4, max_tokens=9)
    for _ in range(steps):
        loop.step()
    loop.abort(family[0].request.id)
    assert loop.pool.num_used == 0
    assert loop.scheduler.plan(0.0) is None
    loop.run(steps=5)
    assert {sequence.finish_reason for sequence in family} == {"abort"}


@pytest.mark.parametrize("what", ["preempted in its prefill", "preempted after it", "ends at its first token"])
def test_continuations_go_on_if_the_first_is_preempted_or_ends(what):
    loop = Loop(blocks=64, block_size=4, max_model_len=32, max_num_batched_tokens=8, max_num_seqs=2)
    first, *others = loop.add(18, n=4, max_tokens=1 if what == "ends at its first token" else 6)
    for _ in range(1 if what == "preempted in its prefill" else 3):
        loop.step()
    if what != "ends at its first token":
        loop.preempt(first)
    loop.run(steps=100)
    loop.check_endings()
    total = sum(loop.computed[sequence] for sequence in (first, *others))
    assert total <= 18 + 4 * first.max_output - 1 + 3 * 2 + 2, "the prompt was computed twice"


def test_continuations_run_when_the_first_is_aborted_in_its_prefill():
    loop = Loop(blocks=64, block_size=4, max_model_len=32, max_num_batched_tokens=8)
    first, *others = loop.add(18, n=3, max_tokens=6)
    loop.step()
    loop.scheduler.finish(first, "abort")
    loop.run(steps=40)
    loop.check_endings()
    assert {other.finish_reason for other in others} == {"length"}


def test_continuations_that_wait_cause_no_deadlock():
    """Those of the first request share its prompt's blocks while another needs the whole pool."""
    loop = Loop(blocks=8, block_size=4, max_model_len=32, max_num_seqs=2)
    (long,) = loop.add(4, max_tokens=28)
    family = loop.add(16, n=4, max_tokens=3)
    loop.run(steps=200)
    loop.check_endings()
    assert max(loop.admitted[s] for s in (long, *family)) <= 3


def test_continuations_with_images_larger_than_the_encoder_cache_encode_each_image_once():
    """While they wait for the first one's blocks they need no features."""
    loop = Loop(blocks=64, block_size=4, max_model_len=64, max_num_batched_tokens=8, feature_rows=8, max_patches=8)
    images = [image_span("a", 1, 6), image_span("b", 9, 6), image_span("c", 17, 6)]
    _, *others = loop.add(26, n=4, max_tokens=3, media=images)
    loop.run(steps=60)
    loop.check_endings()
    assert set(loop.encoded.values()) == {1}
    assert [loop.computed[other] for other in others] == [2 + 2] * 3


# -- aborts and errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(8))
def test_kv_04_an_abort_frees_everything_at_once(steps):
    loop = Loop(blocks=40, block_size=4, max_model_len=40, max_num_batched_tokens=8, max_num_seqs=3)
    for _ in range(4):
        loop.add(12, max_tokens=20, ignore_eos=True)
    for _ in range(steps):
        loop.step()
    for request_id in list(loop.cases):
        loop.abort(request_id)
    assert loop.pool.num_used == 0
    planned = len(loop.plans)
    loop.run(steps=3)
    assert len(loop.plans) == planned
    assert loop.scheduler.abort("r0") == loop.scheduler.abort("unknown") == []


def test_contract_e_all_is_recomputed_after_a_step_that_raised():
    loop = Loop(blocks=40, block_size=4, max_model_len=40, max_num_batched_tokens=16)
    loop.add(12, max_tokens=9, n=3, prompt_logprobs=0)
    loop.add(7, max_tokens=9)
    for step in range(12):
        loop.step()
        if step in (0, 3, 8):
            loop.fail_step(dispatched=step == 3)
            assert loop.pool.num_used == 0
            assert not loop.scheduler.running
    loop.run(steps=40)
    loop.check_endings()
    assert loop.scheduler.num_preemptions == 0
