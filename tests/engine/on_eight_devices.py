"""Two replicas of two virtual devices each. Run by test_replicas.py; see tests/virtual_devices.py."""

import asyncio
import contextlib
import dataclasses
import functools
import threading
from unittest import mock

import jax
import pytest

from omni_jax import LLM
from omni_jax.engine import core as engine_module
from omni_jax.engine import loading
from omni_jax.engine.async_engine import AsyncEngine
from omni_jax.engine.config import EngineConfig
from omni_jax.requests import EngineError, InvalidRequest
from omni_jax.runtime import runner as runner_module
from omni_jax.scheduling.buckets import Buckets
from tests import tiny
from tests.compilation_cache import one_process_at_a_time
from tests.engine.test_async_engine import collect, idle
from tests.engines import Setup, checkpoint, compile_tiny, greedy, make_engine, request, run

SETUP = Setup(variant="eight_heads", decode=(8,), mixed=(64,), heads=("greedy", "sample"))
MESH = {"data_parallel_size": 2, "tensor_parallel_size": 2}
LOADED = {}


@pytest.fixture(scope="module", autouse=True)
def replicas():
    """Load each replica once; each engine gets new device state."""
    config = SETUP.config(checkpoint(SETUP.variant), **MESH)
    buckets = Buckets(decode=SETUP.decode, mixed=SETUP.mixed)
    with (
        one_process_at_a_time(),
        mock.patch.object(loading, "default_buckets", return_value=buckets),
        mock.patch.object(runner_module, "VARIANTS", SETUP.heads),
    ):
        for replica in range(2):
            LOADED[replica] = loading.load(config, None, replica)

    one_device()  # compiled before any test counts compilations

    def load_again(config, progress, replica):
        LOADED[replica].runner.reset()
        return LOADED[replica]

    with mock.patch.object(engine_module, "load", side_effect=load_again):
        yield LOADED


@contextlib.asynccontextmanager
async def started(**options):
    engine = AsyncEngine(EngineConfig(model_dir=checkpoint(SETUP.variant), **MESH, **options))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def requests(count, **params):
    return [request(f"r{n}", [7 + n, *tiny.prompt(20 + 9 * n)], greedy(max_tokens=20, **params)) for n in range(count)]


def expected(items):
    """Tokens of an engine on one device."""
    return {key: answer.tokens for key, answer in run(make_engine(one_device()), *items).items()}


@functools.cache
def one_device():
    return compile_tiny(SETUP)


def devices(replica):
    return {device for array in jax.tree.leaves(LOADED[replica].runner._pool) for device in array.sharding.device_set}


def test_replicas_have_their_own_devices():
    for replica in range(2):
        LOADED[replica].runner.reset()
        assert devices(replica) == set(jax.devices()[2 * replica : 2 * replica + 2])
        weights = LOADED[replica].runner._weights
        assert {d for leaf in weights.arrays for d in leaf.sharding.device_set} == devices(replica)


async def test_two_replicas_answer_like_one_and_both_work():
    items = requests(10)
    async with started() as engine:
        streams = [engine.submit(item) for item in items]
        answers = await asyncio.gather(*map(collect, streams))
        assert {(item.id, 0): a[0].tokens for item, a in zip(items, answers, strict=True)} == expected(items)
        await idle(engine)
        each, both = engine.replica_stats(), engine.stats()
        assert all(stats.steps > 0 and stats.generation_tokens > 0 for stats in each)
        assert both.generation_tokens == sum(stats.generation_tokens for stats in each) == 200
        assert both.requests_finished["length"] == 10
        assert both.compiles_after_warmup == 0
        assert engine.recorder.summary()["requests"]["finished"] == 10
        engine.check_health()


async def test_requests_with_a_cached_prefix_go_to_its_replica():
    prefix = tiny.prompt(64)
    async with started() as engine:
        for n in range(2):  # one for each replica
            streams = [engine.submit(request(f"{n} {k}", [5 + k, *prefix], greedy(max_tokens=4))) for k in range(2)]
            await asyncio.gather(*map(collect, streams))
            if not n:
                assert [stats.requests_finished["length"] for stats in engine.replica_stats()] == [1, 1]
        assert [stats.prefix_hits["text"] for stats in engine.replica_stats()] == [64, 64]
        before = [stats.requests_finished["length"] for stats in engine.replica_stats()]
        for k in range(3):
            await collect(engine.submit(request(f"more {k}", [6, *prefix, 9 + k], greedy(max_tokens=4))))
        after = [stats.requests_finished["length"] for stats in engine.replica_stats()]
        assert [new - old for new, old in zip(after, before, strict=True)] == [0, 3]


async def test_new_prefixes_go_to_the_least_loaded_replica():
    async with started() as engine:
        streams = [engine.submit(item) for item in requests(6)]
        # Prompts of 21, 30, 39, 48, 57 and 66 tokens, in this order, and 20 output tokens each.
        assert list(engine._dispatcher._loads.values()) == [21 + 39 + 57 + 60, 30 + 48 + 66 + 60]
        await asyncio.gather(*map(collect, streams))
        await idle(engine)
        assert set(engine._dispatcher._loads.values()) == {0}
        assert not engine._dispatcher._live


