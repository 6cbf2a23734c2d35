"""Which request gets the error when steps raise."""

from hypothesis import given
from hypothesis import strategies as st

from omni_jax.engine.blame import Blame
from tests.engine.test_vision import CASES, vision_request
from tests.engines import greedy, load_tiny, make_engine, request, run


@given(
    count=st.integers(1, 70),
    chunk=st.integers(1, 9),
    data=st.data(),
)
def test_the_request_is_found_after_about_log2_failures(count, chunk, data):
    """Requests of 10 tokens. A step computes `chunk` tokens of each that is not held; it raises at one token of one."""
    bad = data.draw(st.integers(0, count - 1))
    at = data.draw(st.integers(1, 10))
    blame, computed = Blame(count), {str(i): 0 for i in range(count)}
    failures = 0
    for _ in range(1000):
        step = {name: min(done + chunk, 10) for name, done in computed.items() if name not in blame.held and done < 10}
        if not step:
            assert not blame.held, "everything that may run has ended"
            break
        if step.get(str(bad), 0) >= at:
            failures += 1
            found = blame.failed(step)
            computed = dict.fromkeys(computed, 0)  # the cache is lost
            assert not blame.hopeless
            if found is not None:
                assert found == str(bad)
                del computed[found]
                bad = -1
        else:
            computed |= step
            blame.succeeded(step)
    assert bad == -1
    assert failures <= 2 + (count - 1).bit_length()
    assert computed == dict.fromkeys(computed, 10)
    assert not blame.suspects


def test_a_failure_that_does_not_come_again_blames_nobody():
    blame = Blame(8)
    assert blame.failed({"a": 5, "b": 6, "c": 7}) is None
    assert blame.held == {"c"}
    blame.succeeded({"a": 4, "b": 6})
    assert (blame.suspects, blame.held) == (True, {"c"})  # a has not come as far as when the step failed
    blame.succeeded({"a": 5})
    assert blame.held == set()
    blame.succeeded({"c": 7})
    assert not blame.suspects


def test_steps_that_always_fail_are_hopeless():
    for count in (1, 2, 50, 256):
        blame, live, failures = Blame(256), {str(i): 1 for i in range(count)}, 0
        blamed = []
        while not blame.hopeless:
            failures += 1
            found = blame.failed({name: end for name, end in live.items() if name not in blame.held})
            if found is not None:
                blamed.append(found)
                del live[found]
                live |= {} if live else {"next": 1}
        assert len(blamed) <= 2
        assert failures <= 2 * (2 + 8)
    blame = Blame(256)
    assert blame.failed({}) is None  # nobody knows why
    assert not blame.hopeless
    blame.failed({})
    assert blame.hopeless


def test_a_request_that_makes_steps_raise_ends_alone(monkeypatch):
    main = load_tiny("main")
    items = [request(str(i), 20 + i, greedy(max_tokens=12)) for i in range(7)]
    expected = run(make_engine(main), *items)
    engine, dispatch, raised = make_engine(main), main.runner.dispatch, []

    def poisoned(plan):
        if any(row.request_id == "4" and row.stop > 24 for row in plan.rows):
            raised.append(1)
            raise RuntimeError("injected")
        return dispatch(plan)

    monkeypatch.setattr(main.runner, "dispatch", poisoned)
    answers = run(engine, *items)
    bad = answers.pop(("4", 0))
    assert (bad.finish_reason, bad.error) == ("error", "computing this request failed: RuntimeError")
    assert {key: answer.tokens for key, answer in answers.items()} == {
        key: answer.tokens for key, answer in expected.items() if key != ("4", 0)
    }
    assert len(raised) <= 2 + 3


def test_an_image_that_cannot_be_encoded_ends_its_request_alone(monkeypatch):
    """One bad picture ended the engine for everybody, after 229 recoveries."""
    loaded = load_tiny("qwen2_vl")
    encoder, raised = loaded.runner.encoder, []
    items = [vision_request(loaded, name, name=name) for name in CASES]
    items.append(request("plain", 20, greedy(max_tokens=30)))
    expected = run(make_engine(loaded), *items)
    bad = next(item.media[0].key for item in items if item.media)
    begin = encoder.begin

    def poisoned(batch, rows):
        if bad in {span.key for span in batch}:
            raised.append(1)
            raise RuntimeError("injected")
        return begin(batch, rows)

    engine = make_engine(loaded)
    monkeypatch.setattr(encoder, "begin", poisoned)
    answers = run(engine, *items)
    wrong = {key for key, answer in answers.items() if answer.finish_reason == "error"}
    assert wrong == {(item.id, 0) for item in items if bad in {span.key for span in item.media}}
    assert all(answers[key].tokens == expected[key].tokens for key in answers.keys() - wrong)
    assert len(raised) <= 2 + 4
