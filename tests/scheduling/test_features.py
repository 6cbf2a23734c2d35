"""Images in the scheduler: room in the encoder cache, and which sequences wait for it."""

from tests.scheduling.loop import Loop, image_span


def loop(**changes):
    return Loop(**{"blocks": 40, "block_size": 1, "max_model_len": 40, "feature_rows": 12, "max_patches": 12} | changes)


def add(run, *images, text=3, **params):
    """Add a request whose prompt is images (name, length) followed by text."""
    media, at = [], 0
    for name, length in images:
        media.append(image_span(name, at, length))
        at += length
    return run.add(at + text, media=media, **{"max_tokens": 2, "ignore_eos": True} | params)[0]


def test_no_sequence_waits_for_another_sequences_image():
    run = loop(slices=50)
    add(run, ("a", 6))
    text = add(run)
    for _ in range(10):
        run.step()
    assert text.finish_reason == "length"
    run.run()
    run.check_endings()


def test_mm_07_two_images_that_fit_only_one_after_the_other():
    run = loop()
    add(run, ("a", 8), ("b", 8))
    run.run()
    run.check_endings()
    assert run.encoded == {b"a": 1, b"b": 1}


def test_sch_02_a_chunk_may_end_anywhere_in_an_image():
    """In chunks of 4 tokens, images begin and end at each offset, and two share a chunk."""
    for text in range(5):
        run = loop(max_num_batched_tokens=4, max_num_seqs=2)
        run.add(
            20,
            media=[image_span("a", text, 6), image_span("b", text + 6, 1), image_span("c", text + 9, 4)],
            max_tokens=2,
        )
        run.run()
        run.check_endings()
        assert run.encoded == {b"a": 1, b"b": 1, b"c": 1}


def test_an_image_of_several_sequences_is_encoded_once():
    run = loop(slices=5)
    for _ in range(4):
        add(run, ("a", 6))
    run.run()
    run.check_endings()
    assert run.encoded == {b"a": 1}
    assert (run.features.cache.queries, run.features.cache.hits) == (4, 3)


def test_an_image_is_cached_until_its_rows_are_needed():
    run = loop()
    for name in "aab":
        add(run, (name, 8))
        run.run()
    assert run.encoded == {b"a": 1, b"b": 1}
    add(run, ("a", 8))
    run.run()
    assert run.encoded == {b"a": 2, b"b": 1}
    run.check_endings()


def test_small_images_share_a_call_and_a_large_one_does_not():
    run = loop(max_patches=8, slices=1)
    add(run, ("a", 3), ("b", 3), ("c", 6))
    run.step()
    assert [span.key for span in run.encoding] == [b"a", b"b"]
    run.run()


def test_an_abort_frees_feature_rows_at_once():
    run = loop()
    add(run, ("a", 8), id="gone")
    run.abort("gone")
    assert run.features.cache.usage == 0
    add(run, ("b", 12))
    run.run()
    run.check_endings()
    assert run.encoded == {b"b": 1}


def test_after_an_abort_rows_stay_taken_until_the_encoder_is_done():
    run = loop(slices=4)
    add(run, ("a", 8), id="gone")
    run.step()
    assert run.encoding
    run.abort("gone")
    add(run, ("b", 8))
    add(run, ("a", 8))
    run.run()
    run.check_endings()


def test_a_running_sequence_reclaims_rows_from_a_waiting_one():
    """The second starts first, because its first image is cached. It then holds the blocks that the first needs, which
    holds the feature rows that the second needs."""
    run = loop(blocks=20, max_model_len=20, slices=6)
    add(run, ("known", 3))
    run.run()
    add(run, ("a", 6), ("b", 3), text=5)
    add(run, ("known", 3), ("c", 6), text=5)
    run.run()
    run.check_endings()


def test_a_large_image_is_not_overtaken_for_ever():
    run = loop(max_num_seqs=4)
    for i in range(6):
        add(run, (f"small{i}", 5), max_tokens=9)
    large = add(run, ("large", 12))
    later = [add(run, (f"later{i}", 5)) for i in range(30)]
    while large.finish_reason is None:
        assert run.step()
    assert sum(s.finish_reason is None for s in later) > 20
    run.run()
    run.check_endings()


def test_continuations_share_the_images_of_their_prompt():
    run = loop(block_size=4)
    add(run, ("a", 6), text=1, n=3)
    run.run()
    run.check_endings()


def test_after_a_failed_step_unqueued_continuations_hold_no_features():
    """Continuations that wait for their prompt's prefill are in no queue, so nothing could be reclaimed from them."""
    run = loop(feature_rows=7, slices=8)
    first = add(run, ("a", 6), max_tokens=20)
    add(run, ("b", 6), n=4)
    run.step()
    run.fail_step(dispatched=False)
    while [span.key for span in run.encoding] != [b"b"]:
        run.step()
    run.preempt(first)
    run.run()
    run.check_endings()
