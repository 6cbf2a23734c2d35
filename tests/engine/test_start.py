"""Sizing from settings and memory, and starts that find all programs in the compilation cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from checkpoints.errors import CheckpointError
from omni_jax import compat
from omni_jax.engine import loading
from omni_jax.engine.config import EngineConfig
from omni_jax.requests import InvalidRequest
from omni_jax.runtime.runner import Runner
from omni_jax.runtime.state import round_pages
from tests import tiny
from tests.compilation_cache import CACHE, one_process_at_a_time
from tests.engines import (
    BLOCK_BYTES,
    SETUPS,
    checkpoint,
    compile_tiny,
    greedy,
    load_tiny,
    make_engine,
    request,
    run,
)

pytestmark = pytest.mark.smoke


def test_a_start_with_slightly_different_memory_only_hits_the_compilation_cache():
    first = load_tiny("main")
    assert first.runner_config.num_pages == 496
    hits, compiled = compat.cache_hits(), compat.compilations()
    second = compile_tiny(SETUPS["main"], kv_cache_memory_bytes=507 * BLOCK_BYTES + 123)
    assert second.runner_config.num_pages == 496
    programs = len(second.info.executables)
    assert programs > 10
    assert compat.compilations() - compiled == compat.cache_hits() - hits == second.info.cache_hits == programs
    item = request("a", 33)
    assert run(make_engine(second), item) == run(make_engine(first), item)


@given(st.integers(0, 10**9))
def test_page_counts_have_five_significant_bits(pages):
    down, up = round_pages(pages), round_pages(pages, up=True)
    assert down <= pages <= up
    assert up - down <= max(0, pages // 16)
    for rounded in (down, up):
        assert round_pages(rounded) == round_pages(rounded, up=True) == rounded
        assert rounded < 32 or rounded % (1 << (rounded.bit_length() - 5)) == 0
    assert pages < 1 or down >= 1


@pytest.fixture(scope="module")
def main():
    """Compiled before `dry` disables compilation."""
    return load_tiny("main")


@pytest.fixture
def dry(monkeypatch):
    """A function that loads and sizes without compiling."""
    monkeypatch.setattr(Runner, "start", lambda self, *_: {})

    def load(blocks=100_000, progress=None, **options):
        defaults = {
            "model_dir": checkpoint("llama"),
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "block_size": 16,
            "kv_cache_memory_bytes": int(blocks * BLOCK_BYTES),
            "compilation_cache_dir": CACHE,
        }
        with one_process_at_a_time():
            return loading.load(EngineConfig(**(defaults | options)), progress)

    return load


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 37])
@pytest.mark.parametrize("max_model_len", [None, 1024, 1000, 17, 1])
def test_with_enough_memory_the_cache_holds_max_num_seqs_full_sequences(dry, max_num_seqs, max_model_len):
    info = dry(max_num_seqs=max_num_seqs, max_model_len=max_model_len).info
    assert info.max_model_len == (max_model_len or 1024)
    needed = max_num_seqs * -(-info.max_model_len // 16)
    assert needed <= info.num_blocks - 1 <= needed * 1.07 + 1
    assert info.kv_cache_bytes == info.num_blocks * BLOCK_BYTES


def test_api_15_a_small_cache_lowers_max_model_len(main, dry, caplog):
    info = dry(blocks=20).info
    assert info.max_model_len == 19 * 16
    assert "max_model_len is lowered from 1024 to 304" in caplog.text
    engine = make_engine(main, num_blocks=info.num_blocks, max_model_len=info.max_model_len)
    answers = run(engine, request("fits", 300, greedy(max_tokens=None)), request("scored", 304, greedy(max_tokens=0)))
    assert len(answers["fits", 0].tokens) == 4
    with pytest.raises(InvalidRequest, match=r"context length is 304 .* 304 tokens and asks for 1 more"):
        engine.add(request("longer", 304, greedy(max_tokens=1)))


@pytest.mark.parametrize("wanted", [1024, 1000, 528, 33])
def test_error_for_a_cache_too_small_for_max_model_len_names_a_size_that_works(dry, wanted):
    with pytest.raises(ValueError, match="holds 16 tokens") as error:
        dry(blocks=2, max_model_len=wanted)
    assert f"max_model_len is {wanted}" in str(error.value)
    needed = int(str(error.value).split("--kv-cache-memory-bytes ")[1].split()[0])
    assert dry(kv_cache_memory_bytes=needed, max_model_len=wanted).info.max_model_len == wanted


@pytest.mark.parametrize("blocks", [0.5, 1])
def test_a_cache_without_a_usable_block_is_refused(dry, blocks):
    with pytest.raises(ValueError, match="holds 0 tokens"):
        dry(blocks=blocks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 1025}, "1025 is more than the model's 1024 positions"),
        ({"max_num_seqs": 65}, r"max_num_batched_tokens \(64\) must be at least max_num_seqs \(65\)"),
        ({"dtype": "int8"}, "dtype must be 'auto', 'float32', 'float', 'bfloat16', 'float16' or 'half', got 'int8'"),
        ({"block_size": 24}, "power of two, got 24"),
        ({"max_num_seqs": 0}, "at least 1, got 0"),
        ({"gpu_memory_utilization": 1.5}, "must be at most 1, got 1.5"),
        ({"generation_config": "none"}, "got 'none'"),
    ],
)
def test_errors_for_impossible_settings_name_the_values(dry, options, message):
    with pytest.raises(ValueError, match=message):
        dry(**options)


def test_a_directory_without_a_model_is_refused(dry, tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        dry(model_dir=tmp_path)


def test_dtype_is_the_setting_or_the_checkpoints(dry, tmp_path, caplog):
    assert dry().info.dtype == "float32"
    half = dry(dtype="bfloat16").info
    assert (half.dtype, half.kv_cache_bytes) == ("bfloat16", half.num_blocks * BLOCK_BYTES // 2)
    assert half.weight_bytes * 2 == dry().info.weight_bytes
    assert np.dtype(jnp.bfloat16) == half.dtype
    for alias, name in (("half", "float16"), ("float16", "float16"), ("float", "float32")):
        assert dry(dtype=alias).info.dtype == name
    for stored, name in (("float16", "float16"), ("bfloat16", "bfloat16"), ("float64", "float32")):
        caplog.clear()
        with caplog.at_level("INFO"):
            assert dry(model_dir=tiny.write_tiny(tmp_path / stored, "llama", dtype=stored)).info.dtype == name
        assert f" in {name} (--dtype auto: config.json states {stored})" in caplog.text


def test_weights_beyond_the_range_of_float16_are_refused(dry, tmp_path):
    directory = tiny.write_tiny(tmp_path, "llama")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1e6
    save_file(tensors, directory / "model.safetensors")
    assert dry(model_dir=directory, dtype="bfloat16").info.dtype == "bfloat16"
    with pytest.raises(CheckpointError, match=r"tensor model.norm.weight has values beyond float16's range \(65504\)"):
        dry(model_dir=directory, dtype="float16")


def test_sampling_defaults_are_from_generation_config(dry, tmp_path):
    directory = tiny.write_tiny(tmp_path, "llama")
    path = directory / "generation_config.json"
    path.write_text(
        '{"eos_token_id": 2, "do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": null}'
    )
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert dry(model_dir=directory).info.default_sampling == expected
    assert dry(model_dir=directory, generation_config="vllm").info.default_sampling == {}
    path.write_text('{"eos_token_id": 2, "do_sample": false, "temperature": 0.6, "max_new_tokens": 9}')
    assert dry(model_dir=directory).info.default_sampling == {"temperature": 0.0, "max_tokens": 9}
    assert dry(model_dir=directory, generation_config="vllm").info.default_sampling == {}
    path.write_text('{"temperature": "high"}')
    with pytest.raises(
        CheckpointError, match=r"generation_config.json: temperature must be a number from 0 to 2, got 'high'"
    ):
        dry(model_dir=directory)
    assert dry(model_dir=directory, generation_config="vllm").info.default_sampling == {}


def test_tok_07_the_tokenizers_eos_ends_a_text_too(dry, tmp_path):
    """As in SmolLM2's base files: both configs name <|endoftext|>, the tokenizer <|im_end|>."""
    directory = tiny.write_tiny(tmp_path, "llama", eos_token_id=0)
    path = directory / "generation_config.json"
    path.write_text('{"eos_token_id": 0}')
    loaded = dry(model_dir=directory)
    assert loaded.eos_token_ids == {0, 2}
    path.unlink()
    assert dry(model_dir=directory).eos_token_ids == {0, 2}
    path.write_text('{"eos_token_id": [2, -1]}')
    with pytest.raises(CheckpointError, match=r"eos_token_id in generation_config.json .* 0 to 511 .*\[2, -1\]"):
        dry(model_dir=directory)


