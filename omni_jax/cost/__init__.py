"""Predicted step times, measured on this machine or estimated for a named GPU.

The scheduler, the simulator and the planner use both through one protocol, CostModel.
"""

from omni_jax.cost.model import CostModel, Kind, StepShape, causal_pairs
from omni_jax.cost.published import published_config, published_names, published_repository
from omni_jax.cost.roofline import GPUS, Gpu, ModelSizes, Roofline, VisionSizes, gpu_named
from omni_jax.cost.table import PredictionError, TableCost

__all__ = [
    "GPUS",
    "CostModel",
    "Gpu",
    "Kind",
    "ModelSizes",
    "PredictionError",
    "Roofline",
    "StepShape",
    "TableCost",
    "VisionSizes",
    "causal_pairs",
    "gpu_named",
    "published_config",
    "published_names",
    "published_repository",
]
