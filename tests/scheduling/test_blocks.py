"""Prefix caching, swapping and compression in the scheduler, on the fake device."""

import numpy as np
import pytest

from omni_jax.requests.slo import SLO
from omni_jax.scheduling.discipline import SLOFirst
from tests.scheduling.loop import Loop, image_span


def loop(blocks=60, block_size=4, **options):
    options = {"max_model_len": 64, "max_num_batched_tokens": 16, "prefix_caching": True} | options
    return Loop(blocks=blocks, block_size=block_size, **options)


def computed(run: Loop, sequence) -> int:
    return run.computed[sequence]


def test_a_repeated_prompt_is_not_recomputed():
    run = loop()
    (first,) = run.add(list(range(7)) * 3, max_tokens=3)
    run.run()
    (second,) = run.add(list(range(7)) * 3, max_tokens=3)
    run.run()
    run.check_endings()
    assert (first.cached, second.cached) == (0, 20)
    assert computed(run, second) == 1 + 2  # the last prompt token and two output tokens
    assert run.blocks.queries["text"] == 42
    assert run.blocks.hits["text"] == 20


def test_pc_04_a_fully_cached_prompt_still_computes_its_last_block():
    run = loop()
    prompt = [3, 1, 4, 1, 5, 2, 6, 5]  # two blocks
    for cached in (0, 4):
        (sequence,) = run.add(prompt, max_tokens=2)
        run.run()
        assert sequence.cached == cached
    run.check_endings()


def test_output_is_cached_for_the_next_turn_of_a_chat():
    run = loop()
    (first,) = run.add([1, 2, 3, 4, 5, 6], max_tokens=11)
    run.run()
    (turn,) = run.add([*first.known, 1, 2, 3], max_tokens=2)
    run.run()
    run.check_endings()
    assert turn.cached == 16  # full blocks; the keys of the last output token were never computed


@pytest.mark.parametrize("prompt", [32, 33])
@pytest.mark.parametrize("logprobs", [None, 0])
def test_the_answer_to_a_repeated_prompt_of_whole_blocks_is_cached_for_the_next_turn(prompt, logprobs):
    """Its last block is computed again, to sample from, so two blocks have the same content."""
    run = loop(max_model_len=100)
    ids = [i * i % 7 for i in range(prompt)]
    for max_tokens in (1, 40):
        (sequence,) = run.add(ids, max_tokens=max_tokens, prompt_logprobs=logprobs)
        run.run()
    (turn,) = run.add([*sequence.known, 1, 2, 3], max_tokens=2)
    run.run()
    run.check_endings()
    assert turn.cached == (prompt + 40 - 1) // 4 * 4


def test_sequences_that_computed_the_same_block_hold_it_once():
    """Nobody can find the last block of a whole prompt before its last token, so both compute it."""
    run = loop()
    first, second = (run.add([i % 7 for i in range(16)], max_tokens=20)[0] for _ in range(2))
    while second.num_output < 3:
        run.step()
    assert second.blocks[:4] == first.blocks[:4]
    run.run()
    run.check_endings()


def test_concurrent_requests_compute_a_common_prefix_once():
    run = loop(max_num_batched_tokens=8)
    common = [i % 7 for i in range(24)]
    sequences = [run.add([*common, n, n, n, n, n], max_tokens=2)[0] for n in (1, 2, 3)]
    run.run()
    run.check_endings()
    assert [s.cached for s in sequences] == [0, 24, 24]
    assert sum(computed(run, s) for s in sequences) == 24 + 3 * (5 + 1)


def test_a_sequence_does_not_wait_for_a_prefix_whose_owner_is_paused():
    """By deadline, an urgent sequence pauses the first; the second, which is as urgent, does not wait for the first."""
    run = loop(max_num_batched_tokens=8, discipline=SLOFirst(aging_seconds=1000))
    common = [i % 7 for i in range(40)]
    (first,) = run.add([*common, 1], max_tokens=2, slo=SLO(priority=5))
    run.step()
    run.add(40, max_tokens=2, slo=SLO(priority=0))
    (second,) = run.add([*common, 2], max_tokens=2, slo=SLO(priority=0))
    run.run()
    run.check_endings()
    assert second.first_token_at < first.first_token_at


