"""`omni-jax describe-images`: one question about each of thousands of images, asked of a running server.

As many workers as requests may be in flight take the next image, have a thread read and encode it, ask, and write the
row; so no more images than workers are in memory. A row is written without an await after its answer is there, and
nothing can come between the two: what a signal interrupts is asked again by the next run.
"""

import asyncio
import contextlib
import dataclasses
import json
import signal
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from serving.describe.client import MAX_MESSAGE_LENGTH, Client, Reply, Sleep, rate_limit
from serving.describe.report import Summary, progress, show
from serving.describe.rows import RowFile, open_rows, read_rows
from serving.describe.sources import Source, Unreadable, UsageError, data_uri, find_sources


class NoModel(Exception):
    """The server does not say which model it has; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The command's flags.

    Attributes:
        model: None asks the server for its first.
        concurrency: requests in flight, at most.
        rate: requests a second, at most, repeated ones included; 0 is no limit.
        retries: attempts after the first, at most.
        timeout: seconds of an attempt.
        limit: images to send this time, at most.
    """

    source: str
    prompt: str
    out: Path
    server: str = "http://127.0.0.1:8000/v1"
    model: str | None = None
    api_key: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    concurrency: int = 8
    rate: float = 0.0
    retries: int = 5
    timeout: float = 300.0
    retry_failed: bool = True
    overwrite: bool = False
    limit: int | None = None

    def __post_init__(self):
        try:
            address = urllib.parse.urlsplit(self.server)
            right = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
        except ValueError:  # brackets or a port that are none
            right = False
        if not right:
            raise UsageError(f"the server must be a URL such as http://127.0.0.1:8000/v1, got {self.server!r}")
        if not self.prompt.strip():
            raise UsageError("the prompt must not be empty")
        if not self.rate >= 0 or not self.timeout > 0:  # NaN is neither
            raise UsageError(f"rate must be 0 or more, timeout more than 0, got {self.rate} and {self.timeout}")
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise UsageError("the API key must be printable ASCII; is there a line feed in it?")

    def settings(self, model: str | None) -> dict[str, Any]:
        """What shapes the texts: the rows of one file share it."""
        return {
            "prompt": self.prompt,
            "system": self.system,
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }


def plan(options: Options) -> list[str]:
    """The names of what `run` would send. Asks no server and writes nothing.

    Raises:
        UsageError: the sources or the output file are not as they must be.
    """
    sources = find_sources(options.source)
    before = {} if options.overwrite else read_rows(options.out, options.settings(options.model))
    return [source.name for source in _to_send(options, sources, before)]


def run(options: Options, console: Console | None = None) -> Summary:
    """Asks about every source that has no good row yet and writes the rows. For the main thread: it handles signals.

    Rows are in the order of completion: `{"source", "text", "finish_reason", "usage", "attempts", "seconds"}`, or
    `{"source", "error": {"status", "message", ...}, "attempts", "seconds"}` with all that the server said. `seconds`
    are those of the last attempt.

    Args:
        console: for progress and the summary; standard error by default.

    Raises:
        UsageError: the sources or the output file are not as they must be.
        NoModel: no model was named, and the server does not name one.
        OSError: the output cannot be written.
    """
    console = console or Console(stderr=True)
    sources = find_sources(options.source)
    summary = asyncio.run(_interruptible(options, sources, console))
    show(summary, console)
    return summary


async def describe(
    options: Options,
    sources: Sequence[Source],
    rows: RowFile,
    model: str,
    client: Client,
    count: Callable[[dict[str, Any]], None],
) -> None:
    """Asks about each of `sources`; a row is written, then counted."""
    head, tail = _request(options, model)
    waiting = iter(sources)

    async def worker() -> None:
        for source in waiting:
            row = {"source": source.name} | await _ask(client, source, head, tail)
            rows.append(row)
            count(row)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(options.concurrency, len(sources))):
                group.create_task(worker())
    except BaseExceptionGroup as faults:  # the first stopped the others; a full disk, most likely
        raise faults.exceptions[0] from None


