"""Which tokens of which sequences run in the next step. Pure Python: no JAX, and no clock of its own."""

from omni_jax.scheduling.buckets import Buckets, default_buckets, patch_buckets
from omni_jax.scheduling.discipline import Discipline, FirstCome, SLOFirst
from omni_jax.scheduling.features import Features
from omni_jax.scheduling.limits import SchedulerConfig
from omni_jax.scheduling.plan import Row, StepPlan
from omni_jax.scheduling.scheduler import Accepted, Event, Scheduler

__all__ = [
    "Accepted",
    "Buckets",
    "Discipline",
    "Event",
    "Features",
    "FirstCome",
    "Row",
    "SLOFirst",
    "Scheduler",
    "SchedulerConfig",
    "StepPlan",
    "default_buckets",
    "patch_buckets",
]
