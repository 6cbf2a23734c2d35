"""describe-images stops where all requests would fail, and says how to resume."""

import dataclasses
import shlex
from pathlib import Path

import pytest

from serving.describe.report import Summary
from serving.describe.settings import Options
from serving.describe.stopping import IMAGE_LIMIT, SERVER_LIMIT, Failures, Stopped, resume_command
from tests.serving.describe.fake import described, fill, image_of, in_turn, options, refused, rows, run


def adds_up(summary: Summary) -> bool:
    counts = (summary.done_before, summary.failed_before, summary.not_sent, summary.described, summary.failed)
    return sum(counts) == summary.sources


@pytest.mark.parametrize(
    ("status", "remedy"), [(401, "--api-key"), (403, "--api-key"), (404, "--model"), (503, "--concurrency")]
)
def test_a_fault_of_no_image_stops_the_run(fake, server, folder, tmp_path, status, remedy):
    fill(folder, 100)
    fake.answer = in_turn(lambda: refused(status, "no"))
    out = tmp_path / "out.jsonl"
    summary = run(options(folder, server, out, retries=0, concurrency=4))
    assert len(fake.requests) <= SERVER_LIMIT + 4
    assert adds_up(summary)
    assert (summary.described, summary.exit_code) == (0, 1)
    assert summary.stopped.startswith(f"{SERVER_LIMIT} requests in a row failed ({status}: no)")
    assert remedy in summary.stopped
    assert len(rows(out)) == summary.failed
    fake.answer = fake.describe
    again = run(options(folder, server, out))
    assert (again.described, again.failed, again.not_sent, again.exit_code, again.resume) == (100, 0, 0, 0, None)


def test_a_server_that_dies_in_the_middle_and_returns(fake, server, folder, tmp_path):
    fill(folder, 60)

    async def dies(body):
        return described("fine") if len(fake.requests) <= 20 else None

    fake.answer = dies
    out = tmp_path / "out.jsonl"
    given = options(folder, server, out, retries=1, concurrency=3)
    summary = run(given)
    assert summary.described == 20
    assert adds_up(summary)
    assert SERVER_LIMIT <= summary.failed < SERVER_LIMIT + 3
    assert "is the server running?" in summary.stopped
    assert summary.resume == resume_command(given)
    sent = len(fake.requests)
    fake.answer = fake.describe
    again = run(given)
    assert (again.done_before, again.described, again.exit_code) == (20, 40, 0)
    assert len(fake.requests) == sent + 40
    assert run(given).done_before == 60


def test_one_error_for_all_images_stops_and_bad_images_among_good_ones_do_not(fake, server, folder, tmp_path):
    fill(folder, 100)
    fake.answer = in_turn(lambda: refused(400, "this model reads text only"))
    summary = run(options(folder, server, tmp_path / "a.jsonl", concurrency=1))
    assert summary.failed == IMAGE_LIMIT
    assert "(400: this model reads text only)" in summary.stopped
    assert adds_up(summary)

    async def one_good(body):
        return described("fine") if image_of(body) == "image 3" else refused(400, "cannot read the image")

    fake.answer = one_good
    summary = run(options(folder, server, tmp_path / "b.jsonl", concurrency=1))
    assert (summary.described, summary.failed, summary.stopped) == (1, 99, None)


def test_only_equal_failures_in_a_row_count():
    failures = Failures()
    for number in range(10 * IMAGE_LIMIT):
        failures.check({"error": {"status": 401 if number % 2 else 503, "message": "no"}})
        failures.check({"error": {"status": 400, "message": f"image {number}"}})
        failures.check({"error": {"status": None, "type": "unreadable", "message": "empty"}})
    for _ in range(SERVER_LIMIT - 1):
        failures.check({"error": {"status": None, "type": "connection_error", "message": "refused"}})
    with pytest.raises(Stopped, match="refused"):
        failures.check(
            {"error": {"status": None, "type": "connection_error", "message": "reset"}}
            | {"error": {"status": None, "type": "connection_error", "message": "refused"}}
        )


def test_the_resume_command_has_all_settings_but_no_key_and_no_overwrite(invoke, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    given = Options(
        source="my photos",
        prompt="What's it?",
        out=Path("o.jsonl"),
        api_key="secret",
        overwrite=True,
        retry_failed=False,
        rate=2.5,
        limit=7,
    )
    words = shlex.split(resume_command(given))
    assert words == [
        *("omni-jax", "describe-images", "my photos", "--prompt", "What's it?", "--out", "o.jsonl"),
        *("--rate", "2.5", "--no-retry-failed", "--limit", "7", "--api-key", "KEY"),
    ]
    seen = []
    monkeypatch.setattr("serving.describe.job.plan", lambda options: seen.append(options) or [])
    invoke(*words[1:], "--dry-run")
    assert seen == [dataclasses.replace(given, overwrite=False, api_key="KEY")]


def test_errors_of_a_broken_server_are_alike_whatever_their_messages():
    failures = Failures()
    for number in range(IMAGE_LIMIT - 1):
        failures.check({"error": {"status": 500, "message": f"internal error of request {number}"}})
    with pytest.raises(Stopped, match=f"the first {IMAGE_LIMIT} requests failed alike"):
        failures.check({"error": {"status": 500, "message": "internal error of another"}})
