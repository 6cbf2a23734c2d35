"""The only module that imports Pallas: it hides differences between JAX versions, and private parts of JAX.

Some names moved between JAX 0.10.2 and 0.11. From 0.11 on the Triton backend is deprecated.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu, triton

JAX = tuple(int(part) for part in jax.__version__.split(".")[:2])

# The reason why Mosaic GPU kernels cannot be interpreted, for skipped tests; None if they can.
NO_MOSAIC_INTERPRETER = None if JAX >= (0, 11) else f"JAX {jax.__version__} cannot interpret Mosaic GPU, 0.11 can"

# Whether registers can be stored transposed into swizzled shared memory.
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
    """The `interpret` argument of a Mosaic GPU kernel: it runs on a CPU and raises on races of threads and copies."""
    if NO_MOSAIC_INTERPRETER is not None:
        raise NotImplementedError(NO_MOSAIC_INTERPRETER)
    return mosaic_gpu.InterpretGPUParams(detect_races=True)  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def mosaic_interpreter(device_kind: str = "NVIDIA H100 80GB HBM3") -> Iterator[None]:
    """A context in which Mosaic GPU kernels with `interpret=mosaic_interpret()` run as if on `device_kind`.

    The interpreter simulates shared memory, barriers and asynchronous copies in Python callbacks, with global state. A
    kernel that fails leaves state with which the next one fails, so the state is reset on entry and exit. Wait for
    results (`block_until_ready`) inside the context.
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
