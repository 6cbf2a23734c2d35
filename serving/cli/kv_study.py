"""The command `omni-jax kv-study`."""

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from serving.cli.options import (
    AsJson,
    AttentionBackendType,
    BlockSize,
    CompilationCacheDir,
    Dtype,
    GpuMemoryUtilization,
    KvCacheMemoryBytes,
    LogLevel,
    ModelDir,
)
from serving.cli.support import engine_config, expected_faults, fail, find_own_code, log_to_stderr

PLANS = "off, adaptive, adaptive-CAP, fixed-RATIO or package.module:controller, each also with +int8 behind it; int8"


def add_kv_study(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command(
        name="kv-study",
        epilog="Example: omni-jax kv-study ~/models/SmolLM2-135M-Instruct -i text.jsonl -o results/ "
        "--plan adaptive --plan fixed-0.4 --plan int8",
    )(kv_study)


def kv_study(
    model_dir: ModelDir,
    text: Annotated[
        Path,
        typer.Option(
            "--input",
            "-i",
            metavar="TEXT",
            exists=True,
            dir_okay=False,
            help='A .jsonl with a "text" in each line, or a text file.',
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Of the results; made if it is not there.")],
    plan: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLAN",
            help=f"Run this one beside off; repeat it for more: {PLANS}. Default: adaptive, three fixed ratios, int8, "
            "adaptive+int8.",
        ),
    ] = None,
    windows: Annotated[int, typer.Option(min=2, help="Stretches of the text; intervals need 50 or more.")] = 50,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a window that are its prompt.")] = 512,
    decode_steps: Annotated[int, typer.Option(min=1, help="Steps of a window that are measured.")] = 256,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Windows at once, at most.")] = None,
    block_size: BlockSize = None,
    dtype: Dtype = None,
    attention_backend: AttentionBackendType = None,
    kv_cache_memory_bytes: KvCacheMemoryBytes = None,
    gpu_memory_utilization: GpuMemoryUtilization = None,
    compilation_cache_dir: CompilationCacheDir = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the study that DIR has.")] = False,
    as_json: AsJson = False,
    log_level: LogLevel = "warning",
) -> None:
    """Measure what compressing or quantising the KV cache costs in likelihood, and saves in memory.

    The same windows of your text go through the engine under each plan. DIR/report.md has the table and the plot.
    """
    log_to_stderr(log_level)
    if (out / "study.json").exists() and not overwrite:
        raise typer.BadParameter(f"{out} has a study; choose another directory, or --overwrite", param_hint="--out")
    from omni_jax.engine.engine import Engine
    from omni_jax.inputs import Tokenizer
    from omni_jax.lab.kv_study import BASELINE, DEFAULT_PLANS, Measured, cut_windows, parse_plan, read_texts, study
    from omni_jax.lab.kv_study_report import sentence, summarise, write_results
    from omni_jax.progress import stage_bars

    names = list(dict.fromkeys([BASELINE, *(plan or DEFAULT_PLANS)]))
    try:
        plans = [parse_plan(name) for name in names]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--plan") from None
    for name in names:
        find_own_code(name)
    facts = {
        "model": model_dir.resolve().name,
        "text": text.name,
        "prompt_tokens": prompt_tokens,
        "decode_steps": decode_steps,
        "plans": names,
    }

    def measured(results: list[Measured]) -> None:
        write_results(out, results, facts)
        typer.echo(sentence(summarise(results)[-1]), err=True)

    try:
        options = {
            "model_dir": model_dir,
            "max_model_len": prompt_tokens + decode_steps + 1,
            "max_num_seqs": max_num_seqs,
            "block_size": block_size,
            "dtype": dtype,
            "attention_backend": attention_backend,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "gpu_memory_utilization": gpu_memory_utilization,
            "compilation_cache_dir": compilation_cache_dir,
        }
        engine_config(**options)  # what is wrong with them is wrong with every plan
        tokenizer = Tokenizer.from_directory(model_dir)
        cut = cut_windows(read_texts(text), tokenizer, windows=windows, prompt_tokens=prompt_tokens, steps=decode_steps)
        out.mkdir(parents=True, exist_ok=True)
        with stage_bars() as progress:
            results = study(
                plans,
                cut,
                {name: value for name, value in options.items() if value is not None},
                make=lambda config: Engine(config, progress),
                measured=measured,
                done=lambda name, done, of: progress(name, done, of, "windows") if progress else None,
            )
    except expected_faults() as error:
        logging.getLogger(__name__).debug("kv-study failed", exc_info=True)
        fail(str(error))
    report = out / "report.md"
    lines = summarise(results)
    if as_json:
        typer.echo(json.dumps({"report": str(report), "plans": {line.plan: line.saved for line in lines}}))
    else:
        typer.echo(f"wrote {report}")
