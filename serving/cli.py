"""The command line: serve, generate, describe-images, ... A command imports what it needs when it runs."""

import enum
import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from serving.cli_support import engine_config, expected_faults, log_to_stderr

FAILURE = 1  # usage errors are 2, by typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="An inference engine in JAX with an OpenAI-compatible server.",
)


class SchedulingPolicy(enum.StrEnum):
    fcfs = "fcfs"
    slo = "slo"


class GenerationConfig(enum.StrEnum):
    auto = "auto"
    vllm = "vllm"


ModelDir = Annotated[
    Path, typer.Argument(metavar="MODEL_DIR", help="A model in Hugging Face layout: config, tokenizer, safetensors.")
]


def _model_or_settings(context: typer.Context, given: Path) -> Path:
    """MODEL of `serve`. A file of settings in its place sets the defaults of the flags: what is given on the command
    line overrules it."""
    from serving import config_file

    if context.resilient_parsing or not config_file.is_settings(given):
        return given
    options = {param.name: param for param in context.command.params if param.param_type_name == "option"}
    options.pop("help", None)
    try:
        model, defaults = config_file.load(
            given, flags={str(name): bool(getattr(option, "is_flag", False)) for name, option in options.items()}
        )
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    for name, value in defaults.items():
        many = options[name].multiple
        if isinstance(value, list) != many:
            if not many:
                raise typer.BadParameter(f"{given}: {name} must be one value, got {value!r}")
            defaults[name] = [value]
    context.default_map = defaults
    return model


