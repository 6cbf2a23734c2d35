"""Writing of new keys and values into their pages on NVIDIA GPUs, in place, in one launch (Pallas, Triton backend)."""

import jax
import jax.numpy as jnp

from kernels_pallas.paged_attention.pages import QuantPages, quantise
from kernels_pallas.paged_attention.triton_common import index_tile, unsupported
from kernels_pallas.pallas import pl, triton

VALUES_PER_WARP = 256  # 8 per thread: one access of 16 bytes in bfloat16


def write_kv(key_pages, value_pages, key, value, page, offset, *, interpret: bool = False):
    """See `api.write_kv`.

    Args:
        interpret: run the kernel on any device, slowly, for tests.

    Raises:
        ValueError: the kernel does not support the shapes or dtypes.
    """
    if (reason := unsupported(key, key_pages, value_pages)) is not None:
        raise ValueError(f"write_kv: {reason}")
    tokens, kv_heads, head_dim = key.shape
    pages = key_pages, value_pages
    leaves = len(jax.tree.leaves(pages))
    warps = 1 << max(0, (kv_heads * head_dim // VALUES_PER_WARP).bit_length() - 1)
    return pl.pallas_call(
        _kernel,
        grid=(tokens,),
        out_shape=jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), pages),
        input_output_aliases={leaf: leaf for leaf in range(leaves)},
        compiler_params=triton.CompilerParams(num_warps=min(warps, 8), num_stages=1),
        interpret=interpret,
        name="paged_write",
    )(pages, key, value, page, offset)


def _kernel(_, key, value, page, offset, key_pages, value_pages):
    """A program of the grid (token): writes the token's keys of all heads, then its values."""
    token = pl.program_id(0)
    at_page, at_offset = page[token], offset[token]
    heads, head_dim = key.shape[1:]
    head = jnp.arange(1 << (heads - 1).bit_length())
    wide_head, column = index_tile(head, jnp.arange(head_dim))
    for new, pages in ((key, key_pages), (value, value_pages)):
        rows = triton.load(new.at[token, wide_head, column], mask=wide_head < heads, other=0)
        numbers = pages
        if isinstance(pages, QuantPages):
            rows, scales = quantise(rows)
            triton.store(pages.scales.at[at_page, head, at_offset], scales, mask=head < heads)
            numbers = pages.values
        triton.store(numbers.at[at_page, wide_head, at_offset, column], rows, mask=wide_head < heads)