def test_pc_05_prompt_logprobs_are_computed_for_all_positions_of_a_cached_prompt():
    run = loop()
    prompt = [i % 7 for i in range(33)]
    for _ in range(2):
        (sequence,) = run.add(prompt, max_tokens=1, prompt_logprobs=0)
        run.run()
        assert sequence.cached == 0
    run.add([*prompt[:16], 6, 6, 6], max_tokens=1, prompt_logprobs=0)
    run.run()
    run.check_endings()


def test_pc_06_different_salts_share_nothing():
    run = loop()
    prompt = [i % 7 for i in range(17)]
    found = []
    for salt in ("a", "b", "a"):
        (sequence,) = run.add(prompt, max_tokens=1, cache_salt=salt)
        run.run()
        found.append(sequence.cached)
    assert found == [0, 0, 16]


def test_pc_01_a_different_image_with_the_same_placeholders_is_a_different_prompt():
    run = loop(feature_rows=24)
    found = []
    for name in ("a", "b", "a", "b"):
        (sequence,) = run.add([i % 7 for i in range(20)], media=[image_span(name, 8, 6)], max_tokens=2)
        run.run()
        found.append(sequence.cached)
    run.check_endings()
    assert found == [0, 8, 16, 16]  # the text before the image, then all


def test_a_cached_image_is_not_encoded_again():
    run = loop(feature_rows=6)
    prompt = [i % 7 for i in range(22)]
    run.add(prompt, media=[image_span("a", 4, 6)], max_tokens=2)
    run.run()
    run.add(9, media=[image_span("b", 1, 6)], max_tokens=2)  # evicts a from the encoder cache
    run.run()
    (again,) = run.add(prompt, media=[image_span("a", 4, 6)], max_tokens=2)
    run.run()
    run.check_endings()
    assert again.cached == 20
    assert run.encoded == {b"a": 1, b"b": 1}


def test_cached_blocks_are_evicted_for_live_sequences():
    run = loop(blocks=16)
    for n in range(6):
        run.add([(n + i * i) % 7 for i in range(40)], max_tokens=8)
        run.run()
    run.check_endings()
    assert run.pool.evictions > 0
    assert run.scheduler.num_preemptions == 0


def test_a_preempted_sequence_reuses_its_blocks_that_were_not_evicted():
    run = loop(blocks=16, max_num_seqs=4)
    sequences = [run.add([(n + i * i) % 7 for i in range(20)], max_tokens=30)[0] for n in range(3)]
    run.run()
    run.check_endings()
    assert run.scheduler.num_preemptions > 0
    needed = sum(s.num_prompt + s.max_output - 1 for s in sequences)
    assert sum(run.computed.values()) < needed + 2 * 20, "most preempted tokens were recomputed"


def test_a_step_that_raises_clears_the_cache():
    run = loop()
    prompt = [i % 7 for i in range(17)]
    run.add(prompt, max_tokens=1)
    run.run()
    run.fail_step(dispatched=False)
    (sequence,) = run.add(prompt, max_tokens=1)
    run.run()
    assert sequence.cached == 0


def test_logits_that_are_not_numbers_clear_the_cache():
    run = loop()
    prompt = [i % 7 for i in range(17)]
    run.add(prompt, max_tokens=3, nan_at=1)
    run.run()
    (sequence,) = run.add(prompt, max_tokens=1)
    run.run()
    assert sequence.cached == 0


def test_a_swapped_out_sequence_continues_where_it_stopped():
    run = loop(blocks=16, max_num_seqs=4, prefix_caching=False, swap=1)
    run.swap._faults = False
    sequences = [run.add([(n + i * i) % 7 for i in range(20)], max_tokens=30)[0] for n in range(3)]
    run.run()
    run.check_endings()
    assert run.swap.stored == run.swap.loaded > 0
    assert sum(run.computed.values()) == sum(s.num_prompt + s.max_output - 1 for s in sequences), "computed twice"


