"""One request to an OpenAI-compatible server, at its turn and as often as it takes."""

import asyncio
import dataclasses
import email.utils
import io
import json
import random
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

FIRST_BACKOFF = 1.0  # seconds before a second attempt, at most; doubles with each
MAX_BACKOFF = 60.0
MAX_RETRY_AFTER = 600.0  # seconds; a server that asks for more is not waited for
MAX_MESSAGE = 2000  # characters of a failure that is not in OpenAI's shape

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


class RateLimit:
    """A token bucket: `rate` turns a second; what was not used is kept for one second and no longer.

    Args:
        rate: turns a second; 0 is no limit.
        clock, sleep: in seconds.
    """

    def __init__(self, rate: float, *, clock: Clock, sleep: Sleep):
        self._interval = 1 / rate if rate else 0.0
        self._clock = clock
        self._sleep = sleep
        self._next: float | None = None  # when the next turn is

    async def wait(self) -> None:
        """Returns when it is the caller's turn, in the order of the calls."""
        if not self._interval:
            return
        now = self._clock()
        # A turn that lies back by a second less the one it is itself leaves a bucket of `rate` turns, and of one at
        # least. It starts with one: the first second must not have twice its share.
        turn = now if self._next is None else max(self._next, now - max(0.0, 1 - self._interval))
        self._next = turn + self._interval
        if turn > now:
            await self._sleep(turn - now)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """How a request ended.

    Attributes:
        answer: the JSON of the response; None when it failed.
        error: why it failed: `status` (None when there was no response), `message`, and what else the server said.
        attempts: how often it was sent.
        seconds: from sending the last attempt to its end.
    """

    answer: Any = None
    error: dict[str, Any] | None = None
    attempts: int = 0
    seconds: float = 0.0


class Client:
    """Sends requests with retries.

    A 429, a 5xx, a broken connection and a timeout are tried again, after a random time below a bound that doubles
    (full jitter), and not before a Retry-After has passed. Any other status is final. Redirects are not followed: a
    key would go along.

    Args:
        session: its `timeout.total` bounds an attempt.
        base: the server's URL, without a slash at its end.
        retries: attempts after the first, at most.
        limit: every attempt waits for its turn.
        uniform: draws a float between two.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base: str,
        *,
        retries: int,
        limit: RateLimit,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ):
        self._session = session
        self._base = base
        self._retries = retries
        self._limit = limit
        self._clock = clock
        self._sleep = sleep
        self._uniform = uniform

    async def get(self, path: str) -> Reply:
        """A GET, tried once: nobody should wait for a minute to learn that the server is not there."""
        return (await self._attempt("GET", path, None))[0]

    async def post(self, path: str, body: bytes) -> Reply:
        attempts = 0
        while True:
            await self._limit.wait()
            attempts += 1
            reply, pause = await self._attempt("POST", path, body)
            if pause is None or attempts > self._retries:
                return dataclasses.replace(reply, attempts=attempts)
            bound = min(MAX_BACKOFF, FIRST_BACKOFF * 2 ** (attempts - 1))
            await self._sleep(pause + self._uniform(0.0, bound))

    async def _attempt(self, method: str, path: str, body: bytes | None) -> tuple[Reply, float | None]:
        """The reply, and the seconds after which to try again at the earliest; None is never."""
        started = self._clock()
        headers = {} if body is None else {"Content-Type": "application/json"}
        # aiohttp sends a file in pieces, between which other requests go on; plain bytes go in one.
        data = None if body is None else io.BytesIO(body)
        try:
            async with self._session.request(
                method, self._base + path, data=data, headers=headers, allow_redirects=False
            ) as response:
                content = await response.read()
        except TimeoutError:  # first, since aiohttp's own timeouts are connection errors too
            error = {"status": None, "type": "timeout", "message": f"no answer in {self._session.timeout.total:g} s"}
            pause = 0.0
        except (aiohttp.ClientError, OSError) as fault:
            message = str(fault) or type(fault).__name__
            error, pause = {"status": None, "type": "connection_error", "message": message}, 0.0
        else:
            if response.status == 200:
                answer, error, pause = _json(content), None, None
                if isinstance(answer, dict) and "error" not in answer:
                    return Reply(answer=answer, attempts=1, seconds=self._clock() - started), None
            else:
                pause = _pause(response.status, response.headers.get("Retry-After"))
            error = _reason(response.status, content)
        return Reply(error=error, attempts=1, seconds=self._clock() - started), pause


def _pause(status: int, retry_after: str | None) -> float | None:
    if status != 429 and status < 500:
        return None
    pause = _seconds(retry_after or "")
    return None if pause > MAX_RETRY_AFTER else pause


def _seconds(retry_after: str) -> float:
    """RFC 9110, 10.2.3: seconds (some servers send a fraction) or a date; 0 for anything else."""
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]+)?", retry_after):
        return float(retry_after)
    parsed = email.utils.parsedate_tz(retry_after)
    try:
        return max(0.0, email.utils.mktime_tz(parsed) - time.time()) if parsed else 0.0
    except (ValueError, OverflowError):
        return 0.0


def _reason(status: int, content: bytes) -> dict[str, Any]:
    """The server's own words: its `error` object, or the beginning of the text."""
    document = _json(content)
    inner = document.get("error") if isinstance(document, dict) else None
    if isinstance(inner, dict):
        return {"status": status, "message": None} | inner | {"status": status}
    text = inner if isinstance(inner, str) else content.decode("utf-8", "replace").strip()
    return {"status": status, "message": text[:MAX_MESSAGE] or "no reason given"}


def _json(content: bytes) -> Any:
    try:
        return json.loads(content, parse_constant=lambda constant: None)
    except (ValueError, RecursionError):
        return None
