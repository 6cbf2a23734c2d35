"""Engine cores in processes of their own: the same answers, and what happens when one dies, hangs or cannot start."""

import asyncio
import contextlib
import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.host import stand_in
from checkpoints.errors import CheckpointError
from omni_jax.engine import core_client, loading
from omni_jax.engine.async_engine import AsyncEngine
from omni_jax.engine.config import EngineConfig
from omni_jax.engine.core_loop import CoreLoop
from omni_jax.engine.cores import attached_cores, process_cores
from omni_jax.engine.dispatcher import LOST
from omni_jax.engine.engine import Engine
from omni_jax.engine.messages import ResetPrefixCache
from omni_jax.requests import EngineError, InvalidRequest, SamplingParams
from tests.engine.test_async_engine import collect, idle
from tests.engines import greedy, request, run

SLOW = 0.05  # seconds a step, where a test must catch a request while it runs


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> EngineConfig:
    directory = stand_in.write_model(tmp_path_factory.mktemp("model"))
    return EngineConfig(model_dir=directory, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512, seed=0)


@contextlib.asynccontextmanager
async def started(config: EngineConfig, *, step_seconds: float = 0.0, clients: int = 1):
    prepare = partial(stand_in.use, step_seconds)
    engine = AsyncEngine(config, make_cores=partial(process_cores, clients=clients, prepare=prepare))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def core_pid(engine: AsyncEngine) -> int:
    return engine._cores[0].pid


async def gone(pid: int) -> None:
    """Wait until a process has ended; a test that waits in vain ends by its timeout."""
    while Path(f"/proc/{pid}").exists():
        await asyncio.sleep(0.02)


REQUESTS = (
    request("n", 20, SamplingParams(n=3, seed=5, max_tokens=9, logprobs=2)),
    request("scored", 70, greedy(max_tokens=3, prompt_logprobs=1)),
    request("only scored", 30, greedy(max_tokens=0, prompt_logprobs=0)),
    request("stop string", 20, greedy(max_tokens=60, stop=("z", "q"), include_stop_str_in_output=True)),
    request("stop id", 20, greedy(max_tokens=60, stop_token_ids=[int(stand_in.LETTERS[4])])),
    request("stop string at the last token", 20, greedy(max_tokens=3, stop=("w",))),
)


async def test_a_process_gives_the_same_outputs_as_a_call(config, monkeypatch):
    monkeypatch.setattr(loading, "Runner", stand_in.StandInRunner)
    expected = run(Engine(config), *REQUESTS)
    assert {answer.finish_reason for answer in expected.values()} == {"stop", "length"}
    async with started(config, clients=2) as engine:
        link = engine.link(1)
        other = AsyncEngine(link.config, make_cores=lambda *arguments: attached_cores(link, arguments[-1]))
        await other.start()
        for client in (engine, other, engine):
            answers = await asyncio.gather(*(collect(client.submit(item)) for item in REQUESTS))
            found = {(r.id, index): a for r, many in zip(REQUESTS, answers, strict=True) for index, a in many.items()}
            assert found == expected
        for client in (engine, other):
            await idle(client)
            assert client.stats().prompt_tokens == 3 * sum(len(item.prompt_ids) for item in REQUESTS)
            assert client.recorder.summary()["requests"]["finished"] == 3 * len(expected)
        with pytest.raises(InvalidRequest, match="context"):
            engine.submit(request("long", 600))

        endless = other.submit(request("endless", 20, greedy(max_tokens=None)))
        await anext(endless)
        await other.stop()  # as its process would, without a word about its requests
        engine.client_gone(1, os.getpid())
        await idle(engine)
    assert not Path(link.directory).exists()