def test_progress_names_each_tensor_and_ends_at_the_total(dry):
    calls = []
    dry(progress=lambda *call: calls.append(call))
    load = [call for call in calls if call[0] == "load"]
    assert [done for _, done, _, _ in load] == sorted(done for _, done, _, _ in load)
    assert {total for _, _, total, _ in load} == {load[-1][1]}


def test_needs_cover_every_program(main):
    """On a GPU the cache gets the rest of the memory, so the needs of all programs must be covered, not only bodies."""
    runner = main.runner
    with one_process_at_a_time():
        needs = loading._needs(runner)
    for executable in runner._executables.values():
        found = executable.compiled.memory_analysis()
        assert needs["temporaries of a step"] >= found.temp_size_in_bytes, executable.key
        assert needs["results of two steps"] >= 2 * (found.output_size_in_bytes - found.alias_size_in_bytes)
    held = jax.tree.leaves((runner._slots, runner._tables, runner._history))
    assert needs["state of sequences"] == sum(array.nbytes for array in held)


def test_needs_are_measured_with_the_largest_program_of_each_kind(main, monkeypatch):
    compiled = []

    def compile_all(jobs):
        compiled.extend(job.key for job in jobs)
        return {("head", 8, "full"): main.runner._executables["head", 8, "full"]}

    monkeypatch.setattr(loading, "compile_all", compile_all)
    runner = main.runner
    config = dataclasses.replace(runner.config, swap=True, compression=True)
    loading._needs(Runner(runner._model, runner._weights, config, runner.mesh))
    heads = [("head", 8, variant) for variant in ("greedy", "sample", "full")]
    copies = [("read", 16), ("write", 16), ("compact", runner.sizes.pages_per_row)]
    bodies = [("mixed", 64), ("decode", 8), ("score", 64)]
    assert sorted(compiled) == sorted([*bodies, *heads, ("admit",), ("history",), *copies])
