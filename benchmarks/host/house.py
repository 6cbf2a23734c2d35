"""The whole house without a model: HTTP, templates, scheduler and streams over a runner that computes nothing.

    python -m benchmarks.host.house --json OUT.json
    python -m benchmarks.host.house --cases streams short --serve-flags --scheduling-policy slo

The server is `omni-jax serve` in processes of its own, with the runner of benchmarks.host.stand_in. This process is the
client. CPU times do not depend on what else the machine does; rates do.

- step: the engine alone, without HTTP: milliseconds of CPU time of a decode step of 256 sequences, of its parts, and of
  the abort of half of the waiting requests between two steps.
- streams: 256 streams of chat and of completions at once, where a step takes no time, and where it takes 16 ms: then
  each token is a chunk of its own, at 16,000 tokens a second.
- short: requests for 8 tokens after a prompt of 32, not streamed, over 64 connections.
- queue: 10,000 requests wait at once, where a step takes 50 ms. Meanwhile another process asks for /health and /metrics
  every 50 ms. Half of the clients disconnect, and the others get their answers.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.host import stand_in
from benchmarks.host.http_load import Connection, connect, events, post, repeat
from benchmarks.processes import ROOT, log

SLOTS = 256
PROMPT = "the quick brown fox jumps over a"  # 32 tokens
FLAGS = ("--max-num-seqs", str(SLOTS), "--max-num-batched-tokens", "8192", "--max-model-len", "4096")
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
CASES = ("step", "streams", "short", "queue")
STEP_MS = {"streams": (0, 16), "short": (0,), "queue": (50,)}  # of the runner


class Server:
    """`omni-jax serve` with the stand-in runner, and the CPU time and memory of its processes."""

    def __init__(self, model: Path, step_ms: float, flags: Sequence[str], output: Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "benchmarks.host.stand_in", str(step_ms), "serve", str(model)]
        command += ["--port", str(self.port), *FLAGS, *flags, "--log-level", "warning"]
        self._output = output
        with output.open("w") as file:
            environment = os.environ | {"JAX_PLATFORMS": "cpu"}
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)

    def wait(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.2)
        raise SystemExit(f"the server did not start:\n{self._output.read_text()[-2000:]}")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        if problems := self._output.read_text():
            log(f"the server wrote:\n{problems[-2000:]}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cpu(self) -> tuple[float, float]:
        """Seconds of CPU time so far: of the process that was started, and of those that it has started."""
        first, *others = (
            sum(int(task.read_text().split()[0]) / 1e9 for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))
            for pid in self._pids()
        )
        return first, sum(others)

    def memory(self) -> int:
        """Resident bytes of all its processes."""
        status = [Path(f"/proc/{pid}/status").read_text() for pid in self._pids()]
        return sum(1024 * int(re.findall(r"VmRSS:\s*(\d+)", text)[0]) for text in status)

    def _pids(self) -> list[int]:
        found = [self._process.pid]
        for pid in found:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        return found

    def metric(self, name: str) -> float:
        """The value of a metric, summed over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics") as response:
            text = response.read().decode()
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.M))


@contextlib.contextmanager
def serving(step_ms: float, flags: Sequence[str]) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(stand_in.write_model(Path(folder)), step_ms, flags, Path(folder) / "log")
        try:
            server.wait()
            yield server
        finally:
            server.stop()


class Clock:
    """Wall time, and CPU time of the server and of this process, from its making to `stop`."""

    def __init__(self, server: Server):
        self._server = server
        self._began = time.perf_counter(), *server.cpu(), time.process_time()

    def stop(self, what: str, count: int) -> dict[str, float]:
        """Figures for `count` things named `what`."""
        ended = time.perf_counter(), *self._server.cpu(), time.process_time()
        wall, front, cores, client = (end - begin for begin, end in zip(self._began, ended, strict=True))
        one = what.rstrip("s")
        return {
            what: count,
            f"{what} a second": count / wall,
            f"server CPU us a {one}": 1e6 * (front + cores) / count,
            f"of it engine cores in processes, us a {one}": 1e6 * cores / count,
            f"client CPU us a {one}": 1e6 * client / count,
            "CPUs used": (front + cores + client) / wall,
        }


