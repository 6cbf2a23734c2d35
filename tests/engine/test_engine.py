"""Engine: ends of requests, sampling, log-probabilities, aborts, failures, and what an idle engine holds."""

import jax
import numpy as np
import pytest

from omni_jax.engine.detokenizer import Detokenizer
from omni_jax.requests import EngineError, InvalidRequest, SamplingParams
from tests import tiny
from tests.engines import alone, assert_idle, greedy, load_tiny, make_engine, request, run

pytestmark = pytest.mark.smoke

EOS, OTHER_EOS = tiny.EOS_IDS


@pytest.fixture(scope="module")
def main():
    return load_tiny("main")


@pytest.fixture
def engine(main):
    return make_engine(main)


def biased(*tokens: int, **fields) -> SamplingParams:
    """Greedy, with a bias that makes these tokens the most likely."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 9, "logit_bias": dict.fromkeys(tokens, 100.0)} | fields)


# -- ends of continuations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", tiny.EOS_IDS)
def test_every_eos_of_the_generation_config_ends_a_text(engine, token):
    answer = run(engine, request("a", 20, biased(token, logprobs=0)))["a", 0]
    assert (answer.tokens, answer.text) == ([token], "")
    assert [(entry.token_id, entry.hidden) for entry in answer.logprobs] == [(token, True)]  # LP-05
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


def test_ignore_eos_continues_after_eos(engine):
    answer = run(engine, request("a", 20, biased(EOS, ignore_eos=True)))["a", 0]
    assert (answer.tokens, answer.finish_reason) == ([EOS] * 9, "length")


def test_stop_token_ids_end_a_text_and_are_the_stop_reason(engine):
    answer = run(engine, request("a", 20, biased(77, stop_token_ids=(5, 77))))["a", 0]
    assert (answer.tokens, answer.text) == ([77], "")
    assert (answer.finish_reason, answer.stop_reason) == ("stop", 77)


@pytest.mark.parametrize("special", tiny.EOS_IDS)
def test_a_stop_string_may_be_a_special_token(engine, special):
    spelling = engine.tokenizer.token_text(special)
    for stop in (spelling, spelling * 2):
        answer = run(engine, request("a", 20, biased(special, ignore_eos=True, stop=stop, logprobs=0)))["a", 0]
        assert answer.tokens == [special] * (1 + (stop != spelling))
        assert (answer.text, answer.finish_reason, answer.stop_reason) == ("", "stop", stop)
        assert [entry.token_id for entry in answer.logprobs] == answer.tokens
    assert_idle(engine)


@pytest.mark.parametrize("stops", [{}, {"stop_token_ids": (77, 78)}], ids=["eos", "stop ids"])
def test_no_stop_token_ends_a_text_before_min_tokens(engine, stops):
    tokens = stops.get("stop_token_ids", tiny.EOS_IDS)
    answer = run(engine, request("a", 20, biased(*tokens, min_tokens=4, **stops)))["a", 0]
    assert len(answer.tokens) == 5
    assert not set(answer.tokens[:4]) & {*tokens, EOS, OTHER_EOS}
    assert answer.tokens[4] in tokens
    assert answer.finish_reason == "stop"


def test_a_stop_string_is_not_shown_and_overrides_an_end_by_length(main):
    free = alone(main, request("free", 20, greedy(max_tokens=30)))
    tokenizer = make_engine(main).tokenizer
    pairs = (free.text[i : i + 2] for i in range(5, len(free.text)))
    stop = next(pair for pair in pairs if "\ufffd" not in pair)
    count = next(n for n in range(1, 31) if stop in tokenizer.decode(free.tokens[:n]))
    answer = alone(main, request("a", 20, greedy(max_tokens=count, stop=stop)))
    assert answer.text == free.text[: free.text.index(stop)]
    assert answer.tokens == free.tokens[:count]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_api_14_the_context_length_limits_prompt_and_output(main):
    limits = {"max_model_len": 64}
    engine = make_engine(main, **limits)
    for length, max_tokens, expected in [(63, None, 1), (63, 1, 1), (63, 50, 1), (64, 0, 0), (60, None, 4)]:
        answer = run(engine, request("a", length, greedy(max_tokens=max_tokens)))["a", 0]
        assert (len(answer.tokens), answer.finish_reason) == (expected, "length")
    for length, max_tokens in [(64, 1), (64, None), (65, 0), (65, None)]:
        with pytest.raises(InvalidRequest, match=f"64 tokens.*{length} tokens") as error:
            engine.add(request("b", length, greedy(max_tokens=max_tokens)))
        assert error.value.param == "prompt"
    assert_idle(engine)


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ((), {}, "prompt"),
        ((3, 512), {}, "prompt"),
        ((3, -1), {}, "prompt"),
        ((3,), {"logit_bias": {512: 1.0}}, "logit_bias"),
        ((3,), {"stop_token_ids": (600,)}, "stop_token_ids"),
    ],
)
def test_api_04_ids_outside_the_vocabulary_are_refused_and_affect_no_other_request(engine, prompt, params, param):
    good = request("good", 33)
    engine.add(good)
    engine.step()
    with pytest.raises(InvalidRequest) as error:
        engine.add(request("bad", prompt, greedy(**params)))
    assert error.value.param == param
    assert run(engine)["good", 0].tokens == alone(load_tiny("main"), good).tokens


# -- sampling ---------------------------------------------------------------------------------------------------------


def drawn(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 20, "ignore_eos": True} | fields)


def test_smp_01_without_a_seed_every_request_and_choice_differs(engine):
    answers = run(engine, request("a", 17, drawn()), request("b", 17, drawn()), request("n", 17, drawn(n=4)))
    assert len({tuple(answer.tokens) for answer in answers.values()}) == 6


def test_smp_01_a_seed_gives_the_same_tokens_alone_and_in_a_batch(main):
    seeded = request("seeded", 17, drawn(seed=7))
    others = [request(f"other {i}", 17, drawn(temperature=0.5 + 0.2 * i)) for i in range(7)]
    assert run(make_engine(main), *others, seeded)["seeded", 0].tokens == alone(main, seeded).tokens


def test_smp_01_choices_of_a_seed_are_repeatable_and_differ_from_each_other(main):
    item = request("n", 17, drawn(seed=7, n=3))
    first, second = (run(make_engine(main), item) for _ in range(2))
    assert first == second
    assert len({tuple(answer.tokens) for answer in first.values()}) == 3


def test_the_engines_seed_makes_unseeded_requests_repeatable(main):
    item = request("a", 17, drawn())
    one, two, other = (run(make_engine(main, seed=seed), item)["a", 0].tokens for seed in (1, 1, 2))
    assert one == two != other


def test_api_08_seeds_of_64_bits_are_all_different(main):
    seeds = [2**63 - 1, -(2**63), -1, 0, 2**32, 1]
    answers = run(make_engine(main), *(request(str(seed), 17, drawn(seed=seed)) for seed in seeds))
    assert len({tuple(answer.tokens) for answer in answers.values()}) == len(seeds)
    for seed in seeds:
        assert alone(main, request("again", 17, drawn(seed=seed))).tokens == answers[str(seed), 0].tokens


def test_api_09_rows_of_a_mixed_batch_equal_their_solo_runs(main):
    params = [greedy(max_tokens=20)] + [drawn(seed=3, top_k=k) for k in (5, 513, 9_999_999, 0, -1, 1)]
    items = [request(str(i), 17, p) for i, p in enumerate(params)]
    answers = run(make_engine(main), *items)
    for item in items:
        assert answers[item.id, 0].tokens == alone(main, item).tokens, item.params
    assert answers["2", 0].tokens == answers["3", 0].tokens == answers["4", 0].tokens == answers["5", 0].tokens
    assert answers["6", 0].tokens == answers["0", 0].tokens, "top_k=1 is greedy"
    with pytest.raises(InvalidRequest, match="top_k"):
        SamplingParams(top_k=0.01)


def test_api_07_tiny_temperature_and_top_p_are_greedy(main):
    expected = alone(main, request("a", 33, greedy(max_tokens=20)))
    for fields in ({"temperature": 1e-8}, {"temperature": 1e-4}, {"top_p": 1e-4}, {"top_p": 1e-9}, {"top_p": 0}):
        answer = alone(main, request("a", 33, drawn(logprobs=1, **fields)))
        assert answer.tokens == expected.tokens
        assert all(np.isfinite(entry.logprob) for entry in answer.logprobs)


def test_smp_02_a_strong_repetition_penalty_never_repeats_prompt_or_output(main):
    items = [request(str(n), n, greedy(repetition_penalty=1e9, max_tokens=60)) for n in (3, 33, 150)]
    for item, answer in zip(
        items, run(make_engine(main, num_blocks=22, max_model_len=300), *items).values(), strict=True
    ):
        assert len(set(answer.tokens) | set(item.prompt_ids)) == 60 + len(set(item.prompt_ids))


def test_smp_02_presence_and_frequency_count_only_the_output(main):
    """Each token is the best after the penalties for earlier output are subtracted from the raw logprobs."""
    presence, frequency = 1.2, 0.9
    prompt = tiny.prompt(20) + alone(main, request("x", 20)).tokens[:20]  # the prompt contains likely output tokens
    params = greedy(presence_penalty=presence, frequency_penalty=frequency, logprobs=20, max_tokens=60)
    others = [request(str(i), 5 + i, greedy(frequency_penalty=1.0)) for i in range(4)]
    answer = run(make_engine(main), *others, request("a", prompt, params))["a", 0]
    for i, entry in enumerate(answer.logprobs):
        past = answer.tokens[:i]
        scores = {t: value - frequency * past.count(t) - presence * (t in past) for t, value in entry.top}
        best = max(scores, key=lambda t: scores[t])
        assert scores[best] >= entry.top[-1][1], "a token that is not listed might be better"
        assert entry.token_id == best
    assert len(answer.tokens) > len(set(answer.tokens))


def poison(main, monkeypatch, key, index):
    """Make row `index` of an executable's hidden states NaN, as a broken weight or cache would."""
    original = main.runner._executables[key]

    def spoilt(*arguments):
        pool, tables, hidden, every = original(*arguments)
        hidden, every = (np.array(x) if not isinstance(x, tuple) else x for x in (hidden, every))
        for array in (hidden, every):
            if not isinstance(array, tuple):
                array[index] = np.nan
        return pool, tables, *(jax.device_put(x) for x in (hidden, every))

    monkeypatch.setitem(main.runner._executables, key, spoilt)


