"""`omni-jax serve`: its flags, or a file of settings in their place."""

import enum
import logging
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from serving.cli.mesh_option import (
    CoordinatorAddress,
    DataParallelSize,
    MeshText,
    NumProcesses,
    PipelineParallelSize,
    ProcessId,
    TensorParallelSize,
    mesh_options,
)
from serving.cli.options import (
    AttentionBackendType,
    BlockSize,
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
    MaxSwapOps,
    NumSwapThreads,
    Preemption,
    PrefixCaching,
    Recycling,
    Seed,
    SwapDir,
    SwapDirSpace,
    SwapSpace,
)
from serving.cli.support import engine_config, expected_faults, fail, find_own_code, log_to_stderr, memory_options

logger = logging.getLogger(__name__)


class SchedulingPolicy(enum.StrEnum):
    fcfs = "fcfs"
    slo = "slo"


class GenerationConfig(enum.StrEnum):
    auto = "auto"
    vllm = "vllm"


def _model_or_settings(context: typer.Context, given: Path) -> Path:
    """MODEL of `serve`. A file of settings in its place sets the defaults of the flags: what is given on the command
    line overrules it."""
    from serving.cli import config_file

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
    attention_backend: AttentionBackendType = None,
    tensor_parallel_size: TensorParallelSize = None,
    data_parallel_size: DataParallelSize = None,
    pipeline_parallel_size: PipelineParallelSize = None,
    mesh: MeshText = None,
    coordinator_address: CoordinatorAddress = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
    kv_cache_dtype: KvCacheType = None,
    enable_prefix_caching: PrefixCaching = None,
    recycling_policy: Recycling = None,
    swap_space: SwapSpace = None,
    swap_dir: SwapDir = None,
    swap_dir_space: SwapDirSpace = None,
    max_swap_ops: MaxSwapOps = None,
    num_swap_threads: NumSwapThreads = None,
    preemption_mode: Preemption = None,
    enable_adaptive_compression: Compression = None,
    kv_compress_ratio: KvCompressRatio = None,
    kv_compress_controller: KvCompressController = None,
    seed: Seed = None,
    generation_config: Annotated[
        GenerationConfig, typer.Option(help="Sampling defaults of the model's generation_config.json, or none (vllm).")
    ] = GenerationConfig.auto,
    chat_template: ChatTemplate = None,
    compilation_cache_dir: CompilationCacheDir = None,
    limit_mm_per_prompt: Annotated[
        str,
        typer.Option(metavar="LIMITS", help='Images and videos in a request, at most; or {"image": 16, "video": 1}.'),
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
    media_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds to fetch an image or a video.")] = 5.0,
    max_pixels: MaxPixels = None,
    allow_mm_processor_kwargs: Annotated[
        bool, typer.Option("--allow-mm-processor-kwargs", help="Let requests set max_pixels, fps and the like.")
    ] = False,
    encoder_cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of images whose features are kept on the device.")
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
        typer.Option(min=1, help="Bytes of a request, at most; an image in it takes a third more than its file."),
    ] = 64 * 2**20,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests get after SIGTERM or SIGINT.")
    ] = 30.0,
    access_log: Annotated[
        bool, typer.Option("--access-log/--no-access-log", help="Log a line for each request.")
    ] = True,
    log_level: LogLevel = "info",
) -> None:
    """Serve a model over HTTP, as OpenAI does."""
    log_to_stderr(log_level)
    if not all(api_key or ()):  # an unset shell variable must not open the server
        raise typer.BadParameter("must not be empty", param_hint="--api-key")
    from serving.http.lifecycle import CannotListen, bind, run_server
    from serving.http.media import MediaOptions, MediaPolicy, parse_limits

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
    parallel = mesh_options(mesh, tensor_parallel_size=tensor_parallel_size, data_parallel_size=data_parallel_size)
    cut = _segment_policy(segment_policy)
    _check_objectives(scheduling_policy, ttft_ms, tpot_ms, e2e_ms, aging_seconds, enable_chunked_prefill)
    memory = memory_options(
        kv_cache_dtype=kv_cache_dtype,
        enable_prefix_caching=enable_prefix_caching,
        recycling_policy=recycling_policy,
        swap_space=swap_space,
        swap_dir=swap_dir,
        swap_dir_space=swap_dir_space,
        max_swap_ops=max_swap_ops,
        num_swap_threads=num_swap_threads,
        preemption_mode=preemption_mode,
        enable_adaptive_compression=enable_adaptive_compression,
        kv_compress_ratio=kv_compress_ratio,
        kv_compress_controller=kv_compress_controller,
    )
    try:
        # Before the model is loaded: a port in use is known at once. Processes that follow serve nobody.
        sock = bind(host, port) if not process_id else None
    except CannotListen as error:
        fail(str(error))
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
            attention_backend=attention_backend,
            pipeline_parallel_size=pipeline_parallel_size,
            coordinator_address=coordinator_address,
            num_processes=num_processes,
            process_id=process_id,
            **parallel,
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
            **memory,
        )
        if sock is None:
            from omni_jax.engine.follower import follow

            # Ctrl-C reaches the whole group: the front drains, and says when this process may go.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            follow(config)
            return
        from omni_jax.engine.async_engine import AsyncEngine
        from omni_jax.progress import stage_bars
        from serving.cli.memory_summary import memory_summary
        from serving.http.segment_options import SegmentOptions
        from serving.http.server import make_app

        logger.info("memory: %s", memory_summary(config))
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
        logger.debug("start failed", exc_info=True)
        fail(str(error))
    finally:
        if sock is not None:
            sock.close()
    raise typer.Exit(code)


def _segment_policy(text: str) -> Any:
    """The policy that a flag names, for EngineConfig; a usage error that lists the valid ones when there is none."""
    from serving.http.segment_options import parse_policy

    find_own_code(text)
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
    from omni_jax.requests.slo import SLO
    from omni_jax.scheduling import SLOFirst

    try:
        SLO(ttft_ms=ttft_ms, tpot_ms=tpot_ms, e2e_ms=e2e_ms)
        SLOFirst(aging_seconds=aging_seconds)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if policy is SchedulingPolicy.slo and not chunked:
        raise typer.BadParameter("slo needs chunked prefill", param_hint="--scheduling-policy")
