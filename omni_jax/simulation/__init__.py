"""The scheduler on a virtual clock: what would happen, with a cost model in the place of a device."""

from omni_jax.simulation.texts import WordTokenizer
from omni_jax.simulation.workload import (
    Arrival,
    Bursts,
    Lengths,
    Load,
    Mix,
    build,
    generate,
    read_trace,
    write_trace,
)

__all__ = [
    "Arrival",
    "Bursts",
    "Lengths",
    "Load",
    "Mix",
    "WordTokenizer",
    "build",
    "generate",
    "read_trace",
    "write_trace",
]