def body(kind: str, **fields: Any) -> dict[str, Any]:
    """The JSON of a request to PATHS[kind]."""
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if kind == "chat" else {"prompt": PROMPT}
    return {**prompt, "ignore_eos": True, "temperature": 0, **fields}


# -- cases ------------------------------------------------------------------------------------------------------------


def step(waiting: int) -> dict[str, Any]:
    """CPU milliseconds of decode steps of the engine alone, with no requests and with `waiting` requests that wait."""
    from omni_jax.engine.config import EngineConfig
    from omni_jax.engine.engine import Engine
    from omni_jax.requests import Request, SamplingParams

    def request(name: str, tokens: int) -> Request:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return Request(id=name, prompt_ids=tuple(range(3, 35)), params=params)

    stand_in.use()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(
            EngineConfig(
                model_dir=stand_in.write_model(Path(folder)),
                max_num_seqs=SLOTS,
                max_num_batched_tokens=8192,
                max_model_len=4096,
            )
        )
    parts: dict[str, list[float]] = {"step": [], "plan": [], "dispatch": [], "commit": []}

    def timed(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args)
            finally:
                parts[name].append(time.process_time() - began)

        return call

    scheduler, runner = engine.core.scheduler, engine.core.runner
    for owner, name in ((scheduler, "plan"), (runner, "dispatch"), (scheduler, "commit")):
        setattr(owner, name, timed(name, getattr(owner, name)))
    for number in range(SLOTS):
        engine.add(request(f"running {number}", 4000))
    for _ in range(10):
        engine.step()
    for times in parts.values():
        times.clear()
    advance = timed("step", engine.step)
    for _ in range(300):
        advance()
    found = {f"{name}, ms": 1e3 * statistics.median(times) for name, times in parts.items()}
    for number in range(waiting):
        engine.add(request(f"waiting {number}", 8))
    engine.step()
    began = time.process_time()
    for number in range(0, waiting, 2):
        engine.abort(f"waiting {number}")
    found[f"abort of {waiting // 2}, ms"] = 1e3 * (time.process_time() - began)
    assert engine.core.num_waiting == waiting - len(range(0, waiting, 2))
    parts["step"].clear()
    for _ in range(100):
        advance()
    return found | {f"step, {engine.core.num_waiting} wait, ms": 1e3 * statistics.median(parts["step"])}


async def streams(server: Server, kind: str, tokens: int) -> dict[str, Any]:
    connections = await connect(server.port, SLOTS)
    warm_up = post(PATHS[kind], body(kind, stream=True, max_tokens=8))
    await asyncio.gather(*(connection.send(warm_up) for connection in connections))
    request = post(PATHS[kind], body(kind, stream=True, max_tokens=tokens))
    steps, clock = server.metric("omni_jax:steps_total"), Clock(server)
    await asyncio.gather(*(connection.send(request) for connection in connections))
    found = clock.stop("tokens", SLOTS * tokens)
    found["steps"] = server.metric("omni_jax:steps_total") - steps
    chunks = [events(connection.body) for connection in connections]
    whole = connections[0]
    await whole.send(post(PATHS[kind], body(kind, max_tokens=tokens)))
    expected = _text(json.loads(whole.body))
    assert all("".join(map(_text, each)) == expected for each in chunks), "a stream differs from the whole answer"
    close(connections)
    return found | {"chunks a token": sum(map(len, chunks)) / (SLOTS * tokens)}


def _text(response: dict[str, Any]) -> str:
    """The text of a response or a chunk."""
    choice = response["choices"][0]
    return choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""


async def short(server: Server, kind: str, count: int) -> dict[str, Any]:
    connections = await connect(server.port, 64)
    request = post(PATHS[kind], body(kind, max_tokens=8))
    await repeat(connections, [request] * 200)
    clock = Clock(server)
    await repeat(connections, [request] * count)
    found = clock.stop("requests", count)
    close(connections)
    return found


