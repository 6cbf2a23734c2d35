"""The command line: serve, generate, describe-images, ... A command imports what it needs when it runs."""

import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from serving.cli.convert import add_convert
from serving.cli.kv_study import add_kv_study
from serving.cli.mesh_option import TensorParallelSize
from serving.cli.options import (
    AsJson,
    AttentionBackendType,
    ChatTemplate,
    CompilationCacheDir,
    Compression,
    Dtype,
    GpuMemoryUtilization,
    KvCacheMemoryBytes,
    KvCacheType,
    KvCompressController,
    KvCompressRatio,
    LogLevel,
    MaxModelLen,
    MaxPixels,
    ModelDir,
)
from serving.cli.plan import add_plan
from serving.cli.serve import serve
from serving.cli.support import FAILURE, engine_config, expected_faults, fail, log_to_stderr, memory_options

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="An inference engine in JAX with an OpenAI-compatible server.",
)


app.command(
    epilog="Example: omni-jax serve ~/models/SmolLM2-135M-Instruct --served-model-name smollm2 --port 8000",
)(serve)


@app.command(epilog='Example: omni-jax generate ~/models/SmolLM2-135M-Instruct "Why is the sky blue?" --max-tokens 200')
def generate(
    model_dir: ModelDir,
    prompt: Annotated[str, typer.Argument(help="What to continue or to answer; - reads standard input.")],
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Through the chat template, or as it is. Default: chat, where there is one."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt; implies --chat.")] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="An image to ask about; repeat it for more. Implies --chat."),
    ] = None,
    video: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="A video to ask about; repeat it for more. Implies --chat."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate, at most.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep this many tokens; -1 keeps all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Keep tokens at least this likely, against the best.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1 discourages tokens seen before.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Subtracted from tokens already generated.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="The same, once for each time.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; repeat it for more.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of the sequence.")] = False,
    max_model_len: MaxModelLen = None,
    dtype: Dtype = None,
    attention_backend: AttentionBackendType = None,
    tensor_parallel_size: TensorParallelSize = None,
    kv_cache_dtype: KvCacheType = None,
    enable_adaptive_compression: Compression = None,
    kv_compress_ratio: KvCompressRatio = None,
    kv_compress_controller: KvCompressController = None,
    kv_cache_memory_bytes: KvCacheMemoryBytes = None,
    gpu_memory_utilization: GpuMemoryUtilization = None,
    chat_template: ChatTemplate = None,
    compilation_cache_dir: CompilationCacheDir = None,
    max_pixels: MaxPixels = None,
    as_json: AsJson = False,
    log_level: LogLevel = "warning",
) -> None:
    """Answer one prompt, streaming to the terminal."""
    log_to_stderr(log_level)
    media = [{"type": "image", "image": str(path)} for path in image or ()]
    media += [{"type": "video", "video": str(path)} for path in video or ()]
    if chat is False and (system is not None or media):
        hint = "--system" if system is not None else "--image / --video"
        raise typer.BadParameter("needs the chat template, which --raw leaves out", param_hint=hint)
    if prompt == "-":
        prompt = sys.stdin.read()
    memory = memory_options(
        kv_cache_dtype=kv_cache_dtype,
        enable_adaptive_compression=enable_adaptive_compression,
        kv_compress_ratio=kv_compress_ratio,
        kv_compress_controller=kv_compress_controller,
    )
    given = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        "stop": stop,
    }
    given = {name: value for name, value in given.items() if value is not None}
    try:
        options = {
            "max_model_len": max_model_len,
            "dtype": dtype,
            "attention_backend": attention_backend,
            "tensor_parallel_size": tensor_parallel_size,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "gpu_memory_utilization": gpu_memory_utilization,
            "chat_template": chat_template,
            "compilation_cache_dir": compilation_cache_dir,
            "max_pixels": max_pixels,
        } | memory
        options = {name: value for name, value in options.items() if value is not None}
        options["max_num_seqs"] = 1  # one prompt: a fraction of the executables to compile
        engine_config(model_dir=model_dir, **options)
        from omni_jax import LLM
        from omni_jax.progress import stage_bars
        from omni_jax.requests import SamplingParams
        from serving.http.sampling import MODEL_DEFAULTS

        with stage_bars() as progress:
            llm = LLM(model_dir, progress=progress, **options)
        of_model = {name: value for name, value in llm.info.default_sampling.items() if name in MODEL_DEFAULTS}
        params = SamplingParams(**(of_model | given), max_tokens=max_tokens, ignore_eos=ignore_eos)
        if chat is None:
            chat = system is not None or bool(media) or llm.tokenizer.has_chat_template
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": [*media, {"type": "text", "text": prompt}] if media else prompt})
        pieces = []
        for text in llm.stream(messages if chat else prompt, params):
            pieces.append(text)
            if not as_json:
                print(text, end="", flush=True)
    except BrokenPipeError:  # the reader of our output left, as `head` does; typer ends quietly
        raise
    except expected_faults() as error:
        logging.getLogger(__name__).debug("generate failed", exc_info=True)
        fail(str(error))
    print(json.dumps({"prompt": prompt, "text": "".join(pieces)}, ensure_ascii=False) if as_json else "")


