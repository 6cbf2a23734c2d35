"""Which tokens of which sequences run in the next step. Pure Python: no JAX, and the caller passes the time."""

from omni_jax.scheduling.blocks import Blocks, Compression, Swap
from omni_jax.scheduling.buckets import Buckets, default_buckets, patch_buckets
from omni_jax.scheduling.discipline import Discipline, FirstCome, SLOFirst
from omni_jax.scheduling.events import Event
from omni_jax.scheduling.features import Features
from omni_jax.scheduling.limits import SchedulerConfig
from omni_jax.scheduling.plan import Accepted, Row, StepPlan
from omni_jax.scheduling.scheduler import Scheduler

__all__ = [
    "Accepted",
    "Blocks",
    "Buckets",
    "Compression",
    "Discipline",
    "Event",
    "Features",
    "FirstCome",
    "Row",
    "SLOFirst",
    "Scheduler",
    "SchedulerConfig",
    "StepPlan",
    "Swap",
    "default_buckets",
    "patch_buckets",
]
