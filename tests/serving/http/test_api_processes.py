"""Several API server processes: one socket, shared metrics, one end."""

import asyncio
import collections
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[3]
COUNT = 2
SERVING = re.compile(r"^(api-server-\d): omni-jax serving fake at (\S+)$")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Processes:
    """The processes of a server, and their log."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path):
        self.process, self.directory = process, directory
        self.lines: list[str] = []
        self._arrived = asyncio.Condition()
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for line in self.process.stderr:
            async with self._arrived:
                self.lines.append(line.decode().rstrip())
                self._arrived.notify_all()

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits until something is true of the log."""
        async with self._arrived:
            await self._arrived.wait_for(condition)

    def serving(self) -> list[str]:
        """Names of the processes, each time one began to serve."""
        return [found[1] for line in self.lines if (found := SERVING.match(line))]

    @property
    def base(self) -> str:
        return next(found[2] for line in self.lines if (found := SERVING.match(line)))

    def children(self) -> list[int]:
        """Process ids of the other API servers; multiprocessing has a process of its own beside them."""
        pid = self.process.pid
        found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return [pid for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def owners(self) -> dict[str, str]:
        """Stream -> name of the process that has it."""
        submitted = (re.match(r"^(api-server-\d): submitted \S*(s\d+)-", line) for line in self.lines)
        return {found[2]: found[1] for found in submitted if found}

    def release(self) -> None:
        """Lets all streams go on."""
        for pid in (self.process.pid, *self.children()):
            os.kill(pid, signal.SIGUSR1)


@contextlib.asynccontextmanager
async def server(tmp_path: Path, drain: float, *words: str) -> AsyncIterator[Processes]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.serving.fake_server", "0", str(drain), *words, str(COUNT)),
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    processes = Processes(process, tmp_path)
    try:
        await processes.until(lambda: len(processes.serving()) == COUNT)
        yield processes
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await processes.reading  # the log ends when the last process does
    assert not list(tmp_path.iterdir())


async def post(base: str, name: str, **fields) -> list[str]:
    """The events of one request over a connection of its own."""
    body = {"messages": [{"role": "user", "content": "hello"}], **fields}
    async with (
        aiohttp.ClientSession() as session,
        session.post(base + "/v1/chat/completions", json=body, headers={"X-Request-Id": name}) as response,
    ):
        assert response.status == 200, await response.text()
        return [line.removeprefix("data: ") for line in (await response.text()).splitlines() if line]


async def open_streams(processes: Processes) -> dict[str, asyncio.Task]:
    """Opens streams until each process has two."""
    streams: dict[str, asyncio.Task] = {}
    while True:
        counts = collections.Counter(processes.owners().values())
        if len(counts) == COUNT and min(counts.values()) >= 2:
            return streams
        for _ in range(8):  # at once: alone, the same process may always be the first to accept
            name = f"s{len(streams)}"
            streams[name] = asyncio.create_task(post(processes.base, name, stream=True))
        await processes.until(lambda: len(processes.owners()) == len(streams))


async def figures(base: str) -> dict[str, float]:
    """Samples of /metrics and /stats, each read once from whichever process answers."""
    async with aiohttp.ClientSession() as session:
        async with session.get(base + "/metrics") as response:
            families = list(text_string_to_metric_families(await response.text()))
        async with session.get(base + "/stats") as response:
            policies = (await response.json())["segments"]["by_policy"]
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    found = {f"{policy} {what}": value for policy, counts in policies.items() for what, value in counts.items()}
    for family in families:
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            found[" ".join([sample.name, *labels.values()])] = sample.value
    return found


async def test_processes_share_metrics_and_end_alone_or_together(tmp_path):
    async with server(tmp_path, 60) as processes:
        streams = await open_streams(processes)
        responses = "omni_jax:http_responses_total /v1/chat/completions 200"
        for _ in range(4):  # of either process
            found = await figures(processes.base)
            assert found[responses] == found["vllm:time_to_first_token_seconds_count"] == len(streams)
            assert found["request prompts"] == found["request segments"] == len(streams)
            assert found["omni_jax:segments_total request"] == len(streams)

        # A killed process loses its own streams only, and another takes its place.
        [child] = processes.children()
        os.kill(child, signal.SIGKILL)
        await processes.until(lambda: processes.serving().count("api-server-1") == 2)
        assert "api-server-0: api-server-1 ended with exit code -9: starting it again" in processes.lines
        assert "api-server-0: client 1 is gone" in processes.lines
        found = await figures(processes.base)  # what the killed process counted is kept
        assert found[responses] == found["request prompts"] == len(streams)
        owners = processes.owners()
        processes.release()
        for name, result in zip(streams, await asyncio.gather(*streams.values(), return_exceptions=True), strict=True):
            if owners[name] == "api-server-1":
                assert isinstance(result, aiohttp.ClientError)
            else:
                assert result[-1] == "[DONE]"
        completed = await figures(processes.base)
        assert completed["vllm:request_success_total stop"] == list(owners.values()).count("api-server-0")

        processes.process.send_signal(signal.SIGTERM)
        assert await processes.process.wait() == 0


async def test_all_processes_drain(tmp_path):
    async with server(tmp_path, 60) as processes:
        streams = await open_streams(processes)
        for pid in (processes.process.pid, *processes.children()):  # as a terminal does, and systemd
            os.kill(pid, signal.SIGINT)
        await processes.until(lambda: sum("shutting down: " in line for line in processes.lines) == COUNT)
        for _ in range(4):
            async with aiohttp.ClientSession() as session, session.get(processes.base + "/health") as response:
                assert response.status == 503
        assert not any(stream.done() for stream in streams.values())
        processes.release()
        for events in await asyncio.gather(*streams.values()):
            assert events[-1] == "[DONE]"
        assert await processes.process.wait() == 0
    assert not any("killed" in line or "again" in line for line in processes.lines)


async def test_streams_that_exceed_the_drain_time_get_an_error_event(tmp_path):
    async with server(tmp_path, 0.2) as processes:
        streams = await open_streams(processes)
        processes.process.send_signal(signal.SIGTERM)
        for events in await asyncio.gather(*streams.values()):
            assert json.loads(events[-1])["error"]["code"] == 503
        assert await processes.process.wait() == 0


async def test_processes_end_with_the_first_one(tmp_path):
    async with server(tmp_path, 60) as processes:
        assert len(processes.children()) == COUNT - 1
        processes.process.kill()
        await processes.reading  # the log ends when the last process has
        assert not list(tmp_path.iterdir())