ModelOrSettings = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        is_eager=True,  # before the flags: it may set their defaults
        callback=_model_or_settings,
        help="A model in Hugging Face layout: config, tokenizer, safetensors. Or a .json or .yaml file with the key "
        "model and flags by their names, and segment_policies: a policy for each modality.",
    ),
]
MaxModelLen = Annotated[int | None, typer.Option(min=1, help="Tokens of prompt and output together, at most.")]
Dtype = Annotated[str | None, typer.Option(help="Of weights and KV cache: auto, bfloat16 or float32.")]
BlockSize = Annotated[int | None, typer.Option(min=1, help="Tokens of a KV block.")]
KvCacheMemoryBytes = Annotated[int | None, typer.Option(min=1, help="Size of the KV pool; else what memory allows.")]
GpuMemoryUtilization = Annotated[
    float | None, typer.Option(min=0.01, max=1.0, help="Share of a GPU's memory for this process.")
]
Seed = Annotated[int | None, typer.Option(help="Of requests without a seed of their own.")]
CompilationCacheDir = Annotated[Path | None, typer.Option(help="Where compiled steps are kept between starts.")]
ChatTemplate = Annotated[str | None, typer.Option(help="Replaces the model's own: a file, or Jinja text.")]
MaxPixels = Annotated[
    int | None, typer.Option(min=1, help="Pixels of a picture or a frame once it is resized, at most: 1003520.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.command(
    epilog="Example: omni-jax serve ~/models/SmolLM2-135M-Instruct --served-model-name smollm2 --port 8000",
)
def serve(
    model_dir: ModelOrSettings,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name in the API; repeat it for more. Default: the directory's name.")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="Ask for this bearer key; repeat it for more. Default: no key.")
    ] = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences in a step, at most.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens in a step, at most.")] = None,
    max_num_queued_reqs: Annotated[
        int | None, typer.Option(min=1, help="Waiting requests, at most; one more gets a 503.")
    ] = None,
    block_size: BlockSize = None,
    gpu_memory_utilization: GpuMemoryUtilization = None,
    kv_cache_memory_bytes: KvCacheMemoryBytes = None,
    dtype: Dtype = None,
    seed: Seed = None,
    generation_config: Annotated[
        GenerationConfig, typer.Option(help="Sampling defaults of the model's generation_config.json, or none (vllm).")
    ] = GenerationConfig.auto,
    chat_template: ChatTemplate = None,
    compilation_cache_dir: CompilationCacheDir = None,
    limit_mm_per_prompt: Annotated[
        str,
        typer.Option(metavar="LIMITS", help='Pictures and films in a request, at most; or {"image": 16, "video": 1}.'),
    ] = "image=16,video=1",
    allowed_media_domains: Annotated[
        list[str] | None, typer.Option(help="Fetch media from this host only; repeat it for more. Default: any.")
    ] = None,
    allowed_local_media_path: Annotated[
        Path | None, typer.Option(help="Let requests name files in this directory. Default: none.")
    ] = None,
    allow_private_media_addresses: Annotated[
        bool, typer.Option("--allow-private-media-addresses", help="Fetch media also from this machine and network.")
    ] = False,
    media_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to fetch a picture or a film.")] = 5.0,
    max_pixels: MaxPixels = None,
    allow_mm_processor_kwargs: Annotated[
        bool, typer.Option("--allow-mm-processor-kwargs", help="Let requests set max_pixels, fps and the like.")
    ] = False,
    encoder_cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of pictures whose features are kept on the device.")
    ] = None,
    encoder_layers_per_slice: Annotated[
        int | None, typer.Option(min=1, help="Layers of the vision tower that run between two steps.")
    ] = None,
    scheduling_policy: Annotated[
        SchedulingPolicy, typer.Option(help="First come, first served; or by class and deadline (slo).")
    ] = SchedulingPolicy.fcfs,
    segment_policy: Annotated[
        str,
        typer.Option(
            metavar="NAME_OR_JSON",
            help="How prompts are cut: request, by_modality, by_sentence, hybrid, package.module:function; or "
            'with arguments: {"policy": "by_length", "max_length": 256}; or so for each modality: {"text": ...}.',
        ),
    ] = "request",
    allow_request_segment_policy: Annotated[
        bool, typer.Option("--allow-request-segment-policy", help="Let requests set segment_policy.")
    ] = False,
    ttft_ms: Annotated[
        float | None, typer.Option(help="Objective of requests that bring none: milliseconds to the first token.")
    ] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="The same, from one token to the next.")] = None,
    e2e_ms: Annotated[float | None, typer.Option(help="The same, to the last token.")] = None,
    aging_seconds: Annotated[
        float, typer.Option(help="Who was not served for so long moves up by a class (slo).")
    ] = 10.0,
    enable_chunked_prefill: Annotated[
        bool,
        typer.Option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
            help="Compute a prompt over several steps; without it, whole in one (fcfs only).",
        ),
    ] = True,
    segment_aware: Annotated[
        bool, typer.Option("--segment-aware", help="Log a table of its segments when a request ends.")
    ] = False,
    debug_print_batch: Annotated[
        bool,
        typer.Option("--debug-print-batch", help="Log what each step computes: ids, segments, visible keys. Slow."),
    ] = False,
    max_body_size: Annotated[
        int,
        typer.Option(min=1, help="Bytes of a request, at most; a picture in it takes a third more than its file."),
    ] = 64 * 2**20,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests get after SIGTERM or SIGINT.")
    ] = 30.0,
    access_log: Annotated[
        bool, typer.Option("--access-log/--no-access-log", help="Log a line for each request.")
    ] = True,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a model over HTTP, as OpenAI does."""
    log_to_stderr(log_level)
    if not all(api_key or ()):  # an unset shell variable must not open the server
        raise typer.BadParameter("must not be empty", param_hint="--api-key")
    from serving.media import MediaOptions, MediaPolicy, parse_limits
    from serving.run import CannotListen, bind, run_server

    try:
        media = MediaOptions(
            policy=MediaPolicy(
                allowed_domains=tuple(allowed_media_domains or ()),
                allowed_local_path=allowed_local_media_path,
                allow_private_addresses=allow_private_media_addresses,
                timeout=media_timeout,
            ),
            limits=parse_limits(limit_mm_per_prompt),
            allow_mm_processor_kwargs=allow_mm_processor_kwargs,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    cut = _segment_policy(segment_policy)
    _check_objectives(scheduling_policy, ttft_ms, tpot_ms, e2e_ms, aging_seconds, enable_chunked_prefill)
    try:
        sock = bind(host, port)  # before the model is loaded: a port in use is known at once
    except CannotListen as error:
        _fail(str(error))
    try:
        config = engine_config(
            model_dir=model_dir,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_queued_reqs=max_num_queued_reqs,
            block_size=block_size,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            dtype=dtype,
            seed=seed,
            generation_config=generation_config.value,
            chat_template=chat_template,
            compilation_cache_dir=compilation_cache_dir,
            max_pixels=max_pixels,
            encoder_cache_tokens=encoder_cache_tokens,
            encoder_layers_per_slice=encoder_layers_per_slice,
            scheduling_policy=scheduling_policy.value,
            segment_policy=cut,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            e2e_ms=e2e_ms,
            aging_seconds=aging_seconds,
            enable_chunked_prefill=enable_chunked_prefill,
            segment_aware=segment_aware,
            debug_print_batch=debug_print_batch,
        )
        from omni_jax.engine.async_engine import AsyncEngine
        from serving.progress import stage_bars
        from serving.segments import SegmentOptions
        from serving.server import make_app

        with stage_bars() as progress:
            code = run_server(
                lambda: AsyncEngine(config, progress),
                lambda engine: make_app(
                    engine,
                    served_model_names=served_model_name or [model_dir.resolve().name],
                    api_keys=api_key or (),
                    max_body_size=max_body_size,
                    media=media,
                    segments=SegmentOptions(policy=cut, allow_request_policy=allow_request_segment_policy),
                ),
                sock,
                shutdown_timeout=shutdown_timeout,
                access_log=access_log,
            )
    except expected_faults() as error:
        logging.getLogger(__name__).debug("start failed", exc_info=True)
        _fail(str(error))
    finally:
        sock.close()
    raise typer.Exit(code)


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
        typer.Option(exists=True, dir_okay=False, help="A picture to ask about; repeat it for more. Implies --chat."),
    ] = None,
    video: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="A film to ask about; repeat it for more. Implies --chat."),
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
    kv_cache_memory_bytes: KvCacheMemoryBytes = None,
    gpu_memory_utilization: GpuMemoryUtilization = None,
    chat_template: ChatTemplate = None,
    compilation_cache_dir: CompilationCacheDir = None,
    max_pixels: MaxPixels = None,
    as_json: AsJson = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
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
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "gpu_memory_utilization": gpu_memory_utilization,
            "chat_template": chat_template,
            "compilation_cache_dir": compilation_cache_dir,
            "max_pixels": max_pixels,
        }
        options = {name: value for name, value in options.items() if value is not None}
        options["max_num_seqs"] = 1  # one prompt: a fraction of the executables to compile
        engine_config(model_dir=model_dir, **options)
        from omni_jax import LLM
        from omni_jax.requests import SamplingParams
        from serving.progress import stage_bars
        from serving.protocol import MODEL_DEFAULTS

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
        _fail(str(error))
    print(json.dumps({"prompt": prompt, "text": "".join(pieces)}, ensure_ascii=False) if as_json else "")


@app.command(epilog="Example: omni-jax convert SmolLM2-135M-Instruct.Q8_0.gguf ~/models/SmolLM2-135M-Instruct")
def convert(
    source: Annotated[Path, typer.Argument(metavar="MODEL.gguf", help="A Llama or Qwen2 model in GGUF.")],
    out: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="The Hugging Face directory to write.")],
    dtype: Annotated[
        str, typer.Option(help="Of the written weights: float32 is exact, bfloat16 takes half the room.")
    ] = "float32",
) -> None:
    """Turn a GGUF file into a Hugging Face directory, which the engine reads."""
    from checkpoints.gguf_convert import convert_gguf
    from serving.progress import progress_bar

    try:
        with progress_bar(f"converting {source.name}") as progress:
            convert_gguf(source, out, dtype=dtype, progress=progress)
    except expected_faults() as error:
        _fail(str(error))
    print(f"wrote {out}")


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
    epilog='Example: omni-jax describe-images photos/ --prompt "What is in this picture?" -o photos.jsonl --rate 20',
)
def describe_images(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder, searched recursively; a picture; a URL; or a .txt with a path or URL a line. "
            "URLs are for the server to fetch.",
        ),
    ],
    prompt: Annotated[str, typer.Option(help="What to ask about each picture.")],
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
    """Ask a running server about each of many pictures.

    Exit codes: 0 every source has a text, 1 some failed, 2 usage, 130 interrupted; the same command then goes on.
    """
    import dataclasses

    from serving import describe

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
        _fail(str(error))
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
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Compare ways of scheduling under the same arrivals, on the real engine or in simulation.

    Interrupted, the same command goes on where it was. DIR/report.md says what was found.
    """
    log_to_stderr(log_level)
    from serving.lab.experiment import load_experiment
    from serving.lab.run import OtherSettings, run_experiment, write_results

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
        _fail(str(error))
    print(json.dumps({"report": str(report)}) if as_json else f"wrote {report}")


