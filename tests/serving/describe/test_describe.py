"""describe-images as a whole: requests, rows and the command."""

import asyncio
import base64
import io
import json
import os
import subprocess
import sys
import threading

import pytest
from aiohttp import web
from rich.console import Console

from serving.describe import job as describe
from serving.describe import report as describe_report
from serving.describe import sources as describe_sources
from serving.http.lifecycle import bind, url
from tests.command_line import run_command
from tests.serving.describe.fake import ROOT, described, fill, image_of, in_turn, options, refused, rows, run


def test_each_image_of_a_folder_gets_a_row(fake, server, folder, tmp_path):
    names = fill(folder, 3)
    out = tmp_path / "out.jsonl"
    given = {"prompt": 'Say "url": "" now', "system": "Be brief.", "api_key": "secret", "max_tokens": 9}
    summary = run(options(folder, server, out, **given, temperature=0.5))
    assert (summary.sources, summary.described, summary.failed, summary.exit_code) == (3, 3, 0, 0)
    assert (summary.prompt_tokens, summary.completion_tokens) == (15, 6)
    written = rows(out)
    assert set(written) == set(names)
    for number, name in enumerate(names):
        row = written[name]
        assert row["text"] == f"an image of 'image {number}'"
        assert (row["finish_reason"], row["attempts"], row["usage"]["total_tokens"]) == ("stop", 1, 7)
        assert row["seconds"] >= 0
    body = next(body for body in fake.requests if image_of(body) == "image 0")
    encoded = base64.b64encode(b"image 0").decode()
    assert body == {
        "model": "fake-vl",  # as the server lists it
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
                    {"type": "text", "text": 'Say "url": "" now'},
                ],
            },
        ],
        "max_tokens": 9,
        "temperature": 0.5,
    }
    assert all(headers["Authorization"] == "Bearer secret" for headers in fake.headers)


def test_a_large_file_arrives_unchanged(fake, server, folder, tmp_path):
    data = os.urandom(3 * describe_sources._PIECE + 1)
    (folder / "large.jpg").write_bytes(data)
    run(options(folder, server, tmp_path / "out.jsonl"))
    address = fake.requests[0]["messages"][0]["content"][0]["image_url"]["url"]
    assert address == "data:image/jpeg;base64," + base64.b64encode(data).decode()


def test_answers_without_a_text_are_failures(fake, server, folder, tmp_path):
    fill(folder, 5)
    answers = {
        "image 0": {"error": {"message": "broken", "type": "server_error"}},
        "image 1": {"choices": []},
        "image 2": {"choices": [{"message": {"content": None}, "finish_reason": "stop"}]},
        "image 3": "not json",
        "image 4": {"choices": [{"message": {"content": "\ud800 NaN"}}], "usage": float("nan")},
    }

    async def answer(body):
        document = answers[image_of(body)]
        return web.Response(text=document if isinstance(document, str) else json.dumps(document))

    fake.answer = answer
    out = tmp_path / "out.jsonl"
    assert run(options(folder, server, out)).failed == 4
    got = [row for _, row in sorted(rows(out).items())]
    assert got[0]["error"] == {"status": 200, "message": "broken", "type": "server_error"}
    assert "no text" in got[1]["error"]["message"]
    assert "no text" in got[2]["error"]["message"]
    assert got[3]["error"]["message"] == "not json"
    assert (got[4]["text"], got[4]["usage"]) == ("? NaN", None)


def test_concurrency_reaches_and_never_exceeds_its_limit(fake, server, folder, tmp_path, monkeypatch):
    fill(folder, 12)
    read, threads, ahead = [], set(), []
    barrier = asyncio.Barrier(4)  # fewer than four at once would block

    def data_uri(path):
        read.append(path)
        threads.add(threading.current_thread())
        return describe_sources.data_uri(path)

    async def answer(body):
        await barrier.wait()
        ahead.append(len(read) - len(ahead))  # read, not yet answered
        return described("yes")

    fake.answer = answer
    monkeypatch.setattr(describe, "data_uri", data_uri)
    assert run(options(folder, server, tmp_path / "out.jsonl", concurrency=4, timeout=60)).described == 12
    assert fake.peak == 4
    assert max(ahead) <= 4
    assert threading.main_thread() not in threads  # the main thread runs the event loop


