"""`omni-jax kv-study`."""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter
from cyclopts.types import ExistingFile, PositiveInt

from omni_jax.engine.config import EngineConfig
from serving.cli.options import AsJson, LogLevel, Switch, select
from serving.cli.support import engine_config, expected_errors, fail, interrupted, log_to_stderr, usage_error

EXAMPLE = "omni-jax kv-study ~/models/SmolLM2-135M-Instruct -i text.jsonl -o results/ --plan adaptive fixed-0.4 int8"

_Engine = select(
    EngineConfig,
    *("max_num_seqs", "block_size", "dtype", "attention_backend", "kv_cache_memory_bytes", "gpu_memory_utilization"),
    "compilation_cache_dir",
    "tokenizer",
)


def kv_study(
    model: Path,
    /,
    *,
    text: Annotated[ExistingFile, Parameter(name=("--input", "-i"))],
    out: Annotated[Path, Parameter(name=("--out", "-o"))],
    plan: Sequence[str] = (),
    windows: PositiveInt = 50,
    prompt_tokens: PositiveInt = 512,
    decode_steps: PositiveInt = 256,
    overwrite: Annotated[bool, Switch] = False,
    as_json: AsJson = False,
    log_level: LogLevel = "warning",
    engine: Annotated[_Engine | None, Parameter(name="*", group=Group("Engine", sort_key=0))] = None,  # type: ignore
) -> int:
    """Measure what compressing or quantising the KV cache costs in likelihood, and saves in memory.

    The same windows of a text go through the engine under each plan. OUT/report.md has the table and the plot. The same
    command continues an interrupted run: finished plans are kept.

    Args:
        model: Model directory in Hugging Face layout.
        text: Text file, or a .jsonl file with the key "text" in each line. Intervals are over lines, or with one text
            over its windows.
        out: Directory of the results.
        plan: Plans to compare with off: adaptive, adaptive-CAP, fixed-RATIO, package.module:controller, int8, or one of
            the others with +int8 behind it. Default: adaptive, three fixed ratios, int8, adaptive+int8.
        windows: Number of windows cut from the text. The report warns below 20.
        prompt_tokens: Number of tokens of a window that are its prompt, with the BOS if the tokenizer adds one.
        decode_steps: Number of tokens of a window that are measured.
        overwrite: Replace results that were made with other settings. Without it, such results are an error.
        as_json: Print one JSON object instead of text.
        log_level: Least severe messages that are logged.
    """
    log_to_stderr(log_level)
    if windows < 2:
        usage_error(f"--windows must be at least 2, got {windows}")
    if (out / "study.json").exists() and not (out / "plans").exists() and not overwrite:
        usage_error(f"{out} has a study of an older version: choose another directory for --out, or give --overwrite")
    config = engine_config(model.expanduser(), engine, max_model_len=prompt_tokens + decode_steps + 1)
    from omni_jax.engine.engine import Engine
    from omni_jax.inputs.tokenizer import Tokenizer
    from omni_jax.lab.kv_study import BASELINE, DEFAULT_PLANS, Measured, cut_windows, parse_plan, read_texts, study
    from omni_jax.lab.kv_study_files import kept_plans, plan_settings, write_plan
    from omni_jax.lab.kv_study_report import sentence, summarise, write_results
    from omni_jax.lab.resume import OtherSettings
    from omni_jax.progress import stage_bars

    names = list(dict.fromkeys([BASELINE, *(plan or DEFAULT_PLANS)]))
    try:
        plans = [parse_plan(name) for name in names]
    except ValueError as error:
        usage_error(f"--plan: {error}")
    facts = {
        "model": model.resolve().name,
        "text": text.name,
        "prompt_tokens": prompt_tokens,
        "decode_steps": decode_steps,
        "plans": names,
    }

    options: dict[str, Any] = {} if engine is None else engine.values()
    options = {name: value for name, value in options.items() if value is not None}
    options |= {"model_dir": config.model_dir, "max_model_len": config.max_model_len}
    try:
        tokenizer = Tokenizer.from_directory(config.tokenizer_dir)
        cut = cut_windows(read_texts(text), tokenizer, windows=windows, prompt_tokens=prompt_tokens, steps=decode_steps)
        shared = options | {"model_dir": str(model.expanduser().resolve())}
        settings = {plan.name: plan_settings(plan, cut, shared) for plan in plans}
        kept = kept_plans(out, settings, overwrite=overwrite)
        out.mkdir(parents=True, exist_ok=True)

        def measured(results: list[Measured]) -> None:
            write_plan(out, results[-1], settings[results[-1].plan])
            write_results(out, results, facts)
            print(sentence(summarise(results)[-1]), file=sys.stderr)

        with stage_bars() as progress:
            results = study(
                plans,
                cut,
                options,
                make=lambda config: Engine(config, progress),
                kept=kept,
                measured=measured,
                done=lambda name, done, of: progress(name, done, of, "windows"),
            )
        report = write_results(out, results, facts)
    except OtherSettings as error:
        usage_error(str(error))
    except expected_errors() as error:
        logging.getLogger(__name__).debug("kv-study failed", exc_info=True)
        fail(str(error))
    except KeyboardInterrupt:
        return interrupted("plans", out / "plans")
    lines = summarise(results)
    summary = {"report": str(report), "plans": {line.plan: line.saved for line in lines}}
    print(json.dumps(summary) if as_json else f"wrote {report}")
    return 0