async def queue(server: Server, count: int) -> dict[str, Any]:
    """`count` requests wait behind streams that take all slots, half of them leave, and then the streams do."""
    await short(server, "completions", 2000)
    found: dict[str, Any] = {"memory before, MB": server.memory() / 1e6}
    running = await connect(server.port, SLOTS)
    endless = post(PATHS["completions"], body("completions", max_tokens=4000))
    waits = [connection.send(endless) for connection in running]
    while server.metric("vllm:num_requests_running") < SLOTS:
        await asyncio.sleep(0.1)
    probe = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.host.http_load", str(server.port)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert probe.stdout is not None
    probe.stdout.readline()
    connections = await connect(server.port, count)
    began, request = time.perf_counter(), post(PATHS["completions"], body("completions", max_tokens=8))
    answers = [connection.send(request) for connection in connections]
    await _until(server, "vllm:num_requests_waiting", count)
    found["seconds until all wait"] = time.perf_counter() - began
    found["memory with all waiting, MB"] = server.memory() / 1e6
    began, steps = time.perf_counter(), server.metric("omni_jax:steps_total")
    for connection in connections[::2]:
        connection.close()
    await _until(server, "vllm:num_requests_waiting", count - len(connections[::2]))
    found["seconds until half have left"] = time.perf_counter() - began
    found["steps meanwhile"] = server.metric("omni_jax:steps_total") - steps
    for wait in waits:
        wait.cancel()
    close(running)
    began = time.perf_counter()
    await asyncio.gather(*answers[1::2])
    found["seconds until all are answered"] = time.perf_counter() - began
    texts = {_text(json.loads(connection.body)) for connection in connections[1::2]}
    assert len(texts) == 1, f"answers differ: {texts}"
    close(connections[1::2])
    await _until(server, "vllm:kv_cache_usage_perc", 0)
    found["memory after, MB"] = server.memory() / 1e6
    output, _ = probe.communicate("\n")
    return found | json.loads(output)


async def _until(server: Server, metric: str, value: float) -> None:
    deadline = time.monotonic() + 300
    while (now := await asyncio.to_thread(server.metric, metric)) != value:
        if time.monotonic() > deadline:
            raise SystemExit(f"{metric} is {now}, not {value}, after five minutes")
        await asyncio.sleep(0.1)


def close(connections: Sequence[Connection]) -> None:
    for connection in connections:
        connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host.house",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="what to measure")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each stream")
    parser.add_argument("--requests", type=int, default=2000, help="short requests")
    parser.add_argument("--waiting", type=int, default=10_000, help="requests that wait at once")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument(
        "--serve-flags", nargs=argparse.REMAINDER, default=[], help="flags of omni-jax serve; they come last"
    )
    given = parser.parse_args()
    print(report.machine_line(report.machine()))
    found: dict[str, Any] = {}

    def show(name: str, figures: dict[str, Any]) -> None:
        found[name] = figures
        print(f"\n{name}", *(f"  {what}: {value:,.2f}" for what, value in figures.items()), sep="\n", flush=True)

    if "step" in given.cases:
        show("step", step(given.waiting))
    runs = [
        (f"{case}, {kind}, steps of {step_ms} ms", case, kind, step_ms)
        for case in given.cases
        for step_ms in STEP_MS.get(case, ())
        for kind in (PATHS if case != "queue" else ["completions"])
    ]
    for name, case, kind, step_ms in runs:
        log(name)
        with serving(step_ms, given.serve_flags) as server:
            if case == "streams":
                show(name, asyncio.run(streams(server, kind, given.tokens)))
            elif case == "short":
                show(name, asyncio.run(short(server, kind, given.requests)))
            else:
                show(name, asyncio.run(queue(server, given.waiting)))
    if given.json:
        document = {"machine": report.machine(), "flags": given.serve_flags, "measured": found}
        given.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
