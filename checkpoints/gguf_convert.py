"""Conversion of a GGUF file to a Hugging Face directory: streamed weights, config and tokenizer from the metadata.

GGUF is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the `gguf` package parses and
dequantises it. ARCHITECTURES holds what differs by architecture; gguf_tokenizer.py converts the tokenizer.
"""

import dataclasses
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from checkpoints.errors import CheckpointError
from checkpoints.gguf_tokenizer import Metadata, eos_ids, token_id, tokenizer_config, tokenizer_json
from checkpoints.new_directory import new_directory

Progress = Callable[[str, int, int], None]  # called with name, bytes done, total bytes

_CHUNK_BYTES = 16 << 20  # dequantised float32 values in memory at once
_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Properties of one GGUF architecture.

    Attributes:
        class_name: the Hugging Face architecture.
        interleaved_rope: the rows of q and k are stored in the order of rotary pairs (0, 1), (2, 3), ... of a head and
            must be reordered for pairs (0, d/2), (1, d/2 + 1), ... Text from wrongly ordered rows still looks fluent.
        qkv_bias: q, k and v have biases.
        qk_norm: q and k heads are normalised.
    """

    class_name: str
    interleaved_rope: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False


ARCHITECTURES = {
    "llama": Architecture(class_name="LlamaForCausalLM", interleaved_rope=True),
    "qwen2": Architecture(class_name="Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Architecture(class_name="Qwen3ForCausalLM", qk_norm=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Target:
    """A tensor to write: its name and shape, and the GGUF tensor it is converted from."""

    name: str
    shape: tuple[int, ...]
    source: str
    interleaved: bool = False


def convert_gguf(
    source: Path | str, out: Path | str, *, dtype: str = "float32", progress: Progress | None = None
) -> Path:
    """Convert a Llama, Qwen2 or Qwen3 GGUF file of any quantisation.

    Args:
        source: the GGUF file.
        out: the directory to create; it appears only when it is complete.
        dtype: dtype of the written weights: "float32" keeps the dequantised values exactly, "bfloat16" and
            "float16" halve the size.
        progress: called with (tensor name, bytes done, total bytes) as the weights are written.

    Returns:
        out.

    Raises:
        CheckpointError: the file is damaged, or something in it is not supported.
        FileExistsError: out exists and is not an empty directory.
    """
    source, out = Path(source), Path(out)
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    metadata, tensors = _open(source)
    config = _config(metadata, tensors, dtype)
    targets = _targets(config, ARCHITECTURES[metadata.text("general.architecture")])
    _check_tensors(targets, tensors)

    with new_directory(out) as partial:
        _write_json(partial / "config.json", config)
        _write_json(partial / "generation_config.json", _generation_config(config, metadata))
        _write_json(partial / "tokenizer_config.json", tokenizer_config(metadata, config["max_position_embeddings"]))
        (partial / "tokenizer.json").write_text(tokenizer_json(metadata), encoding="utf-8")
        _write_weights(partial / "model.safetensors", targets, tensors, config["head_dim"], _DTYPES[dtype], progress)
    return out


def _open(source: Path) -> tuple[Metadata, dict[str, ReaderTensor]]:
    if not source.is_file():
        raise CheckpointError(f"{source} is not a file; expected a GGUF file")
    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
        raise CheckpointError(f"{source} is damaged, truncated or not a GGUF file: {error}") from error
    end = max((t.data_offset + t.n_bytes for t in reader.tensors), default=reader.data_offset)
    padded = -(-end // reader.alignment) * reader.alignment  # the last tensor may be padded like the others
    if source.stat().st_size > padded:
        behind = source.stat().st_size - end
        raise CheckpointError(
            f"{source} has {behind:,} bytes after its last tensor: it is damaged, or two files in one"
        )
    return Metadata(reader.fields), {t.name: t for t in reader.tensors}


def _config(metadata: Metadata, tensors: dict[str, ReaderTensor], dtype: str) -> dict:
    """Build config.json; raise CheckpointError for metadata that it cannot express."""
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        raise CheckpointError(f"GGUF architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    for key in ("expert_count", "attention.sliding_window"):
        if metadata.integer(f"{name}.{key}", 0, low=0):
            raise CheckpointError(f"{name}.{key} is {metadata.integer(f'{name}.{key}')}: such models are not supported")
    hidden, heads = metadata.integer(f"{name}.embedding_length"), metadata.integer(f"{name}.attention.head_count")
    head_dim = metadata.integer(f"{name}.attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.integer(f"{name}.{key}", head_dim) != head_dim:
            raise CheckpointError(f"{name}.{key} is {metadata.integer(f'{name}.{key}')}, but head_dim is {head_dim}")
    if "token_embd.weight" not in tensors:
        raise CheckpointError("the file has no tensor token_embd.weight")
    return {
        "architectures": [ARCHITECTURES[name].class_name],
        "model_type": name,
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
        "hidden_size": hidden,
        "intermediate_size": metadata.integer(f"{name}.feed_forward_length"),
        "num_hidden_layers": metadata.integer(f"{name}.block_count", high=1000),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer(f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.integer(f"{name}.context_length", high=2**30),
        "rms_norm_eps": metadata.number(f"{name}.attention.layer_norm_rms_epsilon", low=1e-12, high=1),
        "rope_parameters": _rope_parameters(metadata, name, tensors.get("rope_freqs.weight"), head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": token_id(metadata, "bos"),
        "eos_token_id": token_id(metadata, "eos"),
        "pad_token_id": token_id(metadata, "padding"),
        "dtype": dtype,
    }


def _rope_parameters(metadata: Metadata, name: str, factors: ReaderTensor | None, head_dim: int) -> dict:
    base = metadata.number(f"{name}.rope.freq_base", 10000.0, low=1.001, high=1e12)
    prefix = f"{name}.rope.scaling."
    given = {key.removeprefix(prefix): metadata.value(key) for key in metadata if key.startswith(prefix)}
    kind = given.pop("type", "none")
    given.pop("finetuned", None)  # does not change the model
    if factors is not None:
        return _llama3_rope(base, dequantize(factors.data, factors.tensor_type).reshape(-1), head_dim)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": base}
    names = {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    if kind != "yarn" or not given.keys() <= names.keys() or not {"factor", "original_context_length"} <= given.keys():
        raise CheckpointError(
            f"rope scaling {kind!r} with {', '.join(sorted(given)) or 'no parameters'} is not supported; supported: "
            "none, Llama 3's rope_freqs.weight, and yarn with factor, original_context_length, yarn_beta_*"
        )
    return {"rope_type": "yarn", "rope_theta": base} | {names[key]: value for key, value in given.items()}


def _llama3_rope(base: float, factors: np.ndarray, head_dim: int) -> dict:
    """Recover the parameters of Llama 3's RoPE scaling from the divisor of each frequency, which is all GGUF stores.

    Every published Llama 3 has low_freq_factor 1, high_freq_factor 4 and 8,192 original positions; only `factor`
    differs, and it is the largest divisor. Other divisors raise CheckpointError.
    """
    parameters = {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    wavelengths = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((8192 / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)  # 1 keeps a frequency, 0 divides it by factor
    expected = 1.0 / ((1.0 - smooth) / parameters["factor"] + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise CheckpointError(
            "rope_freqs.weight does not hold Llama 3's scaling (low_freq_factor 1, high_freq_factor 4, 8192 original "
            "positions), the only one supported"
        )
    return parameters


def _targets(config: dict, architecture: Architecture) -> list[_Target]:
    """All tensors of the model, in layer order."""
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    interleaved = architecture.interleaved_rope
    # Hugging Face name within a layer, GGUF name within a block, shape, rows interleaved
    layer = [
        ("input_layernorm.weight", "attn_norm.weight", (hidden,), False),
        ("self_attn.q_proj.weight", "attn_q.weight", (q, hidden), interleaved),
        ("self_attn.k_proj.weight", "attn_k.weight", (kv, hidden), interleaved),
        ("self_attn.v_proj.weight", "attn_v.weight", (kv, hidden), False),
        ("self_attn.o_proj.weight", "attn_output.weight", (hidden, q), False),
        ("post_attention_layernorm.weight", "ffn_norm.weight", (hidden,), False),
        ("mlp.gate_proj.weight", "ffn_gate.weight", (ffn, hidden), False),
        ("mlp.up_proj.weight", "ffn_up.weight", (ffn, hidden), False),
        ("mlp.down_proj.weight", "ffn_down.weight", (hidden, ffn), False),
    ]
    if architecture.qkv_bias:
        layer += [(f"self_attn.{x}_proj.bias", f"attn_{x}.bias", (q if x == "q" else kv,), False) for x in "qkv"]
    if architecture.qk_norm:
        layer += [(f"self_attn.{x}_norm.weight", f"attn_{x}_norm.weight", (head_dim,), False) for x in "qk"]
    ends = [
        ("model.embed_tokens.weight", "token_embd.weight", (config["vocab_size"], hidden)),
        ("model.norm.weight", "output_norm.weight", (hidden,)),
    ]
    if not config["tie_word_embeddings"]:
        ends.append(("lm_head.weight", "output.weight", (config["vocab_size"], hidden)))
    return [_Target(name=name, source=source, shape=shape) for name, source, shape in ends] + [
        _Target(name=f"model.layers.{i}.{name}", source=f"blk.{i}.{source}", shape=shape, interleaved=reorder)
        for i in range(config["num_hidden_layers"])
        for name, source, shape, reorder in layer
    ]


def _check_tensors(targets: list[_Target], tensors: dict[str, ReaderTensor]) -> None:
    faults = []
    for target in targets:
        if target.source not in tensors:
            faults.append(f"tensor {target.source} is missing; {target.name} is converted from it")
            continue
        shape = tuple(int(n) for n in reversed(tensors[target.source].shape))  # GGUF lists the last dimension first
        if shape != target.shape:
            faults.append(f"tensor {target.source} has shape {shape}, expected {target.shape} from the metadata")
    known = {target.source for target in targets} | {"rope_freqs.weight"}
    faults += [f"tensor {name} is not supported" for name in tensors if name not in known]
    if faults:
        raise CheckpointError(faults, what="the GGUF file's tensors do not match its architecture:")


def _write_weights(
    file: Path,
    targets: list[_Target],
    tensors: dict[str, ReaderTensor],
    head_dim: int,
    dtype: np.dtype,
    progress: Progress | None,
) -> None:
    """Write a safetensors file (layout: safetensors_header.py), a chunk of rows at a time."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    total = 0
    for target in targets:
        begin, total = total, total + int(np.prod(target.shape)) * dtype.itemsize
        kind = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype.name]
        header[target.name] = {"dtype": kind, "shape": list(target.shape), "data_offsets": [begin, total]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for target in targets:
            for rows in _row_chunks(tensors[target.source], target, head_dim):
                with np.errstate(over="ignore"):
                    cast = np.ascontiguousarray(rows.astype(dtype))
                if dtype == np.float16 and not np.isfinite(cast).all():
                    raise CheckpointError(
                        f"tensor {target.source} has values beyond float16's range (65504): use bfloat16 or float32"
                    )
                done += stream.write(cast.view(np.uint8).data)
                if progress is not None:
                    progress(target.name, done, total)


def _row_chunks(tensor: ReaderTensor, target: _Target, head_dim: int) -> Iterator[np.ndarray]:
    """Yield chunks of a tensor's rows in float32; whole heads if rows are reordered within a head."""
    count = max(1, _CHUNK_BYTES // (4 * target.shape[-1]))
    if target.interleaved:
        count = max(1, count // head_dim) * head_dim
    if len(target.shape) == 1:
        count = target.shape[0]
    data = tensor.data.reshape(target.shape[0], -1) if len(target.shape) == 2 else tensor.data
    for first in range(0, target.shape[0], count):
        try:
            rows = dequantize(data[first : first + count], tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise CheckpointError(
                f"tensor {tensor.name} has type {kind}, which the gguf package cannot read"
            ) from error
        if target.interleaved:  # [heads, pair, half, columns] -> [heads, half, pair, columns]
            rows = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
        yield rows


def _generation_config(config: dict, metadata: Metadata) -> dict:
    return {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": eos_ids(metadata),
        "pad_token_id": config["pad_token_id"],
    }


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
