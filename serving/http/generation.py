"""Several engine requests run as one: submitted together, read together, aborted together."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from omni_jax.requests import Delta, Request, Unavailable
from serving.http.errors import ApiError
from serving.http.metrics import Metrics
from serving.http.response_models import Usage, usage
from serving.http.state import Server

logger = logging.getLogger(__name__)

Batch = list[tuple[int, Delta]]  # (position of the request, what was added to one of its choices)


@contextlib.asynccontextmanager
async def generation(server: Server, requests: Sequence[Request]) -> AsyncIterator[AsyncIterator[Batch]]:
    """Submits `requests` and gives an iterator over what they produce.

    Everything that waits is handed out at once, one delta a choice, so that a slow reader catches up in few large
    pieces. On leaving, however it happens (the end, a fault, the client's disconnect), the unfinished are aborted.

    Raises:
        InvalidRequest, Unavailable, EngineError: from the engine, before the iterator is given.
        ApiError, Unavailable: from the iterator, when the engine ends a choice with an error or because it stops.
    """
    if server.draining:
        raise Unavailable("the server is shutting down")
    arrived: asyncio.Queue[tuple[int, Delta] | asyncio.Task[None]] = asyncio.Queue()
    unfinished: set[str] = set()
    tasks: list[asyncio.Task[None]] = []

    async def read(position: int, request: Request, stream: AsyncIterator[Delta]) -> None:
        async for delta in _measured(stream, request, server.metrics):
            arrived.put_nowait((position, delta))
        unfinished.discard(request.id)

    try:
        for position, request in enumerate(requests):
            stream = server.engine.submit(request)
            unfinished.add(request.id)
            task = asyncio.create_task(read(position, request, stream))
            task.add_done_callback(arrived.put_nowait)
            tasks.append(task)
        async with contextlib.aclosing(_batches(arrived, len(tasks))) as batches:
            yield batches
    finally:
        for request_id in unfinished:
            server.engine.abort(request_id)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _batches(arrived: asyncio.Queue, running: int) -> AsyncGenerator[Batch, None]:
    while running:
        waiting = [await arrived.get()]
        while not arrived.empty():
            waiting.append(arrived.get_nowait())
        ended = [item for item in waiting if isinstance(item, asyncio.Task)]
        running -= len(ended)
        deltas = [item for item in waiting if not isinstance(item, asyncio.Task)]
        if good := [item for item in deltas if item[1].finish_reason not in ("error", "abort")]:
            yield merged(good)
        for _, delta in deltas:
            if delta.finish_reason == "error":
                raise ApiError(500, delta.error or "the engine failed")
            if delta.finish_reason == "abort":  # not by us: then nobody would be reading
                raise Unavailable(delta.error or "the server is shutting down; the request was cut off")
        for task in ended:
            task.result()


def merged(batch: Batch) -> Batch:
    """One delta for each choice, in order of its first."""
    by_choice: dict[tuple[int, int], list[Delta]] = {}
    for position, delta in batch:
        by_choice.setdefault((position, delta.index), []).append(delta)
    return [(position, _joined(deltas)) for (position, _), deltas in by_choice.items()]


def _joined(deltas: list[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    first, last = deltas[0], deltas[-1]
    return Delta(
        request_id=first.request_id,
        index=first.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        prompt_logprobs=first.prompt_logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        cached_tokens=last.cached_tokens,
    )


class Tally:
    """What a call has used so far: add every delta.

    A prompt counts once, whatever its choices, so its cached tokens are those that the first of them found.
    """

    def __init__(self, prompt_tokens: int):
        self._prompt_tokens, self._generated = prompt_tokens, 0
        self._cached: dict[str, int] = {}  # by request

    def add(self, delta: Delta) -> None:
        self._generated += len(delta.token_ids)
        if delta.index == 0:
            self._cached[delta.request_id] = delta.cached_tokens

    @property
    def usage(self) -> Usage:
        return usage(self._prompt_tokens, self._generated, sum(self._cached.values()))


async def _measured(stream: AsyncIterator[Delta], request: Request, metrics: Metrics) -> AsyncIterator[Delta]:
    """The stream itself; its times and sizes go to the metrics and the log on the way."""
    start = time.monotonic()
    first: float | None = None
    latest: dict[int, float] = {}
    generated = cached = 0
    ends: dict[int, str] = {}
    try:
        async for delta in stream:
            if delta.index == 0:
                cached = delta.cached_tokens
            if delta.token_ids:
                now = time.monotonic()
                generated += len(delta.token_ids)
                if delta.index in latest:
                    metrics.next_tokens(now - latest[delta.index], len(delta.token_ids))
                else:
                    metrics.first_token(now - start)
                    first = now - start if first is None else first
                latest[delta.index] = now
            if delta.finish_reason:
                ends[delta.index] = delta.finish_reason
            yield delta
    finally:
        seconds = time.monotonic() - start
        reasons = sorted({ends.get(index, "abort") for index in range(request.params.n)})
        _log_end(request, cached, generated, first, seconds, reasons)
    if not {"error", "abort"} & set(reasons):
        metrics.request_finished(
            seconds=seconds,
            prompt_tokens=len(request.prompt_ids),
            generated_tokens=generated,
            params=request.params,
        )


def _log_end(
    request: Request, cached: int, generated: int, first: float | None, seconds: float, reasons: list[str]
) -> None:
    of_media = {"image": 0, "video": 0}
    for span in request.media:
        of_media[span.modality] += span.length
    prompt = len(request.prompt_ids)
    logger.info(
        "request %s: prompt %d tokens (text %d, image %d, video %d), %d cached, generated %d, first token %s, "
        "total %.3f s, %s",
        request.id,
        prompt,
        prompt - sum(of_media.values()),
        of_media["image"],
        of_media["video"],
        cached,
        generated,
        "none" if first is None else f"{first:.3f} s",
        seconds,
        "+".join(reasons),
    )
