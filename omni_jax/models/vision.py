"""The vision tower of Qwen2-VL and Qwen2.5-VL: patches to features of the text's width.

The tower runs in slices of layers, so it has three modules: PatchEmbed, Block (`depth` of them) and Merger. All take
patches in the order of `vision_layout.layout`, one image after another; slots with first == last are padding. All
matrices are stored [out, in]: a call has hundreds of rows, and for that many rows the CPU's matrix product is slightly
faster with this layout, unlike for the few rows of a decode step.

On a device of a mesh, parameters hold the device's part of the heads or of the inner width. Hidden states are whole.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from kernels_pallas.packed_attention import packed_attention
from omni_jax.models.axis import ONE_DEVICE, ModelAxis
from omni_jax.models.config import VisionConfig
from omni_jax.models.decoder import RMSNorm, project
from omni_jax.models.rope import rotate
from omni_jax.models.sources import Source
from omni_jax.models.vision_layout import longest_window

NORM_EPS = 1e-6
THETA = 10000.0


class PatchBatch(NamedTuple):
    """The patches' places in a call: `VisionLayout` on the device. Padding has first == last in both ranges.

    A tuple, because JAX also builds it with values that are not arrays, which fail a dataclass's shape checks.

    Attributes:
        positions: row and column of each patch in its image.
        first: first slot of the patch's image.
        last: the slot after the last one of its image.
        window_first: first slot of its window; None if the model has no windows.
        window_last: the slot after the last one of its window; None if the model has no windows.
    """

    positions: Int[Array, "n 2"]
    first: Int[Array, "n"]
    last: Int[Array, "n"]
    window_first: Int[Array, "n"] | None = None
    window_last: Int[Array, "n"] | None = None


def rotary_2d(
    config: VisionConfig, positions: Int[Array, "n 2"]
) -> tuple[Float[Array, "n 1 half"], Float[Array, "n 1 half"]]:
    """Cosines and sines for `rope.rotate`, in float32.

    The first half of a head's pairs rotates with the row, the second half with the column, at the same speeds.
    """
    pairs = config.hidden_size // config.num_heads // 4
    speeds = THETA ** -(np.arange(pairs) / pairs)
    angle = positions.astype(jnp.float32)[:, :, None] * jnp.asarray(speeds, jnp.float32)[None, None, :]
    angle = angle.reshape(positions.shape[0], 1, 2 * pairs)
    return jnp.cos(angle), jnp.sin(angle)


class LayerNorm(nnx.Module):
    """Layer norm over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float, dtype):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.bias = nnx.Param(jnp.zeros((size,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "n size"]) -> Float[Array, "n size"]:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        scaled = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.eps)
        weight, bias = (p[...].astype(jnp.float32)[None, :] for p in (self.weight, self.bias))
        return (scaled * weight + bias).astype(x.dtype)


def _norm(config: VisionConfig, dtype) -> RMSNorm | LayerNorm:
    return (RMSNorm if config.rms_norm else LayerNorm)(config.hidden_size, NORM_EPS, dtype)


class Linear(nnx.Module):
    """A matrix [*outputs, *inputs] and a bias [*outputs]. Axes that a mesh shards are separate axes."""

    def __init__(self, inputs: tuple[int, ...], outputs: tuple[int, ...], dtype):
        self.weight = nnx.Param(jnp.zeros((*outputs, *inputs), dtype))
        self.bias = nnx.Param(jnp.zeros(outputs, dtype))
        self.width = math.prod(inputs)

    def __call__(self, x: Float[Array, "n in"], axis: ModelAxis) -> Float[Array, "n ..."]:
        """This device's outputs [n, *outputs]. If it holds only a part of the inputs, products are all-reduced."""
        bias = self.bias[...]
        y = project(x, self.weight[...].reshape(bias.size, -1), out_in=True)
        if x.shape[1] < self.width:
            y = axis.sum(y)
        return y.reshape(x.shape[0], *bias.shape) + bias[None]


