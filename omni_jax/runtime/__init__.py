"""Turns a step plan into compiled calls. Knows slots, blocks and buckets; knows nothing of requests."""

from omni_jax.runtime.encoder import EncoderConfig
from omni_jax.runtime.runner import Runner, RunnerConfig, StepResult

__all__ = ["EncoderConfig", "Runner", "RunnerConfig", "StepResult"]