async def test_a_core_that_dies_or_hangs_is_replaced_and_what_has_shown_nothing_goes_on(config):
    config = EngineConfig(**{**vars(config), "restart_core": True, "hang_seconds": 5.0})
    async with started(config, step_seconds=SLOW) as engine:
        for number, name in ((signal.SIGKILL, "was ended by signal 9"), (signal.SIGSTOP, "no progress for")):
            shown = engine.submit(request("shown", 20, greedy(max_tokens=400)))
            await anext(shown)
            pid = core_pid(engine)
            os.kill(pid, number)
            waiting = engine.submit(request("waiting", 20, greedy(max_tokens=3)))
            unwanted = engine.submit(request("unwanted", 20, greedy(max_tokens=3)))
            engine.abort("unwanted")  # read by no core; the next one must not compute it
            [answer] = (await collect(shown)).values()
            assert (answer.finish_reason, answer.error) == ("error", LOST)
            with pytest.raises(EngineError, match=name):
                engine.check_health()
            held = engine.submit(request("held", 20, greedy(max_tokens=3)))
            engine.abort("held")
            assert (await collect(held))[0].finish_reason == "abort"
            assert (await collect(waiting))[0].finish_reason == "length"
            assert (await collect(unwanted))[0].finish_reason == "error"
            engine.check_health()
            assert core_pid(engine) != pid
            await gone(pid)
            await idle(engine)


