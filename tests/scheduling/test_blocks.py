"""What sequences find in the prefix cache, what is swapped and compressed: through the scheduler, on a fake device."""

import pytest

from omni_jax.requests.slo import SLO
from omni_jax.scheduling import SLOFirst
from tests.scheduling.loop import Loop, image_span


def loop(blocks=60, block_size=4, **options):
    options = {"max_model_len": 64, "max_num_batched_tokens": 16, "prefix_caching": True} | options
    return Loop(blocks=blocks, block_size=block_size, **options)


def computed(run: Loop, sequence) -> int:
    return run.computed[sequence]


def test_a_prompt_that_was_computed_is_not_computed_again():
    run = loop()
    (first,) = run.add(list(range(7)) * 3, max_tokens=3)
    run.run()
    (second,) = run.add(list(range(7)) * 3, max_tokens=3)
    run.run()
    run.check_endings()
    assert (first.cached, second.cached) == (0, 20)
    assert computed(run, second) == 1 + 2  # the last token of the prompt, and two of the output
    assert run.blocks.queries["text"] == 42
    assert run.blocks.hits["text"] == 20


def test_pc_04_a_prompt_that_is_cached_whole_still_computes_its_last_token():
    run = loop()
    prompt = [3, 1, 4, 1, 5, 2, 6, 5]  # two blocks
    for cached in (0, 4):
        (sequence,) = run.add(prompt, max_tokens=2)
        run.run()
        assert sequence.cached == cached
    run.check_endings()


def test_output_enters_the_cache_too_so_that_the_next_turn_of_a_chat_finds_it():
    run = loop()
    (first,) = run.add([1, 2, 3, 4, 5, 6], max_tokens=11)
    run.run()
    (turn,) = run.add([*first.known, 1, 2, 3], max_tokens=2)
    run.run()
    run.check_endings()
    assert turn.cached == 16  # all but the last output token, whose keys were never computed, in whole blocks


def test_two_that_begin_alike_and_come_together_compute_the_beginning_once():
    run = loop(max_num_batched_tokens=8)
    common = [i % 7 for i in range(24)]
    sequences = [run.add([*common, n, n, n, n, n], max_tokens=2)[0] for n in (1, 2, 3)]
    run.run()
    run.check_endings()
    assert [s.cached for s in sequences] == [0, 24, 24]
    assert sum(computed(run, s) for s in sequences) == 24 + 3 * (5 + 1)


def test_nobody_waits_for_a_beginning_whose_owner_is_paused():
    """By deadline: the first is put off by an urgent one, and the second, as urgent, does not wait with it."""
    run = loop(max_num_batched_tokens=8, discipline=SLOFirst(aging_seconds=1000))
    common = [i % 7 for i in range(40)]
    (first,) = run.add([*common, 1], max_tokens=2, slo=SLO(priority=5))
    run.step()
    run.add(40, max_tokens=2, slo=SLO(priority=0))
    (second,) = run.add([*common, 2], max_tokens=2, slo=SLO(priority=0))
    run.run()
    run.check_endings()
    assert second.first_token_at < first.first_token_at


def test_pc_05_prompt_logprobs_are_computed_for_all_positions_however_much_is_cached():
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


def test_pc_01_another_image_with_as_many_placeholders_is_another_prompt():
    run = loop(feature_rows=24)
    found = []
    for name in ("a", "b", "a"):
        (sequence,) = run.add(20, id=f"{name}{len(found)}", media=[image_span(name, 8, 6)], max_tokens=2)
        run.cases[sequence.request.id]
        run.run()
        found.append(sequence.cached)
    run.check_endings()
    assert found[0] == 0


def test_a_cached_image_is_not_encoded_again():
    run = loop(feature_rows=6)
    prompt = [i % 7 for i in range(22)]
    run.add(prompt, media=[image_span("a", 4, 6)], max_tokens=2)
    run.run()
    run.add(9, media=[image_span("b", 1, 6)], max_tokens=2)  # takes a's rows of the feature array
    run.run()
    (again,) = run.add(prompt, media=[image_span("a", 4, 6)], max_tokens=2)
    run.run()
    run.check_endings()
    assert again.cached == 20
    assert run.encoded == {b"a": 1, b"b": 1}


def test_cached_blocks_give_way_to_live_ones():
    run = loop(blocks=16)
    for n in range(6):
        run.add([(n + i * i) % 7 for i in range(40)], max_tokens=8)
        run.run()
    run.check_endings()
    assert run.pool.evictions > 0
    assert run.scheduler.num_preemptions == 0


def test_who_was_preempted_finds_what_was_not_taken():
    run = loop(blocks=16, max_num_seqs=4)
    sequences = [run.add([(n + i * i) % 7 for i in range(20)], max_tokens=30)[0] for n in range(3)]
    run.run()
    run.check_endings()
    assert run.scheduler.num_preemptions > 0
    needed = sum(s.num_prompt + s.max_output - 1 for s in sequences)
    assert sum(run.computed.values()) < needed + 2 * 20, "most of what was preempted was computed again"


