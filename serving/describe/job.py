"""`omni-jax describe-images`: sends each of thousands of images, with one prompt, to a running server.

As many workers as requests may be in flight take the next image, have a thread read and encode it, send the request
and write the row; so no more images than workers are in memory. There is no await between an answer and its row, so a
signal loses no answer; the next run sends the interrupted requests again.
"""

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
from rich.console import Console

from serving.describe.client import MAX_MESSAGE_LENGTH, Client, Reply, Sleep, rate_limit
from serving.describe.report import Summary, progress, show
from serving.describe.rows import RowFile, open_rows, read_rows
from serving.describe.settings import Options
from serving.describe.sources import Source, Unreadable, data_uri, find_sources
from serving.describe.stopping import Failures, Stopped, resume_command


class NoModel(Exception):
    """No model was named, and the server lists none."""


def plan(options: Options) -> list[str]:
    """Return the names of the sources that `run` would send, without a request and without writing.

    Raises:
        UsageError: the sources or the output file are invalid.
    """
    sources = find_sources(options.source)
    before = {} if options.overwrite else read_rows(options.out, options.settings(options.model))
    return [source.name for source in _to_send(options, sources, before)]


def run(options: Options, console: Console | None = None) -> Summary:
    """Send every source that has no good row yet, and write the rows. Call it in the main thread: it handles signals.

    Rows are in the order of completion: `{"source", "text", "finish_reason", "usage", "attempts", "seconds"}`, or
    `{"source", "error": {"status", "message", ...}, "attempts", "seconds"}` with all fields of the server's error.
    `seconds` is the duration of the last attempt.

    Args:
        console: for progress and the summary; None: standard error.

    Raises:
        UsageError: the sources or the output file are invalid.
        NoModel: no model was named, and the server lists none.
        OSError: the output cannot be written.
    """
    console = console or Console(stderr=True)
    skipped: list[Source] = []
    sources = find_sources(options.source, skipped)
    summary = asyncio.run(_interruptible(options, sources, console))
    summary.skipped = tuple((source.name, source.fault or "") for source in skipped)
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
    """Send each of `sources`; write and then count its row.

    Raises:
        Stopped: all further requests would fail. Requests in flight are cancelled, without rows.
    """
    head, tail = _request(options, model)
    failures = Failures()
    waiting = iter(sources)

    async def worker() -> None:
        for source in waiting:
            row = {"source": source.name} | await _row_of(client, source, head, tail)
            rows.append(row)
            count(row)
            failures.check(row)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(options.concurrency, len(sources))):
                group.create_task(worker())
    except BaseExceptionGroup as faults:  # the first one stopped the others; most likely a full disk, or Stopped
        raise faults.exceptions[0] from None


@contextlib.asynccontextmanager
async def connect(options: Options, *, sleep: Sleep = asyncio.sleep) -> AsyncIterator[Client]:
    """Yield a Client of the server that the options name."""
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),  # the number of workers is the limit
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
    except Stopped as reason:
        summary.stopped = str(reason)
    if summary.not_sent and (summary.interrupted or summary.stopped is not None):
        summary.resume = resume_command(options)
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
    """Return the sources without a row and, with retry_failed, those whose row is an error."""
    again = {True: False, False: options.retry_failed, None: True}
    return [source for source in sources if again[before.get(source.name)]][: options.limit]


async def _first_model(client: Client, server: str) -> str:
    reply = await client.get("/models")
    if reply.error is not None:
        status = reply.error["status"]
        reason = reply.error["message"] if status is None else f"{status}: {reply.error['message']}"
        hint = {None: "; is it running?", 404: "; does --server end in /v1?"}.get(status, "")
        raise NoModel(f"{server} does not list its models: {reason}{hint}")
    try:
        name = reply.answer["data"][0]["id"]
    except (LookupError, TypeError):
        name = None
    if not isinstance(name, str):
        raise NoModel(f"{server} lists no models; name one with --model")
    return name


def _request(options: Options, model: str) -> tuple[bytes, bytes]:
    """Return the JSON of a request before and after the image's URL, which is the only part that differs."""
    content = [{"type": "image_url", "image_url": {"url": ""}}, {"type": "text", "text": options.prompt}]
    messages = [{"role": "system", "content": options.system}] if options.system is not None else []
    body: dict[str, Any] = {"model": model, "messages": [*messages, {"role": "user", "content": content}]}
    for name in ("max_tokens", "temperature"):
        if getattr(options, name) is not None:
            body[name] = getattr(options, name)
    # Quotes in a prompt are escaped, so it cannot contain this separator.
    head, separator, tail = json.dumps(body).partition('"url": ""')
    return (head + separator[:-2]).encode(), tail.encode()


async def _row_of(client: Client, source: Source, head: bytes, tail: bytes) -> dict[str, Any]:
    """Send a source and return its row without `source`."""
    if source.fault is not None:
        return _unreadable(source.fault)
    try:
        body = await asyncio.to_thread(_body, source, head, tail)
    except Unreadable as error:
        return _unreadable(str(error))
    return _row(await client.post("/chat/completions", body))


def _body(source: Source, head: bytes, tail: bytes) -> bytes:
    """Return the body of a request. Call it in a worker thread."""
    url = json.dumps(source.name).encode() if source.path is None else b'"%b"' % data_uri(source.path)
    return b"".join((head, url, tail))


def _unreadable(message: str) -> dict[str, Any]:
    return {"error": {"status": None, "type": "unreadable", "message": message}, "attempts": 0, "seconds": 0.0}


def _row(reply: Reply) -> dict[str, Any]:
    attempts = {"attempts": reply.attempts, "seconds": round(reply.seconds, 3)}
    if reply.error is not None:
        return {"error": reply.error} | attempts
    try:
        choice = reply.answer["choices"][0]
        text, reason = choice["message"]["content"], choice.get("finish_reason")
    except (LookupError, TypeError):
        text = reason = None
    if not isinstance(text, str):
        answer = json.dumps(reply.answer, ensure_ascii=False)[:MAX_MESSAGE_LENGTH]
        return {"error": {"status": 200, "type": "no_text", "message": f"the answer has no text: {answer}"}} | attempts
    return {"text": text, "finish_reason": reason, "usage": reply.answer.get("usage")} | attempts
