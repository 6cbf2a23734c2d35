"""Flax models and the loading of their weights from a Hugging Face directory."""

from omni_jax.models.config import ModelConfig, VisionConfig, compute_dtype, model_config
from omni_jax.models.decoder import Decoder
from omni_jax.models.weights import Split, Tower, Weights, abstract_weights, load_weights

__all__ = [
    "Decoder",
    "ModelConfig",
    "Split",
    "Tower",
    "VisionConfig",
    "Weights",
    "abstract_weights",
    "compute_dtype",
    "load_weights",
    "model_config",
]