@pytest.mark.parametrize(("prefix_caching", "expected"), [(True, (22, 20)), (False, (22, 0))])
def test_recomputing_is_priced_with_the_prefix_hits_that_it_would_get(prefix_caching, expected):
    """Of six blocks, five are registered; the other one suffices for the sequence that needs a block."""
    run, asked = loop(blocks=40, prefix_caching=prefix_caching, swap=1, max_num_batched_tokens=64), []

    def store(sequence, blocks, tokens, cached):
        asked.append((tokens, cached))

    run.swap.store = store
    (first,) = run.add(20, max_tokens=8)
    while first.computed < 22:
        run.step()
    run.preempt(first)
    assert asked == [expected]
    run.run()
    run.check_endings()
    # All of its blocks were still cached: only the tokens after them were computed again.
    assert computed(run, first) == (27 + 2 if prefix_caching else 27 + 22)


@pytest.mark.parametrize(("blocks", "slots"), [(12, 8), (40, 1)])
@pytest.mark.parametrize("swap", [None, 1])
def test_no_later_arrival_takes_the_room_of_a_preempted_sequence_whose_token_is_not_read(blocks, slots, swap):
    run = loop(blocks=blocks, max_num_seqs=slots, max_model_len=40, prefix_caching=False, swap=swap)
    (first,), (second,) = run.add(28, max_tokens=10), run.add(20, max_tokens=10)
    while not first.num_output:
        run.step()
    run.preempt(first)
    assert first.pending
    assert second.slot is None
    run.step()
    assert second.slot is None
    while first.slot is None:
        run.step()
    assert second.slot is None
    run.run()
    run.check_endings()


def test_an_abort_drops_swapped_blocks():
    run = loop(blocks=16, max_num_seqs=4, prefix_caching=False, swap=1)
    run.swap._faults = False
    sequences = [run.add([(n + i * i) % 7 for i in range(20)], max_tokens=30)[0] for n in range(3)]
    while not run.swap.parcels:
        run.step()
    (swapped,) = (s for s in sequences if s.swapped is not None)
    run.abort(swapped.request.id)
    assert not run.swap.parcels
    run.run()


def test_a_sequence_whose_blocks_are_loading_blocks_no_other():
    run = loop(blocks=16, max_num_seqs=4, prefix_caching=False, swap=1)
    run.swap._faults = False
    for n in range(3):
        run.add([(n + i * i) % 7 for i in range(20)], max_tokens=30)
    while not run.swap.parcels:
        run.step()
    for parcel in run.swap.parcels:
        parcel.polls = 1000
    (small,) = run.add(3, max_tokens=1)
    while small.finish_reason is None:
        run.step()
    assert run.swap.parcels
    run.run()


def half(step: int, total: int) -> float:
    return 0.5


@pytest.mark.parametrize("discipline", [None, SLOFirst(aging_seconds=1000)])
def test_no_more_swapped_blocks_are_loaded_than_there_is_room_for(discipline):
    """Six sequences of 4 blocks are out, and 10 blocks are free: two are loaded, the others stay out."""
    run = loop(blocks=24, swap=3, prefix_caching=False, discipline=discipline)
    run.swap._faults, asked = False, []
    for _ in range(6):
        run.add(10, max_tokens=12, ignore_eos=True)
    while not all(sequence.num_output for sequence in run.sequences):
        run.step()
    for sequence in list(run.scheduler.running):
        run.preempt(sequence)
    while run.in_flight:
        run._commit(*run.in_flight.popleft())
    assert len(run.swap.parcels) == 6
    run.swap.is_ready = lambda parcel: asked.append(parcel) or False
    taken = run.pool.allocate(run.pool.num_free - 10)
    for _ in range(4):
        run.scheduler.plan(float(run.pool.step))
    assert len(set(asked)) == 2
    del run.swap.is_ready
    run.pool.free(taken)
    run.run()
    run.check_endings()


