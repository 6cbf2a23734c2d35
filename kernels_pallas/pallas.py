"""The one door to Pallas: everything that differs between the supported JAX lines, or is not promised by JAX.

0.10.2 and 0.11 and later differ in where some names live; from 0.11 on the Triton route is marked as deprecated, which
is why nothing else imports it.
"""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu, triton

JAX = tuple(int(part) for part in jax.__version__.split(".")[:2])

__all__ = ["JAX", "mosaic_gpu", "pl", "triton"]
