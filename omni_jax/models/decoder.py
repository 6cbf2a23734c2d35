"""The text decoder of Llama, Qwen2, Qwen2.5 and Qwen3: one file, the differences are configuration.

The module computes hidden states of a flat run of tokens. It knows nothing of pages: attention is a function it is
given. Matrices are stored as the CPU's matrix product likes them best (docs/performance.md, "Layout of weights"):
those that widen (query-key-value, gate-up) as [in, out], those that narrow (output, down) and the vocabulary as [out,
in].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from omni_jax.models.config import ModelConfig
from omni_jax.models.rope import rotary, rotate

# (layer, query [T, heads, head_dim], key [T, kv_heads, head_dim], value likewise) -> [T, heads, head_dim]
Attend = Callable[[int, Array, Array, Array], Array]


def project(x: Float[Array, "tokens in"], weight: Array, *, out_in: bool) -> Float[Array, "tokens out"]:
    """x times a matrix stored [in, out], or [out, in] with `out_in`. Sums in float32, result in x's dtype.

    The barrier keeps XLA for CPU from fusing the product into each of its users: it would compute query, key and
    value, or gate and up, by as many whole products.
    """
    contract = 1 if out_in else 0
    product = lax.dot_general(x, weight, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32)
    return product.astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root mean square norm over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float, dtype):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        wide = x.astype(jnp.float32)
        scaled = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return scaled.astype(x.dtype) * weight


class Attention(nnx.Module):
    """Projections, norms and rotation around the attention function."""

    def __init__(self, config: ModelConfig, dtype):
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        width = (heads + 2 * kv_heads) * head_dim
        self.qkv = nnx.Param(jnp.zeros((config.hidden_size, width), dtype))
        self.qkv_bias = nnx.Param(jnp.zeros((width,), dtype)) if config.qkv_bias else None
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.out = nnx.Param(jnp.zeros((config.hidden_size, heads * head_dim), dtype))

    def __call__(self, x, cos, sin, attend):
        tokens = x.shape[0]
        qkv = project(x, self.qkv[...], out_in=False)
        if self.qkv_bias is not None:
            qkv = qkv + self.qkv_bias[...][None, :]
        query, key, value = jnp.split(
            qkv.reshape(tokens, -1, self.head_dim), [self.heads, self.heads + self.kv_heads], axis=1
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        attended = attend(rotate(query, cos, sin), rotate(key, cos, sin), value)
        return project(attended.reshape(tokens, -1), self.out[...], out_in=True)


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig, dtype):
        self.gate_up = nnx.Param(jnp.zeros((config.hidden_size, 2 * config.intermediate_size), dtype))
        self.down = nnx.Param(jnp.zeros((config.hidden_size, config.intermediate_size), dtype))

    def __call__(self, x):
        gate, up = jnp.split(project(x, self.gate_up[...], out_in=False), 2, axis=-1)
        return project(jax.nn.silu(gate) * up, self.down[...], out_in=True)


class Layer(nnx.Module):
    """One decoder layer with pre-norms and residuals."""

    def __init__(self, config: ModelConfig, dtype):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, dtype)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype)

    def __call__(self, x, cos, sin, attend):
        with jax.named_scope("attention"):
            x = x + self.attention(self.input_norm(x), cos, sin, attend)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.post_norm(x))


class Decoder(nnx.Module):
    """Token ids to normalised hidden states; logits are `hidden @ output_matrix.T`."""

    def __init__(self, config: ModelConfig, dtype):
        self.config = config
        self.embed = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))
        self.layers = nnx.List([Layer(config, dtype) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.head = None if config.tie_word_embeddings else nnx.Param(jnp.zeros_like(self.embed[...]))

    def __call__(
        self,
        tokens: Int[Array, "tokens"],
        positions: Int[Array, "tokens"] | Int[Array, "3 tokens"],
        attend: Attend,
        features: Float[Array, "rows hidden"] | None = None,
        feature_row: Int[Array, "tokens"] | None = None,
    ) -> Float[Array, "tokens hidden"]:
        """Hidden states of `tokens`. `positions` has three rows with M-RoPE; see `embedded` for features."""
        cos, sin = rotary(self.config.rope, positions)
        x = self.embedded(tokens, features, feature_row)
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, lambda *qkv, i=i: attend(i, *qkv))
        return self.norm(x)

    def embedded(
        self,
        tokens: Int[Array, "tokens"],
        features: Float[Array, "rows hidden"] | None = None,
        feature_row: Int[Array, "tokens"] | None = None,
    ) -> Float[Array, "tokens hidden"]:
        """What the layers begin with: embeddings, and where feature_row is above 0, that row of `features` instead."""
        x = self.embed[...].at[tokens].get(mode="clip")
        if features is None or feature_row is None:
            return x
        return jnp.where((feature_row > 0)[:, None], features.at[feature_row].get(mode="clip"), x)


def weight_sources(config: ModelConfig) -> dict[str, tuple[tuple[str, ...], bool]]:
    """The weight map, as data: parameter path -> (tensors of the checkpoint stacked along their output axis,
    transposed?)."""
    sources: dict[str, tuple[tuple[str, ...], bool]] = {
        "embed": (("model.embed_tokens.weight",), False),
        "norm.weight": (("model.norm.weight",), False),
    }
    if not config.tie_word_embeddings:
        sources["head"] = (("lm_head.weight",), False)
    for i in range(config.num_hidden_layers):
        here, there = f"layers.{i}.", f"model.layers.{i}."
        attention = there + "self_attn."
        sources |= {
            here + "input_norm.weight": ((there + "input_layernorm.weight",), False),
            here + "post_norm.weight": ((there + "post_attention_layernorm.weight",), False),
            here + "attention.qkv": (tuple(f"{attention}{p}_proj.weight" for p in "qkv"), True),
            here + "attention.out": ((attention + "o_proj.weight",), False),
            here + "mlp.gate_up": ((there + "mlp.gate_proj.weight", there + "mlp.up_proj.weight"), True),
            here + "mlp.down": ((there + "mlp.down_proj.weight",), False),
        }
        if config.qkv_bias:
            sources[here + "attention.qkv_bias"] = (tuple(f"{attention}{p}_proj.bias" for p in "qkv"), False)
        if config.qk_norm:
            sources[here + "attention.q_norm.weight"] = ((attention + "q_norm.weight",), False)
            sources[here + "attention.k_norm.weight"] = ((attention + "k_norm.weight",), False)
    return sources
