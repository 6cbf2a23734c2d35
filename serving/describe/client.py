"""Requests to an OpenAI-compatible server, with a rate limit and retries."""

import asyncio
import contextlib
import dataclasses
import email.utils
import io
import json
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiolimiter import AsyncLimiter
from tenacity import AsyncRetrying, RetryCallState, retry_if_result, stop_after_attempt, wait_random_exponential

FIRST_BACKOFF = 1.0  # seconds; bound of the first backoff, doubled for each further one
MAX_BACKOFF = 60.0  # seconds
MAX_RETRY_AFTER = 600.0  # seconds; a response with a longer Retry-After is final
MAX_MESSAGE_LENGTH = 2000  # characters kept of an error body that is not in OpenAI's format

Sleep = Callable[[float], Awaitable[None]]


def rate_limit(rate: float) -> contextlib.AbstractAsyncContextManager[None]:
    """Return a context that can be entered `rate` times a second, evenly spaced, so without bursts; 0 is no limit."""
    return AsyncLimiter(1, 1 / rate) if rate else contextlib.nullcontext()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """Outcome of a request.

    Attributes:
        answer: JSON of the response; None if the request failed.
        error: `status` (None without a response), `message`, and the other fields of the server's error.
        attempts: number of attempts.
        seconds: duration of the last attempt.
        retry_after: minimum seconds before a retry; None if the outcome is final.
    """

    answer: Any = None
    error: dict[str, Any] | None = None
    attempts: int = 1
    seconds: float = 0.0
    retry_after: float | None = None


class Client:
    """HTTP client that retries.

    429, 5xx, connection errors and timeouts are retried after Retry-After plus a random time below a bound that doubles
    (full jitter). Other statuses are final. Redirects are not followed, because they would forward the API key.

    Args:
        session: its `timeout.total` bounds an attempt.
        base: URL of the server without a trailing slash.
        retries: maximum number of attempts after the first.
        limit: context that each attempt of a POST enters first, see rate_limit.
        sleep: waits between attempts.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base: str,
        *,
        retries: int,
        limit: contextlib.AbstractAsyncContextManager[None],
        sleep: Sleep = asyncio.sleep,
    ):
        self._session = session
        self._base = base
        self._retries = retries
        self._limit = limit
        self._sleep = sleep

    async def get(self, path: str) -> Reply:
        """Send a GET without retries, so that a missing server is reported at once."""
        return await self._attempt("GET", path, None)

    async def post(self, path: str, body: bytes) -> Reply:
        """Send a POST of JSON, with retries."""
        retrying = AsyncRetrying(
            retry=retry_if_result(lambda reply: reply.retry_after is not None),
            wait=_wait,
            stop=stop_after_attempt(1 + self._retries),
            retry_error_callback=_reply,
            sleep=self._sleep,
        )
        reply = await retrying(self._limited_attempt, "POST", path, body)
        return dataclasses.replace(reply, attempts=retrying.statistics["attempt_number"])

    async def _limited_attempt(self, method: str, path: str, body: bytes) -> Reply:
        async with self._limit:
            return await self._attempt(method, path, body)

    async def _attempt(self, method: str, path: str, body: bytes | None) -> Reply:
        started = time.monotonic()
        headers = {} if body is None else {"Content-Type": "application/json"}
        # aiohttp sends a file in pieces, between which other requests proceed; it sends bytes in one piece.
        data = None if body is None else io.BytesIO(body)
        answer, retry_after = None, 0.0
        try:
            async with self._session.request(
                method, self._base + path, data=data, headers=headers, allow_redirects=False
            ) as response:
                content = await response.read()
        except TimeoutError:  # first, since aiohttp's own timeouts are connection errors too
            error = {"status": None, "type": "timeout", "message": f"no answer in {self._session.timeout.total:g} s"}
        except (aiohttp.ClientError, OSError) as fault:
            error = {"status": None, "type": "connection_error", "message": str(fault) or type(fault).__name__}
        else:
            answer = _answer(response.status, content)
            error = _error(response.status, content) if answer is None else None
            retry_after = _pause(response.status, response.headers.get("Retry-After"))
        return Reply(answer=answer, error=error, seconds=time.monotonic() - started, retry_after=retry_after)


def _reply(retry_state: RetryCallState) -> Reply:
    assert retry_state.outcome is not None
    return retry_state.outcome.result()


def _wait(retry_state: RetryCallState) -> float:
    """Return the seconds before the next attempt: Retry-After plus a random backoff (full jitter)."""
    backoff = wait_random_exponential(multiplier=FIRST_BACKOFF, max=MAX_BACKOFF)
    return (_reply(retry_state).retry_after or 0.0) + backoff(retry_state)


def _pause(status: int, retry_after: str | None) -> float | None:
    """Return the minimum seconds before a retry; None if the response is final."""
    if status != 429 and status < 500:
        return None
    pause = _seconds(retry_after or "")
    return None if pause > MAX_RETRY_AFTER else pause


def _seconds(retry_after: str) -> float:
    """Parse Retry-After (RFC 9110, 10.2.3): seconds (some servers send a fraction) or a date; 0 for anything else."""
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", retry_after):
        return float(retry_after)
    parsed = email.utils.parsedate_tz(retry_after)
    try:
        return max(0.0, email.utils.mktime_tz(parsed) - time.time()) if parsed else 0.0
    except (ValueError, OverflowError):
        return 0.0


def _answer(status: int, content: bytes) -> dict[str, Any] | None:
    """Return the JSON of a success. Some servers send errors with status 200."""
    answer = _json(content) if status == 200 else None
    return answer if isinstance(answer, dict) and "error" not in answer else None


def _error(status: int, content: bytes) -> dict[str, Any]:
    """Return the `error` object of a response, or the beginning of its text."""
    document = _json(content)
    inner = document.get("error") if isinstance(document, dict) else None
    if isinstance(inner, dict):
        return {"status": status, "message": None} | inner | {"status": status}
    text = inner if isinstance(inner, str) else content.decode("utf-8", "replace").strip()
    return {"status": status, "message": text[:MAX_MESSAGE_LENGTH] or "no reason given"}


def _json(content: bytes) -> Any:
    try:
        return json.loads(content, parse_constant=lambda constant: None)
    except (ValueError, RecursionError):
        return None
