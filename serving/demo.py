"""`make demo`: serves a small real model, sends it eight questions at once, and shows the answers and their speed."""

import asyncio
import dataclasses
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import aiohttp
import openai
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from checkpoints.demo_model import NAME, demo_model
from checkpoints.errors import CheckpointError
from omni_jax import interrupts
from omni_jax.progress import progress_bar
from serving.http import lifecycle as run

MAX_TOKENS = 120
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "Give me three tips for sleeping well.",
    "Write a short poem about the sea.",
    "How do bees make honey?",
    "What should I cook with tomatoes, eggs and bread?",
    "Who was Isaac Newton?",
    "Tell me a short story about a cat and a robot.",
)
_START_TIMEOUT = 600.0  # seconds; the first start compiles


@dataclasses.dataclass
class Answer:
    """Answer to a question so far. Times are in seconds on the monotonic clock."""

    number: int
    question: str
    sent_at: float = 0.0
    text: str = ""
    first_token: float | None = None
    ended: float = 0.0
    tokens: int = 0
    finish_reason: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed after the first token; None with fewer than two tokens."""
        if self.first_token is None or self.tokens < 2:
            return None
        return (self.tokens - 1) / max(self.ended - self.first_token, 1e-9)


@dataclasses.dataclass(kw_only=True)
class Metrics:
    """Values of /metrics: the peak share of the KV cache in use, and the number of compilations after warm-up."""

    peak_usage: float = 0.0
    compilations: int = 0


def main() -> int:
    """Return the exit code: 0 if every question was answered and the server stopped cleanly."""
    console = Console()
    stages = set()
    with progress_bar(NAME, console) as bar:

        def progress(stage: str, done: int, total: int) -> None:
            stages.add(stage)
            if stage != "cached":
                bar(stage, done, total)

        try:
            model_dir = demo_model(progress=progress)
        except CheckpointError as error:
            console.print(f"The demo model is not available: {error}", soft_wrap=True, highlight=False, markup=False)
            return 1
    where = f"Model: {model_dir}" + (" (from the cache)" if stages == {"cached"} else "")
    console.print(where, soft_wrap=True, highlight=False, markup=False)
    with run.bind("127.0.0.1", 0) as sock:  # find a free port for the server
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "serving.cli.main", "serve", str(model_dir), "--served-model-name", NAME]
    command += ["--port", str(port), "--no-access-log"]
    return demonstrate(command, f"http://127.0.0.1:{port}", NAME, console)


def demonstrate(command: Sequence[str], base: str, model: str, console: Console) -> int:
    """Start a server, send it the questions, and stop it.

    Args:
        command: starts the server, which shows its progress on standard error.
        base: URL of the server.

    Returns:
        the exit code of the demo.
    """
    server = subprocess.Popen(command)
    try:
        answers = asyncio.run(_converse(server, base, model, console))
        server.send_signal(signal.SIGTERM)
        code = server.wait()
    finally:
        if server.poll() is None:
            server.terminate()
            server.wait()
    console.print(f"The server stopped with exit code {code}.", highlight=False)
    return 0 if code == 0 and all(answer.finish_reason in ("stop", "length") for answer in answers) else 1


async def _converse(server: subprocess.Popen, base: str, model: str, console: Console) -> list[Answer]:
    async with aiohttp.ClientSession() as session:
        await _until_healthy(server, session, base)
        console.print(f"\nAsking {len(QUESTIONS)} questions at once:\n", highlight=False)
        metrics = Metrics()
        polling = asyncio.create_task(_poll(session, base, metrics))
        started = time.monotonic()
        try:
            answers = await _ask_all(base, model, console)
        finally:
            polling.cancel()
        seconds = time.monotonic() - started
        await _read_metrics(session, base, metrics)
    console.print()
    console.print(_table(answers, console.width))
    total = sum(answer.tokens for answer in answers)
    console.print(
        f"Together: {total} tokens in {seconds:.1f} s, {total / seconds:.0f} tokens/s; "
        f"KV cache usage at most {100 * metrics.peak_usage:.1f} %; "
        f"{metrics.compilations} compilations after warm-up.",
        highlight=False,
        soft_wrap=True,
    )
    return answers


async def _until_healthy(server: subprocess.Popen, session: aiohttp.ClientSession, base: str) -> None:
    async with asyncio.timeout(_START_TIMEOUT):
        while True:
            if server.poll() is not None:
                raise SystemExit(f"the server exited with code {server.returncode} before it was ready")
            try:
                async with session.get(base + "/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass  # not listening yet
            await asyncio.sleep(0.1)


async def _ask_all(base: str, model: str, console: Console) -> list[Answer]:
    answers = [Answer(number, question) for number, question in enumerate(QUESTIONS, 1)]
    # Ignore proxy settings of the environment: the server is on this machine.
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url=base + "/v1", api_key="none", max_retries=0, http_client=http) as client:
        asking = [_ask(client, model, answer, None if console.is_terminal else console) for answer in answers]
        if not console.is_terminal:
            await asyncio.gather(*asking)
            return answers
        with Live(get_renderable=lambda: _growing(answers, console), console=console, transient=True):
            await asyncio.gather(*asking)
    for answer in answers:
        console.print(Text.assemble((f"[{answer.number}] {answer.question}\n", "bold"), answer.text.strip() + "\n"))
    return answers


async def _ask(client: openai.AsyncOpenAI, model: str, answer: Answer, lines_to: Console | None) -> None:
    """Fill in `answer`; if `lines_to` is set, print its lines there once they are complete."""
    printed = 0
    answer.sent_at = time.monotonic()
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": answer.question}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        if chunk.usage is not None:
            answer.tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.delta.content:
                answer.first_token = answer.first_token or time.monotonic()
                answer.text += choice.delta.content
            answer.finish_reason = choice.finish_reason or answer.finish_reason
        if lines_to is not None:
            printed = _print_lines(answer, printed, lines_to)
    answer.ended = time.monotonic()
    if lines_to is not None:
        _print_lines(answer, printed, lines_to, rest=True)


def _print_lines(answer: Answer, printed: int, console: Console, *, rest: bool = False) -> int:
    """Print the lines or sentences completed after `printed` characters. Returns the new count."""
    text = answer.text
    end = len(text) if rest else max((match.end() for match in re.finditer(r"\n+|(?<=[^\W\d])[.!?] ", text)), default=0)
    for line in text[printed:end].splitlines():
        if line.strip():
            console.print(Text(f"[{answer.number}] {line.strip()}"), soft_wrap=True)
    return max(end, printed)


def _growing(answers: Sequence[Answer], console: Console) -> Table:
    """Return the last lines of all answers, as many as fit the screen."""
    room = max(1, (console.height - 2) // len(answers) - 1)
    width = max(20, console.width - 8)
    table = Table.grid(padding=(0, 1))
    for answer in answers:
        lines = Text(answer.text.strip().replace("\n", " ")).wrap(console, width)[-room:]
        table.add_row(f"[{answer.number}]", Text.assemble((answer.question, "bold"), "\n", Text("\n").join(lines)))
    return table


def _table(answers: Sequence[Answer], width: int) -> Table:
    table = Table()
    table.add_column("#")
    table.add_column("question", no_wrap=True, width=min(60, max(10, width - 58)))
    for name in ("first token", "tokens", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("end", no_wrap=True)
    for answer in answers:
        waited = "-" if answer.first_token is None else f"{1000 * (answer.first_token - answer.sent_at):.0f} ms"
        speed = "-" if answer.tokens_per_second is None else f"{answer.tokens_per_second:.1f}"
        table.add_row(
            *(str(answer.number), answer.question, waited, str(answer.tokens)),
            *(speed, answer.finish_reason or "cut off"),
        )
    return table


async def _poll(session: aiohttp.ClientSession, base: str, metrics: Metrics) -> None:
    while True:
        await _read_metrics(session, base, metrics)
        await asyncio.sleep(0.1)


async def _read_metrics(session: aiohttp.ClientSession, base: str, metrics: Metrics) -> None:
    async with session.get(base + "/metrics") as response:
        text = await response.text()
    samples = dict(re.findall(r"^([a-z_:]+)\{[^}]*\} (\S+)$", text, re.MULTILINE))
    metrics.peak_usage = max(metrics.peak_usage, float(samples["vllm:kv_cache_usage_perc"]))
    metrics.compilations = int(float(samples["omni_jax:compiles_after_warmup_total"]))


if __name__ == "__main__":
    interrupts.run(main)
