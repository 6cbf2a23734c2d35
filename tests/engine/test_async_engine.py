"""AsyncEngine: streams, aborts, stops, and failures that end every stream."""

import asyncio
import contextlib
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from checkpoints.errors import CheckpointError
from omni_jax.engine.async_engine import AsyncEngine
from omni_jax.engine.config import EngineConfig
from omni_jax.requests import EngineError, InvalidRequest, SamplingParams, Unavailable
from tests.engines import Answer, greedy, load_tiny, make_engine, request, run, sharing

pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def main():
    return load_tiny("main")


@contextlib.asynccontextmanager
async def started(loaded, *, limits=None, **options):
    with sharing(loaded, **(limits or {})) as model_dir:
        engine = AsyncEngine(EngineConfig(model_dir=model_dir, **options))
        await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def collect(stream, answers=None) -> dict[int, Answer]:
    answers = {} if answers is None else answers
    async for delta in stream:
        answers.setdefault(delta.index, Answer()).take(delta)
    return answers


def drawn(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 1, "max_tokens": 30, "ignore_eos": True} | fields)


async def idle(engine) -> None:
    """Wait until the engine is idle."""
    while (stats := engine.stats()).num_requests_running or stats.num_requests_waiting or stats.kv_cache_usage:
        await asyncio.sleep(0.005)


async def test_streams_deliver_all_continuations_to_their_ends(main):
    items = [request("n", 40, drawn(n=3)), request("g", 33), request("one", 1, greedy(max_tokens=1))]
    expected = run(make_engine(main), *items)
    async with started(main) as engine:
        answers = await asyncio.gather(*(collect(engine.submit(item)) for item in items))
        found = {(item.id, index): a for item, many in zip(items, answers, strict=True) for index, a in many.items()}
        assert found == expected
        await idle(engine)
        engine.check_health()


async def test_requests_that_arrive_while_others_run_get_the_same_tokens(main):
    items = [request(str(i), 10 + 9 * i, drawn(seed=i)) for i in range(12)]
    expected = {item.id: run(make_engine(main), item)[item.id, 0] for item in items}
    async with started(main) as engine:

        async def later(i):
            await asyncio.sleep(0.003 * i)
            return await collect(engine.submit(items[i]))

        for item, answer in zip(items, await asyncio.gather(*map(later, range(12))), strict=True):
            assert answer[0].tokens == expected[item.id].tokens


async def test_kv_04_abort_ends_the_stream_and_frees_everything(main):
    async with started(main) as engine:
        endless = engine.submit(request("endless", 20, drawn(n=2, max_tokens=None)))
        kept = asyncio.create_task(collect(engine.submit(request("kept", 20))))
        first = await anext(endless)
        assert first.finish_reason is None
        engine.abort("endless")
        engine.abort("unknown")
        answers = await collect(endless)
        assert {answer.finish_reason for answer in answers.values()} == {"abort"}
        assert (await kept)[0].finish_reason == "length"
        await idle(engine)
        engine.abort("endless")
        assert engine.stats().requests_finished["abort"] == 2


async def test_api_10_the_id_of_a_live_request_is_refused(main):
    async with started(main) as engine:
        first = engine.submit(request("same", 20, greedy(max_tokens=40)))
        with pytest.raises(InvalidRequest, match="'same'"):
            engine.submit(request("same", 20))
        assert (await collect(first))[0].finish_reason == "length"
        again = await collect(engine.submit(request("same", 20, greedy(max_tokens=2))))
        assert len(again[0].tokens) == 2


@contextlib.contextmanager
def held(main, monkeypatch, key):
    """A context in which the executable hangs. Yields an event that is set at its first call."""
    entered, go_on = threading.Event(), threading.Event()
    original = main.runner._executables[key]

    def hanging(*arguments):
        entered.set()
        go_on.wait(60)
        return original(*arguments)

    monkeypatch.setitem(main.runner._executables, key, hanging)
    try:
        yield entered
    finally:
        go_on.set()


async def test_a_full_queue_refuses_requests(main, monkeypatch):
    async with started(main, max_num_queued_reqs=3) as engine:
        with held(main, monkeypatch, ("mixed", 64)) as entered:
            streams = [engine.submit(request("running", 64))]
            assert await asyncio.to_thread(entered.wait, 60)
            for i in range(3):
                engine.check_queue()
                streams.append(engine.submit(request(str(i), 20)))
            with pytest.raises(Unavailable, match="the queue is full: 3 requests are waiting"):
                engine.check_queue()
            streams.append(engine.submit(request("of the same call", 20)))
        for stream in streams:
            assert (await collect(stream))[0].finish_reason == "length"
        engine.check_queue()


async def test_a_slow_reader_delays_no_other_and_loses_nothing(main):
    expected = run(make_engine(main), request("a", 33))["a", 0]
    async with started(main) as engine:
        slow, quick = engine.submit(request("slow", 33)), engine.submit(request("quick", 33))
        assert (await collect(quick))[0] == expected
        await idle(engine)
        assert (await collect(slow))[0] == expected