async def test_load_counts_expected_output_beside_prompts():
    """Otherwise one long prompt would send all short chats to the other replica."""
    async with started() as engine:
        first = engine.submit(request("long", tiny.prompt(100), greedy(max_tokens=4)))
        chats = [engine.submit(request(f"chat {n}", [9 + n], greedy(max_tokens=30))) for n in range(12)]
        loads = list(engine._dispatcher._loads.values())
        assert max(loads) - min(loads) <= 31
        await asyncio.gather(*map(collect, [first, *chats]))


def test_seeds_do_not_depend_on_the_replica():
    """A request without a seed gets one before it is submitted to a replica."""
    sampled = dataclasses.replace(greedy(max_tokens=8), temperature=1.0)
    prompts = [list(item.prompt_ids) for item in requests(6)]
    answers = []
    for turn in range(2):
        llm = LLM(checkpoint(SETUP.variant), **MESH, seed=11)
        if turn:  # requests go to the other replica
            llm.engine._dispatcher._loads[0] = 1
        answers.append([output.outputs[0].token_ids for output in llm.generate(prompts, sampled)])
        llm.engine.close()
    assert answers[0] == answers[1]
    assert len(set(map(tuple, answers[0]))) > 1


def test_llm_raises_instead_of_returning_only_some_outputs():
    def broken(*arguments):
        raise RuntimeError("the device is lost")

    executables = LOADED[1].runner._executables
    llm = LLM(checkpoint(SETUP.variant), **MESH)
    with (
        mock.patch.dict(executables, {key: broken for key in executables if key[0] in ("mixed", "decode")}),
        pytest.raises(EngineError, match="replica 1: the engine has stopped"),
    ):
        llm.generate([list(item.prompt_ids) for item in requests(6)], greedy(max_tokens=20))
    llm.engine.close()


async def test_abort_reaches_the_replica():
    async with started() as engine:
        streams = [engine.submit(item) for item in requests(4, ignore_eos=True)]
        for stream in streams:
            await anext(stream)
        for n in range(4):
            engine.abort(f"r{n}")
        for stream in streams:
            assert (await collect(stream))[0].finish_reason == "abort"
        await idle(engine)
        assert engine.stats().requests_finished["abort"] == 4
        assert set(engine._dispatcher._loads.values()) == {0}


async def test_an_id_in_use_on_another_replica_is_refused():
    async with started() as engine:
        first = engine.submit(requests(1)[0])
        with pytest.raises(InvalidRequest, match="'r0'"):
            engine.submit(requests(1)[0])
        await collect(first)


async def test_a_failed_replica_ends_only_its_own_requests_and_health_names_it():
    def broken(*arguments):
        raise RuntimeError("the device is lost")

    items = requests(6)
    executables = LOADED[1].runner._executables
    async with started() as engine:
        with mock.patch.dict(executables, {key: broken for key in executables if key[0] in ("mixed", "decode")}):
            answers = await asyncio.gather(*[collect(engine.submit(item)) for item in items])
        ends = [answer[0].finish_reason for answer in answers]
        assert sorted(set(ends)) == ["error", "length"]
        with pytest.raises(EngineError, match="replica 1: the engine has stopped: steps keep failing"):
            engine.check_health()
        more = await asyncio.gather(
            *[collect(engine.submit(dataclasses.replace(item, id=f"again {item.id}"))) for item in items]
        )
        assert {(item.id, 0): answer[0].tokens for item, answer in zip(items, more, strict=True)} == expected(items)
        await idle_replica(engine, 0)
        assert engine._dispatcher._loads[0] == 0


async def idle_replica(engine, replica):
    while (stats := engine.replica_stats()[replica]).num_requests_running or stats.num_requests_waiting:
        await asyncio.sleep(0.005)


async def test_a_replica_that_cannot_start_stops_all():
    def fails(config, progress, replica):
        if replica:
            raise ValueError("no room for a KV cache")
        return LOADED[0]

    with (
        mock.patch.object(engine_module, "load", side_effect=fails),
        pytest.raises(ValueError, match="no room for a KV cache"),
    ):
        async with started():
            pass
    for thread in threading.enumerate():
        if thread.name == "engine":
            thread.join(30)
            assert not thread.is_alive()


def test_llm_returns_outputs_of_two_replicas_in_order():
    llm = LLM(checkpoint(SETUP.variant), **MESH)
    items = requests(9)
    outputs = llm.generate([list(item.prompt_ids) for item in items], greedy(max_tokens=20))
    found = {(item.id, 0): list(output.outputs[0].token_ids) for item, output in zip(items, outputs, strict=True)}
    assert found == expected(items)
    assert all(stats.steps > 0 for stats in llm.engine.replica_stats())
    stream = llm.stream("hello", greedy(max_tokens=400))
    next(stream)
    stream.close()
    llm.engine.close()
