"""Prefix caching, swap, int8 caches and compression on compiled programs."""

import dataclasses
import time

import numpy as np
import pytest

from omni_jax.requests import InvalidRequest
from omni_jax.requests.slo import SLO
from tests import tiny
from tests.engines import SETUPS, assert_idle, compile_tiny, greedy, load_tiny, make_engine, request, run

GREEDY = dataclasses.replace(SETUPS["main"], heads=("greedy",))
SWAP = {"swap_space": 0.05, "preemption_mode": "swap"}


@pytest.fixture(scope="module")
def main():
    return load_tiny("main")


@pytest.fixture(scope="module")
def swapping():
    return compile_tiny(GREEDY, **SWAP)


@pytest.fixture(scope="module")
def int8():
    return compile_tiny(GREEDY, kv_cache_dtype="int8", **SWAP)


def tokens(answers) -> dict:
    return {key: answer.tokens for key, answer in answers.items()}


def requests(count: int, max_tokens: int = 80):
    return [request(f"r{n}", [7 + n, *tiny.prompt(30 + 9 * n)], greedy(max_tokens=max_tokens)) for n in range(count)]


def close_idle(engine) -> None:
    assert_idle(engine)
    engine.close()


def test_prefix_hits_are_counted_and_change_no_token(main):
    engine, prompt = make_engine(main), tiny.prompt(70)
    cold = run(engine, request("cold", prompt, greedy(max_tokens=12)))
    warm = run(engine, request("warm", prompt, greedy(max_tokens=12)))
    longer = run(engine, request("longer", [*prompt, *cold["cold", 0].tokens, 5], greedy(max_tokens=3)))
    assert warm["warm", 0].tokens == cold["cold", 0].tokens
    assert engine.stats().prefix_queries == {"text": 70 + 70 + 83}
    assert engine.stats().prefix_hits == {"text": 64 + 80}
    alone = make_engine(main, options={"enable_prefix_caching": False})
    assert longer == run(alone, request("longer", [*prompt, *cold["cold", 0].tokens, 5], greedy(max_tokens=3)))
    close_idle(engine)


