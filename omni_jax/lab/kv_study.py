"""`omni-jax kv-study`: cost in likelihood, and savings in memory, of compressing or quantising the KV cache.

The engine runs the same windows of a text under each plan. A window is a prompt, followed by decode steps that take the
next token from the text instead of sampling it (teacher forcing), so that plans differ only in their cache. Only decode
steps are measured: the logprob of each step's next token, and the rows and blocks that the sequence holds in the step.
The first token after the prompt is not counted, because no plan has dropped rows by then.

Each window begins with the BOS, if the model's tokenizer adds one to a prompt, as if its text were a prompt of its own:
models that were trained with a BOS need it, and their attention leans on it. llama.cpp's perplexity does the same. The
BOS is the first of the prompt's tokens.
"""

import collections
import contextlib
import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omni_jax.engine.config import EngineConfig, EngineInfo
from omni_jax.engine.engine import Engine
from omni_jax.inputs.tokenizer import Tokenizer
from omni_jax.lab.machine import machine_facts
from omni_jax.requests import EngineError, Request, SamplingParams
from omni_jax.requests import Sequence as Continuation
from omni_jax.scheduling.plan import StepPlan
from omni_jax.telemetry.recorder import Recorder
from omni_jax.yaml_file import read_json

logger = logging.getLogger(__name__)

BASELINE = "off"
DEFAULT_PLANS = ("off", "adaptive", "fixed-0.2", "fixed-0.4", "fixed-0.6", "int8", "adaptive+int8")
PLANS_HELP = "off, adaptive, adaptive-CAP, fixed-RATIO, package.module:controller, each with or without +int8; int8"
MAX_RATIO = 0.95  # share of rows dropped

Text = tuple[int, str]  # (number of the document that it belongs to, text)
Done = Callable[[int, int], None]  # (windows done, number of windows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of the KV cache.

    Attributes:
        name: value of --plan.
        options: fields of EngineConfig.
    """

    name: str
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """A stretch of the text.

    Attributes:
        prompt_ids: tokens of the prompt, with the BOS if the tokenizer adds one.
        forced_ids: tokens after it: the first output token, and one for each decode step.
        document: number of the document in which it begins.
    """

    prompt_ids: tuple[int, ...]
    forced_ids: tuple[int, ...]
    document: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of a plan. Arrays are [windows, decode steps].

    Attributes:
        plan: name of the plan.
        documents: by window, the number of the document in which it begins.
        nll: negative log-likelihood, in nats, of the next token.
        rows: cache rows that the sequence holds in the step, the step's row included.
        blocks: blocks that it holds.
        block_size: rows in a block.
        block_bytes: bytes of a block, over all layers, scales included.
        seconds: duration of all windows, without the start of the engine.
        device: device that it ran on.
        dtype: dtype of weights and activations.
        machine: facts about the machine and the software.
    """

    plan: str
    documents: tuple[int, ...]
    nll: np.ndarray
    rows: np.ndarray
    blocks: np.ndarray
    block_size: int
    block_bytes: int
    seconds: float
    device: str
    dtype: str
    machine: Mapping[str, Any]


class BadText(ValueError):
    """The input is no text, or too short."""


def full_ratio(step: int, total: int) -> float:
    """Controller that always requests the maximum: with a cap, a fixed ratio."""
    del step, total
    return MAX_RATIO


def parse_plan(text: str) -> Plan:
    """Return the plan of a name.

    Raises:
        ValueError: unknown plan.
    """
    base, plus, dtype = text.partition("+")
    options: dict[str, Any] = {}
    if text == "int8" or (plus and dtype == "int8" and base != "int8"):
        options["kv_cache_dtype"] = "int8"
        base = "off" if text == "int8" else base
    elif plus:
        raise _unknown(text)
    kind, dash, ratio = base.partition("-")
    if ":" in base:
        options |= {"enable_adaptive_compression": True, "kv_compress_controller": base}
    elif base == "adaptive":
        options["enable_adaptive_compression"] = True
    elif dash and kind in ("adaptive", "fixed"):
        options |= {"enable_adaptive_compression": True, "kv_compress_ratio": _ratio(text, ratio)}
        if kind == "fixed":
            options["kv_compress_controller"] = f"{__name__}:{full_ratio.__name__}"
    elif base != BASELINE:
        raise _unknown(text)
    return Plan(name=text, options=options)


