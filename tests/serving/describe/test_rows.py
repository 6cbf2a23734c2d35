"""Rows survive failures of the server, the process and the disk."""

import asyncio
import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from serving.describe import job as describe
from serving.describe import rows as describe_rows
from serving.describe.job import plan
from serving.describe.sources import UsageError
from serving.describe.stopping import SERVER_LIMIT
from tests.serving.describe.fake import ROOT, described, fill, image_of, in_turn, options, refused, rows, run


def test_a_server_that_dies_during_a_run(fake, folder, tmp_path):
    names = fill(folder, 30)
    out = tmp_path / "out.jsonl"

    async def dying(body):
        return None if len(fake.requests) > 10 else await fake.describe(body)

    fake.answer = dying
    with fake.running() as address:
        given = options(folder, address, out, concurrency=3, retries=1)
        first = run(given)
    assert (first.described, first.exit_code) == (10, 1)
    assert SERVER_LIMIT <= first.failed == first.reasons["connection_error"]["count"] < SERVER_LIMIT + 3
    assert first.not_sent == 20 - first.failed  # the run gives up
    kept = {source: row for source, row in rows(out).items() if "text" in row}
    assert len(kept) == 10
    assert len(rows(out)) == 10 + first.failed  # failures have rows too
    with pytest.raises(describe.NoModel, match="does not list its models"):
        run(given)
    fake.answer, fake.requests = fake.describe, []
    with fake.running() as address:
        again = run(dataclasses.replace(given, server=address))  # at its new address
    assert (again.done_before, again.described, again.failed, again.exit_code) == (10, 20, 0, 0)
    written = rows(out)
    assert set(written) == set(names)
    assert all("text" in row for row in written.values())
    assert kept.items() <= written.items()
    assert len(fake.requests) == 20  # finished images are not sent again


def test_a_finished_run_sends_nothing_again(fake, server, folder, tmp_path):
    fill(folder, 3)
    out = tmp_path / "out.jsonl"
    run(options(folder, server, out))
    before = out.read_bytes()
    summary = run(options(folder, server, out))
    assert (summary.done_before, summary.described, summary.exit_code) == (3, 0, 0)
    assert (out.read_bytes(), len(fake.requests)) == (before, 3)
    other = tmp_path / "other"
    other.mkdir()
    fill(other, 2)  # the same names in another folder are other images
    assert run(options(other, server, out)).described == 2
    assert len(rows(out)) == 5


def test_failed_rows_are_kept_without_retry_failed(fake, server, folder, tmp_path):
    names = fill(folder, 4)
    out = tmp_path / "out.jsonl"

    async def answer(body):
        return refused(400, "no") if image_of(body) == "image 2" else described("yes")

    fake.answer = answer
    assert run(options(folder, server, out)).failed == 1
    fake.answer, fake.requests = fake.describe, []
    summary = run(options(folder, server, out, retry_failed=False))
    assert (summary.done_before, summary.failed_before, summary.described, summary.exit_code) == (3, 1, 0, 1)
    assert fake.requests == []
    assert plan(options(folder, server, out)) == [names[2]]
    assert plan(options(folder, server, out, retry_failed=False)) == []


