"""The stand-in runner, and the client of the benchmark of the whole house."""

import pytest

from benchmarks.host import stand_in
from benchmarks.host.http_load import Connection, events
from omni_jax.engine import loading
from omni_jax.engine.config import EngineConfig
from omni_jax.engine.engine import Engine
from omni_jax.requests import Request, SamplingParams
from tests.engines import run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return stand_in.write_model(tmp_path_factory.mktemp("stand-in"))


@pytest.fixture
def engine(model, monkeypatch):
    monkeypatch.setattr(loading, "Runner", stand_in.StandInRunner)
    return Engine(EngineConfig(model_dir=model, max_num_seqs=4, max_model_len=256, kv_cache_memory_bytes=2**24))


def test_the_next_letter_follows_from_the_position(engine):
    params = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=2)
    requests = [Request(id=str(length), prompt_ids=(5,) * length, params=params) for length in (3, 40, 100, 7, 26)]
    letters = "abcdefghijklmnopqrstuvwxyz" * 6
    for (_, _), answer in run(engine, *requests).items():
        assert len(answer.tokens) == 30
        assert answer.finish_reason == "length"
        assert all(len(each.top) == 2 for each in answer.logprobs)
    for item in requests:
        start = len(item.prompt_ids) % 26
        answer = run(engine, item)[item.id, 0]
        assert answer.text == letters[start : start + 30]


def test_forced_and_scored_tokens_are_those_given(engine):
    item = Request(
        id="forced",
        prompt_ids=(5, 6, 7, 8),
        params=SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=0),
        forced_ids=(40, 41, 42),
    )
    answer = run(engine, item)["forced", 0]
    assert answer.tokens == [40, 41, 42]
    assert [each and each.token_id for each in answer.prompt_logprobs] == [None, 6, 7, 8]


STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKS = b'b\r\ndata: {"a":\r\n5\r\n 1}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n'


WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


@pytest.mark.asyncio
@pytest.mark.parametrize("response", [STREAM + CHUNKS, WHOLE])
async def test_the_client_reads_responses_however_they_are_cut(response):
    connection = made()
    for cut in range(len(response)):  # all over one connection
        done = connection.send(b"request")
        for part in filter(None, (response[:cut], response[cut:])):
            assert not done.done()
            connection.data_received(part)
        assert done.done()
        if response == WHOLE:
            assert connection.body == b"hello"
        else:
            assert events(connection.body) == [{"a": 1}]


@pytest.mark.asyncio
async def test_an_error_ends_the_wait():
    connection = made()
    done = connection.send(b"request")
    connection.data_received(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
    with pytest.raises(RuntimeError, match="503"):
        await done
    done = connection.send(b"request")
    connection.connection_lost(None)
    with pytest.raises(ConnectionError):
        await done


def made() -> Connection:
    class Transport:
        def write(self, data: bytes) -> None:
            pass

    connection = Connection()
    connection.connection_made(Transport())
    return connection