async def test_without_a_restart_every_stream_ends_and_the_engine_is_unhealthy(config):
    async with started(config, step_seconds=SLOW) as engine:
        streams = [engine.submit(request(str(i), 20, greedy(max_tokens=400, n=2))) for i in range(9)]
        await anext(streams[0])
        os.kill(core_pid(engine), signal.SIGKILL)
        for stream in streams:
            assert {answer.finish_reason for answer in (await collect(stream)).values()} == {"error"}
        for call in (engine.check_health, engine.check_queue):
            with pytest.raises(EngineError, match="was ended by signal 9"):
                call()
        stats = engine.stats()
        assert (stats.num_requests_running, stats.num_requests_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


async def test_a_core_that_cannot_start_says_why(config, tmp_path):
    engine = AsyncEngine(EngineConfig(model_dir=tmp_path / "nothing here"), make_cores=process_cores)
    with pytest.raises(CheckpointError, match="nothing here"):
        await engine.start()
    await engine.stop()
    engine = AsyncEngine(config, make_cores=partial(process_cores, prepare=partial(os._exit, 7)))
    with pytest.raises(EngineError, match="exit code 7 while it was loading"):
        await engine.start()
    await engine.stop()


def start_once(marker: str) -> None:
    """Let a core start, and others in its place end while they load."""
    if Path(marker).exists():
        os._exit(7)
    Path(marker).touch()
    stand_in.use(SLOW)


async def test_all_clients_hear_that_no_core_comes_back(config, tmp_path, monkeypatch):
    config = EngineConfig(**{**vars(config), "restart_core": True})
    monkeypatch.setattr(core_client, "RETRY_SECONDS", 0.01)
    prepare = partial(start_once, str(tmp_path / "started"))
    engine = AsyncEngine(config, make_cores=partial(process_cores, clients=2, prepare=prepare))
    await engine.start()
    link = engine.link(1)
    other = AsyncEngine(config, make_cores=lambda *arguments: attached_cores(link, arguments[-1]))
    await other.start()
    clients = {"a": engine, "b": other}
    streams = [client.submit(request(name, 20, greedy(max_tokens=400))) for name, client in clients.items()]
    os.kill(core_pid(engine), signal.SIGKILL)
    for client, stream in zip(clients.values(), streams, strict=True):
        assert (await collect(stream))[0].error == LOST
        with pytest.raises(EngineError, match="exit code 7"):
            client.check_health()
        with pytest.raises(EngineError, match="exit code 7"):
            client.submit(request("c", 20))
    await other.stop()
    late = AsyncEngine.attach(engine.link(1))  # a process of this client is started again
    async with asyncio.timeout(60):
        await late.start()
    for call in (late.check_health, late.check_queue):
        with pytest.raises(EngineError, match="exit code 7"):
            call()
    await late.stop()
    await engine.stop()


def fail_once(folder: str) -> None:
    """Let a core start, the first one in its place end while it loads, and the next one start."""
    number = len(list(Path(folder).iterdir()))
    (Path(folder) / str(number)).touch()
    if number == 1:
        os._exit(7)
    stand_in.use(SLOW)


async def test_a_start_in_place_of_another_that_fails_is_tried_again(config, tmp_path, monkeypatch):
    """What the core before it held may not be free yet."""
    monkeypatch.setattr(core_client, "RETRY_SECONDS", 0.01)
    config = EngineConfig(**{**vars(config), "restart_core": True})
    engine = AsyncEngine(config, make_cores=partial(process_cores, prepare=partial(fail_once, str(tmp_path))))
    await engine.start()
    os.kill(core_pid(engine), signal.SIGKILL)
    waiting = engine.submit(request("waiting", 20, greedy(max_tokens=3)))
    assert (await collect(waiting))[0].finish_reason == "length"
    assert len(list(tmp_path.iterdir())) == 3
    engine.check_health()
    await engine.stop()


async def test_statistics_are_exact_once_all_streams_have_ended(config, monkeypatch):
    async with started(config) as engine:
        for count in (1, 2):
            streams = [engine.submit(request(str(number), 20, greedy(max_tokens=5))) for number in range(9)]
            await asyncio.gather(*map(collect, streams))
            stats = engine.stats()
            assert (stats.num_requests_running, stats.num_requests_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
            assert (stats.generation_tokens, stats.prompt_tokens) == (count * 9 * 5, count * 9 * 20)
            assert engine.recorder.summary()["requests"]["window"] == count * 9
            assert engine.totals.summary()["requests"]["finished"] == count * 9


OWNER = """
import asyncio, sys
from functools import partial
from benchmarks.host import stand_in
from omni_jax.engine.async_engine import AsyncEngine
from omni_jax.engine.config import EngineConfig
from omni_jax.engine.cores import process_cores
from omni_jax.interrupts import end_process

async def main():
    engine = AsyncEngine(
        EngineConfig(model_dir=sys.argv[1]), make_cores=partial(process_cores, prepare=partial(stand_in.use, 0.0))
    )
    await engine.start()
    print(engine._cores[0].pid, flush=True)
    END

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("end", "stopped"),
    [
        ("await asyncio.sleep(600)", False),
        ("await asyncio.sleep(600)", True),
        ("end_process(3)", False),
        ("raise SystemExit(3)", False),
    ],
)
async def test_what_a_core_has_ends_with_its_owner_however_that_ends(config, tmp_path, end, stopped):
    program, temporary = tmp_path / "owner.py", tmp_path / "tmp"
    temporary.mkdir()
    program.write_text(OWNER.replace("END", end))
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, str(program), str(config.model_dir)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(temporary)},
    ) as owner:
        assert owner.stdout is not None
        pid = int(await asyncio.to_thread(owner.stdout.readline))
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        if end.startswith("await"):
            owner.kill()
        assert await asyncio.to_thread(owner.wait) in (3, -signal.SIGKILL)
        await gone(pid)
        assert not list(temporary.glob("omni-jax-*"))


def test_a_core_that_was_idle_for_long_does_not_hang_when_a_request_comes():
    loop = CoreLoop(SimpleNamespace(has_work=False, num_waiting=0, patience=30.0), emit=None)
    loop._progressed -= 1000.0
    loop.put(0, ResetPrefixCache())  # no thread runs the loop, so it has not woken yet
    assert loop.status(0).stalled == 0.0
    loop._progressed -= 1000.0
    assert loop.status(0).stalled > 1000.0


async def test_a_process_that_cannot_be_started_is_an_error(config, monkeypatch):
    def start(process):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", start)
    engine = AsyncEngine(config, make_cores=process_cores)
    with pytest.raises(EngineError, match=r"could not be started: .*Cannot allocate memory"):
        await engine.start()
    await engine.stop()
