"""The engine with random weights of Qwen2-0.5B's shape: start-up, latency, throughput, and host gaps between steps."""

import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from benchmarks.gpu_check.section import Section
from benchmarks.gpu_check.steps import TINY
from benchmarks.models import QWEN2, byte_tokenizer, qwen2_weights
from omni_jax.engine.config import EngineConfig
from omni_jax.engine.engine import Engine
from omni_jax.requests import Request, SamplingParams

ALONE = 3  # number of requests that run one after another


def engine(section: Section) -> None:
    """Add a row for each workload, and facts about the start-up and kernels."""
    prompt, output, together, seqs = (24, 8, 4, 2) if section.dry_run else (512, 128, 192, 64)
    directory = _model(section.scratch / "model", TINY if section.dry_run else QWEN2)
    begin = time.perf_counter()
    engine = Engine(
        EngineConfig(
            model_dir=directory,
            dtype="bfloat16",
            max_num_seqs=seqs,
            max_num_batched_tokens=16 if section.dry_run else 2048,
            max_model_len=64 if section.dry_run else 4096,
            kv_cache_memory_bytes=1 << 20 if section.dry_run else None,
            compilation_cache_dir=section.programs,
            enable_prefix_caching=False,
            seed=0,
        ),
        lambda stage, done, total, detail: section.state(starting=f"{stage} {done} of {total}: {detail}"),
    )
    info = engine.info
    section.state(
        starting=None,
        start_s=round(time.perf_counter() - begin, 1),
        executables=len(info.executables),
        compile_s=round(info.compile_seconds, 1),
        kv_tokens=info.num_blocks * info.block_size,
        attention=dict(info.attention),
        attention_fallbacks=list(info.attention_fallbacks),
    )
    try:
        _run(engine, "warm-up", [_request("warm-up", prompt, 4)])
        alone = [_run(engine, f"alone {i}", [_request(f"alone {i}", prompt, output)]) for i in range(ALONE)]
        section.add(**_medians("one request at a time", alone))
        if section.has_time(10, for_="throughput"):
            section.add(
                **_run(
                    engine,
                    f"{together} requests at once, {seqs} in a step",
                    [_request(f"{i}", prompt, output) for i in range(together)],
                )
            )
    finally:
        engine.close()


def _run(engine: Engine, name: str, requests: Iterable[Request]) -> dict[str, Any]:
    """Run requests that arrive together, and return their figures."""
    requests = list(requests)
    before = engine.stats()
    begin = time.perf_counter()
    for request in requests:
        engine.add(request)
    first: dict[str, float] = {}
    tokens, prompt_tokens = 0, sum(len(request.prompt_ids) for request in requests)
    while engine.has_work:
        for delta in engine.step():
            if delta.finish_reason == "error":
                raise RuntimeError(f"{name}: request {delta.request_id} failed: {delta.error}")
            first.setdefault(delta.request_id, time.perf_counter() - begin)
            tokens += len(delta.token_ids)
    seconds = time.perf_counter() - begin
    after = engine.stats()
    run = min(after.steps - before.steps, len(after.step_seconds), len(after.host_gap_seconds))
    gaps, busy = sum(after.host_gap_seconds[-run:]), sum(after.step_seconds[-run:])
    return {
        "workload": name,
        "seconds": seconds,
        "output_tokens_per_s": tokens / seconds,
        "all_tokens_per_s": (tokens + prompt_tokens) / seconds,
        "first_token_ms": 1e3 * statistics.median(first.values()),
        "step_ms": 1e3 * busy / run,
        "host_gap": gaps / (gaps + busy),
        "compiles_after_warmup": after.compiles_after_warmup,
    }


def _medians(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"workload": name} | {
        key: statistics.median(run[key] for run in runs) for key in runs[0] if key != "workload"
    }


def _request(name: str, prompt: int, output: int) -> Request:
    ids = tuple(1 + (len(name) + 7 * i) % 250 for i in range(prompt))
    return Request(id=name, prompt_ids=ids, params=SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True))


def _model(directory: Path, config: dict) -> Path:
    """Write a Hugging Face directory of random weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    byte_tokenizer("<|endoftext|>").save(str(directory / "tokenizer.json"))
    save_file(qwen2_weights(config), directory / "model.safetensors", metadata={"format": "pt"})
    return directory