def test_an_incomplete_last_line_is_removed(fake, server, folder, tmp_path):
    names = fill(folder, 5)
    out = tmp_path / "out.jsonl"
    run(options(folder, server, out))
    lines = out.read_bytes().splitlines(keepends=True)
    last = json.loads(lines[-1])["source"]
    for cut in (1, len(lines[-1]) // 2, len(lines[-1]) - 2):
        fake.requests.clear()
        out.write_bytes(b"".join(lines[:-1]) + lines[-1][:cut])
        assert plan(options(folder, server, out)) == [last]
        summary = run(options(folder, server, out))
        assert (summary.done_before, summary.described, len(fake.requests)) == (4, 1, 1)
        assert set(rows(out)) == set(names)
    out.write_bytes(b"".join(lines).removesuffix(b"\n"))  # only the line feed is missing
    assert run(options(folder, server, out)).done_before == 5
    assert out.read_bytes() == b"".join(lines)


def test_lines_that_are_not_rows_are_dropped(fake, server, folder, tmp_path):
    names = fill(folder, 4)
    out = tmp_path / "out.jsonl"
    run(options(folder, server, out))
    lines = out.read_bytes().splitlines(keepends=True)
    lost = json.loads(lines[1])["source"]
    lines[1] = b"\0" * len(lines[1]) + b"\n"  # as after a power cut
    junk = [b"\n", b"[1]\n", b'{"source": 1}\n', b'{"source": "x"}\n', b"\xff\n"]
    out.write_bytes(b"".join(lines[:2] + junk + lines[2:]))
    assert plan(options(folder, server, out)) == [lost]
    assert run(options(folder, server, out)).described == 1
    assert set(rows(out)) == set(names)


def test_a_file_of_other_settings_is_refused_with_both_values(fake, server, folder, tmp_path):
    fill(folder, 2)
    out = tmp_path / "out.jsonl"
    run(options(folder, server, out))
    before = out.read_bytes()
    with pytest.raises(UsageError, match=r"prompt was 'What is it\?' and is now 'Who is it\?'.*--overwrite"):
        run(options(folder, server, out, prompt="Who is it?"))
    for more in ({"model": "other"}, {"system": "s"}, {"max_tokens": 3}, {"temperature": 0.0}):
        ((name, value),) = more.items()
        with pytest.raises(UsageError, match=f"{name} was .* and is now {value!r}"):
            run(options(folder, server, out, **more))
        with pytest.raises(UsageError, match="other settings"):
            plan(options(folder, server, out, **more))
    fake.models = ["newer-vl"]
    with pytest.raises(UsageError, match="model was 'fake-vl' and is now 'newer-vl'"):
        run(options(folder, server, out))
    assert out.read_bytes() == before
    assert run(options(folder, server, out, prompt="Who is it?", overwrite=True)).described == 2
    assert len(rows(out)) == 2
    assert run(options(folder, server, out, prompt="Who is it?")).done_before == 2


def test_a_foreign_file_is_left_unchanged(server, folder, tmp_path):
    fill(folder, 1)
    out = tmp_path / "mine.jsonl"
    out.write_text('{"source": "a", "text": "b"}\n')
    with pytest.raises(UsageError, match=r"no mine\.jsonl\.run\.json beside it"):
        run(options(folder, server, out))
    assert out.read_text() == '{"source": "a", "text": "b"}\n'
    assert sorted(os.listdir(tmp_path)) == ["images", "mine.jsonl"]
    for wrong, message in ((folder, "not a regular file"), (tmp_path / "no/out.jsonl", "does not exist")):
        with pytest.raises(UsageError, match=message):
            run(options(folder, server, wrong))


def test_two_runs_cannot_write_to_one_file(server, folder, tmp_path):
    fill(folder, 1)
    out = tmp_path / "out.jsonl"
    given = options(folder, server, out)
    with (
        describe_rows.open_rows(out, given.settings("fake-vl"), overwrite=False),
        pytest.raises(UsageError, match="another process"),
    ):
        run(given)


def test_a_full_disk_stops_the_run_and_loses_nothing(fake, server, folder, tmp_path, monkeypatch):
    names = fill(folder, 20)
    out = tmp_path / "out.jsonl"
    write, written = describe_rows._write, []

    def full(file, data):
        written.append(data)
        if len(written) > 5:
            write(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, data)

    barrier = asyncio.Barrier(4)  # all workers write a row at once

    async def answer(body):
        await barrier.wait()
        return described("yes")

    fake.answer = answer
    monkeypatch.setattr(describe_rows, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        run(options(folder, server, out, concurrency=4))
    assert len(written) == 6  # no worker appends to half a line
    monkeypatch.setattr(describe_rows, "_write", write)
    fake.answer = fake.describe
    summary = run(options(folder, server, out))
    assert (summary.done_before, summary.described) == (5, 15)
    assert set(rows(out)) == set(names)


def test_superseded_rows_of_a_killed_run_are_dropped_by_the_next(fake, server, folder, tmp_path, monkeypatch):
    """Of two rows of a source, the last counts."""
    names = fill(folder, 3)
    out = tmp_path / "out.jsonl"
    fake.answer = in_turn(lambda: refused(400, "no"))
    run(options(folder, server, out))
    fake.answer, fake.requests = fake.describe, []
    monkeypatch.setattr(describe_rows.RowFile, "close", lambda self: None)
    run(options(folder, server, out, limit=2))
    assert len(out.read_bytes().splitlines()) == 5
    monkeypatch.undo()
    link = tmp_path / "link.jsonl"
    link.symlink_to(out)
    out.chmod(0o640)
    assert run(options(folder, server, link)).done_before == 2
    assert set(rows(out)) == set(names)
    assert all("text" in row for row in rows(out).values())
    assert link.is_symlink()
    assert out.stat().st_mode & 0o777 == 0o640
    assert len(fake.requests) == 3


def test_limit_and_dry_run(fake, server, folder, tmp_path):
    names = fill(folder, 5)
    out = tmp_path / "out.jsonl"
    assert plan(options(folder, server, out, limit=2)) == names[:2]
    assert (out.exists(), fake.requests) == (False, [])
    summary = run(options(folder, server, out, limit=2))
    assert (summary.described, summary.not_sent, summary.exit_code) == (2, 3, 0)
    assert set(rows(out)) == set(names[:2])
    assert plan(options(folder, server, out, limit=2)) == names[2:4]
    assert plan(options(folder, server, out, overwrite=True)) == names
    run(options(folder, server, out, limit=2))
    assert run(options(folder, server, out, limit=2)).not_sent == 0
    assert set(rows(out)) == set(names)


def command(folder: Path, server: str, out: Path, *more: str) -> list[str]:
    words = ["describe-images", str(folder), "--prompt", "What is it?", "-o", str(out), "--server", server]
    return [sys.executable, "-m", "serving.cli.main", *words, *more]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_loses_no_row(fake, server, folder, tmp_path, number):
    names = fill(folder, 20)
    out = tmp_path / "out.jsonl"
    held = threading.Event()

    async def hold(body):
        if len(fake.requests) <= 6:
            return await fake.describe(body)
        if fake.in_flight == 4:  # all workers wait, so every earlier answer has been written
            held.set()
        await asyncio.Event().wait()
        return None

    fake.answer = hold
    process = subprocess.Popen(
        command(folder, server, out, "--concurrency", "4", "--json"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert held.wait(timeout=60)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert len(rows(out)) == 6
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 130, stderr
        summary = json.loads(stdout)
        assert (summary["described"], summary["not_sent"], summary["interrupted"]) == (6, 14, True)
        assert b"6 described, 0 failed" in stderr
        assert b"Interrupted" in stderr
        assert b"Traceback" not in stderr
    fake.answer = fake.describe
    again = subprocess.run(command(folder, server, out), cwd=ROOT, capture_output=True, text=True)
    assert (again.returncode, again.stdout) == (0, "")
    assert "20 sources: 14 described, 0 failed, 6 done before." in again.stderr
    assert set(rows(out)) == set(names)
