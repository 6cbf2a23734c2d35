"""Pages of keys or values: in their own dtype, or int8 with one scale per token and KV head."""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int8, Shaped

QUANT_MAX = 127  # symmetric: without -128, x and -x dequantise to opposite values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantPages:
    """Quantised pages: a row dequantises to `values * scales[..., None]`.

    The first axis of both fields is the page, so a tree map that copies or moves pages handles both. (The fields' type
    is Any because they may also hold abstract arrays and shardings.)

    Attributes:
        values: int8 [num_pages, kv_heads, page_size, head_dim], -127 to 127.
        scales: float32 [num_pages, kv_heads, page_size].
    """

    values: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """[num_pages, kv_heads, page_size, head_dim], as for pages that are not quantised."""
        return self.values.shape

    def read(self, index: Int[Array, "..."]) -> Float[Array, "..."]:
        """Dequantise the pages `index` [...] only: float32 [..., kv_heads, page_size, head_dim]."""
        values, scales = (array.at[index].get(mode="promise_in_bounds") for array in (self.values, self.scales))
        return values.astype(jnp.float32) * scales[..., None]


Pages: TypeAlias = Shaped[Array, "num_pages kv_heads page_size head_dim"] | QuantPages


def storage_dtype(dtype: Any, platform: str) -> np.dtype:
    """The pool's storage dtype: bfloat16 is stored as uint16 on CPUs, everything else as it is.

    Otherwise XLA for CPU converts the whole pool to float32 around every scatter (18 times slower on JAX 0.10.2), which
    its alias check does not detect.
    """
    return jnp.dtype(jnp.uint16) if platform == "cpu" and dtype == jnp.bfloat16 else jnp.dtype(dtype)


def quantise(rows: Float[Array, "*rows head_dim"]) -> tuple[Int8[Array, "*rows head_dim"], Float[Array, "*rows"]]:
    """Quantise symmetrically to int8 values and one float32 scale per row: max|x| / 127.

    A row of zeros gets the scale 0. Results are always finite: the scale is that of the finite values, infinities
    saturate at +-127, and NaN becomes 0. So a token with broken keys or values does not make other tokens' results NaN.
    """
    rows = rows.astype(jnp.float32)
    scales = jnp.where(jnp.isfinite(rows), jnp.abs(rows), 0).max(-1) / QUANT_MAX
    steps = rows / jnp.where(scales > 0, scales, 1)[..., None]
    # Round to nearest, halves away from 0. Pallas kernels call this function and cannot lower jnp.round.
    steps = jnp.sign(steps) * jnp.floor(jnp.abs(steps) + 0.5)
    # A scale may underflow to 0, or be a subnormal that is too coarse for its row: so clip, and store zeros.
    values = jnp.where(jnp.isnan(steps) | (scales == 0)[..., None], 0, jnp.clip(steps, -QUANT_MAX, QUANT_MAX))
    return values.astype(jnp.int8), scales


def write_pages(
    pages: Pages,
    new: Float[Array, "tokens kv_heads head_dim"],
    page: Int[Array, "tokens"],
    offset: Int[Array, "tokens"],
) -> Pages:
    """Write one row of keys (or values) per token, quantised if the pages are; in place if `pages` is donated."""
    if isinstance(pages, QuantPages):
        values, scales = quantise(new)
        return QuantPages(
            values=pages.values.at[page, :, offset].set(values, mode="promise_in_bounds"),
            scales=pages.scales.at[page, :, offset].set(scales, mode="promise_in_bounds"),
        )
    if pages.dtype == jnp.uint16 and new.dtype == jnp.bfloat16:
        new = jax.lax.bitcast_convert_type(new, jnp.uint16)
    return pages.at[page, :, offset].set(new, mode="promise_in_bounds")
