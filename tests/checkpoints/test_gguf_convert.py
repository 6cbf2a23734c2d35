"""GGUF conversion: files written by the gguf package come back as the weights, config and tokenizer they hold."""

import json
import tracemalloc

import gguf
import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

from checkpoints import gguf_convert
from checkpoints.errors import CheckpointError
from checkpoints.gguf_convert import convert_gguf
from checkpoints.reader import Checkpoint
from tests import tiny
from tests.checkpoints import gguf_files

Q = gguf.GGMLQuantizationType
TEXT = "The capital of France is Zürich? 東京 🙂\n\n  12345 it's <|im_end|> no"


def convert(tmp_path, variant="llama", **how):
    weights = gguf_files.write(tmp_path / "model.gguf", variant, **how)
    return Checkpoint(convert_gguf(tmp_path / "model.gguf", tmp_path / "out")), weights


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen2_untied", "qwen3", "qwen3_tied"])
def test_round_trip(tmp_path, variant):
    checkpoint, weights = convert(tmp_path, variant)
    assert checkpoint.tensors.keys() == weights.keys()
    for name, tensor in weights.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor, err_msg=name)
    expected = tiny.config(variant)
    for key in expected.keys() - {"transformers_version", "use_sliding_window", "attention_bias"}:
        assert checkpoint.config[key] == expected[key], key
    assert checkpoint.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0}
    assert AutoConfig.from_pretrained(tmp_path / "out").architectures == expected["architectures"]


def test_llama_rows_are_reordered_and_qwen_rows_are_not():
    # By hand: in heads of four rows, the file's order is 0 2 1 3, which makes rotary pairs (0, 2), (1, 3) neighbours.
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert gguf_files.permute(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert gguf_convert.ARCHITECTURES["llama"].interleaved_rope
    assert not gguf_convert.ARCHITECTURES["qwen2"].interleaved_rope
    assert not gguf_convert.ARCHITECTURES["qwen3"].interleaved_rope


@pytest.mark.parametrize("kind", [Q.Q4_1, Q.Q8_0, Q.Q4_0, Q.Q5_0, Q.F16, Q.BF16])
def test_quantised_weights_are_dequantised_exactly(tmp_path, kind):
    checkpoint, weights = convert(tmp_path, quantise=kind)
    for name, tensor in weights.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor, err_msg=name)


def test_chunk_size_does_not_change_the_result(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_convert, "_CHUNK_BYTES", 4 * 64 * 20)  # 20 rows: between one and two heads of 16 rows
    checkpoint, weights = convert(tmp_path, quantise=Q.Q8_0)
    for name, tensor in weights.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor, err_msg=name)


def test_memory_does_not_grow_with_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_convert, "_CHUNK_BYTES", 1 << 16)
    weights = gguf_files.write(tmp_path / "model.gguf", "llama", config_overrides={"vocab_size": 65536})
    assert weights["lm_head.weight"].nbytes == 1 << 24
    del weights
    parsed = gguf_convert._open(tmp_path / "model.gguf")  # outside the measurement: the gguf package's memory
    config = gguf_convert._config(*parsed, "float32")
    targets = gguf_convert._targets(config, gguf_convert.ARCHITECTURES["llama"])
    tracemalloc.start()
    gguf_convert._write_weights(tmp_path / "w", targets, parsed[1], config["head_dim"], np.dtype(np.float32), None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(tmp_path, dtype):
    weights = gguf_files.write(tmp_path / "model.gguf", "qwen3")
    checkpoint = Checkpoint(convert_gguf(tmp_path / "model.gguf", tmp_path / "out", dtype=dtype))
    assert checkpoint.config["dtype"] == dtype
    for name, tensor in weights.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor.astype(np.dtype(dtype)))
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got 'int4'"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "other", dtype="int4")


def test_tokenizer_and_chat_template(tmp_path):
    convert(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(TEXT)["input_ids"] == tiny.tokenizer().encode(TEXT).ids
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.chat_template == tiny.CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["it", "'s", "Ġ12345", "Ċ", "Ċ", "no"]),
        ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "Ċ", "Ċ", "no"]),
        ("qwen2", ["it", "'s", "Ġ", "1", "2", "3", "4", "5", "ĊĊ", "no"]),
        ("llama-bpe", ["it", "'s", "Ġ", "123", "45", "ĊĊ", "no"]),
    ],
)
def test_each_pre_tokenizer_splits_text_like_its_model(tmp_path, pre, pieces):
    convert(tmp_path, pre=pre)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out").backend_tokenizer
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("it's 12345\n\nno")] == pieces
    composed = tokenizer.normalizer.normalize_str("e\u0301") if tokenizer.normalizer else "e\u0301"
    assert composed == ("\xe9" if pre == "qwen2" else "e\u0301")