@pytest.mark.parametrize("params", [greedy(), drawn(seed=1, top_p=0.9), greedy(frequency_penalty=0.5)])
def test_smp_04_nan_logits_end_only_their_own_request(main, monkeypatch, params):
    items = [request(str(i), 10 + i, params) for i in range(3)]
    expected = [alone(main, item) for item in items]
    engine = make_engine(main)
    poison(main, monkeypatch, ("decode", 8), 1)
    answers = run(engine, *items)
    assert answers["1", 0].finish_reason == "error"
    assert "NaN" in answers["1", 0].error
    # Then row 1 is request 2, whose earlier tokens must not be affected by its neighbour.
    assert answers["0", 0] == expected[0]
    assert engine.stats().corrupted_requests == 2
    assert answers["2", 0].finish_reason == "error"
    assert answers["2", 0].tokens == expected[2].tokens[: len(answers["2", 0].tokens)]


def test_smp_04_nan_logits_of_a_scored_prompt_end_it_with_an_error(main, monkeypatch):
    engine = make_engine(main)
    poison(main, monkeypatch, ("mixed", 64), 5)
    items = [request("bad", 20, greedy(prompt_logprobs=1, max_tokens=0)), request("good", 30)]
    answers = run(engine, *items)
    assert (answers["bad", 0].finish_reason, answers["bad", 0].prompt_logprobs) == ("error", None)
    monkeypatch.undo()
    assert answers["good", 0] == alone(main, items[1])


