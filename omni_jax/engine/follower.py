"""A process that holds a part of the model and makes the front process's calls."""

import contextlib
import logging
from collections.abc import Callable

from omni_jax import compat
from omni_jax.engine.config import EngineConfig
from omni_jax.engine.loading import load
from omni_jax.progress import StageReport
from omni_jax.runtime.processes import Follower

logger = logging.getLogger(__name__)


def follow(
    config: EngineConfig, progress: StageReport | None = None, *, ready: Callable[[], object] = lambda: None
) -> None:
    """Load this process's part of the model, and make the front's calls until the front stops. If the connection to the
    front is lost, the process exits. Calls `ready` when the model is loaded.

    Raises:
        whatever loading or a call raises. The front exits then, when it loses the connection.
    """
    loaded = load(config, progress)
    assert isinstance(loaded.channel, Follower)
    ready()
    logger.info("process %d of %d is ready to follow the front", config.process_id, config.num_processes)
    with compat.no_tracing() if config.forbid_tracing else contextlib.nullcontext():
        for operation, key, buffers in loaded.channel.messages():
            loaded.runner.do(operation, key, *buffers)
    logger.info("the front has stopped")