def _apply_in_float32(function, x):
    return function(x.astype(jnp.float32)).astype(x.dtype)


class PatchEmbed(nnx.Module):
    """Pixels to hidden states.

    The checkpoint's convolution has a stride equal to its kernel, so it is a matrix product over each patch: its weight
    [hidden, channels, frames, p, p] becomes [hidden, channels * frames * p * p].
    """

    def __init__(self, config: VisionConfig, dtype):
        size = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self.weight = nnx.Param(jnp.zeros((config.hidden_size, size), dtype))

    def __call__(
        self,
        patches: UInt8[Array, "n channels frames p p"],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        rescale_factor: float,
    ) -> Float[Array, "n hidden"]:
        """Normalise (pixel * rescale_factor - mean) / std by channel in float32, then project in the weights' dtype."""
        if not len(mean) == len(std) == patches.shape[1]:
            raise ValueError(
                f"mean and std need one value for each of the {patches.shape[1]} channels, got {mean} and {std}"
            )
        shift, scale = (jnp.asarray(x, jnp.float32).reshape(1, -1, 1, 1, 1) for x in (mean, std))
        pixels = (patches.astype(jnp.float32) * rescale_factor - shift) / scale
        weight = self.weight[...]
        return project(pixels.astype(weight.dtype).reshape(patches.shape[0], -1), weight, out_in=True)


class Attention(nnx.Module):
    """Bidirectional attention among the patches of an image or of a window."""

    def __init__(self, config: VisionConfig, dtype):
        heads, head_dim = config.num_heads, config.hidden_size // config.num_heads
        self.scale = head_dim**-0.5
        self.longest = longest_window(config)
        self.qkv = Linear((config.hidden_size,), (3, heads, head_dim), dtype)
        self.out = Linear((heads, head_dim), (config.hidden_size,), dtype)

    def __call__(self, x, cos, sin, batch: PatchBatch, full: bool, axis: ModelAxis):
        qkv = self.qkv(x, axis)
        query, key, value = (qkv[:, i] for i in range(3))
        first, last = (batch.first, batch.last) if full else (batch.window_first, batch.window_last)
        if first is None or last is None:
            raise ValueError("full=False needs window_first and window_last in the batch, got None")
        attended = packed_attention(
            rotate(query, cos, sin),
            rotate(key, cos, sin),
            value,
            first,
            last,
            scale=self.scale,
            longest=None if full else self.longest,
        )
        return self.out(attended.reshape(x.shape[0], -1), axis)


class QuickMLP(nnx.Module):
    """Two matrices around x * sigmoid(1.702 x), an approximation of GELU (Qwen2-VL)."""

    def __init__(self, config: VisionConfig, dtype):
        self.fc1 = Linear((config.hidden_size,), (config.intermediate_size,), dtype)
        self.fc2 = Linear((config.intermediate_size,), (config.hidden_size,), dtype)

    def __call__(self, x, axis: ModelAxis):
        return self.fc2(_apply_in_float32(lambda y: y * jax.nn.sigmoid(1.702 * y), self.fc1(x, axis)), axis)


class GatedMLP(nnx.Module):
    """SwiGLU with biases (Qwen2.5-VL)."""

    def __init__(self, config: VisionConfig, dtype):
        self.gate_up = Linear((config.hidden_size,), (2, config.intermediate_size), dtype)
        self.down = Linear((config.intermediate_size,), (config.hidden_size,), dtype)

    def __call__(self, x, axis: ModelAxis):
        gate_up = self.gate_up(x, axis)
        return self.down(_apply_in_float32(jax.nn.silu, gate_up[:, 0]) * gate_up[:, 1], axis)