def test_extreme_penalties_end_no_request_and_keep_the_prefix_cache(main):
    """Infinite logits once ended such a request with an error, and emptied the cache for all others."""
    engine = make_engine(main)
    run(engine, request("before", 40))
    items = [request(str(p), 20, drawn(seed=1, repetition_penalty=p)) for p in (1e-20, 1e-10, 1e20)]
    for answer in run(engine, *items).values():
        assert answer.finish_reason in ("stop", "length")
        assert answer.tokens
        assert all(0 <= token < 512 for token in answer.tokens)
    assert engine.stats().corrupted_requests == 0
    hits = sum(engine.stats().prefix_hits.values())
    run(engine, request("after", 40))
    assert sum(engine.stats().prefix_hits.values()) == hits + 32


@pytest.mark.parametrize(
    ("name", "values", "bounds"),
    [
        ("repetition_penalty", (0, 1e-38, 9e-21, 1.1e20, 1e38), "from 1e-20 to 1e\\+20"),
        ("top_p", (-0.1, 1.1, 10**400), "from 0 to 1"),
        ("min_p", (-1e-40, 1.1), "from 0 to 1"),
        ("temperature", (-1e-40, 2.1, True, "1", None), "from 0 to 2"),
        ("presence_penalty", (-2.1, 2.1), "from -2 to 2"),
    ],
)
def test_smp_05_numbers_out_of_range_are_refused_with_the_bounds(name, values, bounds):
    for value in (*values, float("nan"), float("inf"), -float("inf")):
        with pytest.raises(InvalidRequest, match=f"{name} must be a number {bounds}, got") as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name


