"""`make demo`: serve a small real model, ask it eight questions at once, show what came back and how fast."""

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
    """What has come of one question so far. Times in seconds on the monotonic clock."""

    number: int
    question: str
    asked: float = 0.0
    text: str = ""
    first_token: float | None = None
    ended: float = 0.0
    tokens: int = 0
    finish_reason: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        """After the first token; None when there were fewer than two."""
        if self.first_token is None or self.tokens < 2:
            return None
        return (self.tokens - 1) / max(self.ended - self.first_token, 1e-9)


@dataclasses.dataclass(kw_only=True)
class Readings:
    """What /metrics said: the largest share of the KV pool in use, and compilations after warm-up."""

    peak_pool: float = 0.0
    compilations: int = 0


def main() -> int:
    """Returns the exit code: 0 when every question was answered and the server stopped cleanly."""
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
            console.print(f"The demo model cannot be had: {error}", soft_wrap=True, highlight=False, markup=False)
            return 1
    where = f"Model: {model_dir}" + (" (from the cache)" if stages == {"cached"} else "")
    console.print(where, soft_wrap=True, highlight=False, markup=False)
    with run.bind("127.0.0.1", 0) as sock:  # a free port, given up again for the server to take
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "serving.cli.main", "serve", str(model_dir), "--served-model-name", NAME]
    command += ["--port", str(port), "--no-access-log"]
    return demonstrate(command, f"http://127.0.0.1:{port}", NAME, console)


def demonstrate(command: Sequence[str], base: str, model: str, console: Console) -> int:
    """Starts a server, talks to it, stops it.

    Args:
        command: starts the server; it shows its own progress on standard error.
        base: where it will answer.
    """
    server = subprocess.Popen(command)
    try:
        answers = asyncio.run(_talk(server, base, model, console))
        server.send_signal(signal.SIGTERM)
        code = server.wait()
    finally:
        if server.poll() is None:
            server.terminate()
            server.wait()
    console.print(f"The server stopped with exit code {code}.", highlight=False)
    return 0 if code == 0 and all(answer.finish_reason in ("stop", "length") for answer in answers) else 1


async def _talk(server: subprocess.Popen, base: str, model: str, console: Console) -> list[Answer]:
    async with aiohttp.ClientSession() as session:
        await _until_healthy(server, session, base)
        console.print(f"\nAsking {len(QUESTIONS)} questions at once:\n", highlight=False)
        readings = Readings()
        polling = asyncio.create_task(_poll(session, base, readings))
        started = time.monotonic()
        try:
            answers = await _ask_all(base, model, console)
        finally:
            polling.cancel()
        seconds = time.monotonic() - started
        await _read_metrics(session, base, readings)
    console.print()
    console.print(_table(answers, console.width))
    total = sum(answer.tokens for answer in answers)
    console.print(
        f"Together: {total} tokens in {seconds:.1f} s, {total / seconds:.0f} tokens/s; "
        f"KV pool at most {100 * readings.peak_pool:.1f} % in use; "
        f"{readings.compilations} compilations after warm-up.",
        highlight=False,
        soft_wrap=True,
    )
    return answers


async def _until_healthy(server: subprocess.Popen, session: aiohttp.ClientSession, base: str) -> None:
    async with asyncio.timeout(_START_TIMEOUT):
        while True:
            if server.poll() is not None:
                raise SystemExit(f"the server ended with exit code {server.returncode} before it was ready")
            try:
                async with session.get(base + "/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass  # not listening yet
            await asyncio.sleep(0.1)


async def _ask_all(base: str, model: str, console: Console) -> list[Answer]:
    answers = [Answer(number, question) for number, question in enumerate(QUESTIONS, 1)]
    # Proxies of the environment are for the world outside, not for our own machine.
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
    """Fills in `answer`; without a terminal its lines are printed as they become whole."""
    printed = 0
    answer.asked = time.monotonic()
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
    """Prints lines, or sentences, that are whole since `printed` characters; returns the new count."""
    text = answer.text
    end = len(text) if rest else max((match.end() for match in re.finditer(r"\n+|(?<=[^\W\d])[.!?] ", text)), default=0)
    for line in text[printed:end].splitlines():
        if line.strip():
            console.print(Text(f"[{answer.number}] {line.strip()}"), soft_wrap=True)
    return max(end, printed)


def _growing(answers: Sequence[Answer], console: Console) -> Table:
    """The ends of all answers, as many lines of each as the screen has room for."""
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
        waited = "-" if answer.first_token is None else f"{1000 * (answer.first_token - answer.asked):.0f} ms"
        speed = "-" if answer.tokens_per_second is None else f"{answer.tokens_per_second:.1f}"
        table.add_row(
            *(str(answer.number), answer.question, waited, str(answer.tokens)),
            *(speed, answer.finish_reason or "cut off"),
        )
    return table


async def _poll(session: aiohttp.ClientSession, base: str, readings: Readings) -> None:
    while True:
        await _read_metrics(session, base, readings)
        await asyncio.sleep(0.1)


async def _read_metrics(session: aiohttp.ClientSession, base: str, readings: Readings) -> None:
    async with session.get(base + "/metrics") as response:
        text = await response.text()
    samples = dict(re.findall(r"^([a-z_:]+)\{[^}]*\} (\S+)$", text, re.MULTILINE))
    readings.peak_pool = max(readings.peak_pool, float(samples["vllm:kv_cache_usage_perc"]))
    readings.compilations = int(float(samples["omni_jax:compiles_after_warmup_total"]))


if __name__ == "__main__":
    sys.exit(main())
