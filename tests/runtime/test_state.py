"""Shapes, dtypes and bytes of the pool's arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention import QuantPages
from omni_jax.models.config import ModelConfig, model_config
from omni_jax.runtime.state import abstract_pool, block_bytes
from tests import tiny

pytestmark = pytest.mark.smoke

BF16 = jnp.dtype(jnp.bfloat16)


def config(head_dim: int = 64) -> ModelConfig:
    return dataclasses.replace(model_config(tiny.config("llama")), head_dim=head_dim)


def pool(model, **changes):
    given = {"num_pages": 6, "block_size": 16, "dtype": BF16, "platform": "cpu", **changes}
    return abstract_pool(model, **given)


def test_an_int8_pool_is_stored_as_int8_with_scales_on_a_cpu():
    model = config()
    pages = pool(model, kv_cache_dtype="int8")
    assert len(pages) == 2 * model.num_hidden_layers
    assert all(isinstance(page, QuantPages) for page in pages)
    shape = (6, model.num_key_value_heads, 16, 64)
    assert {(page.values.shape, page.values.dtype) for page in pages} == {(shape, jnp.dtype(jnp.int8))}
    assert {(page.scales.shape, page.scales.dtype) for page in pages} == {(shape[:3], jnp.dtype(jnp.float32))}


def test_the_first_axis_of_every_array_is_pages():
    for kind in ("auto", "int8"):
        assert {array.shape[0] for array in jax.tree.leaves(pool(config(), kv_cache_dtype=kind))} == {6}


def test_auto_stores_the_models_dtype():
    assert {array.dtype for array in pool(config())} == {jnp.dtype(jnp.uint16)}
    assert {array.dtype for array in pool(config(), platform="gpu")} == {BF16}
    assert {array.dtype for array in pool(config(), dtype=jnp.float32)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("kind", ["auto", "int8"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_block_bytes_match_the_arrays(kind, dtype):
    model = config()
    arrays = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), pool(model, dtype=dtype, kv_cache_dtype=kind))
    held = sum(array.nbytes for array in jax.tree.leaves(arrays))
    assert held == 6 * block_bytes(model, block_size=16, dtype=dtype, kv_cache_dtype=kind)


@pytest.mark.parametrize(("head_dim", "share"), [(64, 0.531), (128, 0.516)])
def test_int8_with_scales_takes_little_more_than_half_of_bfloat16(head_dim, share):
    model = config(head_dim)
    int8, bfloat16 = (block_bytes(model, block_size=32, dtype=BF16, kv_cache_dtype=k) for k in ("int8", "auto"))
    assert bfloat16 == 2 * model.num_hidden_layers * 32 * model.num_key_value_heads * head_dim * 2
    assert int8 / bfloat16 == pytest.approx(share, abs=5e-4)
    assert int8 / bfloat16 <= 0.54


def test_an_unknown_kv_cache_dtype_is_refused():
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be .* got 'fp8'"):
        pool(config(), kv_cache_dtype="fp8")