def _ratio(plan: str, text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        raise _unknown(plan) from None
    if not 0 < ratio <= MAX_RATIO:
        raise ValueError(f"the ratio of {plan!r}, a share of the rows, must be above 0 and at most {MAX_RATIO}")
    return ratio


def _unknown(text: str) -> ValueError:
    return ValueError(f"unknown plan {text!r}; expected {PLANS_HELP}")


# -- text -------------------------------------------------------------------------------------------------------------


def read_texts(path: Path) -> Iterator[Text]:
    """Yield the "text" of each line of a JSONL file, a document each; or the paragraphs of another text file, which is
    one document.

    Raises:
        OSError: the file cannot be read.
        BadText: a line is not JSON with a "text", or the file is not UTF-8.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            if path.suffix.lower() not in (".jsonl", ".ndjson", ".json"):
                yield from ((1, paragraph.strip()) for paragraph in lines.read().split("\n\n") if paragraph.strip())
                return
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _text_of(line, f"{path}, line {number}")
    except UnicodeDecodeError as error:
        raise BadText(f"{path} is not UTF-8: {error}") from None


def _text_of(line: str, where: str) -> str:
    try:
        row = read_json(line)
    except ValueError as error:
        raise BadText(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise BadText(f'{where}: expected an object with a string "text", got {line.strip()[:60]}')
    return row["text"]


def cut_windows(
    texts: Iterator[Text], tokenizer: Tokenizer, *, windows: int, prompt_tokens: int, steps: int
) -> tuple[Window, ...]:
    """Cut `windows` windows from the texts, which are joined with empty lines.

    Args:
        prompt_tokens: length of a prompt, with the BOS if the tokenizer adds one.

    Raises:
        BadText: the texts are too short; the numbers are in the message.
    """
    bos = _bos(tokenizer)
    length = prompt_tokens + steps + 1 - len(bos)  # tokens of text in a window
    ids: list[int] = []
    documents: list[int] = []  # by token
    while len(ids) < windows * length and (text := next(texts, None)) is not None:
        ids += tokenizer.encode(text[1] + "\n\n", add_special_tokens=False)
        documents += [text[0]] * (len(ids) - len(documents))
    if len(ids) < windows * length:
        raise BadText(
            f"the text has {len(ids):,} tokens, but {windows} windows of {length} need {windows * length:,}: give more "
            f"text, or set --windows to at most {len(ids) // length}"
        )
    return tuple(
        Window(
            prompt_ids=(*bos, *ids[start : start + prompt_tokens - len(bos)]),
            forced_ids=tuple(ids[start + prompt_tokens - len(bos) : start + length]),
            document=documents[start],
        )
        for start in range(0, windows * length, length)
    )


def _bos(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that the tokenizer puts before a prompt: the BOS, or none."""
    alone, prompt = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    starts = (start for start in range(len(prompt)) if prompt[start : start + len(alone)] == alone)
    return tuple(prompt[: next(starts, 0)])


# -- measuring --------------------------------------------------------------------------------------------------------


class _HoldingsRecorder(Recorder):
    """Records the rows and blocks that each sequence holds in each decode step."""

    def __init__(self, windows: int, steps: int):
        super().__init__()
        self.rows = np.full((windows, steps), -1)
        self.blocks = np.full((windows, steps), -1)

    def planned(self, plan: StepPlan, sequences: tuple[Continuation, ...], now: float) -> None:
        super().planned(plan, sequences, now)
        for row, sequence in zip(plan.rows, sequences, strict=True):
            step = row.start - sequence.num_prompt
            if row.count == 1 and 0 <= step < self.rows.shape[1]:
                window = int(row.request_id)
                self.rows[window, step] = row.stop - row.dropped
                self.blocks[window, step] = len(sequence.blocks)


def measure(engine: Engine, plan: Plan, windows: Sequence[Window], *, done: Done = lambda *_: None) -> Measured:
    """Run the windows of a plan, at most as many at once as fit the cache, so that none is preempted.

    Raises:
        ValueError: a window does not fit the engine.
        EngineError: a window failed, or lacks logprobs or decode steps. Nothing of the plan counts then.
    """
    steps = len(windows[0].forced_ids) - 1
    recorder = engine.recorder = _HoldingsRecorder(len(windows), steps)
    params = SamplingParams(
        temperature=0.0, max_tokens=steps + 1, ignore_eos=True, logprobs=0, skip_special_tokens=False
    )
    waiting = collections.deque(
        Request(
            id=f"{number}",
            prompt_ids=window.prompt_ids,
            forced_ids=window.forced_ids,
            params=params,
        )
        for number, window in enumerate(windows)
    )
    for request in waiting:
        engine.check(request)
    max_running = _max_running(engine.info, len(windows[0].prompt_ids) + steps + 1)
    found: dict[str, list[float]] = {request.id: [] for request in waiting}
    running = 0
    begin = time.perf_counter()
    while waiting or running:
        while waiting and running < max_running:
            engine.add(dataclasses.replace(waiting.popleft(), arrival=time.monotonic()))
            running += 1
        for delta in engine.step():
            found[delta.request_id] += [entry.logprob for entry in delta.logprobs]
            if delta.finish_reason not in (None, "length"):
                reason = delta.error or f"it ended with {delta.finish_reason!r}"
                raise EngineError(f"window {delta.request_id} of plan {plan.name}: {reason}")
            if delta.finish_reason is not None:
                running -= 1
                done(len(windows) - len(waiting) - running, len(windows))
    seconds = time.perf_counter() - begin
    short = [name for name, logprobs in found.items() if len(logprobs) != steps + 1]
    if short or (recorder.rows < 0).any():
        raise EngineError(
            f"plan {plan.name}: {len(short)} windows lack some of their {steps + 1} logprobs, and "
            f"{int((recorder.rows < 0).sum())} of {recorder.rows.size} decode steps were not recorded"
        )
    return Measured(
        plan=plan.name,
        documents=tuple(window.document for window in windows),
        nll=-np.array([found[f"{number}"][1:] for number in range(len(windows))]),
        rows=recorder.rows,
        blocks=recorder.blocks,
        block_size=engine.info.block_size,
        block_bytes=engine.info.kv_cache_bytes // engine.info.num_blocks,
        seconds=seconds,
        device=engine.info.device,
        dtype=engine.info.dtype,
        machine=machine_facts(),
    )


def _max_running(info: EngineInfo, length: int) -> int:
    """Return the number of windows that run at once."""
    blocks_each = -(-length // info.block_size) + 1  # a sequence takes its next block a little early
    return max(1, min(info.max_num_seqs, (info.num_blocks - 1) // blocks_each))


def study(
    plans: Sequence[Plan],
    windows: Sequence[Window],
    options: Mapping[str, Any],
    *,
    make: Callable[[EngineConfig], Engine],
    kept: Mapping[str, Measured] = {},
    measured: Callable[[list[Measured]], None],
    done: Callable[[str, int, int], None] = lambda *_: None,
) -> list[Measured]:
    """Run each plan on its own engine.

    Args:
        options: fields of EngineConfig that all plans share.
        make: starts an engine.
        kept: results of an earlier run, by plan, which does not run again.
        measured: called after each plan that ran with all results so far.
        done: called with (plan, windows done, number of windows).

    Raises:
        ValueError: the engine refuses the settings, or the model cannot run a plan; the message names the plan.
    """
    configs = []
    for plan in plans:  # before the first one runs
        with _naming(plan):
            configs.append(EngineConfig(**options, **plan.options))
    results: list[Measured] = []
    for plan, config in zip(plans, configs, strict=True):
        if plan.name in kept:
            results.append(kept[plan.name])
            continue
        with _naming(plan):
            engine = make(config)
        results.append(measure(engine, plan, windows, done=lambda some, of, plan=plan: done(plan.name, some, of)))
        logger.info("plan %s took %.1f s", plan.name, results[-1].seconds)
        engine.close()
        del engine
        gc.collect()  # the next one needs its memory
        measured(results)
    return results


@contextlib.contextmanager
def _naming(plan: Plan) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"plan {plan.name}: {error}") from error
