"""State on the device between steps: the KV pool, and by slot the block tables, last tokens and sampling state.

Padding rows use slot `max_num_seqs`, which no sequence gets.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from kernels_pallas.paged_attention import Pages, QuantPages, storage_dtype
from omni_jax.models.config import ModelConfig
from omni_jax.requests.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

# Columns of SlotState.numbers.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
NEUTRAL = (1.0, 1.0, 0.0, 1.0, 0.0, 0.0)

Pool = tuple[Pages, ...]  # keys and values of layer 0, of layer 1, …; the first axis of every array is pages
KVCacheDtype = Literal["auto", "int8"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotState:
    """Sampling state of all slots. A slot is written once, when a sequence gets it.

    Attributes:
        key: random key of the continuation.
        numbers: temperature, top_p, min_p and penalties in the columns named above.
        top_k: number of tokens to keep; 0 for no limit.
        bias_ids: token ids of logit_bias, padded with the vocabulary's size.
        bias_values: the biases.
        stop_ids: token ids that min_tokens suppresses, padded with the vocabulary's size.
    """

    key: UInt[Array, "slots 2"]
    numbers: Float[Array, "slots 6"]
    top_k: Int[Array, "slots"]
    bias_ids: Int[Array, "slots pairs"]
    bias_values: Float[Array, "slots pairs"]
    stop_ids: Int[Array, "slots ids"]


def abstract_pool(
    config: ModelConfig,
    *,
    num_pages: int,
    block_size: int,
    dtype,
    platform: str,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> Any:
    """Shapes of the pool.

    Args:
        num_pages: first axis of every array; see `round_pages`.
        block_size: tokens per page.
        dtype: dtype of the model's keys and values.
        platform: platform of the devices; see `storage_dtype`.
        kv_cache_dtype: "auto" stores keys and values in `dtype`, "int8" as QuantPages.

    Raises:
        ValueError: kv_cache_dtype is unknown.
    """
    shape = (num_pages, config.num_key_value_heads, block_size, config.head_dim)
    if kv_cache_dtype == "int8":
        page = QuantPages(
            values=jax.ShapeDtypeStruct(shape, jnp.int8), scales=jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
        )
    elif kv_cache_dtype == "auto":
        page = jax.ShapeDtypeStruct(shape, storage_dtype(jnp.dtype(dtype), platform))
    else:
        raise ValueError(f"kv_cache_dtype must be 'auto' (the model's dtype) or 'int8', got {kv_cache_dtype!r}")
    return (page,) * (2 * config.num_hidden_layers)


def abstract_slots(slots: int) -> SlotState:
    def array(*shape: int, dtype) -> Any:
        return jax.ShapeDtypeStruct((slots, *shape), dtype)

    return SlotState(
        key=array(2, dtype=jnp.uint32),
        numbers=array(len(NEUTRAL), dtype=jnp.float32),
        top_k=array(dtype=jnp.int32),
        bias_ids=array(MAX_LOGIT_BIAS, dtype=jnp.int32),
        bias_values=array(MAX_LOGIT_BIAS, dtype=jnp.float32),
        stop_ids=array(MAX_STOP_TOKEN_IDS, dtype=jnp.int32),
    )


def block_bytes(config: ModelConfig, *, block_size: int, dtype, kv_cache_dtype: KVCacheDtype = "auto") -> int:
    """Bytes of one block in all layers: keys, values and, for int8, scales. int8 with scales takes
    (head_dim + 4) / (2 * head_dim) of bfloat16's bytes: 0.531 at head_dim 64, 0.516 at 128."""
    block = abstract_pool(
        config, num_pages=1, block_size=block_size, dtype=dtype, platform="cpu", kv_cache_dtype=kv_cache_dtype
    )
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(block))


def round_pages(pages: int, *, up: bool = False) -> int:
    """Round down (or up) to five significant bits. The page count is part of every executable's shape, so a small
    change of free memory must not change it, or the compilation cache would miss."""
    step = 1 << max(0, pages.bit_length() - 5)
    return -(-pages // step) * step if up else pages // step * step