def test_bos_is_added_by_metadata_or_for_llama_3(tmp_path):
    def first(folder, **how):
        convert(tmp_path / folder, **how)
        return AutoTokenizer.from_pretrained(tmp_path / folder / "out")("a")["input_ids"][0]

    for folder in "abcd":
        (tmp_path / folder).mkdir()
    key = "tokenizer.ggml.add_bos_token"
    assert first("a", add={key: True}) == 1
    assert first("b") != 1
    assert first("c", without=(key,)) != 1
    assert first("d", without=(key,), pre="llama-bpe") == 1


def test_added_tokens_are_kept_and_unused_tokens_are_dropped(tmp_path):
    extra = [("<|eot_id|>", 3), ("<tool_call>", 4), ("[PAD514]", 5)]
    checkpoint, _ = convert(tmp_path, "qwen2", pre="qwen2", tokens_extra=extra, config_overrides={"vocab_size": 528})
    words = tiny.tokenizer(528).get_vocab_size()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("a<tool_call><|eot_id|>[PAD514]")["input_ids"]
    assert ids[1:3] == [words + 1, words]
    assert words + 2 not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool_call>[PAD514]"
    assert checkpoint.generation_config["eos_token_id"] == [2, words, 0]
    assert checkpoint.config["vocab_size"] == 528


def llama3_factors(theta, dim, factor):
    """The divisors by the formula of Llama 3.1's own code, one frequency at a time."""
    result = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * theta ** (i / dim)
        if wavelength < 8192 / 4:
            result.append(1.0)
        elif wavelength > 8192 / 1:
            result.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            result.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(result, np.float32)


