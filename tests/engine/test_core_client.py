"""Cores as their clients see them, without a core: what the dispatcher and the client of a process do with messages.

Named after public reports of other engines.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import cast

import pytest

from benchmarks.host import stand_in
from omni_jax.engine import core_client, core_loop, core_process, loading
from omni_jax.engine.config import EngineConfig, EngineInfo
from omni_jax.engine.core_client import AttachedCore, Inbox, OwnedCore
from omni_jax.engine.core_loop import CoreLoop
from omni_jax.engine.core_process import OWNER, Outbox, Pauses, Started
from omni_jax.engine.core_thread import ThreadCore
from omni_jax.engine.cores import link
from omni_jax.engine.detokenizer import Detokenizer
from omni_jax.engine.dispatcher import Dispatcher
from omni_jax.engine.engine import Engine
from omni_jax.engine.messages import (
    Abort,
    Add,
    Attach,
    ClientGone,
    End,
    Failed,
    Outputs,
    Ready,
    ResetPrefixCache,
    SequenceOutput,
    Stats,
    Status,
    Stop,
)
from omni_jax.requests import EngineError, InvalidRequest
from tests.engines import greedy, request

A, B, C = (int(token) for token in stand_in.LETTERS[:3])


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> EngineConfig:
    directory = stand_in.write_model(tmp_path_factory.mktemp("model"))
    return EngineConfig(model_dir=directory, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512)


@pytest.fixture(scope="module")
def engine(config) -> Engine:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loading, "Runner", stand_in.StandInRunner)
        return Engine(config)


class FakeCore(ThreadCore):
    """Keeps what it is sent."""

    def __init__(self, engine, index=0):
        self.index, self.sent, self.ready = index, [], core_client.concurrent.futures.Future()
        self.ready.set_result(core_client.Served(info=engine.info, tokenizer=engine.tokenizer, vision=engine.vision))

    def send(self, message):
        self.sent.append(message)

    def status(self):
        return Status(waiting=0, received=0, stalled=0.0)

    @property
    def added(self) -> list[str]:
        """The ids of the requests it was given."""
        return [message.request.id for message in self.sent if isinstance(message, Add)]


@pytest.fixture
def dispatched(config, engine):
    """A dispatcher over one core, the core, and the deltas."""
    deltas = []
    core = FakeCore(engine)
    return Dispatcher(config, [core], deltas.extend), core, deltas


def test_vllm_27987_a_name_is_free_again_while_a_core_still_sends_outputs_of_it(dispatched):
    """A stop string ends a request here first; by then the core has computed more tokens of it."""
    dispatcher, core, deltas = dispatched
    dispatcher.submit(request("chosen by the client", 9, greedy(stop=("b",))))
    with pytest.raises(InvalidRequest, match="'chosen by the client' is in use"):
        dispatcher.submit(request("chosen by the client", 9))
    [first] = core.added
    dispatcher.receive(core, Outputs([SequenceOutput(first, 0, A), SequenceOutput(first, 0, B)]))
    assert isinstance(core.sent[-1], End)
    assert [(delta.request_id, delta.finish_reason) for delta in deltas] == [
        ("chosen by the client", None),
        ("chosen by the client", "stop"),
    ]
    deltas.clear()
    dispatcher.submit(request("chosen by the client", 9))
    dispatcher.receive(core, Outputs([SequenceOutput(first, 0, C)]))
    assert not deltas
    dispatcher.abort("chosen by the client")
    second = core.added[1]
    assert core.sent[-1] == Abort([second])
    dispatcher.receive(core, Outputs([SequenceOutput(second, 0, finish_reason="abort")]))
    assert [(delta.request_id, delta.finish_reason) for delta in deltas] == [("chosen by the client", "abort")]


def test_vllm_27711_clients_may_use_the_same_names(config, engine):
    cores = [FakeCore(engine), FakeCore(engine)]
    for core in cores:
        Dispatcher(config, [core], lambda deltas: None).submit(request("same", 9))
    assert cores[0].added != cores[1].added


def test_a_request_that_cannot_be_sent_leaves_nothing(dispatched, monkeypatch):
    dispatcher, core, _ = dispatched

    def refuse(message):
        raise TypeError("cannot send an object")

    with monkeypatch.context() as patched:
        patched.setattr(core, "send", refuse)
        with pytest.raises(TypeError):
            dispatcher.submit(request("a", 9))
    assert dispatcher._loads == {0: 0}
    dispatcher.submit(request("a", 9))


def test_vllm_17448_an_output_that_cannot_be_processed_ends_its_request_and_no_other(dispatched, monkeypatch):
    dispatcher, core, deltas = dispatched
    dispatcher.submit(request("bad", 9, greedy(n=2)))
    dispatcher.submit(request("good", 9))
    bad, good = core.added
    push = Detokenizer.push

    def broken(self, token, entry):
        if token == C:
            raise ValueError("Invalid prefix encountered")
        return push(self, token, entry)

    monkeypatch.setattr(Detokenizer, "push", broken)
    outputs = [SequenceOutput(bad, 0, C), SequenceOutput(good, 0, A), SequenceOutput(bad, 1, A)]
    dispatcher.receive(core, Outputs(outputs))
    found = [(delta.request_id, delta.index, delta.text, delta.finish_reason) for delta in deltas]
    assert found == [("bad", 0, "", "error"), ("bad", 1, "", "error"), ("good", 0, "a", None)]
    assert core.sent[-1] == Abort([bad])
    assert dispatcher._outputs.finished["error"] == 2
    assert list(dispatcher._live) == ["good"]


def test_an_output_that_an_engine_cannot_process_ends_its_request_in_the_core(config, monkeypatch):
    monkeypatch.setattr(loading, "Runner", stand_in.StandInRunner)
    engine = Engine(config)
    monkeypatch.setattr(Detokenizer, "push", None)
    engine.add(request("bad", 9))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert [delta.finish_reason for delta in deltas] == ["error"]
    assert engine.stats().num_requests_running == 0


def test_the_load_of_a_core_is_that_of_its_live_requests(config, engine):
    """Otherwise the router avoids a core for ever."""
    cores = [FakeCore(engine, 0), FakeCore(engine, 1)]
    dispatcher = Dispatcher(config, cores, lambda deltas: None)
    for name in "abcd":
        dispatcher.submit(request(name, 9, greedy(n=2)))
    assert [len(core.added) for core in cores] == [2, 2]
    for index in range(2):
        outputs = [SequenceOutput(name, index, finish_reason="length") for core in cores for name in core.added]
        dispatcher.receive(cores[0], Outputs(outputs))
    assert dispatcher._loads == {0: 0, 1: 0}
    dispatcher.submit(request("shown", 9))
    [core] = (core for core in cores if len(core.added) == 3)
    dispatcher.receive(core, Outputs([SequenceOutput(core.added[-1], 0, A)]))
    dispatcher.receive(core, Failed("it has ended", final=True))
    assert dispatcher._loads == {0: 0, 1: 0}


def test_a_request_that_has_shown_output_or_lost_two_cores_ends_with_a_failed_core(dispatched):
    """Its tokens are lost; and it may be what makes cores fail."""
    dispatcher, core, deltas = dispatched
    dispatcher.submit(request("shown", 9))
    dispatcher.submit(request("new", 9))
    dispatcher.receive(core, Outputs([SequenceOutput(core.added[0], 0, A)]))
    deltas.clear()
    dispatcher.receive(core, Failed("it has ended", final=False))
    assert [(delta.request_id, delta.finish_reason) for delta in deltas] == [("shown", "error")]
    dispatcher.receive(core, Ready())
    assert len(core.added) == 3
    dispatcher.receive(core, Failed("it has ended", final=False))
    assert [(delta.request_id, delta.finish_reason) for delta in deltas[1:]] == [("new", "error")]
    dispatcher.submit(request("held", 9))
    dispatcher.receive(core, Failed("it is not started again", final=True))
    assert deltas[-1].request_id == "held"
    with pytest.raises(EngineError, match="not started again"):
        dispatcher.submit(request("late", 9))


# -- the client of a process ------------------------------------------------------------------------------------------


@pytest.fixture
def inbox():
    with tempfile.TemporaryDirectory(prefix="omni-jax-", dir="/tmp") as directory:
        box = Inbox(Path(directory), 1)
        yield box
        box.context.destroy(linger=0)


@pytest.fixture
def attached(inbox):
    """Makes a core that process 7 runs, and a list of what its client receives."""
    cores = []

    def make(*, restart_core: bool = True):
        received = []
        config = EngineConfig(model_dir=Path("."), restart_core=restart_core)
        cores.append(core := AttachedCore(0, config, inbox, lambda _, message: received.append(message)))
        core.take(7, Ready())
        received.clear()
        return core, received

    yield make
    for core in cores:
        core.stop()


def test_outputs_of_a_core_that_has_ended_are_not_taken(attached):
    """They may arrive after its end was noticed, when its requests already run on another core."""
    core, received = attached()
    core.take(7, Failed("was ended by signal 9", final=False))
    late = Outputs([SequenceOutput("a", 0, A)])
    core.take(7, late)
    assert received == [Failed("was ended by signal 9", final=False)]
    core.take(8, Ready())
    core.take(7, late)
    core.take(7, Failed("was ended by signal 9", final=False))
    core.take(8, late)
    assert received[1:] == [Ready(), late]


def test_what_a_core_has_not_read_is_not_sent_to_its_successor(attached):
    """A socket connects again by itself, and sends what waits."""
    core, _ = attached()
    core.send(Abort(["a"]))
    assert core._socket is not None
    core.take(7, Failed("was ended by signal 9", final=False))
    assert core._socket is None


def test_vllm_18577_other_clients_hear_that_no_core_comes_back(attached):
    """Also with restart_core, which ends after a few attempts: their requests must not wait for ever."""
    core, received = attached()
    core.take(7, Failed("the engine has stopped"))  # by the core itself, which does not know whether another is started
    core.take(OWNER, Failed("it is not started again"))
    assert received == [Failed("the engine has stopped", final=False), Failed("it is not started again", final=True)]
    core, received = attached(restart_core=False)
    core.take(7, Failed("the engine has stopped"))
    assert received == [Failed("the engine has stopped", final=True)]


def test_a_core_that_was_replaced_unnoticed_has_lost_its_requests(attached):
    core, received = attached()
    core.take(8, Ready())
    assert [type(message) for message in received] == [Failed, Ready]
    assert (received[0].final, core.pid) == (False, 8)


def test_clients_give_different_seeds_to_their_requests(config, inbox):
    core = OwnedCore(0, config, inbox, lambda *_: None, clients=3, progress=None, prepare=None)
    core.started = Started(info=cast(EngineInfo, None), vision=None)
    for seed, expected in ((5, [6, 7]), (None, [None, None])):
        config = EngineConfig(**{**vars(config), "seed": seed})
        assert [link(config, [core], client).config.seed for client in (1, 2)] == expected


def test_an_owner_tells_the_others_of_each_end(config, inbox, monkeypatch):
    told = []
    monkeypatch.setattr(Outbox, "__init__", lambda self, context, launch, pid: setattr(self, "pid", pid))
    monkeypatch.setattr(Outbox, "send", lambda self, client, message: told.append((self.pid, client, message.final)))
    monkeypatch.setattr(Outbox, "close", lambda self: None)
    monkeypatch.setattr(OwnedCore, "_begin", lambda self: None)
    config = EngineConfig(**{**vars(config), "restart_core": True})
    core = OwnedCore(0, config, inbox, lambda *_: None, clients=3, progress=None, prepare=None)
    for pid in range(7, 8 + core_client.MAX_RESTARTS):
        core.pid = pid
        core._replace("it has ended")
    assert told == [
        *((pid, client, False) for pid in range(7, 7 + core_client.MAX_RESTARTS) for client in (1, 2)),
        (OWNER, 1, True),
        (OWNER, 2, True),
    ]


def test_for_linux_1142_a_core_is_watched_where_pidfd_open_is_forbidden(attached, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    core, _ = attached()
    assert core.pid == 7


def test_a_message_that_cannot_be_sent_is_not_counted_as_on_its_way(attached):
    core, _ = attached()
    with pytest.raises(TypeError):
        core.send(Abort([object()]))  # type: ignore[list-item]
    assert core.status().waiting == 0


def test_time_in_which_all_processes_were_stopped_is_no_silence(attached, monkeypatch):
    """Ctrl-Z and fg, or a paused container: the client must not kill a core that was stopped with it."""
    now = [1000.0]
    monkeypatch.setattr(core_client.time, "monotonic", lambda: now[0])
    pauses = Pauses()
    core, _ = attached()
    now[0] += core_process.BEAT_SECONDS
    assert not pauses.noticed()
    now[0] += 3600
    assert core.status().stalled > 3000
    assert pauses.noticed()
    core.excuse()
    assert core.status().stalled == 0
    assert not pauses.noticed()


def test_time_in_which_a_core_was_stopped_is_no_hang(engine, monkeypatch):
    loop = CoreLoop(engine.core, lambda client, message: None)
    loop.put(0, Abort([]))
    now = [core_client.time.monotonic() + 3600]
    monkeypatch.setattr(core_client.time, "monotonic", lambda: now[0])
    assert loop.status(0).stalled > 3000
    loop.excuse()
    assert loop.status(0).stalled == 0


def test_clients_hear_of_a_failed_core_whatever_else_fails(engine, monkeypatch):
    """The requests of a failed core are ended one by one; an error there must not leave clients that wait for ever."""
    sent = []
    loop = CoreLoop(engine.core, lambda client, message: sent.append((client, message)), clients=2)

    def broken(*_):
        raise RuntimeError("a fault")

    monkeypatch.setattr(loop, "_turn", broken)
    monkeypatch.setattr(engine.core, "fail", broken)
    with pytest.raises(RuntimeError):
        loop.run()
    assert [client for client, message in sent if isinstance(message, Failed)] == [0, 1]


OWNER_PROGRAM = """
import os, sys, time
from pathlib import Path
from omni_jax.engine.config import EngineConfig
from omni_jax.engine.cores import process_cores

