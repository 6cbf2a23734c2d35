"""What the commands have in common: an engine's settings from flags, the faults that are told in one line, the log."""

import logging
import os
import sys
from typing import Any

import typer


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


def expected_faults() -> tuple[type[Exception], ...]:
    """What a wrong model, flag or machine raises: told in one line. Anything else is a bug and keeps its traceback."""
    from checkpoints.reader import CheckpointError
    from omni_jax.requests import EngineError
    from serving.run import CannotListen

    return (CheckpointError, EngineError, CannotListen, OSError, ValueError)


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