def test_a_step_that_raises_empties_the_cache():
    run = loop()
    prompt = [i % 7 for i in range(17)]
    run.add(prompt, max_tokens=1)
    run.run()
    run.fail_step(dispatched=False)
    (sequence,) = run.add(prompt, max_tokens=1)
    run.run()
    assert sequence.cached == 0


def test_logits_that_are_no_numbers_empty_the_cache():
    run = loop()
    prompt = [i % 7 for i in range(17)]
    run.add(prompt, max_tokens=3, nan_at=1)
    run.run()
    (sequence,) = run.add(prompt, max_tokens=1)
    run.run()
    assert sequence.cached == 0


def test_preempted_sequences_are_swapped_out_and_go_on_where_they_were():
    run = loop(blocks=16, max_num_seqs=4, prefix_caching=False, swap=1)
    run.swap._faults = False
    sequences = [run.add([(n + i * i) % 7 for i in range(20)], max_tokens=30)[0] for n in range(3)]
    run.run()
    run.check_endings()
    assert run.swap.stored == run.swap.loaded > 0
    assert sum(run.computed.values()) == sum(s.num_prompt + s.max_output - 1 for s in sequences), "nothing twice"


def test_an_abort_drops_what_was_swapped_out():
    run = loop(blocks=16, max_num_seqs=4, prefix_caching=False, swap=1)
    run.swap._faults = False
    sequences = [run.add([(n + i * i) % 7 for i in range(20)], max_tokens=30)[0] for n in range(3)]
    while not run.swap.parcels:
        run.step()
    (swapped,) = (s for s in sequences if s.swapped is not None)
    run.abort(swapped.request.id)
    assert not run.swap.parcels
    run.run()


def test_a_swapped_sequence_that_waits_for_the_disk_stands_in_nobodys_way():
    run = loop(blocks=16, max_num_seqs=4, prefix_caching=False, swap=1)
    run.swap._faults = False
    for n in range(3):
        run.add([(n + i * i) % 7 for i in range(20)], max_tokens=30)
    while not run.swap.parcels:
        run.step()
    for parcel in run.swap.parcels:
        parcel.asks = 1000
    (small,) = run.add(3, max_tokens=1)
    while small.finish_reason is None:
        run.step()
    assert run.swap.parcels
    run.run()


def half(step: int, total: int) -> float:
    return 0.5


def test_kvc_01_compression_frees_blocks_and_positions_stay_where_they_were():
    run = loop(ratio=half, prefix_caching=False)
    (sequence,) = run.add(40, max_tokens=20)
    most = 0
    while run.step():
        most = max(most, run.pool.num_used)
        if sequence.num_output == 10:
            assert sequence.dropped == sequence.computed // 2 or sequence.dropped + 4 > sequence.computed // 2
            assert len(sequence.blocks) < 10
    run.check_endings()
    assert run.blocks.dropped > 20


def test_compressed_blocks_never_enter_the_cache_and_cached_ones_are_not_written_to():
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
def test_with_compression_nobody_is_preempted_for_blocks(swap):
    run = loop(blocks=16, max_num_seqs=4, ratio=half, swap=swap)
    for n in range(5):
        run.add([(n + i * i) % 7 for i in range(20)], max_tokens=30)
    run.run()
    run.check_endings()
    assert run.scheduler.num_preemptions == 0


def test_with_swap_a_compressed_sequence_makes_way_for_a_more_urgent_one_and_comes_back_compressed():
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


def test_compression_takes_nothing_that_is_kept_for_others_where_beginnings_are_shared():
    """Continuations share their prompt, and each would need copies of its own to be compressed: admission counted the
    prompt once. Whoever cannot be compressed without what is kept for others is not, and all of them end."""
    run = loop(blocks=34, max_num_seqs=4, max_model_len=72, ratio=half, prefix_caching=False)
    run.add([i % 7 for i in range(40)], n=3, max_tokens=30)
    run.run()
    run.check_endings()
    assert run.scheduler.num_preemptions == 0


def test_a_step_needs_no_room_on_the_host_for_what_others_hold_too():
    """Of a preempted continuation only what it alone holds is swapped."""
    run = loop(blocks=22, max_num_seqs=4, max_model_len=72, prefix_caching=False, swap=1)
    run.swap._faults = False
    run.add([i % 7 for i in range(40)], n=3, max_tokens=30)
    while not run.swap.parcels:
        run.step()
    (parcel,) = run.swap.parcels
    assert len(parcel.content) <= 8
    run.run()
    run.check_endings()


def test_a_step_that_raises_forgets_what_was_swapped():
    """Its last rows may be those of the step: a request that only scores would wait for ever for their end."""
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