def prepare():
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    [core] = process_cores(EngineConfig(model_dir=Path(".")), None, lambda *_: None, prepare=prepare)
    core.start()
    input()
    raise RuntimeError("a fault of the owner")
"""


def test_vllm_11076_an_owner_that_fails_does_not_wait_for_its_core(tmp_path):
    """The core ignores SIGTERM, which multiprocessing sends at the exit before it waits; it ends with its owner."""
    program = tmp_path / "owner.py"
    program.write_text(OWNER_PROGRAM)
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        _, errors = owner.communicate(b"\n")
    assert owner.returncode == 1
    assert b"a fault of the owner" in errors
    assert not Path(f"/proc/{pid}").exists()


def test_a_core_that_ended_before_its_client_listened_is_noticed(attached):
    """The owner's word of it is lost if nobody listens within a second."""
    core, received = attached()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for pid, found in ((os.getpid(), []), (ended.pid, [Failed("the engine core has ended", final=False)])):
        core.pid, core._heard = pid, -1000.0
        core.look_after()
        assert received == found


# -- the loop ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def loop(config, monkeypatch):
    """The loop of a core with two clients, and what they receive."""
    monkeypatch.setattr(loading, "Runner", stand_in.StandInRunner)
    received = []
    return CoreLoop(Engine(config).core, lambda client, message: received.append((client, message)), 2), received


