"""Simulation: the real scheduler on a virtual clock, with a cost model in place of the device."""

from omni_jax.scheduling.router import ROUTERS, LeastLoaded, PrefixAware, RoundRobin, Router, make_router
from omni_jax.simulation.gpu import GpuReplica, gpu_replica
from omni_jax.simulation.replica import Piece, ReplicaConfig, Step
from omni_jax.simulation.simulator import SimulationResult, prepare, simulate, simulate_requests
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
    "ROUTERS",
    "Arrival",
    "Bursts",
    "GpuReplica",
    "LeastLoaded",
    "Lengths",
    "Load",
    "Mix",
    "Piece",
    "PrefixAware",
    "ReplicaConfig",
    "RoundRobin",
    "Router",
    "SimulationResult",
    "Step",
    "WordTokenizer",
    "build",
    "generate",
    "gpu_replica",
    "make_router",
    "prepare",
    "read_trace",
    "simulate",
    "simulate_requests",
    "write_trace",
]