@contextlib.asynccontextmanager
async def connect(options: Options, *, sleep: Sleep = asyncio.sleep) -> AsyncIterator[Client]:
    """Yield a Client of the server that the options name."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),  # the workers are the limit
        timeout=aiohttp.ClientTimeout(total=options.timeout),
        headers=headers,
    ) as session:
        base, limit = options.server.rstrip("/"), rate_limit(options.rate)
        yield Client(session, base, retries=options.retries, limit=limit, sleep=sleep)


async def _interruptible(options: Options, sources: Sequence[Source], console: Console) -> Summary:
    summary = Summary(sources=len(sources), not_sent=len(sources), out=str(options.out))
    loop = asyncio.get_running_loop()
    work = asyncio.ensure_future(_run(options, sources, summary, console))
    started = time.monotonic()

    def interrupt() -> None:
        summary.interrupted = True
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one ends the process at once
            loop.remove_signal_handler(number)
        work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        await work
    except asyncio.CancelledError:
        if not summary.interrupted:
            raise
    summary.seconds = round(time.monotonic() - started, 3)
    return summary


async def _run(options: Options, sources: Sequence[Source], summary: Summary, console: Console) -> None:
    async with connect(options) as client:
        model = options.model or await _first_model(client, options.server)
        with open_rows(options.out, options.settings(model), overwrite=options.overwrite) as rows:
            before = rows.rows()
            to_send = _to_send(options, sources, before)
            summary.done_before = sum(before.get(source.name, False) for source in sources)
            if not options.retry_failed:
                summary.failed_before = sum(not before.get(source.name, True) for source in sources)
            summary.not_sent = len(sources) - summary.done_before - summary.failed_before
            with progress(summary, len(to_send), console) as count:
                await describe(options, to_send, rows, model, client, count)


def _to_send(options: Options, sources: Sequence[Source], before: dict[str, bool]) -> list[Source]:
    """Those without a row, and those whose row is an error unless it is to stay."""
    again = {True: False, False: options.retry_failed, None: True}
    return [source for source in sources if again[before.get(source.name)]][: options.limit]


async def _first_model(client: Client, server: str) -> str:
    reply = await client.get("/models")
    if reply.error is not None:
        status = reply.error["status"]
        said = reply.error["message"] if status is None else f"{status}: {reply.error['message']}"
        hint = {None: "; is it running?", 404: "; does --server end in /v1?"}.get(status, "")
        raise NoModel(f"{server} does not list its models: {said}{hint}")
    try:
        name = reply.answer["data"][0]["id"]
    except (LookupError, TypeError):
        name = None
    if not isinstance(name, str):
        raise NoModel(f"{server} lists no models; name one with --model")
    return name


def _request(options: Options, model: str) -> tuple[bytes, bytes]:
    """A request's JSON around the image's URL, which is by far the most of it and the same for nobody."""
    content = [{"type": "image_url", "image_url": {"url": ""}}, {"type": "text", "text": options.prompt}]
    messages = [{"role": "system", "content": options.system}] if options.system is not None else []
    body: dict[str, Any] = {"model": model, "messages": [*messages, {"role": "user", "content": content}]}
    for name in ("max_tokens", "temperature"):
        if getattr(options, name) is not None:
            body[name] = getattr(options, name)
    # The quotes of a prompt are escaped, so that no prompt contains this.
    head, separator, tail = json.dumps(body).partition('"url": ""')
    return (head + separator[:-2]).encode(), tail.encode()


async def _ask(client: Client, source: Source, head: bytes, tail: bytes) -> dict[str, Any]:
    """A row without its source."""
    if source.fault is not None:
        return _unreadable(source.fault)
    try:
        body = await asyncio.to_thread(_body, source, head, tail)
    except Unreadable as error:
        return _unreadable(str(error))
    return _row(await client.post("/chat/completions", body))


def _body(source: Source, head: bytes, tail: bytes) -> bytes:
    """For a worker thread."""
    url = json.dumps(source.name).encode() if source.path is None else b'"%b"' % data_uri(source.path)
    return b"".join((head, url, tail))


def _unreadable(message: str) -> dict[str, Any]:
    return {"error": {"status": None, "type": "unreadable", "message": message}, "attempts": 0, "seconds": 0.0}


def _row(reply: Reply) -> dict[str, Any]:
    tried = {"attempts": reply.attempts, "seconds": round(reply.seconds, 3)}
    if reply.error is not None:
        return {"error": reply.error} | tried
    try:
        choice = reply.answer["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
    except (LookupError, TypeError):
        text = reason = None
    if not isinstance(text, str):
        said = json.dumps(reply.answer, ensure_ascii=False)[:MAX_MESSAGE_LENGTH]
        return {"error": {"status": 200, "type": "no_text", "message": f"the answer has no text: {said}"}} | tried
    return {"text": text, "finish_reason": reason, "usage": reply.answer.get("usage")} | tried
