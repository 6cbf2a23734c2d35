"""Engine requests of one API request: submitted together, read together and aborted together."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence

from omni_jax.requests import Delta, Request, Unavailable
from serving.http.errors import ApiError
from serving.http.metrics import Metrics
from serving.http.state import Server

logger = logging.getLogger(__name__)

PromptDelta = tuple[int, Delta]  # (position of the prompt in the API request, what was added to one of its choices)


def check_open(server: Server) -> None:
    """Raises Unavailable or EngineError if no request can be submitted now."""
    if server.draining:
        raise Unavailable("the server is shutting down")
    server.engine.check_queue()


@contextlib.asynccontextmanager
async def stream_deltas(server: Server, requests: Sequence[Request]) -> AsyncIterator[AsyncIterator[list[PromptDelta]]]:
    """Submits `requests` and yields an iterator over batches of their deltas.

    A batch holds everything that has arrived since the last one, merged into one delta per choice, so a slow reader
    catches up in a few large batches. On exit (end, error or client disconnect), unfinished requests are aborted.

    Raises:
        InvalidRequest, Unavailable, EngineError: from the engine on submission.
        ApiError, Unavailable: from the iterator, if the engine ends a choice with an error or because it stops.
    """
    check_open(server)
    arrived: asyncio.Queue[PromptDelta | asyncio.Task[None]] = asyncio.Queue()
    unfinished: set[str] = set()
    unread: dict[str, Request] = {}  # submitted, and their reader has not begun
    tasks: list[asyncio.Task[None]] = []

    async def read(position: int, request: Request, stream: AsyncIterator[Delta]) -> None:
        del unread[request.id]
        async for delta in _measured(stream, request, server.metrics):
            arrived.put_nowait((position, delta))
        unfinished.discard(request.id)

    try:
        for position, request in enumerate(requests):
            stream = server.engine.submit(request)
            unfinished.add(request.id)
            unread[request.id] = request
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
        for request in unread.values():
            server.metrics.choices_ended(["abort"] * request.params.n)


async def _batches(arrived: asyncio.Queue, running: int) -> AsyncGenerator[list[PromptDelta], None]:
    while running:
        waiting = [await arrived.get()]
        while not arrived.empty():
            waiting.append(arrived.get_nowait())
        finished = [item for item in waiting if isinstance(item, asyncio.Task)]
        running -= len(finished)
        deltas = [item for item in waiting if not isinstance(item, asyncio.Task)]
        if good := [item for item in deltas if item[1].finish_reason not in ("error", "abort")]:
            yield merged(good)
        for _, delta in deltas:
            if delta.finish_reason == "error":
                raise ApiError(500, delta.error or "the engine failed")
            if delta.finish_reason == "abort":  # by the engine: after an abort from here, nothing reads the stream
                raise Unavailable(delta.error or "the server is shutting down; the request was aborted")
        for task in finished:
            task.result()


def merged(deltas: Iterable[PromptDelta]) -> list[PromptDelta]:
    """One delta per choice, in order of each choice's first delta."""
    by_choice: dict[tuple[int, int], list[Delta]] = {}
    for position, delta in deltas:
        by_choice.setdefault((position, delta.index), []).append(delta)
    return [(position, _merged_choice(of_choice)) for (position, _), of_choice in by_choice.items()]


def _merged_choice(deltas: list[Delta]) -> Delta:
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


async def _measured(stream: AsyncIterator[Delta], request: Request, metrics: Metrics) -> AsyncIterator[Delta]:
    """The same stream; records its latencies and token counts in the metrics, and logs a line at its end."""
    first_token: float | None = None
    latest: dict[int, float] = {}  # choice -> time of its latest token
    generated = cached = 0
    reasons = dict.fromkeys(range(request.params.n), "abort")
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
                    metrics.first_token(now - request.arrival)
                    first_token = now - request.arrival if first_token is None else first_token
                latest[delta.index] = now
            if delta.finish_reason:
                reasons[delta.index] = delta.finish_reason
            yield delta
    except Exception:
        reasons = {index: "error" if reason == "abort" else reason for index, reason in reasons.items()}
        raise
    finally:
        seconds = time.monotonic() - request.arrival
        _log_end(request, cached, generated, first_token, seconds, sorted(set(reasons.values())))
        # Both here, so that they agree: the engine may end a request while its client leaves.
        metrics.choices_ended(reasons.values())
        if not {"error", "abort"} & set(reasons.values()):
            metrics.request_finished(
                seconds=seconds,
                prompt_tokens=len(request.prompt_ids),
                generated_tokens=generated,
                params=request.params,
            )


def _log_end(
    request: Request, cached: int, generated: int, first_token: float | None, seconds: float, reasons: list[str]
) -> None:
    media_tokens = {"image": 0, "video": 0}
    for span in request.media:
        media_tokens[span.modality] += span.length
    prompt = len(request.prompt_ids)
    logger.info(
        "request %s: prompt %d tokens (text %d, image %d, video %d), %d cached, generated %d, first token %s, "
        "total %.3f s, %s",
        request.id,
        prompt,
        prompt - sum(media_tokens.values()),
        media_tokens["image"],
        media_tokens["video"],
        cached,
        generated,
        "none" if first_token is None else f"{first_token:.3f} s",
        seconds,
        "+".join(reasons),
    )
