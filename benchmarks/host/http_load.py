"""A light HTTP client: one protocol object a connection, and nothing is parsed on the way.

As a command, it measures how soon a server answers /health and /metrics, for benchmarks.host.house.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any


class Connection(asyncio.Protocol):
    """A keep-alive connection that sends one request at a time.

    Attributes:
        parts: the latest response as it came, head included.
    """

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._begun = self._streams = False  # whether the head was read; whether the response is a stream
        self._size, self._tail = 0, b""  # bytes of a response that are missing, and its last ones
        self._done: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the server closed the connection before the end"))

    def data_received(self, data: bytes) -> None:
        done = self._done
        if done is None or done.done():
            return
        self.parts.append(data)
        self._tail = self._tail[-6:] + data
        if not self._begun:
            self._begin(done)
        self._size -= len(data)
        if self._tail.endswith(b"\r\n0\r\n\r\n") if self._streams else self._begun and self._size <= 0:
            done.set_result(None)

    def _begin(self, done: "asyncio.Future[None]") -> None:
        """Read the head, once all of it is there."""
        head, end, _ = b"".join(self.parts).partition(b"\r\n\r\n")
        if not end:
            return
        if not head.startswith(b"HTTP/1.1 200"):
            done.set_exception(RuntimeError(head.decode(errors="replace")))
            return
        self._begun, self._streams = True, b"Transfer-Encoding: chunked" in head
        if not self._streams:
            length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
            self._size += len(head) + 4 + int(length.partition(b":")[2])

    def send(self, request: bytes) -> "asyncio.Future[None]":
        """Send a request; the result is done at the end of the response."""
        self.parts, self._begun, self._streams, self._size, self._tail = [], False, False, 0, b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        if self._done is not None:
            self._done.cancel()
        self._transport.abort()

    @property
    def body(self) -> bytes:
        """The body of a response that has ended."""
        _, _, body = b"".join(self.parts).partition(b"\r\n\r\n")
        if not self._streams:
            return body
        pieces = []
        while body:
            size, _, body = body.partition(b"\r\n")
            pieces.append(body[: int(size, 16)])
            body = body[int(size, 16) + 2 :]
        return b"".join(pieces)


async def connect(port: int, count: int) -> list[Connection]:
    """Open connections, some at a time, since a listener's queue is short."""
    loop, found = asyncio.get_running_loop(), []
    while len(found) < count:
        group = min(200, count - len(found))
        made = await asyncio.gather(*(loop.create_connection(Connection, "127.0.0.1", port) for _ in range(group)))
        found += [connection for _, connection in made]
    return found


def post(path: str, body: Mapping[str, Any]) -> bytes:
    """A request with a JSON body."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode()


async def repeat(connections: Iterable[Connection], requests: Iterable[bytes]) -> None:
    """Send requests over the connections, the next one as soon as a response has ended."""
    left = iter(requests)

    async def work(connection: Connection) -> None:
        for request in left:
            await connection.send(request)

    await asyncio.gather(*map(work, connections))


def events(body: bytes) -> list[dict[str, Any]]:
    """The chunks of a stream that ended well."""
    *chunks, done = [line.removeprefix(b"data: ") for line in body.split(b"\n\n")[:-1]]
    if done != b"[DONE]":
        raise RuntimeError(f"a stream ended with {done!r}")
    return [json.loads(chunk) for chunk in chunks]


async def probe(port: int) -> dict[str, float]:
    """Ask for /health and /metrics every 50 ms until there is a line on the standard input. Returns milliseconds."""
    times: dict[str, list[float]] = {"/health": [], "/metrics": []}
    connections = dict(zip(times, await connect(port, len(times)), strict=True))
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))

    async def ask(path: str) -> None:
        while not ended.done():
            began = time.perf_counter()
            await connections[path].send(get(path))
            times[path].append(1e3 * (time.perf_counter() - began))
            await asyncio.sleep(0.05)

    print("ready", flush=True)
    await asyncio.gather(*map(ask, times))
    found = {}
    for path, measured in times.items():
        found[f"{path}, ms: P50"] = statistics.median(measured)
        found[f"{path}, ms: P99"] = statistics.quantiles(measured, n=100, method="inclusive")[-1]
        found[f"{path}, ms: max"] = max(measured)
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(probe(int(sys.argv[1])))))
