"""Ceilings of the device, measured with simple programs; other figures are compared with them."""

import jax
import jax.numpy as jnp

from benchmarks.gpu_check.measure import calls_for, in_turn, loop
from benchmarks.gpu_check.section import Section

GIB = 1 << 30


def ceilings(section: Section) -> None:
    """Measure the bandwidth of copying and of reading, and the FLOP/s of a bfloat16 product."""
    size = 1 << 20 if section.dry_run else 2 * GIB
    side = 128 if section.dry_run else 8192
    data = jnp.zeros(size // 4, jnp.int32)
    copies = calls_for(2 * size / 4e12, dry_run=section.dry_run)
    reads = calls_for(size / 4e12, dry_run=section.dry_run)
    products = calls_for(2 * side**3 / 8e14, dry_run=section.dry_run)
    matrix = jax.random.normal(jax.random.key(0), (side, side), jnp.bfloat16)
    square = (matrix * side**-0.5).astype(jnp.bfloat16)

    copy = jax.jit(loop(lambda _, data: data + 1, copies))
    # Each trip depends on the sum of the last, so that none is optimised away.
    read = jax.jit(loop(lambda _, total, data: (data ^ total).sum(), reads))
    multiply = jax.jit(loop(lambda _, product, square: product @ square, products))
    seconds = in_turn(
        {
            "copy": lambda: copy(data),
            "read": lambda: read(jnp.int32(1), data),
            "multiply": lambda: multiply(matrix, square),
        }
    )
    found = {
        "copy_bytes_per_s": 2 * size * copies / seconds["copy"],
        "read_bytes_per_s": size * reads / seconds["read"],
        "matmul_flops": 2 * side**3 * products / seconds["multiply"],
    }
    section.state(**found)
    section.add(what=f"copy of {size >> 20} MiB, read and written", rate=found["copy_bytes_per_s"] / 1e12, unit="TB/s")
    section.add(what=f"sum of {size >> 20} MiB, read", rate=found["read_bytes_per_s"] / 1e12, unit="TB/s")
    section.add(what=f"bfloat16 product of {side} x {side}", rate=found["matmul_flops"] / 1e12, unit="TFLOP/s")
