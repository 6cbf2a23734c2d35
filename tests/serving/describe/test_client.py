"""Rate limit, retries and errors of the client."""

import asyncio
import email.utils
import time
from pathlib import Path

import pytest
from aiohttp import web

from serving.describe import client as describe_client
from serving.describe.client import rate_limit
from serving.describe.job import connect
from serving.http.lifecycle import bind, url
from tests.serving.describe.fake import described, in_turn, options, refused


class Pauses(list):
    """Records the waits between attempts instead of waiting."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)


async def entries(rate: float, workers: int, each: int) -> list[float]:
    """Seconds at which `workers` tasks enter a rate limit, `each` times each."""
    limit, seconds = rate_limit(rate), []
    start = time.monotonic()

    async def enter() -> None:
        for _ in range(each):
            async with limit:
                seconds.append(time.monotonic() - start)

    await asyncio.gather(*(enter() for _ in range(workers)))
    return seconds


async def test_the_rate_holds_from_the_first_second_on():
    seconds = await entries(20, workers=6, each=5)
    assert sum(second < 0.9 for second in seconds) <= 18  # a bucket of 20 tokens would allow 38
    assert all(later - earlier >= 0.9 for earlier, later in zip(seconds, seconds[20:], strict=False))


async def test_unused_turns_are_not_saved_up():
    limit = rate_limit(20)
    for pause in (0.0, 0.3, 0.3):
        await asyncio.sleep(pause)
        start = time.monotonic()
        for _ in range(3):
            async with limit:
                pass
        assert time.monotonic() - start >= 0.09


async def test_rates_below_one_a_second_and_no_limit():
    assert (await entries(0.9, workers=2, each=1))[1] >= 1.1
    assert len(await entries(0, workers=10, each=1000)) == 10_000


async def post(server: str, pauses: Pauses | None = None, **more) -> describe_client.Reply:
    """Send one request without waiting between attempts."""
    given = options("x", server, Path("x"), **more)
    async with connect(given, sleep=Pauses() if pauses is None else pauses) as client:
        return await client.post("/chat/completions", b'{"messages": []}')


@pytest.fixture
def longest_backoff(monkeypatch):
    """Makes every backoff the longest possible."""
    monkeypatch.setattr(describe_client, "FIRST_BACKOFF", 1.0)
    monkeypatch.setattr("tenacity.wait.random.uniform", lambda low, high: high)


async def test_a_503_is_retried_after_its_retry_after_plus_jitter(fake, server, longest_backoff):
    fake.answer = in_turn(lambda: refused(503, "busy", {"Retry-After": "7"}), lambda: described("yes"))
    pauses = Pauses()
    reply = await post(server, pauses)
    assert (reply.answer["choices"][0]["message"]["content"], reply.attempts) == ("yes", 2)
    assert pauses == [8.0]


async def test_backoff_doubles_up_to_a_bound_and_ends(fake, server, longest_backoff):
    fake.answer = in_turn(lambda: refused(500, "broken"))
    pauses = Pauses()
    reply = await post(server, pauses, retries=8)
    assert (reply.error["status"], reply.error["message"], reply.attempts) == (500, "broken", 9)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert len(fake.requests) == 9


async def test_backoff_is_random(fake, server, monkeypatch):
    monkeypatch.setattr(describe_client, "FIRST_BACKOFF", 1.0)
    fake.answer = in_turn(lambda: refused(500, "broken"))
    pauses = Pauses()
    await post(server, pauses, retries=9)
    assert all(0 <= pause <= min(60, 2**number) for number, pause in enumerate(pauses))
    assert len(set(pauses)) == 9


async def test_the_rate_limit_counts_every_attempt(fake, server):
    fake.answer = in_turn(lambda: refused(429, "slow down"))
    start = time.monotonic()
    await post(server, retries=3, rate=10)
    assert time.monotonic() - start >= 0.29


@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 422])
async def test_other_statuses_are_final_and_keep_the_error(fake, server, status):
    fake.answer = in_turn(lambda: refused(status, "the image is broken", {"Retry-After": "1"}))
    pauses = Pauses()
    reply = await post(server, pauses)
    assert (reply.attempts, pauses) == (1, [])
    assert reply.error == {
        "status": status,
        "message": "the image is broken",
        "type": "invalid_request_error",
        "param": "messages[0].content[0]",
        "code": status,
    }


async def test_errors_that_are_not_in_openais_format(fake, server):
    for text, message in (("<h1>Bad</h1>", "<h1>Bad</h1>"), ('{"error": "no"}', "no"), ("", "no reason given")):
        fake.answer = in_turn(lambda text=text: web.Response(status=400, text=text))
        assert (await post(server)).error == {"status": 400, "message": message}


async def test_redirects_are_not_followed(fake, server):
    fake.answer = in_turn(lambda: web.Response(status=307, headers={"Location": "/v1/chat/completions"}))
    reply = await post(server, api_key="secret")
    assert (reply.error["status"], reply.attempts, len(fake.requests)) == (307, 1, 1)


async def test_broken_connections_and_timeouts_are_retried(fake, server):
    fake.answer = in_turn(lambda: None, lambda: None, lambda: described("yes"))
    reply = await post(server)
    assert (reply.error, reply.attempts) == (None, 3)

    async def hang(body):
        await asyncio.Event().wait()

    fake.answer = hang
    reply = await post(server, timeout=0.05, retries=1)
    assert reply.attempts == 2
    assert (reply.error["status"], reply.error["type"], reply.error["message"]) == (
        None,
        "timeout",
        "no answer in 0.05 s",
    )


async def test_connection_refused():
    with bind("127.0.0.1", 0) as sock:  # bound and not listening
        reply = await post(f"{url(sock)}/v1", retries=2)
    assert (reply.attempts, reply.error["status"], reply.error["type"]) == (3, None, "connection_error")
    assert "Connect call failed" in reply.error["message"]


def test_retry_after():
    seconds = describe_client._seconds
    assert (seconds("3"), seconds("0.5"), seconds("0")) == (3.0, 0.5, 0.0)
    assert 100 < seconds(email.utils.formatdate(time.time() + 120, usegmt=True)) <= 120
    for text in ("", "-1", "nan", "inf", "soon", "9" * 20, "Wed, 99 Foo 99999", email.utils.formatdate(0)):
        assert seconds(text) == 0.0
    pause = describe_client._pause
    assert (pause(429, None), pause(503, "5"), pause(400, "5")) == (0.0, 5.0, None)
    assert pause(503, "86400") is None  # too long to wait for
