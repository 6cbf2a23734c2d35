"""The one door to Pallas: everything that differs between the supported JAX lines, or is not promised by JAX.

0.10.2 and 0.11 and later differ in where some names live; from 0.11 on the Triton route is marked as deprecated, which
is why nothing else imports it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu, triton

JAX = tuple(int(part) for part in jax.__version__.split(".")[:2])

# Why Mosaic GPU kernels cannot be interpreted here, or None if they can: tests skip with this sentence.
NO_MOSAIC_INTERPRETER = None if JAX >= (0, 11) else f"JAX {jax.__version__} cannot interpret Mosaic GPU, 0.11 can"

# 0.10 cannot store what lies in registers into swizzled shared memory the other way round.
MOSAIC_STORES_TRANSPOSED = JAX >= (0, 11)

__all__ = [
    "JAX",
    "MOSAIC_STORES_TRANSPOSED",
    "NO_MOSAIC_INTERPRETER",
    "mosaic_gpu",
    "mosaic_interpret",
    "mosaic_interpreter",
    "pl",
    "triton",
]


def mosaic_interpret() -> Any:
    """The `interpret` argument of a Mosaic GPU kernel: on a CPU, with races between threads and copies raised."""
    if NO_MOSAIC_INTERPRETER is not None:
        raise NotImplementedError(NO_MOSAIC_INTERPRETER)
    return mosaic_gpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def mosaic_interpreter(device_kind: str = "NVIDIA H100 80GB HBM3") -> Iterator[None]:
    """Where Mosaic GPU kernels called with `interpret=mosaic_interpret()` run as if on `device_kind`.

    The interpreter simulates shared memory, barriers and asynchronous copies in Python callbacks, and keeps its state
    in the process. A kernel that fails leaves it behind, and the next one would fail with it: so it is dropped at both
    ends. Results must be waited for (`block_until_ready`) inside.
    """
    if NO_MOSAIC_INTERPRETER is not None:
        raise NotImplementedError(NO_MOSAIC_INTERPRETER)
    # Not exported by JAX, and absent before 0.11.
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state

    device = jax.sharding.AbstractDevice(device_kind=device_kind, platform="gpu", num_cores=1)
    reset_gpu_interpret_mode_state()
    try:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
            yield
    finally:
        reset_gpu_interpret_mode_state()
