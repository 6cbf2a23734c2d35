"""The text decoder of Llama, Qwen2, Qwen2.5 and Qwen3. The config selects what differs.

The module computes hidden states of a flat sequence of tokens. Attention is a function argument, so the module does not
depend on the layout of the KV cache. Matrices are stored in the layout that the CPU's matrix product computes fastest
(docs/performance.md, "Layout of weights"): widening ones (query-key-value, gate-up) as [in, out], narrowing ones
(output, down) and the vocabulary as [out, in].

Output axes are laid out so that each device of a mesh holds a contiguous part: query-key-value by KV head, each with
its queries, key and value; gate-up by inner column, each with its gate and up. Every layer has two all-reduces over the
devices (`axis`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from omni_jax.models.axis import ONE_DEVICE, ModelAxis
from omni_jax.models.config import ModelConfig
from omni_jax.models.rope import rotary, rotate
from omni_jax.models.sources import Source

# (layer, query [T, heads, head_dim], key [T, kv_heads, head_dim], value likewise) -> [T, heads, head_dim]
Attend = Callable[[int, Array, Array, Array], Array]


def project(x: Float[Array, "tokens in"], weight: Array, *, out_in: bool) -> Float[Array, "tokens out"]:
    """Multiply x by a matrix [in, out], or [out, in] with `out_in`. Sums in float32; the result has x's dtype."""
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
    """Projections, norms and RoPE around the attention function."""

    def __init__(self, config: ModelConfig, dtype):
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        group = heads // kv_heads  # queries per KV head; the head's key and value follow them
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
    """A SwiGLU feed-forward network."""

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
    """The decoder: token ids to normalised hidden states. Logits are `hidden @ output_matrix.T`."""

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
        axis: ModelAxis = ONE_DEVICE,
    ) -> Float[Array, "tokens hidden"]:
        """Compute the hidden states of `tokens`.

        Args:
            tokens: token ids.
            positions: their positions; three rows with M-RoPE.
            attend: the attention function, called with this device's heads.
            features: vision features; see `embed_tokens`.
            feature_row: see `embed_tokens`.
            axis: the devices that share the model. Parameters are one device's parts; the result is whole.
        """
        cos, sin = rotary(self.config.rope, positions)
        x = self.embed_tokens(tokens, features, feature_row, axis=axis)
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, lambda *qkv, i=i: attend(i, *qkv), axis)
        return self.norm(x)

    def embed_tokens(
        self,
        tokens: Int[Array, "tokens"],
        features: Float[Array, "rows hidden"] | None = None,
        feature_row: Int[Array, "tokens"] | None = None,
        *,
        axis: ModelAxis = ONE_DEVICE,
    ) -> Float[Array, "tokens hidden"]:
        """The first layer's input: token embeddings, or row `feature_row` of `features` where it is above 0."""
        embed = self.embed[...]
        x = axis.sum(embed.at[axis.local(tokens, embed.shape[0])].get(mode="fill", fill_value=0))
        if features is None or feature_row is None:
            return x
        return jnp.where((feature_row > 0)[:, None], features.at[feature_row].get(mode="clip"), x)


def weight_sources(config: ModelConfig) -> dict[str, Source]:
    """The weight map: the source of each parameter, by its path."""
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    kv = (kv_heads // config.kv_repeats, 1, head_dim)  # one key or value per KV head of the checkpoint
    qkv = ((kv_heads, heads // kv_heads, head_dim), kv, kv)
    gate_up = ((1, config.intermediate_size),) * 2
    sources = {
        "embed": Source(tensors=("model.embed_tokens.weight",)),
        "norm.weight": Source(tensors=("model.norm.weight",)),
    }
    if not config.tie_word_embeddings:
        sources["head"] = Source(tensors=("lm_head.weight",))
    for i in range(config.num_hidden_layers):
        path, name = f"layers.{i}.", f"model.layers.{i}."
        attention, mlp = name + "self_attn.", name + "mlp."
        weights, biases = (tuple(f"{attention}{p}_proj.{kind}" for p in "qkv") for kind in ("weight", "bias"))
        sources |= {
            path + "input_norm.weight": Source(tensors=(name + "input_layernorm.weight",)),
            path + "post_norm.weight": Source(tensors=(name + "post_attention_layernorm.weight",)),
            path + "attention.qkv": Source(tensors=weights, transposed=True, output_shapes=qkv, axis=1),
            path + "attention.out": Source(tensors=(attention + "o_proj.weight",)),
            path + "mlp.gate_up": Source(
                tensors=(mlp + "gate_proj.weight", mlp + "up_proj.weight"), transposed=True, output_shapes=gate_up
            ),
            path + "mlp.down": Source(tensors=(mlp + "down_proj.weight",)),
        }
        if config.qkv_bias:
            sources[path + "attention.qkv_bias"] = Source(tensors=biases, output_shapes=qkv, axis=1)
        if config.qk_norm:
            sources[path + "attention.q_norm.weight"] = Source(tensors=(attention + "q_norm.weight",))
            sources[path + "attention.k_norm.weight"] = Source(tensors=(attention + "k_norm.weight",))
    return sources
