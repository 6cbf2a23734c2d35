"""The demo with a server without a model."""

import io
import re
import sys

import pytest
from rich.console import Console

from serving import demo
from serving.http import lifecycle
from tests.serving.fake_engine import FakeEngine


@pytest.mark.parametrize("terminal", [False, True])
def test_demo(terminal):
    with lifecycle.bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "tests.serving.fake_server", str(port), "9", "free"]
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80, height=50)
    assert demo.demonstrate(command, f"http://127.0.0.1:{port}", "fake", console) == 0
    out = console.file.getvalue()
    tokenizer = FakeEngine().tokenizer
    total = 0
    for number, question in enumerate(demo.QUESTIONS, 1):
        prompt = tokenizer.render_chat([{"role": "user", "content": question}])
        answer = f"choice 0: the ďábel 今天 👋 of {sum(prompt) % 997}"
        total += len(tokenizer.encode(answer))
        assert answer in out
        assert f"[{number}] " in out
        assert question[:20] in out
    assert f"Together: {total} tokens in " in out
    assert "0 compilations after warm-up" in out
    assert re.search(r"KV cache usage at most \d+\.\d %", out)
    assert out.endswith("The server stopped with exit code 0.\n")
    assert ("\x1b" in out) == terminal
    rows = [line for line in out.splitlines() if " ms " in line]
    assert len(rows) == len(demo.QUESTIONS)
    assert all("stop" in row for row in rows)  # no row is wrapped or cut


def test_a_server_that_does_not_start():
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(SystemExit, match="exited with code 3 before it was ready"):
        demo.demonstrate(command, "http://127.0.0.1:9", "fake", Console(file=io.StringIO()))


def test_lines_are_printed_once_and_whole():
    console = Console(file=io.StringIO())
    answer, printed = demo.Answer(1, "?"), 0
    text = "One sentence. Another\n\n- [bold]a[/bold]\n2. b. And 3.5 more"
    for end in range(len(text) + 1):
        answer.text = text[:end]
        printed = demo._print_lines(answer, printed, console)
        assert printed <= end
    demo._print_lines(answer, printed, console, rest=True)
    lines = ["One sentence.", "Another", "- [bold]a[/bold]", "2. b.", "And 3.5 more"]
    assert console.file.getvalue().splitlines() == [f"[1] {line}" for line in lines]
