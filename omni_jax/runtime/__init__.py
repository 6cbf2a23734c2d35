"""Runs step plans with compiled functions, in terms of slots, blocks and buckets."""

from omni_jax.runtime.encoder import EncoderConfig
from omni_jax.runtime.runner import Runner, RunnerConfig, StepResult

__all__ = ["EncoderConfig", "Runner", "RunnerConfig", "StepResult"]