class Block(nnx.Module):
    """One layer of the tower, with pre-norms and residuals. Parameter shapes are the same in all layers."""

    def __init__(self, config: VisionConfig, dtype):
        self.norm1 = _norm(config, dtype)
        self.attention = Attention(config, dtype)
        self.norm2 = _norm(config, dtype)
        self.mlp = (GatedMLP if config.hidden_act == "silu" else QuickMLP)(config, dtype)

    def __call__(
        self,
        x: Float[Array, "n hidden"],
        cos: Float[Array, "n 1 half"],
        sin: Float[Array, "n 1 half"],
        batch: PatchBatch,
        *,
        full: bool,
        axis: ModelAxis = ONE_DEVICE,
    ) -> Float[Array, "n hidden"]:
        """Apply the layer. With `full`, patches attend to their image instead of their window (`attends_fully`)."""
        with jax.named_scope("vision_attention"):
            x = x + self.attention(self.norm1(x), cos, sin, batch, full, axis)
        with jax.named_scope("vision_mlp"):
            return x + self.mlp(self.norm2(x), axis)


class Merger(nnx.Module):
    """The patches of each merge block, in adjacent slots, to one feature."""

    def __init__(self, config: VisionConfig, dtype):
        self.width = config.hidden_size * config.spatial_merge_size**2
        self.norm = _norm(config, dtype)
        self.fc1 = Linear((self.width,), (self.width,), dtype)
        self.fc2 = Linear((self.width,), (config.out_hidden_size,), dtype)

    def __call__(
        self, x: Float[Array, "n hidden"], axis: ModelAxis = ONE_DEVICE
    ) -> Float[Array, "features out_hidden"]:
        merged = self.fc1(self.norm(x).reshape(-1, self.width), axis)
        return self.fc2(_apply_in_float32(lambda y: jax.nn.gelu(y, approximate=False), merged), axis)


def attends_fully(config: VisionConfig) -> tuple[bool, ...]:
    """For each layer, whether it attends to the whole image."""
    windows = config.window_size is not None
    return tuple(not windows or i in config.full_attention_layers for i in range(config.depth))


def weight_sources(config: VisionConfig) -> dict[str, Source]:
    """The weight map: the source of each parameter, by its path.

    Paths begin with the module: `patch_embed.`, `blocks.{i}.` or `merger.`.
    """
    heads = config.num_heads

    def linear(path: str, *names: str, output_shape: tuple[int, ...] = ()) -> dict[str, Source]:
        output_shapes = (output_shape,) * len(names) if output_shape else ()
        return {
            path + part: Source(tensors=tuple(name + part for name in names), output_shapes=output_shapes)
            for part in (".weight", ".bias")
        }

    def norm(path: str, name: str) -> dict[str, Source]:
        parts = (".weight",) if config.rms_norm else (".weight", ".bias")
        return {path + part: Source(tensors=(name + part,)) for part in parts}

    sources = {"patch_embed.weight": Source(tensors=("visual.patch_embed.proj.weight",))}
    for i in range(config.depth):
        path, name = f"blocks.{i}.", f"visual.blocks.{i}."
        mlp = name + "mlp."
        sources |= norm(path + "norm1", name + "norm1") | norm(path + "norm2", name + "norm2")
        qkv_shape = (3, heads, config.hidden_size // heads)
        sources |= linear(path + "attention.qkv", name + "attn.qkv", output_shape=qkv_shape)
        sources |= linear(path + "attention.out", name + "attn.proj")
        if config.hidden_act == "silu":
            gate_up = (mlp + "gate_proj", mlp + "up_proj")
            sources |= linear(path + "mlp.gate_up", *gate_up, output_shape=(1, config.intermediate_size))
            sources |= linear(path + "mlp.down", mlp + "down_proj")
        else:
            sources |= linear(path + "mlp.fc1", mlp + "fc1") | linear(path + "mlp.fc2", mlp + "fc2")
    sources |= norm("merger.norm", "visual.merger.ln_q")
    return sources | linear("merger.fc1", "visual.merger.mlp.0") | linear("merger.fc2", "visual.merger.mlp.2")
