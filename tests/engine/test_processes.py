"""Two processes that share a model over loopback answer like one device, and exit soon after one of them dies."""

import contextlib
import json
import socket
import subprocess
import sys

import numpy as np
import pytest

from omni_jax.engine import loading
from omni_jax.engine.config import EngineConfig
from omni_jax.engine.engine import Engine
from omni_jax.runtime import processes
from omni_jax.runtime.processes import EXIT_CODE
from tests.engines import compile_tiny, sharing
from tests.virtual_devices import environment

TIMEOUT = 300  # seconds to load and compile on a busy machine


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run(mode: str) -> list[tuple[int, str]]:
    """Run both processes. Returns (exit code, output) of the front and of the follower."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine.two_processes", str(number), str(port), mode],
            env=environment(2),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def test_two_processes_answer_like_one_device():
    from omni_jax import LLM
    from tests.engine.two_processes import SETUP, answers

    front, follower = run("answer")
    assert front[0] == 0, front[1][-5000:] + follower[1][-5000:]
    assert follower[0] == 0, follower[1][-5000:]
    assert "the front has stopped" in follower[1]
    [line] = [line for line in front[1].splitlines() if line.startswith("ANSWERS")]
    tokens, logprobs = json.loads(line.removeprefix("ANSWERS"))
    with sharing(compile_tiny(SETUP)) as model_dir:
        expected_tokens, expected_logprobs = answers(LLM(model_dir))
    assert tokens == expected_tokens
    for found, expected in zip(logprobs, expected_logprobs, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize(
    ("mode", "survivor", "lost"),
    [("die", 0, "a follower"), pytest.param("die-front", 1, "the front", marks=pytest.mark.full)],
)
def test_when_one_process_dies_the_other_exits_with_a_clear_error(mode, survivor, lost):
    results = run(mode)
    assert results[1 - survivor][0] == 9, results[1 - survivor][1][-5000:]
    code, output = results[survivor]
    assert code != 0
    assert code in (EXIT_CODE, -6, 1), output[-3000:]
    assert f"lost the connection to {lost}" in output, output[-3000:]


def proposal(**changes):
    kernels = {"decode": "triton", "mixed": "triton", "write": "triton"}
    same = {"model": "a", "settings": "b"}
    return {"kernels": kernels, "num_pages": 100, "max_model_len": 64, "same": same} | changes


def test_processes_agree_on_the_smallest_sizes_and_common_kernels():
    other = {"decode": "xla", "mixed": "triton", "write": "triton"}
    proposals = [proposal(), proposal(num_pages=80, max_model_len=48), proposal(kernels=other)]
    assert loading._combine(proposals) == {"kernels": other, "num_pages": 80, "max_model_len": 48}


def test_error_for_different_settings_names_both():
    other = proposal(same=proposal()["same"] | {"settings": "c"})
    with pytest.raises(ValueError, match="process 1 and the front have different settings: c and b"):
        loading._combine([proposal(), other])


def test_connections_without_the_token_are_closed(caplog):
    with processes._listen() as server:
        port, token = server.getsockname()[1], "0123456789abcdef"
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        connections[0].close()
        connections[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        connections[2].sendall(token[:4].encode())
        connections[2].sendall(token[4:].encode())
        with processes._accept(server, token) as accepted:
            connections[2].sendall(b"!")
            assert accepted.recv(1) == b"!"
        with contextlib.suppress(ConnectionResetError):  # a part of its bytes was not read
            assert connections[1].recv(1) == b""
        for connection in connections:
            connection.close()
    assert caplog.text.count("that did not send the group's token") == 2


def test_a_follower_cannot_have_an_engine():
    config = EngineConfig(model_dir="x", num_processes=2, process_id=1, coordinator_address="h:1")
    with pytest.raises(ValueError, match="process 1 is a follower, and only process 0 can have an engine"):
        Engine(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 2}, "need a coordinator_address, host:port .*got None"),
        ({"num_processes": 2, "coordinator_address": "host"}, "got 'host'"),
        ({"num_processes": 2, "process_id": 2, "coordinator_address": "h:1"}, "got 2 of 2 processes"),
        ({"process_id": 1}, "got 1 of 1 processes"),
        (
            {"num_processes": 2, "coordinator_address": "h:1", "data_parallel_size": 2},
            "run a group of processes for each",
        ),
        ({"num_processes": 2, "coordinator_address": "h:1", "swap_space": 1.0}, "swap_space needs all blocks in one"),
    ],
)
def test_impossible_process_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(model_dir="x", **options)