async def test_stop_drains_live_requests_and_refuses_new_ones(main):
    async with started(main) as engine:
        stream = asyncio.create_task(collect(engine.submit(request("a", 20, greedy(max_tokens=200)))))
        stopping = asyncio.create_task(engine.stop(drain_seconds=600))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="shutting down"):
            engine.submit(request("b", 20))
        await stopping
        answer = (await stream)[0]
        assert (len(answer.tokens), answer.finish_reason) == (200, "length")


async def test_stop_without_drain_time_aborts(main):
    async with started(main) as engine:
        stream = engine.submit(request("a", 20, drawn(max_tokens=None, n=2)))
        await anext(stream)
        await engine.stop()
        assert {a.finish_reason for a in (await collect(stream)).values()} == {"abort"}
        await idle(engine)
        assert not [thread for thread in threading.enumerate() if thread.name == "engine"]


async def test_a_failed_start_raises_the_error(tmp_path):
    engine = AsyncEngine(EngineConfig(model_dir=tmp_path / "nothing here"))
    with pytest.raises(Unavailable, match="not started"):
        engine.submit(request("a", 3))
    with pytest.raises(CheckpointError, match="nothing here"):
        await engine.start()
    with pytest.raises(EngineError):
        engine.check_health()
    await engine.stop()


async def test_forbid_tracing_stops_an_eager_operation_in_the_engines_thread(main, monkeypatch):
    """The guard is thread-local, so it must be entered in the thread that runs steps. Without it, an eager operation
    would trace and compile for each new shape while serving."""
    dispatch, sizes, threads = main.runner.dispatch, iter(range(1000, 2000)), []

    def eager(plan):
        threads.append(threading.current_thread().name)
        jnp.zeros((next(sizes),)) + 1.0
        return dispatch(plan)

    monkeypatch.setattr(main.runner, "dispatch", eager)
    async with started(main) as engine:
        for name in "ab":
            answer = (await collect(engine.submit(request(name, 20, greedy(max_tokens=4)))))[0]
            assert answer.finish_reason == "error"
        with pytest.raises(EngineError, match="steps keep failing"):
            engine.check_health()
    assert set(threads) == {"engine"}
    async with started(main, forbid_tracing=False) as engine:
        answer = (await collect(engine.submit(request("a", 20, greedy(max_tokens=4)))))[0]
        assert answer.finish_reason == "length"
        assert engine.stats().compiles_after_warmup > 0


async def test_op_02_a_failed_engine_ends_every_stream_and_is_unhealthy(main, monkeypatch):
    """Streams of requests that are submitted while the last step fails end too."""
    entered, go_on, calls = threading.Event(), threading.Event(), iter(range(100))

    def broken(*_):
        if next(calls) == 1:
            entered.set()
            go_on.wait(60)
        raise RuntimeError("a secret of the device")

    monkeypatch.setitem(main.runner._executables, ("mixed", 64), broken)
    async with started(main) as engine:
        engine.check_health()
        streams = [engine.submit(request(str(i), 64, drawn(n=2))) for i in range(3)]
        assert await asyncio.to_thread(entered.wait, 60)
        streams.append(engine.submit(request("late", 20)))
        engine.abort("2")
        go_on.set()
        for stream, wanted in zip(streams, ("error", "error", "abort", "error"), strict=True):
            for answer in (await collect(stream)).values():
                assert answer.finish_reason == wanted
                assert wanted == "abort" or "failed" in answer.error
                assert "secret" not in (answer.error or "")
        with pytest.raises(EngineError, match="has stopped"):
            engine.check_health()
        with pytest.raises(EngineError, match="has stopped"):
            engine.submit(request("b", 3))
        stats = engine.stats()
        assert (stats.num_requests_running, stats.num_requests_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


async def test_op_02_the_engine_is_unhealthy_while_a_step_hangs(main, monkeypatch):
    async with started(main, hang_seconds=0.0) as engine:
        with held(main, monkeypatch, ("decode", 1)) as entered:
            stream = engine.submit(request("a", 20, greedy(max_tokens=4)))
            assert await asyncio.to_thread(entered.wait, 60)
            await asyncio.sleep(0.001)
            with pytest.raises(EngineError, match="no progress"):
                engine.check_health()
        assert (await collect(stream))[0].finish_reason == "length"
        await idle(engine)


def test_the_start_can_be_cancelled(main):
    """A cancelled start and a closed loop raise no error in the engine's thread."""
    gate = threading.Event()

    async def give_up():
        engine = AsyncEngine(EngineConfig(model_dir=Path(main.info.model_dir)))
        with sharing(main):
            monkey = pytest.MonkeyPatch()
            monkey.setattr("omni_jax.engine.core.load", lambda *_: gate.wait(60) and main)
            start = asyncio.create_task(engine.start())
            await asyncio.sleep(0.01)
            start.cancel()
            with pytest.raises(asyncio.CancelledError):
                await start
            gate.set()
            await engine.stop()
            monkey.undo()

    asyncio.run(give_up())
    assert not [thread for thread in threading.enumerate() if thread.name == "engine"]


def test_no_tracing_of_jax_raises_on_eager_operations():
    with jax.no_tracing(), pytest.raises(Exception, match="trac"):
        jnp.zeros((777,)) + 1.0