def turn(loop: CoreLoop) -> None:
    while loop.busy:
        loop._turn()


def new(name: str) -> Add:
    return Add(request(name, 9, greedy(max_tokens=3, seed=1)))


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_statistics_come_before_the_outputs_that_leave_a_core_idle(loop, monkeypatch, seconds):
    loop, received = loop
    monkeypatch.setattr(core_loop, "STATS_SECONDS", seconds)
    for count in (1, 2, 3):
        received.clear()
        loop.put(1, new("a"))
        turn(loop)
        own = [message for client, message in received if client == 1]
        at = max(index for index, message in enumerate(own) if isinstance(message, Outputs))
        last = next(message for message in reversed(own[:at]) if isinstance(message, Stats))
        assert (last.stats.generation_tokens, last.stats.num_requests_running) == (3 * count, 0)
        assert last.stats.pool is not None
        assert last.stats.pool.active == 0
        assert last.records.num_requests == count
        told = [message for client, message in received if client == 0]
        assert [len(message.records.requests) for message in told if message.records.requests] == [1]
        assert len(told) == 1 if seconds else len(told) > 3


def test_an_abort_and_a_cleared_cache_are_told_too(loop, monkeypatch):
    loop, received = loop
    monkeypatch.setattr(core_loop, "STATS_SECONDS", 1e9)
    loop.put(0, Add(request("a", 40, greedy(max_tokens=400, seed=1))))
    for _ in range(5):
        loop._turn()
    loop.put(0, Abort(["a"]))
    turn(loop)
    before = [message.stats.pool.cached for _, message in received if isinstance(message, Stats)][-1]
    loop.put(0, ResetPrefixCache())
    turn(loop)
    stats = [message.stats for _, message in received if isinstance(message, Stats)][-1]
    assert (before > 0, stats.pool.cached, stats.requests_finished["abort"]) == (True, 0, 1)


def test_requests_of_a_client_that_has_ended_are_not_taken_though_they_come_late(loop):
    """They come by another socket than the word of its end."""
    loop, received = loop
    loop.put(1, new("early"), pid=7)
    loop.put(0, ClientGone(1, 7), pid=1)
    loop.put(1, new("late"), pid=7)
    loop.put(0, new("other"), pid=1)
    turn(loop)
    assert {client for client, _ in received} == {0}, "nobody would read it"
    [name] = {
        output.request_id for _, message in received if isinstance(message, Outputs) for output in message.outputs
    }
    assert name == "other"
    assert not loop.listens(1)
    loop.put(1, Attach(), pid=8)
    assert (loop.listens(1), loop.status(1).received) == (True, 1)
    loop.put(1, new("successor"), pid=8)
    received.clear()
    turn(loop)
    assert {type(message) for client, message in received if client == 1} == {Stats, Outputs}


def test_an_idle_core_has_time_for_garbage(loop):
    loop, _ = loop
    loop._idle, calls = lambda: calls.append(loop.core.has_work) or loop.put(0, Stop()), []
    loop.put(0, new("a"))
    loop.run()
    assert calls == [False]