add_convert(app)


@app.command(epilog="Example: omni-jax check ~/models/SmolLM2-135M-Instruct")
def check(
    directory: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="The model to look at.")],
    as_json: AsJson = False,
) -> None:
    """Say whether a model directory is whole: files, sizes, headers, configuration, tokenizer."""
    from checkpoints.reader import CheckpointError
    from checkpoints.reader import check as check_directory

    try:
        report, ok = check_directory(directory), True
    except CheckpointError as error:
        report, ok = str(error), False
    if as_json:
        print(json.dumps({"directory": str(directory), "ok": ok, "report": report}, ensure_ascii=False))
    else:
        print(report, file=sys.stdout if ok else sys.stderr)
    raise typer.Exit(0 if ok else FAILURE)


@app.command(
    name="describe-images",
    epilog='Example: omni-jax describe-images photos/ --prompt "What is in this image?" -o photos.jsonl --rate 20',
)
def describe_images(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder, searched recursively; an image; a URL; or a .txt with a path or URL a line. "
            "URLs are for the server to fetch.",
        ),
    ],
    prompt: Annotated[str, typer.Option(help="What to ask about each image.")],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="OUT.jsonl",
            help="A JSON row for each source, in the order of completion. What has a text there is not asked again. "
            "A file *.run.json beside it remembers prompt, model and settings.",
        ),
    ],
    server: Annotated[str, typer.Option(help="An OpenAI-compatible server.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option(help="Default: the first that the server lists.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a text, at most.")] = 256,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy. Default: the server's.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight, at most.")] = 8,
    rate: Annotated[float, typer.Option(min=0, help="Requests a second, at most; 0 is no limit.")] = 0.0,
    retries: Annotated[
        int, typer.Option(min=0, help="Further attempts after a 429, a 5xx, a broken connection or a timeout.")
    ] = 5,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds of an attempt.")] = 300.0,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed/--no-retry-failed", help="Ask again about what failed in an earlier run.")
    ] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Throw away what OUT.jsonl has.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Send this many this time, at most.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be sent.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on standard output.")] = False,
) -> None:
    """Ask a running server about each of many images.

    Exit codes: 0 every source has a text, 1 some failed, 2 usage, 130 interrupted; the same command then goes on.
    """
    import dataclasses

    from serving.describe import job as describe

    try:
        options = describe.Options(
            source=source,
            prompt=prompt,
            out=out,
            server=server,
            model=model,
            api_key=api_key,
            system=system,
            max_tokens=max_tokens,
            temperature=temperature,
            concurrency=concurrency,
            rate=rate,
            retries=retries,
            timeout=timeout,
            retry_failed=retry_failed,
            overwrite=overwrite,
            limit=limit,
        )
        done = describe.plan(options) if dry_run else describe.run(options)
    except describe.UsageError as error:
        raise typer.BadParameter(str(error)) from None
    except (describe.NoModel, OSError) as error:
        fail(str(error))
    if isinstance(done, list):
        print(json.dumps({"would_send": done}, ensure_ascii=False) if as_json else "\n".join(done))
        return
    if as_json:
        print(json.dumps(dataclasses.asdict(done), ensure_ascii=False))
    raise typer.Exit(done.exit_code)


@app.command(epilog="Example: omni-jax ablate examples/ablation/two-minute.yaml -o results/")
def ablate(
    experiment: Annotated[
        Path, typer.Argument(metavar="EXPERIMENT.yaml", exists=True, dir_okay=False, help="Arms, mixes, rates, seeds.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Of the results; made if it is not there.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Run again what DIR has from other settings. Default: an error.")
    ] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Run nothing; write tables, figures and report of what DIR has.")
    ] = False,
    as_json: AsJson = False,
    log_level: LogLevel = "warning",
) -> None:
    """Compare ways of scheduling under the same arrivals, on the real engine or in simulation.

    Interrupted, the same command goes on where it was. DIR/report.md says what was found.
    """
    log_to_stderr(log_level)
    from omni_jax.lab.experiment import load_experiment
    from omni_jax.lab.run import OtherSettings, run_experiment, write_results

    try:
        asked = load_experiment(experiment)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        report = write_results(asked, out) if report_only else run_experiment(asked, out, overwrite=overwrite)
    except OtherSettings as error:
        raise typer.BadParameter(str(error)) from None
    except expected_faults() as error:
        logging.getLogger(__name__).debug("ablate failed", exc_info=True)
        fail(str(error))
    print(json.dumps({"report": str(report)}) if as_json else f"wrote {report}")


add_kv_study(app)
add_plan(app)


@app.command(epilog="Example: omni-jax version --json")
def version(as_json: AsJson = False) -> None:
    """Print the versions of omni-jax, JAX and Python."""
    from importlib.metadata import version as version_of

    versions = {"omni-jax": version_of("omni-jax"), "jax": version_of("jax"), "python": sys.version.split()[0]}
    print(json.dumps(versions) if as_json else "\n".join(f"{name} {number}" for name, number in versions.items()))


def main() -> None:
    """The entry point. Typer turns usage errors into exit code 2."""
    app()


if __name__ == "__main__":
    main()
