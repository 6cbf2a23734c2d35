"""An HTTP host on loopback with scripted responses, which records its requests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


class Listener:
    """An HTTP host with scripted responses.

    Attributes:
        answers: path -> bytes of the response, or a coroutine function that writes it.
        connections: number of accepted connections, with or without a request.
        requests: path and headers, in lower case, of each request.
    """

    def __init__(self, host: str):
        self.host = host
        self.port = 0
        self.answers: dict[str, Answer] = {}
        self.connections = 0
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.handlers: dict[asyncio.Task, asyncio.StreamWriter] = {}

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    def url(self, path: str, host: str | None = None) -> str:
        return f"http://{host or self.host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.handlers[asyncio.current_task()] = writer
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                path = head[0].split(" ")[1]
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                self.requests.append((path, headers))
                answer = self.answers.get(path, response(b"", status="404 Not Found"))
                if isinstance(answer, bytes):
                    writer.write(answer)
                else:
                    await answer(writer)
                await writer.drain()


def response(body: bytes, *, status: str = "200 OK", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def redirect(location: str, status: str = "302 Found") -> bytes:
    return response(b"", status=status, Location=location)


@contextlib.asynccontextmanager
async def listening(host: str = "127.0.0.1") -> AsyncIterator[Listener]:
    listener = Listener(host)
    server = await asyncio.start_server(listener.serve, host, 0)
    listener.port = server.sockets[0].getsockname()[1]
    try:
        yield listener
    finally:
        server.close()
        for task, writer in listener.handlers.items():
            task.cancel()
            writer.transport.abort()
        await asyncio.gather(*listener.handlers, return_exceptions=True)