def test_kvc_01_compression_frees_blocks_and_keeps_positions():
    run = loop(ratio=half, prefix_caching=False)
    (sequence,) = run.add(40, max_tokens=20)
    peak = 0
    while run.step():
        peak = max(peak, run.pool.num_used)
        if sequence.num_output == 10:
            assert sequence.dropped == sequence.computed // 2 or sequence.dropped + 4 > sequence.computed // 2
            assert len(sequence.blocks) < 10
    run.check_endings()
    assert run.blocks.dropped > 20


def test_shares_of_a_request_replace_those_of_the_default():
    """To step 5 nothing, then half: the default would drop nothing."""
    run = loop(ratio=lambda step, total: 0.0, prefix_caching=False)
    (sequence,) = run.add(40, max_tokens=20, drop_shares=np.array([[0, 5], [0, 0.5]]))
    (other,) = run.add(40, max_tokens=20)
    dropped = {}
    while run.step():
        dropped[sequence.num_output] = sequence.dropped
        assert not other.dropped
    run.check_endings()
    assert [dropped[step] for step in range(5)] == [0] * 5
    assert dropped[7] > 15


def test_compressed_blocks_are_not_cached_and_cached_blocks_are_not_written_to():
    run = loop(ratio=half)
    (first,) = run.add([i % 7 for i in range(40)], max_tokens=20)
    run.run()
    (second,) = run.add([i % 7 for i in range(40)], max_tokens=20)
    run.run()
    run.check_endings()
    assert second.cached == 36
    (turn,) = run.add([*first.known], max_tokens=4)
    run.run()
    run.check_endings()
    assert turn.cached < 48, "output after the first compression is not cached"


@pytest.mark.parametrize("swap", [None, 3])
def test_with_compression_no_sequence_is_preempted_for_blocks(swap):
    run = loop(blocks=16, max_num_seqs=4, ratio=half, swap=swap)
    for n in range(5):
        run.add([(n + i * i) % 7 for i in range(20)], max_tokens=30)
    run.run()
    run.check_endings()
    assert run.scheduler.num_preemptions == 0


def test_with_swap_a_compressed_sequence_is_preempted_by_a_more_urgent_one_and_stays_compressed():
    run = loop(blocks=16, max_num_seqs=1, ratio=half, swap=3, discipline=SLOFirst(aging_seconds=1000))
    run.swap._faults = False
    (long,) = run.add(24, max_tokens=30, slo=SLO(priority=3))
    while long.num_output < 12:
        run.step()
    dropped = long.dropped
    assert dropped
    (urgent,) = run.add(40, max_tokens=2, slo=SLO(priority=0))
    while urgent.finish_reason is None:
        run.step()
    assert long.swapped is not None
    while long.swapped is not None:
        run.step()
    assert long.dropped >= dropped
    run.run()
    run.check_endings()


def test_compression_of_shared_prompts_leaves_reserved_blocks_alone():
    """Continuations share their prompt, and each needs blocks of its own to be compressed, but admission counted the
    prompt once. A sequence that would need blocks reserved for others is not compressed, and all of them end."""
    run = loop(blocks=34, max_num_seqs=4, max_model_len=72, ratio=half, prefix_caching=False)
    run.add([i % 7 for i in range(40)], n=3, max_tokens=30)
    run.run()
    run.check_endings()
    assert run.scheduler.num_preemptions == 0


def test_only_blocks_without_other_holders_are_swapped_out():
    """Continuations share their prompt's blocks."""
    run = loop(blocks=22, max_num_seqs=4, max_model_len=72, prefix_caching=False, swap=1)
    run.swap._faults = False
    run.add([i % 7 for i in range(40)], n=3, max_tokens=30)
    while not run.swap.parcels:
        run.step()
    (parcel,) = run.swap.parcels
    assert len(parcel.content) <= 8
    run.run()
    run.check_endings()


def test_a_step_that_raises_drops_swapped_blocks():
    """Their last rows may be those that the step did not write."""
    run = loop(blocks=16, max_num_seqs=4, prefix_caching=False, swap=1)
    run.swap._faults = False
    for n in range(3):
        run.add([(n + i * i) % 7 for i in range(20)], max_tokens=30)
    while not run.swap.parcels:
        run.step()
    run.fail_step(dispatched=True)
    assert not run.swap.parcels
    run.run()
    run.check_endings()
