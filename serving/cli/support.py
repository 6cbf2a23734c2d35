"""What the commands have in common: an engine's settings from flags, the faults that are told in one line, the log."""

import enum
import logging
import os
import sys
from typing import Any, NoReturn

import typer

FAILURE = 1  # usage errors are 2, by typer


def engine_config(**options: Any) -> Any:
    """An EngineConfig of the flags that were given, the rest being its own defaults.

    XLA takes 0.75 of a GPU unless it is told otherwise before JAX first touches it, so it is told here.
    """
    from omni_jax.engine.config import EngineConfig

    given = {name: value for name, value in options.items() if value is not None}
    config = EngineConfig(**given)
    if "gpu_memory_utilization" in given:
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(config.gpu_memory_utilization)
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(config.gpu_memory_utilization))
    return config


def memory_options(**options: Any) -> dict[str, Any]:
    """The fields of EngineConfig that the flags of the engine's memory set, without those that were not given.

    Raises:
        typer.BadParameter: values that cannot be, alone or together; said before a model is loaded.
    """
    from omni_jax.engine.config import EngineConfig
    from omni_jax.memory import make_recycling
    from omni_jax.memory.compression import Schedule

    given = {
        name: value.value if isinstance(value, enum.Enum) else value
        for name, value in options.items()
        if value is not None
    }
    try:
        config = EngineConfig(model_dir=".", **given)
        find_own_code(config.recycling_policy)
        make_recycling(config.recycling_policy)
        find_own_code(config.kv_compress_controller or "")
        Schedule(config.kv_compress_controller, config.kv_compress_ratio)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return given


def find_own_code(path: str) -> None:
    """Lets a dotted path, package.module:function, name what a person keeps in the working directory."""
    if ":" in path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # after everything that is installed


def expected_faults() -> tuple[type[Exception], ...]:
    """What a wrong model, flag or machine raises: told in one line. Anything else is a bug and keeps its traceback."""
    from checkpoints.reader import CheckpointError
    from omni_jax.requests import EngineError
    from serving.http.lifecycle import CannotListen

    return (CheckpointError, EngineError, CannotListen, OSError, ValueError)


def fail(message: str) -> NoReturn:
    """Ends the command with one line."""
    typer.echo(f"omni-jax: {message}", err=True)
    raise typer.Exit(FAILURE)


def log_to_stderr(level: str) -> None:
    """Sets logging up, for a --log-level."""
    if level.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise typer.BadParameter(f"must be debug, info, warning or error, got {level!r}", param_hint="--log-level")
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level.upper() == "INFO":  # JAX tells of every backend that is not there
        logging.getLogger("jax").setLevel(logging.WARNING)


class _StderrHandler(logging.StreamHandler):
    """Writes to what sys.stderr is at the time: while a progress bar is shown, lines must go above it."""

    def __init__(self):
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stderr