def test_llama_3_rope_scaling_is_recovered(tmp_path):
    config = {"head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    factors = llama3_factors(500000.0, 64, 32.0)
    assert len(set(factors.tolist())) > 2  # some frequencies lie in the smooth band
    checkpoint, _ = convert(tmp_path, config_overrides=config, extra_tensors={"rope_freqs.weight": factors})
    assert checkpoint.config["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_yarn_rope_scaling_is_converted(tmp_path):
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 256,
    }
    checkpoint, _ = convert(tmp_path, "llama_yarn", add=yarn)
    assert checkpoint.config["rope_parameters"] == tiny.config("llama_yarn")["rope_parameters"]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"add": {"general.architecture": "gemma"}}, "'gemma' is not supported; supported: llama, qwen2"),
        ({"add": {"tokenizer.ggml.model": "llama"}}, "tokenizer.ggml.model 'llama' is not supported"),
        ({"pre": "deepseek-llm"}, "'deepseek-llm' is not supported; supported: gpt-2, smollm, qwen2, llama-bpe"),
        ({"add": {"llama.expert_count": 8}}, "llama.expert_count is 8"),
        ({"add": {"llama.rope.dimension_count": 8}}, "llama.rope.dimension_count is 8, but head_dim is 16"),
        ({"add": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}}, "rope scaling 'linear'"),
        ({"add": {"llama.attention.head_count": [4, 4]}}, "llama.attention.head_count must be one integer"),
        ({"add": {"tokenizer.ggml.eos_token_id": 9999}}, "eos_token_id is 9999, but the vocabulary has 512 tokens"),
        ({"add": {"llama.block_count": 3}}, "tensor blk.2.attn_norm.weight is missing"),
        ({"add": {"llama.feed_forward_length": 96}}, r"blk.0.ffn_gate.weight has shape \(128, 64\), .* \(96, 64\)"),
        ({"without": ("llama.block_count",)}, "has no metadata llama.block_count"),
        ({"without": ("blk.1.ffn_up.weight",)}, "tensor blk.1.ffn_up.weight is missing"),
        ({"without": ("token_embd.weight",)}, "no tensor token_embd.weight"),
        ({"extra_tensors": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, "blk.0.attn_q.bias is not supported"),
        ({"extra_tensors": {"rope_freqs.weight": np.full(8, 3, np.float32)}}, "does not hold Llama 3's scaling"),
        ({"tokens_extra": [("the", 1)]}, "lists a token twice"),
        ({"add": {"llama.attention.head_count": 0}}, "llama.attention.head_count must be from 1 to 16,777,216, got 0"),
        ({"add": {"llama.block_count": 2**31}}, "llama.block_count must be from 1 to 1,000, got 2147483648"),
        ({"add": {"llama.attention.layer_norm_rms_epsilon": float("nan")}}, "rms_epsilon must be from .* nan"),
        ({"add": {"llama.attention.layer_norm_rms_epsilon": -1.0}}, "layer_norm_rms_epsilon must be from .*, got -1.0"),
        ({"add": {"llama.embedding_length": True}}, "llama.embedding_length must be one integer, got 'True'"),
        ({"add": {"llama.context_length": "4096"}}, "llama.context_length must be one integer, got '4096'"),
        ({"add": {"llama.rope.freq_base": 0.0}}, "llama.rope.freq_base must be from"),
    ],
)  # fmt: skip
def test_unsupported_files_are_refused_and_leave_no_partial_directory(tmp_path, how, message):
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path, **how)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("kind", [None, Q.Q4_1])
@pytest.mark.parametrize("keep", [0, 3, 20, 3000, -40])
def test_damaged_files_are_refused(tmp_path, keep, kind):
    gguf_files.write(tmp_path / "model.gguf", "llama", quantise=kind)
    content = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "model.gguf").write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match=r"model\.gguf is damaged, truncated or not a GGUF file"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04" + content[4:])
    with pytest.raises(CheckpointError, match="damaged, truncated or not a GGUF file"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    with pytest.raises(CheckpointError, match="is not a file"):
        convert_gguf(tmp_path / "nothing.gguf", tmp_path / "out")


def test_metadata_that_is_not_utf_8_is_named(tmp_path):
    file = tmp_path / "model.gguf"
    gguf_files.write(file, "llama")
    assert file.read_bytes().count(b"gpt2") == 1
    file.write_bytes(file.read_bytes().replace(b"gpt2", b"gp\xff2"))
    with pytest.raises(CheckpointError, match=r"the GGUF metadata tokenizer\.ggml\.model is damaged"):
        convert_gguf(file, tmp_path / "out")


@pytest.mark.parametrize("extra", [b"\0" * 8, b"\0" * 64, b"x" * 5000])
def test_bytes_behind_the_last_tensor(tmp_path, extra):
    """Writers pad the last tensor to the alignment of 32 bytes, or not. More bytes are no part of the file."""
    file = tmp_path / "model.gguf"
    gguf_files.write(file, "llama")
    reader = gguf.GGUFReader(file)
    end = max(tensor.data_offset + tensor.n_bytes for tensor in reader.tensors)
    content = file.read_bytes()
    file.write_bytes(content[:end])
    convert_gguf(file, tmp_path / "unpadded")
    file.write_bytes(content + extra)
    if len(content) + len(extra) <= -(-end // 32) * 32:
        convert_gguf(file, tmp_path / "out")
    else:
        with pytest.raises(CheckpointError, match=r"model.gguf has [\d,]+ bytes after its last tensor"):
            convert_gguf(file, tmp_path / "out")


def test_an_interrupted_conversion_leaves_no_directory(tmp_path):
    gguf_files.write(tmp_path / "model.gguf", "llama")
    seen = []

    def interrupt(name, done, total):
        seen.append((name, done, total))
        assert not (tmp_path / "out").exists()
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out", progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]

    progress = []
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out", progress=lambda *event: progress.append(event))
    assert [event[1] for event in progress] == sorted(event[1] for event in progress)
    assert progress[-1][1] == progress[-1][2] == Checkpoint(tmp_path / "out").nbytes


def test_a_directory_with_files_is_not_overwritten(tmp_path):
    gguf_files.write(tmp_path / "model.gguf", "llama")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(FileExistsError, match="already exists"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    (tmp_path / "out" / "mine").unlink()
    Checkpoint(convert_gguf(tmp_path / "model.gguf", tmp_path / "out"))  # an empty directory is filled


def test_tokenizer_json_holds_a_bpe_model(tmp_path):
    convert(tmp_path)
    content = json.loads((tmp_path / "out" / "tokenizer.json").read_text())
    assert content["model"]["type"] == "BPE"
    assert len(content["model"]["vocab"]) == 512
