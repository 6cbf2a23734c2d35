"""`omni-jax serve`."""

import dataclasses
import functools
import logging
import multiprocessing
import os
import signal
from pathlib import Path

from serving.cli.options import (
    Access,
    Cache,
    Config,
    Encoder,
    LogLevel,
    Media,
    Model,
    Parallel,
    Scheduling,
    Security,
    Server,
)
from serving.cli.support import engine_config, expected_errors, fail, log_to_stderr, usage_error
from serving.http.metrics_directory import remove_shared_metrics, share_metrics
from serving.http.settings import ServerSettings

logger = logging.getLogger(__name__)

EXAMPLE = "omni-jax serve ~/models/SmolLM2-135M-Instruct --served-model-name smollm2 --port 8000"


def serve(
    model: Path | None = None,
    *,
    config: Config = None,
    log_level: LogLevel = "info",
    server: Server = None,
    model_settings: Model = None,
    cache: Cache = None,
    scheduling: Scheduling = None,
    encoder: Encoder = None,
    media: Media = None,
    security: Security = None,
    access: Access = None,
    parallel: Parallel = None,
) -> int:
    """Serve a model over HTTP with OpenAI's API.

    Args:
        model: Model directory in Hugging Face layout (config.json, tokenizer, safetensors), or the id of a repository
            of the Hugging Face hub, such as Qwen/Qwen2.5-0.5B-Instruct.
        config: JSON or YAML file of settings: flags by their names, and model. Flags and variables override it.
        log_level: Least severe messages that are logged.
    """
    several = server is not None and server.api_server_count > 1
    log_to_stderr(log_level, named=several)
    if model is None:
        usage_error(
            "give the model's directory: omni-jax serve MODEL, before flags that take several values, or the key model "
            "in the file of --config"
        )
    server = server or ServerSettings()
    for name in server.served_model_name:
        if os.sep in name and Path(name).is_dir():
            usage_error(f"served_model_name {name!r} is a directory: give MODEL before flags that take several values")
    if not server.served_model_name:
        name = model.resolve().name if model.expanduser().exists() else str(model)  # an id of the hub is a name
        server = dataclasses.replace(server, served_model_name=(name,))
    engine_settings = engine_config(model.expanduser(), model_settings, cache, scheduling, encoder, parallel)
    if engine_settings.process_id:
        return _follow(engine_settings)
    if several:
        multiprocessing.current_process().name = "api-server-0"
        share_metrics()
    from serving.http.lifecycle import CannotListen, bind, run_server

    try:
        sock = bind(server.host, server.port)  # before the model is loaded: a port in use is known at once
    except CannotListen as error:
        remove_shared_metrics()
        fail(str(error))
    try:
        from omni_jax.engine.async_engine import AsyncEngine
        from omni_jax.engine.cores import process_cores, thread_cores
        from omni_jax.progress import stage_bars
        from serving.cli.memory_summary import memory_summary
        from serving.http.api_processes import Launch
        from serving.http.server import make_app

        logger.info(
            "loading %s, then compiling: minutes at the first start, seconds from the compilation cache later",
            model,
        )
        logger.info("memory: %s", memory_summary(engine_settings))
        prepare = functools.partial(log_to_stderr, log_level, named=several)
        make_cores = thread_cores
        if server.engine_core == "process":
            make_cores = functools.partial(process_cores, clients=server.api_server_count, prepare=prepare)
        app = functools.partial(
            make_app,
            settings=server,
            security=security,
            media=media,
            access=access,
            segment_policy=engine_settings.segment_policy,
        )

        def launch(engine: AsyncEngine, number: int) -> Launch:
            return Launch(
                name=f"api-server-{number}",
                prepare=prepare,
                make_engine=functools.partial(AsyncEngine.attach, engine.link(number)),
                make_app=app,
                sock=sock,
                settings=server,
            )

        with stage_bars() as progress:
            return run_server(
                lambda: AsyncEngine(engine_settings, progress, make_cores=make_cores),
                app,
                sock,
                server,
                alone=engine_settings.num_processes == 1,
                launch=launch,
            )
    except expected_errors() as error:
        logger.debug("start failed", exc_info=True)
        fail(str(error))
    finally:
        sock.close()
        remove_shared_metrics()


def _follow(config) -> int:
    """Runs a process that follows process 0 and serves no requests."""
    from omni_jax.engine.follower import follow

    def ready() -> None:  # Ctrl-C reaches the whole group: process 0 drains, and ends this one afterwards
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    try:
        follow(config, ready=ready)
    except expected_errors() as error:
        fail(str(error))
    return 0
