"""What lives on the device between steps: the KV pool, block tables, last tokens and sampling state, by slot.

Slot `max_num_seqs` is nobody's: padding rows use it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped, UInt

from kernels_pallas.paged_attention import storage_dtype
from omni_jax.models import ModelConfig
from omni_jax.requests.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

# Columns of SlotState.numbers.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
NEUTRAL = (1.0, 1.0, 0.0, 1.0, 0.0, 0.0)

Pool = tuple[Shaped[Array, "num_pages kv_heads page_size head_dim"], ...]  # keys and values of layer 0, of layer 1, …


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotState:
    """Sampling state, written once when a sequence gets its slot.

    Attributes:
        key: random key of the continuation.
        numbers: temperature, top_p, min_p and penalties, see the column names above.
        top_k: 0 for no limit.
        bias_ids: logit_bias, unused places hold the vocabulary's size.
        bias_values: what is added.
        stop_ids: ids that min_tokens suppresses, unused places hold the vocabulary's size.
    """

    key: UInt[Array, "slots 2"]
    numbers: Float[Array, "slots 6"]
    top_k: Int[Array, "slots"]
    bias_ids: Int[Array, "slots pairs"]
    bias_values: Float[Array, "slots pairs"]
    stop_ids: Int[Array, "slots ids"]


def abstract_pool(config: ModelConfig, *, num_pages: int, block_size: int, dtype, platform: str):
    """Shapes of the pool; see `round_pages` for the number of pages."""
    shape = (num_pages, config.num_key_value_heads, block_size, config.head_dim)
    page = jax.ShapeDtypeStruct(shape, storage_dtype(jnp.dtype(dtype), platform))
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


def block_bytes(config: ModelConfig, *, block_size: int, dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    row = config.num_key_value_heads * config.head_dim * jnp.dtype(dtype).itemsize
    return 2 * config.num_hidden_layers * block_size * row


def round_pages(pages: int, *, up: bool = False) -> int:
    """The next lower (or higher) number with five significant bits. The page count is part of every executable's shape,
    so free memory that differs a little must not change it: the compilation cache would miss."""
    step = 1 << max(0, pages.bit_length() - 5)
    return -(-pages // step) * step if up else pages // step * step
