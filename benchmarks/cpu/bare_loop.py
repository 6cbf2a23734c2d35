"""The limit of XLA's own operations: a jitted loop without an engine.

The cache is contiguous and has exactly the size of prompt and output, attention is dense over all of it, and everything
is compiled for the exact batch. Prompts of different lengths are padded on the left to the longest, so that all rows
write their next key at the same position. Tokens stay on the device; the host only dispatches.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.worker import serve
from checkpoints.demo_model import default_cache_dir
from checkpoints.reader import Checkpoint
from omni_jax import compat


class BareLoop:
    """A benchmarks.worker.Continuer: Llama or Qwen2, weights as [in, out] or [out, in], float32 or bfloat16."""

    def __init__(self, directory: Path, dtype: str, layout: str):
        compat.use_compilation_cache(default_cache_dir() / "xla-benchmarks")
        checkpoint = Checkpoint(directory)
        self._config, self._dtype, self._layout = checkpoint.config, jnp.dtype(dtype), layout
        self._weights = _load(checkpoint, self._dtype, layout)
        self._compiled = {}

    def describe(self):
        return {"name": f"bare loop [{self._layout}]", "version": f"JAX {jax.__version__}"}

    def open(self, prompts, room):
        longest, rows = max(map(len, prompts)), len(prompts)
        padding = np.asarray([longest - len(prompt) for prompt in prompts], np.int32)
        tokens = np.asarray([[0] * (longest - len(prompt)) + prompt for prompt in prompts], np.int32)
        prefill, self._step = self._compile(rows, longest, longest + room), self._compile(rows, 1, longest + room)
        self._padding = jax.device_put(padding)
        self._cache = tuple(
            jax.device_put(np.zeros(c.shape, c.dtype)) for c in _cache(self._config, rows, longest + room, self._dtype)
        )
        self._position = jax.device_put(np.int32(0))
        self._tokens, self._last = [], jax.device_put(tokens)
        jax.block_until_ready((self._cache, self._last, self._padding))
        begin = time.perf_counter()
        self._advance(prefill)
        self._last.block_until_ready()
        return {"seconds": time.perf_counter() - begin}

    def decode(self, steps):
        begin = time.perf_counter()
        for _ in range(steps):
            self._advance(self._step)
        self._last.block_until_ready()
        return {"seconds": time.perf_counter() - begin}

    def close(self):
        self._cache = ()
        return {"tokens": np.concatenate(self._tokens, axis=1).tolist()}

    def _advance(self, executable):
        self._last, self._position, self._cache = executable(
            self._weights, self._last, self._position, self._padding, self._cache
        )
        self._tokens.append(self._last)

    def _compile(self, rows, count, slots):
        key = (rows, count, slots)
        if key not in self._compiled:

            def shape(*sizes):
                return jax.ShapeDtypeStruct(sizes, jnp.int32)

            weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._weights)
            function = _forward(self._config, self._dtype, self._layout)
            cache = _cache(self._config, rows, slots, self._dtype)
            lowered = jax.jit(function, donate_argnums=(4,)).lower(
                weights, shape(rows, count), shape(), shape(rows), cache
            )
            self._compiled[key] = lowered.compile()
        return self._compiled[key]


def _load(checkpoint: Checkpoint, dtype, layout: str):
    def array(*names):
        return jax.device_put(np.concatenate([checkpoint.read(name) for name in names]).astype(dtype))

    def matrix(*names):
        stacked = np.concatenate([checkpoint.read(name) for name in names]).astype(dtype)
        return jax.device_put(np.ascontiguousarray(stacked.T) if layout == "in, out" else stacked)

    layers = []
    for i in range(checkpoint.config["num_hidden_layers"]):
        here = f"model.layers.{i}."
        attention = here + "self_attn."
        layer = {
            "norm": array(here + "input_layernorm.weight"),
            "qkv": matrix(*(f"{attention}{p}_proj.weight" for p in "qkv")),
            "out": matrix(attention + "o_proj.weight"),
            "post_norm": array(here + "post_attention_layernorm.weight"),
            "gate_up": matrix(here + "mlp.gate_proj.weight", here + "mlp.up_proj.weight"),
            "down": matrix(here + "mlp.down_proj.weight"),
        }
        if attention + "q_proj.bias" in checkpoint.tensors:
            layer["qkv_bias"] = array(*(f"{attention}{p}_proj.bias" for p in "qkv"))
        layers.append(layer)
    return {"embed": array("model.embed_tokens.weight"), "norm": array("model.norm.weight"), "layers": layers}


def _sizes(config):
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return heads, config["num_key_value_heads"], config.get("head_dim") or hidden // heads


def _cache(config, rows, slots, dtype):
    _, kv_heads, head_dim = _sizes(config)
    one = jax.ShapeDtypeStruct((rows, kv_heads, slots, head_dim), dtype)
    return (one,) * (2 * config["num_hidden_layers"])


def _forward(config, dtype, layout):
    """Return a function (weights, tokens [rows, count], position, padding [rows], cache) -> (token [rows, 1], next
    position, cache)."""
    heads, kv_heads, head_dim = _sizes(config)
    group, eps = heads // kv_heads, config["rms_norm_eps"]
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)

    def dot(x, weight, out_in):
        """Multiply [tokens, in] by a matrix, in float32. One row of bfloat16 is computed as two, which is faster."""
        padded = jnp.concatenate([x, x]) if dtype == jnp.bfloat16 and x.shape[0] == 1 else x
        contract = 1 if out_in else 0
        out = lax.dot_general(padded, weight, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32)
        return out[: x.shape[0]]

    def project(x, weight):
        return dot(x, weight, layout == "out, in").astype(dtype)

    def norm(x, weight):
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)).astype(dtype) * weight

    def rotate(x, cos, sin):
        first, second = jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(dtype)

    def attention(x, layer, cos, sin, position, visible, keys, values):
        rows, count = cos.shape[:2]
        qkv = project(x, layer["qkv"])
        if "qkv_bias" in layer:
            qkv = qkv + layer["qkv_bias"]
        qkv = qkv.reshape(rows, count, -1, head_dim)
        query, key, value = jnp.split(qkv, [heads, heads + kv_heads], 2)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        keys = lax.dynamic_update_slice(keys, key.transpose(0, 2, 1, 3), (0, 0, position, 0))
        values = lax.dynamic_update_slice(values, value.transpose(0, 2, 1, 3), (0, 0, position, 0))
        grouped = query.reshape(rows, count, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
        grouped = grouped.reshape(rows, kv_heads, count * group, head_dim)
        scores = jnp.einsum("bkqd,bksd->bkqs", grouped, keys, preferred_element_type=jnp.float32) * head_dim**-0.5
        scores = jnp.where(jnp.repeat(visible, group, axis=1)[:, None], scores, -1e30)
        chances = jax.nn.softmax(scores, -1).astype(dtype)
        mixed = jnp.einsum("bkqs,bksd->bkqd", chances, values, preferred_element_type=jnp.float32).astype(dtype)
        mixed = mixed.reshape(rows, kv_heads, count, group, head_dim).transpose(0, 2, 1, 3, 4)
        return project(mixed.reshape(rows * count, heads * head_dim), layer["out"]), keys, values

    def run(weights, tokens, position, padding, cache):
        rows, count = tokens.shape
        slots = cache[0].shape[2]
        place = position + jnp.arange(count)
        angle = jnp.maximum(place[None, :] - padding[:, None], 0)[..., None] * jnp.asarray(frequencies, jnp.float32)
        cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
        slot = jnp.arange(slots)
        visible = (slot[None, None, :] >= padding[:, None, None]) & (slot[None, None, :] <= place[None, :, None])
        x = weights["embed"][tokens.reshape(-1)]
        cache = list(cache)
        for i, layer in enumerate(weights["layers"]):
            mixed, cache[2 * i], cache[2 * i + 1] = attention(
                norm(x, layer["norm"]), layer, cos, sin, position, visible, cache[2 * i], cache[2 * i + 1]
            )
            x = x + mixed
            gate, up = jnp.split(project(norm(x, layer["post_norm"]), layer["gate_up"]), 2, -1)
            x = x + project(jax.nn.silu(gate) * up, layer["down"])
        last = norm(x.reshape(rows, count, -1)[:, -1], weights["norm"])
        token = jnp.argmax(dot(last, weights["embed"], True), -1).astype(jnp.int32)
        return token[:, None], position + count, tuple(cache)

    return run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="worker of benchmarks.cpu")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--layout", choices=("in, out", "out, in"), required=True)
    args = parser.parse_args()
    serve(f"bare loop [{args.layout}]", lambda: BareLoop(args.directory, args.dtype, args.layout))
