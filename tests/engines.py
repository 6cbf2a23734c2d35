"""Engines of tiny checkpoints. Compiling is slow, so programs are compiled once and shared.

`load_tiny(name)` compiles one of SETUPS. Within `sharing(loaded, ...)`, Engine, AsyncEngine and LLM use these programs,
with new device state and with limits that need no other programs: fewer blocks, a smaller budget, a shorter context.
Use one engine of the same `loaded` at a time.
"""

import atexit
import contextlib
import dataclasses
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from omni_jax.engine import core as engine_module
from omni_jax.engine import loading
from omni_jax.engine.config import EngineConfig
from omni_jax.engine.engine import Engine
from omni_jax.engine.loading import Loaded
from omni_jax.memory.accounting import check_leaks
from omni_jax.requests import Delta, Request, SamplingParams, TokenLogprob
from omni_jax.runtime import runner
from omni_jax.scheduling.buckets import Buckets
from tests import tiny, tiny_vl
from tests.compilation_cache import CACHE, one_process_at_a_time

BLOCK_SIZE = 16
BLOCK_BYTES = 2 * 2 * BLOCK_SIZE * 2 * 16 * 4  # keys and values, layers, tokens, KV heads, head_dim, float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A tiny checkpoint and the programs to compile; `patches` are buckets of the vision tower."""

    variant: str = "llama"
    decode: tuple[int, ...] = (2,)
    mixed: tuple[int, ...] = (32,)
    heads: tuple[str, ...] = ("greedy",)
    dtype: str = "float32"
    patches: tuple[int, ...] = ()

    def config(
        self, model_dir: Path, *, kv_cache_memory_bytes: int = 500 * BLOCK_BYTES, **options: Any
    ) -> EngineConfig:
        return EngineConfig(
            model_dir=model_dir,
            max_num_seqs=self.decode[-1],
            max_num_batched_tokens=self.mixed[-1],
            block_size=BLOCK_SIZE,
            dtype=self.dtype,
            compilation_cache_dir=CACHE,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            max_pixels=tiny_vl.MAX_PIXELS,
            **options,
        )


SETUPS = {
    "main": Setup(decode=(1, 8), mixed=(16, 64), heads=("greedy", "sample", "full")),
    "bfloat16": Setup(decode=(2, 8), mixed=(16, 64), dtype="bfloat16"),
    "float16": Setup(decode=(2, 8), mixed=(16, 64), dtype="half"),
    "qwen2_vl": Setup(variant="qwen2_vl", decode=(1, 8), mixed=(16, 64), patches=(128, 512)),
    "qwen2_5_vl": Setup(variant="qwen2_5_vl", decode=(8,), mixed=(64,), patches=(512,)),
} | {variant: Setup(variant=variant) for variant in tiny.VARIANTS if variant != "llama"}


@functools.cache
def checkpoint(variant: str) -> Path:
    directory = tempfile.mkdtemp(prefix="omni-jax-tests-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    if variant in tiny_vl.FAMILIES:
        return tiny_vl.write_tiny_vl(directory, variant)
    if variant == "eight_heads":  # with two KV heads, for meshes
        return tiny.write_tiny(directory, "qwen2_untied", num_attention_heads=8, head_dim=16)
    return tiny.write_tiny(directory, variant)


@functools.cache
def load_tiny(name: str) -> Loaded:
    """Compile one of SETUPS."""
    return compile_tiny(SETUPS[name])


def compile_tiny(setup: Setup, **options) -> Loaded:
    """Load a setup, with its few buckets instead of the default ones."""
    buckets = Buckets(decode=setup.decode, mixed=setup.mixed)
    with (
        one_process_at_a_time((setup, options)),
        mock.patch.object(loading, "default_buckets", return_value=buckets),
        mock.patch.object(loading, "patch_buckets", return_value=setup.patches),
        mock.patch.object(runner, "VARIANTS", setup.heads),
    ):
        return loading.load(setup.config(checkpoint(setup.variant), **options))


@contextlib.contextmanager
def sharing(loaded: Loaded, **limits) -> Iterator[Path]:
    """A context in which engines use `loaded`, with fields of EngineInfo replaced by `limits`. Yields the directory."""
    loaded.runner.reset()
    changed = dataclasses.replace(loaded, info=dataclasses.replace(loaded.info, **limits))
    with mock.patch.object(engine_module, "load", return_value=changed):
        yield Path(loaded.info.model_dir)


def make_engine(
    loaded: Loaded, *, seed: int | None = None, options: Mapping[str, Any] | None = None, **limits
) -> Engine:
    """Make an engine. `options` are fields of EngineConfig that need no other programs: policies, objectives."""
    with sharing(loaded, **limits) as model_dir:
        return Engine(EngineConfig(model_dir=model_dir, seed=seed, **(options or {})))


# -- requests and answers ---------------------------------------------------------------------------------------------


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 64, "ignore_eos": True} | fields)


def request(name: str, prompt: int | Iterable[int], params: SamplingParams | None = None) -> Request:
    """A request with `prompt` tokens of tiny.prompt, or with the given ids."""
    ids = tiny.prompt(prompt) if isinstance(prompt, int) else prompt
    return Request(id=name, prompt_ids=tuple(ids), params=params or greedy())


@dataclasses.dataclass(kw_only=True)
class Answer:
    """All deltas of one continuation combined."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None

    def take(self, delta: Delta) -> None:
        assert self.finish_reason is None, f"a delta after the last one: {delta}"
        self.tokens += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt logprobs were returned twice"
            self.prompt_logprobs = delta.prompt_logprobs
        self.finish_reason, self.stop_reason, self.error = delta.finish_reason, delta.stop_reason, delta.error


Answers = dict[tuple[str, int], Answer]


def run(engine: Engine, *requests: Request, each_step: Callable[[], Iterable[Delta] | None] = lambda: None) -> Answers:
    """Run the engine until it has no work, and return answers by (request id, index). `each_step` is called after each
    step and may return more deltas."""
    for item in requests:
        engine.add(item)
    answers: Answers = {}
    steps = 0
    while engine.has_work:
        for delta in [*engine.step(), *(each_step() or ())]:
            answers.setdefault((delta.request_id, delta.index), Answer()).take(delta)
        steps += 1
        assert steps < 10_000, "the engine does not finish"
    assert_idle(engine)
    return answers


def alone(loaded: Loaded, item: Request, **limits) -> Answer:
    """The first continuation of a request that runs alone in an engine."""
    return run(make_engine(loaded, **limits), item)[item.id, 0]


def assert_idle(engine: Engine) -> None:
    """OP-04: an idle engine holds nothing."""
    stats = engine.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert stats.encoder_cache_usage == 0.0
    assert stats.blocks_swapped == 0
    check_leaks(engine.core.pool, [])