def test_pc_05_prompt_logprobs_are_the_same_with_a_full_cache(main):
    engine, prompt = make_engine(main), tiny.prompt(33)
    found = [
        run(engine, request(f"r{n}", prompt, greedy(max_tokens=1, prompt_logprobs=0)))[f"r{n}", 0].prompt_logprobs
        for n in range(2)
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 33


@pytest.mark.parametrize("caching", [False, True])
def test_pre_01_swapping_does_not_change_tokens(main, swapping, caching):
    expected = tokens(run(make_engine(main), *requests(5)))
    options = SWAP | {"enable_prefix_caching": caching}
    engine = make_engine(swapping, options=options, num_blocks=20, max_model_len=160)
    assert tokens(run(engine, *requests(5))) == expected
    stats = engine.stats()
    assert stats.blocks_swapped_out > 0
    assert stats.blocks_swapped_in > 0
    assert stats.compiles_after_warmup == 0
    close_idle(engine)


def test_kvq_02_int8_gives_the_same_tokens_cold_cached_chunked_and_swapped(int8):
    prompt = tiny.prompt(70)
    cold = run(make_engine(int8, options=SWAP), request("a", prompt, greedy(max_tokens=16)))["a", 0].tokens
    engine = make_engine(int8, options=SWAP)
    run(engine, request("first", prompt[:40], greedy(max_tokens=2)))
    assert run(engine, request("a", prompt, greedy(max_tokens=16)))["a", 0].tokens == cold
    assert engine.stats().prefix_hits["text"] == 32
    plenty = tokens(run(make_engine(int8, options=SWAP), *requests(5)))
    scarce = make_engine(int8, options=SWAP, num_blocks=20, max_model_len=160)
    assert tokens(run(scarce, *requests(5))) == plenty
    assert scarce.stats().blocks_swapped_in > 0
    close_idle(scarce)


def test_kvq_01_int8_logprobs_are_near_float32(main, int8):
    prompt = tiny.prompt(60)

    def logprobs(loaded):
        answer = run(make_engine(loaded, options={}), request("a", prompt, greedy(max_tokens=1, prompt_logprobs=0)))
        return np.array([token.logprob for token in answer["a", 0].prompt_logprobs[1:]])

    assert np.abs(logprobs(int8) - logprobs(main)).mean() < 0.1  # logits range over tens


def test_a_lost_parcel_is_recomputed(main, swapping, monkeypatch):
    from omni_jax.memory.host_tier import HostTier, ParcelLost

    expected = tokens(run(make_engine(main), *requests(5)))

    def lost(self, parcel):
        self.drop(parcel)
        raise ParcelLost("gone")

    engine = make_engine(swapping, options=SWAP, num_blocks=20, max_model_len=160)
    monkeypatch.setattr(HostTier, "take", lost)
    assert tokens(run(engine, *requests(5))) == expected
    assert engine.stats().blocks_swapped_out > 0
    assert engine.stats().blocks_swapped_in == 0
    close_idle(engine)


def test_an_urgent_request_swaps_out_another_which_continues_later(main, swapping):
    long = request("long", tiny.prompt(64), greedy(max_tokens=40))
    urgent = request("now", [3, *tiny.prompt(200)], greedy(max_tokens=8))
    expected = tokens(run(make_engine(main), long, urgent))
    options = SWAP | {"scheduling_policy": "slo"}
    engine = make_engine(swapping, options=options, num_blocks=18, max_model_len=272)
    now = time.monotonic()
    engine.add(dataclasses.replace(long, arrival=now, slo=SLO(priority=3)))
    begun = [delta for _ in range(12) for delta in engine.step()]
    answers = run(engine, dataclasses.replace(urgent, arrival=now, slo=SLO(priority=0)))
    assert answers["now", 0].tokens == expected["now", 0]
    assert [t for d in begun for t in d.token_ids] + answers["long", 0].tokens == expected["long", 0]
    assert engine.stats().blocks_swapped_in > 0
    close_idle(engine)


def test_compression_drops_the_same_rows_alone_and_in_company():
    """Prompts of a few words, repeated: their keys have equal norms, but for rounding that depends on the batch."""
    options = {"swap_space": 0.05, "enable_adaptive_compression": True}
    compressing, draw = compile_tiny(GREEDY, **options), np.random.default_rng(0)
    repeating = [
        request(f"r{n}", draw.integers(3, 500, 8)[draw.integers(0, 8, 60 + 5 * n)].tolist(), greedy(logprobs=0))
        for n in range(10)
    ]
    engine = make_engine(compressing, options=options)
    together = run(engine, *repeating)
    assert engine.stats().tokens_dropped > 0
    for each in repeating:
        expected = run(make_engine(compressing, options=options), each)[each.id, 0]
        found = together[each.id, 0]
        assert found.tokens == expected.tokens
        theirs = [entry.logprob for entry in expected.logprobs]
        np.testing.assert_allclose([entry.logprob for entry in found.logprobs], theirs, atol=1e-4)


def bad_controller(step: int, total: int) -> float:
    return 2.0 if total > 300 else 0.0


def test_an_invalid_value_of_a_controller_refuses_the_request_and_is_in_the_error(main):
    options = {"enable_adaptive_compression": True, "kv_compress_controller": f"{__name__}:bad_controller"}
    engine = make_engine(main, options=options)
    with pytest.raises(InvalidRequest, match=r"returned 2.0 at step 0 of 400"):
        engine.check(request("a", 20, greedy(max_tokens=400)))
    assert len(run(engine, request("b", 20, greedy(max_tokens=4)))["b", 0].tokens) == 4


def counted_controller(step: int, total: int) -> float:
    CALLS.append(total)
    return 0.6


CALLS: list[int] = []


def test_a_controller_is_called_before_its_request_reaches_the_core_and_its_shares_count():
    options = {"swap_space": 0.05, "enable_adaptive_compression": True, "kv_compress_ratio": 0.6}
    compressing = compile_tiny(GREEDY, **options)
    dropped = {}
    for name in (None, f"{__name__}:counted_controller"):
        engine = make_engine(compressing, options=options | {"kv_compress_controller": name})
        CALLS.clear()
        engine.add(request("a", 90, greedy(max_tokens=8)))
        assert len(CALLS) == (0 if name is None else 8)
        while engine.has_work:
            engine.step()
        assert len(CALLS) == (0 if name is None else 8)
        dropped[name] = engine.stats().tokens_dropped
    assert dropped.pop(None) == 0  # the default drops nothing in the first 10 steps
    assert min(dropped.values()) > 0
