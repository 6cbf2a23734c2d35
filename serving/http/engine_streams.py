"""Engine requests of one API request: submitted together, read together and aborted together."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

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
async def stream_deltas(
    server: Server, requests: Sequence[Request], *, ends_only: bool = False
) -> AsyncIterator[AsyncIterator[list[PromptDelta]]]:
    """Submits `requests` and yields an iterator over batches of their deltas. All of them enter the queue, or none.

    A batch holds everything that has arrived since the last one, merged into one delta per choice, so a slow reader
    catches up in a few large batches. With `ends_only`, a batch comes when a choice has ended, so a reader who needs
    whole answers does not wake for every token. On exit (end, error or client disconnect), unfinished requests are
    aborted.

    Raises:
        InvalidRequest, Unavailable, EngineError: from the engine on submission.
        ApiError, Unavailable: from the iterator, if the engine ends a choice with an error or because it stops.
    """
    check_open(server)
    arrivals = _Arrivals(ends_only)
    answers: list[_Answer] = []
    try:
        for position, request in enumerate(requests):
            stream = server.engine.submit(request)
            answers.append(_Answer(position, request, arrivals, server.metrics))
            stream.forward(answers[-1].add)
        async with contextlib.aclosing(_batches(arrivals, sum(request.params.n for request in requests))) as batches:
            yield batches
    finally:
        for answer in answers:
            if answer.unfinished:
                answer.end()
                server.engine.abort(answer.request.id)


class _Arrivals:
    """Deltas of one API request that nobody has read yet.

    Args:
        ends_only: whether `take` waits for the end of a choice.
    """

    def __init__(self, ends_only: bool):
        self._ends_only = ends_only
        self._deltas: list[PromptDelta] = []
        self._some = asyncio.Event()

    def put(self, item: PromptDelta) -> None:
        self._deltas.append(item)
        if not self._ends_only or item[1].finish_reason is not None:
            self._some.set()

    async def take(self) -> list[PromptDelta]:
        """Waits until there are any, and takes all of them."""
        await self._some.wait()
        self._some.clear()
        taken, self._deltas = self._deltas, []
        return taken


async def _batches(arrivals: _Arrivals, unfinished: int) -> AsyncGenerator[list[PromptDelta], None]:
    while unfinished:
        deltas = await arrivals.take()
        unfinished -= sum(delta.finish_reason is not None for _, delta in deltas)
        if good := [item for item in deltas if item[1].finish_reason not in ("error", "abort")]:
            yield merged(good)
        for _, delta in deltas:
            if delta.finish_reason == "error":
                raise ApiError(500, delta.error or "the engine failed")
            if delta.finish_reason == "abort":  # by the engine: after an abort from here, nothing reads the stream
                raise Unavailable(delta.error or "the server is shutting down; the request was aborted")


def merged(deltas: Sequence[PromptDelta]) -> list[PromptDelta]:
    """One delta per choice, in order of each choice's first delta."""
    if len(deltas) == 1:
        return list(deltas)
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


class _Answer:
    """The answer to an engine request as it arrives, for the metrics, the log and the reader of the API request.

    Attributes:
        request: the engine request.
        unfinished: number of choices that have not ended.
    """

    def __init__(self, position: int, request: Request, arrivals: _Arrivals, metrics: Metrics):
        self.request, self.unfinished = request, request.params.n
        self._position, self._arrivals, self._metrics = position, arrivals, metrics
        self._first_token: float | None = None
        self._latest: dict[int, float] = {}  # choice -> time of its latest token
        self._generated = self._cached = 0
        self._reasons = ["abort"] * request.params.n

    def add(self, delta: Delta) -> None:
        """Takes what the engine added. Ignores what comes after the end."""
        if not self.unfinished:
            return
        index = delta.index
        if index == 0:
            self._cached = delta.cached_tokens
        if delta.token_ids:
            now = time.monotonic()
            self._generated += len(delta.token_ids)
            if index in self._latest:
                self._metrics.next_tokens(now - self._latest[index], len(delta.token_ids))
            else:
                self._metrics.first_token(now - self.request.arrival)
                self._first_token = now - self.request.arrival if self._first_token is None else self._first_token
            self._latest[index] = now
        self._arrivals.put((self._position, delta))
        if delta.finish_reason is not None:
            self._reasons[index] = delta.finish_reason
            self.unfinished -= 1
            if not self.unfinished:
                self.end()

    def end(self) -> None:
        """Choices that have not ended yet end as aborted."""
        self.unfinished = 0
        seconds, reasons = time.monotonic() - self.request.arrival, set(self._reasons)
        _log_end(self.request, self._cached, self._generated, self._first_token, seconds, sorted(reasons))
        # Both here, so that they agree: the engine may end a request while its client leaves.
        self._metrics.choices_ended(self._reasons)
        if not {"error", "abort"} & reasons:
            self._metrics.request_finished(
                seconds=seconds,
                prompt_tokens=len(self.request.prompt_ids),
                generated_tokens=self._generated,
                params=self.request.params,
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
