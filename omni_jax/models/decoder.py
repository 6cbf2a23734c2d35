"""The text decoder of Llama, Qwen2, Qwen2.5 and Qwen3: one file, the differences are configuration.

The module computes hidden states of a flat run of tokens. It knows nothing of pages: attention is a function it is
given. Matrices are stored as the CPU's matrix product likes them best (docs/performance.md, "Layout of weights"):
those that widen (query-key-value, gate-up) as [in, out], those that narrow (output, down) and the vocabulary as [out,
in].

The axes of outputs are cut so that any device of a mesh can hold a whole part: query-key-value by KV heads, each with
its queries, its key and its value; gate-up by the inner width, each with its gate and its up. On a device that has a
part, the module computes with that part and meets the others twice a layer (`axis`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from omni_jax.models.axis import ALONE, ModelAxis
from omni_jax.models.config import ModelConfig
from omni_jax.models.rope import rotary, rotate
from omni_jax.models.sources import Source

# (layer, query [T, heads, head_dim], key [T, kv_heads, head_dim], value likewise) -> [T, heads, head_dim]
Attend = Callable[[int, Array, Array, Array], Array]


def project(x: Float[Array, "tokens in"], weight: Array, *, out_in: bool) -> Float[Array, "tokens out"]:
    """x times a matrix stored [in, out], or [out, in] with `out_in`. Sums in float32, result in x's dtype."""
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
        group = heads // kv_heads  # the queries of a KV head; its key and its value lie behind them
        self.qkv = nnx.Param(jnp.zeros((config.hidden_size, kv_heads, group + 2, head_dim), dtype))
        self.qkv_bias = nnx.Param(jnp.zeros((kv_heads, group + 2, head_dim), dtype)) if config.qkv_bias else None
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.out = nnx.Param(jnp.zeros((config.hidden_size, heads * head_dim), dtype))

    def __call__(self, x, cos, sin, attend, axis):
        tokens, weight = x.shape[0], self.qkv[...]
        group, head_dim = weight.shape[2] - 2, weight.shape[3]
        qkv = project(x, weight.reshape(x.shape[1], -1), out_in=False).reshape(tokens, *weight.shape[1:])
        if self.qkv_bias is not None:
            qkv = qkv + self.qkv_bias[...][None]
        query = qkv[:, :, :group].reshape(tokens, -1, head_dim)
        key, value = qkv[:, :, -2], qkv[:, :, -1]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        attended = attend(rotate(query, cos, sin), rotate(key, cos, sin), value)
        return axis.sum(project(attended.reshape(tokens, -1), self.out[...], out_in=True))


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig, dtype):
        self.gate_up = nnx.Param(jnp.zeros((config.hidden_size, 2, config.intermediate_size), dtype))
        self.down = nnx.Param(jnp.zeros((config.hidden_size, config.intermediate_size), dtype))

    def __call__(self, x, axis):
        gate_up = project(x, self.gate_up[...].reshape(x.shape[1], -1), out_in=False)
        gate, up = jnp.split(gate_up, 2, axis=-1)
        return axis.sum(project(jax.nn.silu(gate) * up, self.down[...], out_in=True))


class Layer(nnx.Module):
    """One decoder layer with pre-norms and residuals."""

    def __init__(self, config: ModelConfig, dtype):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, dtype)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype)

    def __call__(self, x, cos, sin, attend, axis):
        with jax.named_scope("attention"):
            x = x + self.attention(self.input_norm(x), cos, sin, attend, axis)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.post_norm(x), axis)


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
        *,
        axis: ModelAxis = ALONE,
    ) -> Float[Array, "tokens hidden"]:
        """Hidden states of `tokens`. `positions` has three rows with M-RoPE; see `embedded` for features. With `axis`
        the parameters are one device's parts, and `attend` is called with its heads; the result is whole."""
        cos, sin = rotary(self.config.rope, positions)
        x = self.embedded(tokens, features, feature_row, axis=axis)
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, lambda *qkv, i=i: attend(i, *qkv), axis)
        return self.norm(x)

    def embedded(
        self,
        tokens: Int[Array, "tokens"],
        features: Float[Array, "rows hidden"] | None = None,
        feature_row: Int[Array, "tokens"] | None = None,
        *,
        axis: ModelAxis = ALONE,
    ) -> Float[Array, "tokens hidden"]:
        """What the layers begin with: embeddings, and where feature_row is above 0, that row of `features` instead."""
        embed = self.embed[...]
        x = axis.sum(embed.at[axis.local(tokens, embed.shape[0])].get(mode="fill", fill_value=0))
        if features is None or feature_row is None:
            return x
        return jnp.where((feature_row > 0)[:, None], features.at[feature_row].get(mode="clip"), x)


def weight_sources(config: ModelConfig) -> dict[str, Source]:
    """The weight map, as data: parameter path -> where it comes from."""
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    one = (kv_heads // config.kv_repeats, 1, head_dim)  # a key or a value of each KV head that the checkpoint has
    qkv = ((kv_heads, heads // kv_heads, head_dim), one, one)
    gate_up = ((1, config.intermediate_size),) * 2
    sources = {
        "embed": Source(tensors=("model.embed_tokens.weight",)),
        "norm.weight": Source(tensors=("model.norm.weight",)),
    }
    if not config.tie_word_embeddings:
        sources["head"] = Source(tensors=("lm_head.weight",))
    for i in range(config.num_hidden_layers):
        here, there = f"layers.{i}.", f"model.layers.{i}."
        attention, mlp = there + "self_attn.", there + "mlp."
        weights, biases = (tuple(f"{attention}{p}_proj.{kind}" for p in "qkv") for kind in ("weight", "bias"))
        sources |= {
            here + "input_norm.weight": Source(tensors=(there + "input_layernorm.weight",)),
            here + "post_norm.weight": Source(tensors=(there + "post_attention_layernorm.weight",)),
            here + "attention.qkv": Source(tensors=weights, transposed=True, cuts=qkv, axis=1),
            here + "attention.out": Source(tensors=(attention + "o_proj.weight",)),
            here + "mlp.gate_up": Source(
                tensors=(mlp + "gate_proj.weight", mlp + "up_proj.weight"), transposed=True, cuts=gate_up
            ),
            here + "mlp.down": Source(tensors=(mlp + "down_proj.weight",)),
        }
        if config.qkv_bias:
            sources[here + "attention.qkv_bias"] = Source(tensors=biases, cuts=qkv, axis=1)
        if config.qk_norm:
            sources[here + "attention.q_norm.weight"] = Source(tensors=(attention + "q_norm.weight",))
            sources[here + "attention.k_norm.weight"] = Source(tensors=(attention + "k_norm.weight",))
    return sources