def test_numbers_and_arrays_of_numpy_are_pythons():
    for kind in (np.int64, np.int32, np.uint8):
        whole = {name: kind(5) for name in ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs")}
        params = SamplingParams(
            **whole, stop_token_ids=np.array([3, 4], kind), logit_bias={kind(7): np.float32(0.5)}, stop=np.array(["a"])
        )
        assert all(type(getattr(params, name)) is int and getattr(params, name) == 5 for name in whole)
        assert (params.stop_token_ids, params.logit_bias, params.stop) == ((3, 4), {7: 0.5}, ("a",))
        assert {type(each) for each in (*params.stop_token_ids, *params.logit_bias)} == {int}
    for value in (np.float32(0.5), np.float16(0.5), np.float64(0.5)):
        params = SamplingParams(temperature=value, top_p=value, min_p=value, ignore_eos=np.bool_(True))
        assert [type(each) for each in (params.temperature, params.top_p, params.min_p)] == [float] * 3
        assert params.temperature == 0.5
        assert params.ignore_eos is True
    for name, value in (("seed", np.float64(5)), ("n", np.bool_(True)), ("stop_token_ids", np.array([1.0]))):
        with pytest.raises(InvalidRequest, match=f"{name} must be an integer"):
            SamplingParams(**{name: value})
    with pytest.raises(InvalidRequest, match="stop_token_ids must be a list, got int"):
        SamplingParams(stop_token_ids=np.array(3))


@pytest.mark.parametrize("name", ["skip_special_tokens", "ignore_eos", "include_stop_str_in_output"])
def test_booleans_are_booleans(name):
    for value in ("no", 1, 0, None):
        with pytest.raises(InvalidRequest, match=f"{name} must be True or False, got {value!r}") as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name


# -- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 20])
def test_lp_03_the_sampled_token_always_has_a_logprob(main, count):
    answer = alone(main, request("a", 33, drawn(temperature=2.0, seed=4, logprobs=count, prompt_logprobs=count)))
    for entries, tokens in ((answer.logprobs, answer.tokens), (answer.prompt_logprobs[1:], tiny.prompt(33)[1:])):
        assert len(entries) > 15
        for entry in entries:
            assert entry.token_id in tokens
            assert len(entry.top) == count
            values = [value for _, value in entry.top]
            assert values == sorted(values, reverse=True)
            found = dict(entry.top).get(entry.token_id)
            assert found == pytest.approx(entry.logprob, abs=1e-6) or (
                found is None and entry.logprob <= min(values, default=0)
            )
            assert sum(np.exp(values)) <= 1 + 1e-5
    assert any(entry.token_id not in dict(entry.top) for entry in answer.logprobs)


def test_logprobs_are_the_models_own_before_temperature_penalties_and_bias(main):
    plain = alone(main, request("a", 33, greedy(max_tokens=1, logprobs=5)))
    changed = greedy(max_tokens=1, logprobs=5, repetition_penalty=1.9, logit_bias={77: 100.0})
    [entry] = alone(main, request("b", 33, changed)).logprobs
    assert entry.token_id == 77
    assert [token for token, _ in entry.top] == [token for token, _ in plain.logprobs[0].top]
    assert [value for _, value in entry.top] == pytest.approx([value for _, value in plain.logprobs[0].top])


# -- blocks, aborts and counters --------------------------------------------------------------------------------------


def test_n_continuations_share_the_blocks_of_the_prompt(main):
    engine = make_engine(main)
    used = []
    answers = run(
        engine,
        request("n", 65, drawn(n=4, seed=1, max_tokens=10)),
        each_step=lambda: used.append(engine.core.pool.num_used),
    )
    assert sorted(answers) == [("n", i) for i in range(4)]
    assert max(used) == 4 + 4, "64 tokens are in 4 shared blocks, and each continuation has another block"
    assert engine.stats().prompt_tokens == 65, "the prompt counts once"


def test_kv_04_abort_frees_everything_by_the_next_step(main):
    engine = make_engine(main)
    kept = request("kept", 20)
    for item in (request("gone", 150, greedy(max_tokens=500)), kept, request("n", 40, drawn(n=3, max_tokens=100))):
        engine.add(item)
    for _ in range(10):
        engine.step()
    before = engine.core.pool.num_used
    deltas = engine.abort("gone") + engine.abort("n")
    assert [(d.request_id, d.index, d.finish_reason) for d in deltas] == [
        ("gone", 0, "abort"),
        ("n", 0, "abort"),
        ("n", 1, "abort"),
        ("n", 2, "abort"),
    ]
    assert {d.request_id for d in engine.step()} <= {"kept"}
    assert engine.core.pool.num_used <= 3 < before
    assert engine.abort("gone") == engine.abort("unknown") == []
    rest = run(engine)["kept", 0].tokens
    expected = alone(main, kept).tokens
    assert rest == expected[len(expected) - len(rest) :]


def test_aborted_waiting_requests_do_not_count_their_prompts(main):
    engine = make_engine(main, max_num_batched_tokens=16)
    for i in range(20):
        engine.add(request(str(i), 40, drawn(n=2, prompt_logprobs=0)))
    engine.step()
    deltas = [delta for i in range(20) for delta in engine.abort(str(i))]
    assert len(deltas) == 40
    assert all(delta.prompt_logprobs is None for delta in deltas)
    run(engine)
    stats = engine.stats()
    assert stats.requests_finished["abort"] == 40
    assert (stats.prompt_tokens, stats.generation_tokens) == (0, 0)


def test_api_10_the_id_of_a_live_request_is_refused(main):
    engine = make_engine(main)
    first = request("same", 20)
    engine.add(first)
    engine.step()
    with pytest.raises(InvalidRequest, match="'same' is in use") as error:
        engine.add(request("same", 30))
    assert error.value.param == "request_id"
    expected = alone(main, first)
    assert run(engine)["same", 0].tokens == expected.tokens
    assert run(engine, first)["same", 0] == expected, "the id can be used again after the end"


def test_the_queue_counts_requests_not_their_continuations(main):
    """vllm-project/vllm#53936: one request with many continuations is no full queue (--max-num-queued-reqs)."""
    engine = make_engine(main)
    for name in ("first", "second"):
        engine.add(request(name, 33, drawn(n=12, max_tokens=4)))
    assert engine.core.num_waiting == 2
    for _ in range(4):
        engine.step()
    assert len(engine.core.scheduler.running) == 8
    assert (engine.core.num_waiting, engine.stats().num_requests_waiting) == (1, 1)
    run(engine)


def test_op_04_counters_add_up_and_gauges_are_zero_at_idle(main):
    engine = make_engine(main, num_blocks=20, max_model_len=200)
    random = np.random.default_rng(0)
    items = []
    for i in range(40):
        params = drawn(n=int(random.integers(1, 4)), max_tokens=int(random.integers(0, 60)), seed=i, temperature=i % 2)
        items.append(request(str(i), int(random.integers(1, 100)), params))
    aborted = iter(range(0, 40, 4))

    def abort_some():
        stats = engine.stats()
        assert 0 <= stats.kv_cache_usage <= 1
        assert stats.num_requests_running <= 8
        assert stats.num_requests_running + stats.num_requests_waiting <= 40  # requests, not their continuations
        if stats.steps % 25 == 0 and (victim := next(aborted, None)) is not None:
            return engine.abort(str(victim))
        return None

    answers = run(engine, *items, each_step=abort_some)
    stats = engine.stats()
    assert set(answers) == {(item.id, index) for item in items for index in range(item.params.n)}
    reasons = [answer.finish_reason for answer in answers.values()]
    assert stats.requests_finished == {reason: reasons.count(reason) for reason in ("stop", "length", "abort", "error")}
    assert stats.requests_finished["abort"] > 3
    assert stats.generation_tokens == sum(len(answer.tokens) for answer in answers.values())
    prefilled = {name for (name, _), answer in answers.items() if answer.tokens or answer.finish_reason != "abort"}
    assert stats.prompt_tokens == sum(len(item.prompt_ids) for item in items if item.id in prefilled)
    assert stats.num_preemptions > 0
    assert stats.padded_tokens > 0
    assert stats.real_tokens >= stats.prompt_tokens + stats.generation_tokens - len(answers)


# -- no compilation while serving -------------------------------------------------------------------------------------


def test_200_requests_of_random_lengths_compile_nothing(main):
    engine = make_engine(main)
    random = np.random.default_rng(1)
    kinds = [greedy, drawn, lambda **f: drawn(top_k=40, **f), lambda **f: greedy(frequency_penalty=0.5, **f)]
    items = [
        request(
            str(i),
            int(random.integers(1, 200)),
            kinds[i % 4](
                max_tokens=int(random.integers(1, 30)),
                logprobs=[None, 0, 5][i % 3],
                prompt_logprobs=0 if i % 17 == 0 else None,
                n=1 + (i % 13 == 0),
                stop=["e"] if i % 5 == 0 else [],
            ),
        )
        for i in range(200)
    ]
    answers = run(engine, *items)
    assert len({name for name, _ in answers}) == 200
    assert all(answer.finish_reason in ("stop", "length") for answer in answers.values())
    assert engine.stats().compiles_after_warmup == 0


def test_what_others_compile_is_not_the_engine_s(main):
    one, other = make_engine(main), make_engine(main)
    jax.jit(lambda x: x + 12345)(np.arange(3))  # the user's own, between two steps and in the same thread
    assert (one.stats().compiles_after_warmup, other.stats().compiles_after_warmup) == (0, 0)


def test_sch_06_an_odd_budget_compiles_nothing(main):
    engine = make_engine(main, max_num_batched_tokens=37)
    run(engine, *(request(str(n), n, greedy(max_tokens=5)) for n in (1, 36, 37, 38, 64, 150)))
    assert engine.stats().compiles_after_warmup == 0


def test_a_compilation_in_a_step_is_counted(main, monkeypatch):
    engine, other = make_engine(main, options={"forbid_tracing": False}), make_engine(main)
    dispatch = main.runner.dispatch

    def compiling(plan):
        jax.jit(lambda x: x * 3 + 1)(np.ones(7))
        return dispatch(plan)

    monkeypatch.setattr(main.runner, "dispatch", compiling)
    run(engine, request("a", 5, greedy(max_tokens=1)))
    assert engine.stats().compiles_after_warmup > 0
    assert other.stats().compiles_after_warmup == 0


# -- failed steps (contract (e) of scheduling/scheduler.py) -----------------------------------------------------------


def failing(main, monkeypatch, key, calls):
    """Make the executable raise at the calls with these numbers, after the pool was donated to it."""
    original, count = main.runner._executables[key], iter(range(10**9))

    def sometimes(leaves, pool, *rest):
        if next(count) in calls:
            for array in pool:
                array.delete()
            raise RuntimeError("injected")
        return original(leaves, pool, *rest)

    monkeypatch.setitem(main.runner._executables, key, sometimes)


def test_a_step_that_raises_is_recomputed(main, monkeypatch):
    items = [
        request("greedy", 33, greedy(prompt_logprobs=1, logprobs=1)),
        request("drawn", 17, drawn(n=3, seed=5, max_tokens=40)),
        request("penalties", 20, greedy(frequency_penalty=0.8, max_tokens=40)),
        request("later", 100, greedy(max_tokens=10)),
    ]
    expected = run(make_engine(main), *items)
    engine = make_engine(main)
    failing(main, monkeypatch, ("decode", 8), {3, 17, 18 + 12})
    answers = run(engine, *items)
    assert {key: answer.tokens for key, answer in answers.items()} == {key: a.tokens for key, a in expected.items()}
    assert {key: answer.text for key, answer in answers.items()} == {key: a.text for key, a in expected.items()}
    assert len(answers["greedy", 0].prompt_logprobs) == 33


def test_op_02_steps_that_keep_failing_end_the_engine(main, monkeypatch):
    """Two requests get the error, one by one; then it is the device, and nobody else's step is tried."""
    engine = make_engine(main)
    for size in (16, 64):
        failing(main, monkeypatch, ("mixed", size), range(100))
    for name, length in (("a", 20), ("b", 21), ("c", 22)):
        engine.add(request(name, range(length, 0, -1)))
    deltas = [delta for _ in range(4) for delta in engine.step()]
    with pytest.raises(EngineError, match=r"steps keep failing.*RuntimeError"):
        engine.step()
    assert [(d.request_id, d.finish_reason) for d in deltas] == [("a", "error")]
    deltas = engine.fail("sorry")
    assert [(d.request_id, d.finish_reason, d.error) for d in deltas] == [(n, "error", "sorry") for n in "bc"]
    assert_idle(engine)
    assert not engine.has_work


def test_fail_ends_all_requests_whatever_they_wait_for(main):
    """Amid prompts, with siblings that wait for a prefill or are queued by it, and with steps in flight."""
    for steps in (0, 1, 2, 3, 5, 8, 13):
        engine = make_engine(main)
        for i, length in enumerate((33, 17, 5, 100)):
            engine.add(request(str(i), length, greedy(n=1 + i % 3, max_tokens=6 + 3 * i)))
        ended = [delta for _ in range(steps) for delta in engine.step() if delta.finish_reason is not None]
        ended += engine.fail("sorry")
        assert sorted((d.request_id, d.index) for d in ended) == [
            (str(i), index) for i in range(4) for index in range(1 + i % 3)
        ]
        assert not engine.has_work
        assert_idle(engine)


def test_a_request_that_could_not_be_added_is_not_live(main, monkeypatch):
    """Queued without a detokenizer, it was no business of `fail`, and the engine had work for ever."""
    engine, made = make_engine(main), []

    def broken(*args):
        made.append(args)
        if len(made) == 2:
            raise RuntimeError("no detokenizer")
        return Detokenizer(*args)

    monkeypatch.setattr("omni_jax.engine.output_processor.Detokenizer", broken)
    with pytest.raises(RuntimeError, match="no detokenizer"):
        engine.add(request("a", 5, greedy(n=2)))
    assert engine.fail("sorry") == []
    assert not engine.has_work
    assert_idle(engine)
    assert run(engine, request("a", 5, greedy(max_tokens=2)))["a", 0].tokens


# -- continuations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_continuations_share_the_prompt_and_give_what_each_gives_with_the_other_setting(main, caching):
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    engine = make_engine(main, options={"enable_prefix_caching": caching})
    found = run(engine, request("a", 70, params), request("b", 70, params))
    other = run(make_engine(main, options={"enable_prefix_caching": not caching}), request("a", 70, params))
    for index in range(3):
        assert found["a", index].tokens == found["b", index].tokens == other["a", index].tokens
    shared = 69 // engine.info.block_size * engine.info.block_size
    parts = 2 if not caching else 1  # how often the prompt's full blocks are computed
    assert engine.stats().real_tokens == 6 * (70 - shared) + parts * shared + 6 * 5
    assert_idle(engine)
