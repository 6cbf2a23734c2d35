"""Images in the scheduler: who gets room in the encoder cache, who waits, and who does not."""

from tests.scheduling.loop import Loop, image_span


def loop(**changes):
    return Loop(
        **{"blocks": 40, "block_size": 1, "max_model_len": 40, "feature_rows": 12, "most_patches": 12} | changes
    )


def ask(run, *images, text=3, **params):
    """A request whose prompt is images (name, length) one after another, and text."""
    media, at = [], 0
    for name, length in images:
        media.append(image_span(name, at, length))
        at += length
    return run.add(at + text, media=media, **{"max_tokens": 2, "ignore_eos": True} | params)[0]


def test_nobody_waits_for_anothers_image():
    run = loop(slices=50)
    ask(run, ("a", 6))
    text = ask(run)
    for _ in range(10):
        run.step()
    assert text.finish_reason == "length"
    run.run()
    run.check_endings()


def test_mm_07_two_images_that_fit_only_in_turn():
    run = loop()
    ask(run, ("a", 8), ("b", 8))
    run.run()
    run.check_endings()
    assert run.encoded == {b"a": 1, b"b": 1}


def test_sch_02_a_chunk_may_end_anywhere_in_a_image():
    """Chunks of 4 tokens: images begin and end at each place in one, two of them in the same."""
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


def test_an_image_that_several_wait_for_is_encoded_once():
    run = loop(slices=5)
    for _ in range(4):
        ask(run, ("a", 6))
    run.run()
    run.check_endings()
    assert run.encoded == {b"a": 1}
    assert (run.features.cache.queries, run.features.cache.hits) == (4, 3)


def test_an_image_is_kept_until_its_room_is_wanted():
    run = loop()
    for name in "aab":
        ask(run, (name, 8))
        run.run()
    assert run.encoded == {b"a": 1, b"b": 1}
    ask(run, ("a", 8))
    run.run()
    assert run.encoded == {b"a": 2, b"b": 1}
    run.check_endings()


def test_small_images_share_a_call_and_a_large_one_goes_alone():
    run = loop(most_patches=8, slices=1)
    ask(run, ("a", 3), ("b", 3), ("c", 6))
    run.step()
    assert [span.key for span in run.encoding] == [b"a", b"b"]
    run.run()


def test_an_abort_gives_the_room_back_at_once():
    run = loop()
    ask(run, ("a", 8), id="gone")
    run.abort("gone")
    assert run.features.cache.usage == 0
    ask(run, ("b", 12))
    run.run()
    run.check_endings()
    assert run.encoded == {b"b": 1}


def test_an_abort_while_it_is_being_encoded_leaves_the_rows_alone_until_that_is_done():
    run = loop(slices=4)
    ask(run, ("a", 8), id="gone")
    run.step()
    assert run.encoding
    run.abort("gone")
    ask(run, ("b", 8))
    ask(run, ("a", 8))
    run.run()
    run.check_endings()


def test_who_runs_takes_room_back_from_who_waits():
    """The second starts first, for its first image is known; it then holds the blocks that the first needs, which
    holds the room for features that the second needs."""
    run = loop(blocks=20, max_model_len=20, slices=6)
    ask(run, ("known", 3))
    run.run()
    ask(run, ("a", 6), ("b", 3), text=5)
    ask(run, ("known", 3), ("c", 6), text=5)
    run.run()
    run.check_endings()


def test_a_large_image_is_not_overtaken_for_ever():
    run = loop(max_num_seqs=4)
    for i in range(6):
        ask(run, (f"small{i}", 5), max_tokens=9)
    large = ask(run, ("large", 12))
    behind = [ask(run, (f"later{i}", 5)) for i in range(30)]
    while large.finish_reason is None:
        assert run.step()
    assert sum(s.finish_reason is None for s in behind) > 20
    run.run()
    run.check_endings()


def test_continuations_share_what_their_prompt_shows():
    run = loop(block_size=4)
    ask(run, ("a", 6), text=1, n=3)
    run.run()
    run.check_endings()


def test_after_a_failed_step_those_who_are_not_queued_yet_hold_nothing():
    """Continuations that wait for their prompt to be computed are in no queue, and could not give anything back."""
    run = loop(feature_rows=7, slices=8)
    first = ask(run, ("a", 6), max_tokens=20)
    ask(run, ("b", 6), n=4)
    run.step()
    run.fail_step(dispatched=False)
    while [span.key for span in run.encoding] != [b"b"]:
        run.step()
    run.preempt(first)
    run.run()
    run.check_endings()
