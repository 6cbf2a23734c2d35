"""A process that has a part of the model and does what the front process tells it."""

import contextlib
import logging

from omni_jax import compat
from omni_jax.engine.config import EngineConfig
from omni_jax.engine.loading import Progress, load
from omni_jax.runtime.processes import Follower

logger = logging.getLogger(__name__)


def follow(config: EngineConfig, progress: Progress | None = None) -> None:
    """Loads this process's part, and makes the front's calls until that ends. Ends the process when the front goes
    without a word.

    Raises:
        whatever loading raises, and what a call raises: the front cannot go on then, and finds this process gone.
    """
    loaded = load(config, progress)
    assert isinstance(loaded.channel, Follower)
    logger.info("process %d of %d follows", config.process_id, config.num_processes)
    with compat.no_tracing() if config.forbid_tracing else contextlib.nullcontext():
        for operation, key, buffers in loaded.channel.messages():
            loaded.runner.do(operation, key, *buffers)
    logger.info("the front has ended")