def test_500_images(fake, server, folder, tmp_path):
    names = fill(folder, 500)
    out = tmp_path / "out.jsonl"
    assert run(options(folder, server, out, concurrency=32)).described == 500
    written = rows(out)
    assert set(written) == set(names)
    assert all(written[name]["text"] == f"an image of 'image {number}'" for number, name in enumerate(names))
    assert fake.peak <= 32


@pytest.fixture
def invoke(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return lambda *words, **kwargs: run_command("describe-images", *words, **kwargs)


def test_the_command_and_its_output(fake, server, folder, tmp_path, invoke):
    names = fill(folder, 3)
    out = tmp_path / "out.jsonl"
    words = [folder, "--prompt", "p", "--out", out, "--server", f"{server}/"]
    result = invoke(*words, "--dry-run")
    assert (result.exit_code, result.stdout.splitlines()) == (0, names)
    assert json.loads(invoke(*words, "--dry-run", "--json").stdout) == {"would_send": names}
    assert fake.requests == []
    result = invoke(*words, "--json", env={"OPENAI_API_KEY": "from the environment"})
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert (summary["sources"], summary["described"], summary["out"]) == (3, 3, str(out))
    assert fake.headers[0]["Authorization"] == "Bearer from the environment"
    assert fake.requests[0]["max_tokens"] == 256
    assert "temperature" not in fake.requests[0]
    fake.answer = in_turn(lambda: refused(400, "the image [is] broken"))
    result = invoke(*words, "--overwrite")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "3 sources: 0 described, 3 failed" in result.stderr
    assert "3 x 400, such as: the image [is] broken" in result.stderr


def test_invalid_usage_exits_with_2(server, folder, tmp_path, invoke):
    out = tmp_path / "out.jsonl"
    right = [folder, "--prompt", "p", "-o", out, "--server", server]
    assert invoke(*right).exit_code == 2  # an empty folder
    fill(folder, 1)
    for words in ([folder], [folder, "--prompt", "p"], [folder, "-o", out], [tmp_path / "no", *right[1:]]):
        assert invoke(*words).exit_code == 2
    for flag, value in (
        *(("--prompt", " "), ("--server", "host:8000"), ("--server", "http://[::1"), ("--server", "http://host:99999")),
        *(("--concurrency", "0"), ("--rate", "-1"), ("--rate", "nan"), ("--timeout", "0"), ("--retries", "-1")),
        *(("--api-key", "a\nb"), ("--limit", "0"), ("--temperature", "-1"), ("--max-tokens", "0")),
    ):
        assert invoke(*right, flag, value).exit_code == 2, flag
    assert not out.exists()
    with bind("127.0.0.1", 0) as sock:
        result = invoke(*right[:-1], f"{url(sock)}/v1")
    assert result.exit_code == 1
    assert "does not list its models" in result.stderr
    assert not out.exists()


def test_help_has_an_example():
    result = run_command("describe-images", "--help")
    assert "Example: omni-jax describe-images" in " ".join(result.output.split())


def test_neither_the_engine_nor_the_server_is_imported():
    heavy = "{'jax', 'numpy', 'transformers', 'omni_jax.engine', 'serving.http'}"
    code = f"import sys, serving.describe.job; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("terminal", [False, True])
def test_progress(fake, server, folder, tmp_path, monkeypatch, terminal):
    monkeypatch.setattr(describe_report, "_LINE_PERIOD", 0.0)
    fill(folder, 4)
    fake.answer = in_turn(lambda: refused(400, "no"), lambda: described("yes"))
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    describe.run(options(folder, server, tmp_path / "out.jsonl", concurrency=1), console)
    text = console.file.getvalue()
    assert ("━" in text and "4/4" in text) == terminal
    assert ("describing: " in text and " of 4, " in text) == (not terminal)
    assert "4 sources: 3 described, 1 failed, 0 done before." in text