@app.command(epilog="Example: omni-jax version --json")
def version(as_json: AsJson = False) -> None:
    """Print the versions of omni-jax, JAX and Python."""
    from importlib.metadata import version as version_of

    versions = {"omni-jax": version_of("omni-jax"), "jax": version_of("jax"), "python": sys.version.split()[0]}
    print(json.dumps(versions) if as_json else "\n".join(f"{name} {number}" for name, number in versions.items()))


def _segment_policy(text: str) -> Any:
    """The policy that a flag names, for EngineConfig; a usage error that lists the valid ones when there is none."""
    from serving.segments import parse_policy

    if ":" in text and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where a person keeps a policy of their own; after everything that is installed
    try:
        return parse_policy(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--segment-policy") from None


def _check_objectives(
    policy: SchedulingPolicy,
    ttft_ms: float | None,
    tpot_ms: float | None,
    e2e_ms: float | None,
    aging_seconds: float,
    chunked: bool,
) -> None:
    """Usage errors of what the engine would refuse only once the model is loaded."""
    from omni_jax.scheduling import SLOFirst
    from omni_jax.segments import SLO

    try:
        SLO(ttft_ms=ttft_ms, tpot_ms=tpot_ms, e2e_ms=e2e_ms)
        SLOFirst(aging_seconds=aging_seconds)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if policy is SchedulingPolicy.slo and not chunked:
        raise typer.BadParameter("slo needs chunked prefill", param_hint="--scheduling-policy")


def _fail(message: str) -> NoReturn:
    print(f"omni-jax: {message}", file=sys.stderr)
    raise typer.Exit(FAILURE)


def main() -> None:
    """The entry point. Typer turns usage errors into exit code 2."""
    app()


if __name__ == "__main__":
    main()
