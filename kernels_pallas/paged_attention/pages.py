"""What a page holds: keys or values as they came, or int8 numbers with a scale a token and KV head."""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int8, Shaped

QUANT_MAX = 127  # symmetric: -128 is not used, so that x and -x read back as opposites


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantPages:
    """Quantised pages: a row reads back as `values * scales[..., None]`.

    The scale lies with its page, first axis for first axis, so whoever copies, moves or shares a page by a tree map
    takes both. (The fields are not typed more closely because abstract arrays and shardings stand in them too.)

    Attributes:
        values: int8 [num_pages, kv_heads, page_size, head_dim], -127 to 127.
        scales: float32 [num_pages, kv_heads, page_size].
    """

    values: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """[num_pages, kv_heads, page_size, head_dim], as of pages that are not quantised."""
        return self.values.shape

    def read(self, index: Int[Array, "..."]) -> Float[Array, "..."]:
        """The pages `index` [...], float32 [..., kv_heads, page_size, head_dim]. The others are not touched."""
        values, scales = (array.at[index].get(mode="promise_in_bounds") for array in (self.values, self.scales))
        return values.astype(jnp.float32) * scales[..., None]


Pages: TypeAlias = Shaped[Array, "num_pages kv_heads page_size head_dim"] | QuantPages


def storage_dtype(dtype: Any, platform: str) -> np.dtype:
    """The dtype in which the pool is kept. bfloat16 lies as uint16 on a CPU: XLA for CPU otherwise converts the whole
    pool to float32 around every scatter (18 times slower on JAX 0.10.2), and its alias check does not see it. int8
    lies as int8 everywhere."""
    return jnp.dtype(jnp.uint16) if platform == "cpu" and dtype == jnp.bfloat16 else jnp.dtype(dtype)


def quantise(rows: Float[Array, "*rows head_dim"]) -> tuple[Int8[Array, "*rows head_dim"], Float[Array, "*rows"]]:
    """int8 values and float32 scales, symmetric, one scale a row: max|x| / 127.

    A row of zeros gets scale 0 and reads back as zeros. Nothing that is not finite comes out: the scale is that of the
    finite numbers, infinities saturate at +-127 and NaN becomes 0. What a broken token leaves in
    the cache is wrong, but makes no other token's result NaN.
    """
    rows = rows.astype(jnp.float32)
    scales = jnp.where(jnp.isfinite(rows), jnp.abs(rows), 0).max(-1) / QUANT_MAX
    steps = rows / jnp.where(scales > 0, scales, 1)[..., None]
    # To the nearest, halves away from 0. A Pallas kernel calls this too, which has no rule for jnp.round.
    steps = jnp.sign(steps) * jnp.floor(jnp.abs(steps) + 0.5)
    # A scale may underflow to 0, or be a subnormal too coarse for its row: hence the clip, and the row of zeros.
    values = jnp.where(jnp.isnan(steps) | (scales == 0)[..., None], 0, jnp.clip(steps, -QUANT_MAX, QUANT_MAX))
    return values.astype(jnp.int8), scales


def write_pages(
    pages: Pages,
    new: Float[Array, "tokens kv_heads head_dim"],
    page: Int[Array, "tokens"],
    offset: Int[Array, "tokens"],
) -> Pages:
    """Writes one row of keys (or values) a token, quantised if the pages are. In place, when the caller donates
    `pages`."""
    if isinstance(pages, QuantPages):
        values, scales = quantise(new)
        return QuantPages(
            values=pages.values.at[page, :, offset].set(values, mode="promise_in_bounds"),
            scales=pages.scales.at[page, :, offset].set(scales, mode="promise_in_bounds"),
        )
    if pages.dtype == jnp.uint16 and new.dtype == jnp.bfloat16:
        new = jax.lax.bitcast_convert_type(new, jnp.uint16)
    return pages.at[page, :, offset].set(new, mode="promise_in_bounds")
