"""What the commands share: the engine's settings, errors in one line, the log."""

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from omni_jax.settings import Settings

if TYPE_CHECKING:
    from omni_jax.engine.config import EngineConfig

# Exit codes: the command failed; wrong arguments, a model that cannot be found among them.
FAILURE, USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141


def engine_config(model_dir: Path, *panels: Settings | None, **options: Any) -> "EngineConfig":
    """An EngineConfig of the panels of settings that were given; `options` that are not None override them.

    Checks what else is wrong with them before anything large is imported or loaded. Gives XLA its share of a GPU's
    memory, which it reads when JAX first touches the device.
    """
    from omni_jax.engine.config import EngineConfig

    values = {name: value for panel in panels if panel is not None for name, value in panel.values().items()}
    values |= {name: value for name, value in options.items() if value is not None}
    model_dir = model_directory(model_dir, values.get("revision"), values.get("download_dir"))
    try:
        config = EngineConfig(model_dir=model_dir, **values)
        _check_custom_functions(config)
    except ValueError as error:
        usage_error(str(error))
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(config.gpu_memory_utilization)
    return config


def _check_custom_functions(config: "EngineConfig") -> None:
    """Makes every policy and objective once, so that a wrong one is known before the model is loaded.

    Raises:
        ValueError: one of them is wrong.
    """
    from omni_jax.memory.compression import Schedule
    from omni_jax.memory.recycling import make_recycling
    from omni_jax.requests.slo import SLO
    from omni_jax.scheduling.discipline import SLOFirst
    from omni_jax.segments.policies import make_policy

    find_custom_functions()
    make_policy(config.segment_policy, allow_custom=True)
    make_recycling(config.recycling_policy)
    if config.kv_compress_controller is not None:
        Schedule(config.kv_compress_controller, config.kv_compress_ratio)
    SLO(ttft_ms=config.ttft_ms, tpot_ms=config.tpot_ms, e2e_ms=config.e2e_ms)
    SLOFirst(aging_seconds=config.aging_seconds)


def find_custom_functions() -> None:
    """Lets package.module:function name a module in the working directory, after everything that is installed."""
    with contextlib.suppress(FileNotFoundError):  # the working directory was removed
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())


def model_directory(model: Path | str, revision: str | None = None, download_dir: Path | str | None = None) -> Path:
    """The directory of a model, downloaded if it is the id of a repository of the Hugging Face hub. Ends the command
    where there is no such model."""
    from checkpoints.hub import CheckpointError, find_model

    try:
        path = find_model(Path(model).expanduser(), revision=revision, download_dir=download_dir)
    except CheckpointError as error:
        usage_error(str(error))
    if not path.exists():
        usage_error(f"there is no directory {path}")
    if not path.is_dir():
        usage_error(
            f"{path} is a file, not a model directory; `omni-jax convert {path} MODEL_DIR` converts a GGUF file"
        )
    return path


def expected_errors() -> tuple[type[Exception], ...]:
    """What a wrong model, setting or machine raises, which is shown in one line. Any other exception is a bug and
    keeps its traceback."""
    from checkpoints.errors import CheckpointError
    from omni_jax.requests.errors import EngineError
    from serving.http.lifecycle import CannotListen

    return (CheckpointError, EngineError, CannotListen, OSError, ValueError)


def fail(message: str) -> NoReturn:
    """Ends the command with one line and exit code 1."""
    print(f"omni-jax: {message}", file=sys.stderr)
    sys.exit(FAILURE)


def usage_error(message: str) -> NoReturn:
    """Ends the command with a message about its arguments and exit code 2."""
    print(f"omni-jax: {message}", file=sys.stderr)
    sys.exit(USAGE)


def interrupted(what: str, where: Path) -> int:
    """Says how a study goes on that was interrupted, and returns the exit code for it."""
    print(f"omni-jax: interrupted; repeat the command to resume: finished {what} are in {where}", file=sys.stderr)
    return INTERRUPTED


def log_to_stderr(level: str, *, named: bool = False) -> None:
    """Sets logging up for a --log-level. If `named`, lines begin with the name of the process."""
    handler = _StderrHandler()
    name = "%(processName)s " if named else ""
    handler.setFormatter(logging.Formatter(f"{name}%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level == "info":  # JAX logs every backend that is missing
        logging.getLogger("jax").setLevel(logging.WARNING)


class _StderrHandler(logging.StreamHandler):
    """Writes to the current sys.stderr, which a progress bar replaces while it is shown."""

    def __init__(self):
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stderr
