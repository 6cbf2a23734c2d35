"""The roofline agrees with published parameter counts, published speeds and small cases computed by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from omni_jax.cost.model import StepShape, causal_pairs
from omni_jax.cost.roofline import GPUS, ModelSizes, Roofline, gpu_named
from omni_jax.models.config import UnsupportedModel
from tests import tiny, tiny_vl

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6}
QWEN2_05B = QWEN2 | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN2_7B = QWEN2 | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
QWEN2_72B = QWEN2_7B | {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
QWEN2_VL_7B = (
    QWEN2_7B
    | MROPE
    | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "vision_config": {
            "depth": 32,
            "embed_dim": 1280,
            "mlp_ratio": 4,
            "num_heads": 16,
            "in_chans": 3,
            "hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }
)
QWEN25_VL_7B = (
    QWEN2_7B
    | MROPE
    | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    }
)
LLAMA2 = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "vocab_size": 32000}
LLAMA2_7B = LLAMA2 | {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
LLAMA2_70B = LLAMA2 | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
SIZES_VL = ModelSizes.from_config(QWEN25_VL_7B)
IDEAL = {"mfu": 1.0, "mbu": 1.0, "overhead_seconds": 0.0, "link_efficiency": 1.0, "link_latency_seconds": 0.0}


def prompt(tokens: int, before: int = 0) -> StepShape:
    return StepShape(
        kind="mixed",
        size=tokens,
        rows=1,
        tokens=tokens,
        context=before + tokens,
        attended=causal_pairs(tokens, before),
    )


def decode(rows: int, context: int = 0) -> StepShape:
    return StepShape(kind="decode", size=rows, rows=rows, tokens=rows, context=context, attended=context)


def image(patches: int) -> StepShape:
    return StepShape(kind="encode", size=patches, rows=1, tokens=patches, context=0, attended=patches**2)


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "billions", "tower_millions"),
    [
        # Model cards of Qwen2 and Qwen2-VL on Hugging Face; the tower of Qwen2-VL: arXiv 2409.12191, table 1.
        pytest.param(QWEN2_05B, 0.494, 0, id="Qwen2-0.5B"),
        pytest.param(QWEN2_7B, 7.62, 0, id="Qwen2-7B"),
        pytest.param(QWEN2_72B, 72.7, 0, id="Qwen2-72B"),
        pytest.param(QWEN2_VL_7B, 8.29, 675, id="Qwen2-VL-7B"),
        pytest.param(QWEN25_VL_7B, 8.29, 676.6, id="Qwen2.5-VL-7B"),
        pytest.param(LLAMA2_7B, 6.74, 0, id="Llama-2-7B"),
        pytest.param(LLAMA2_70B, 69.0, 0, id="Llama-2-70B"),
    ],
)
def test_parameter_counts_match_publications(config, billions, tower_millions):
    sizes = ModelSizes.from_config(config)
    assert sizes.parameters == pytest.approx(billions * 1e9, rel=0.002)
    tower = sizes.vision.parameters if sizes.vision else 0
    assert tower == pytest.approx(tower_millions * 1e6, rel=0.002)
    assert sizes.parameter_bytes(2) == 2 * sizes.parameters


@pytest.mark.parametrize("name", [*tiny.VARIANTS, *tiny_vl.FAMILIES])
def test_parameter_counts_match_checkpoints_exactly(name, tmp_path):
    vision = name in tiny_vl.FAMILIES
    directory = (tiny_vl.write_tiny_vl if vision else tiny.write_tiny)(tmp_path, name)
    config = (tiny_vl if vision else tiny).config(name)
    with safe_open(directory / "model.safetensors", "np") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    sizes = ModelSizes.from_config(config)
    assert sizes.parameters == sum(map(math.prod, shapes.values()))
    if vision:
        tower = sum(math.prod(shape) for key, shape in shapes.items() if "visual" in key)
        assert sizes.vision is not None
        assert sizes.vision.parameters == tower


def test_sizes_of_qwen2_vl_7b_by_hand():
    sizes = ModelSizes.from_config(QWEN2_VL_7B)
    assert sizes.kv_bytes_per_token() == 2 * 28 * 4 * 128 * 2 == 57_344
    layer = 3584 * (3584 + 2 * 512) + 3584 * 3584 + 3 * 3584 * 18944
    assert sizes.flops_per_token == 2 * 28 * layer == 13_050_576_896
    assert sizes.flops_per_logits == 2 * 3584 * 152064
    assert sizes.flops_per_pair == 4 * 3584 * 28
    assert sizes.vision is not None
    # Embedding, 32 layers, and a quarter of the merger, which takes four patches at once.
    matrices = 3 * 2 * 14 * 14 * 1280 + 32 * (4 * 1280**2 + 2 * 1280 * 5120) + (5120**2 + 5120 * 3584) // 4
    assert sizes.vision.flops_per_patch == 2 * matrices == 1_283_584_000
    assert (sizes.vision.full_layers, sizes.vision.window_layers) == (32, 0)


def test_window_layers_of_the_tower():
    vision = ModelSizes.from_config(QWEN25_VL_7B).vision
    assert vision is not None
    assert (vision.full_layers, vision.window_layers, vision.window_patches) == (4, 28, 64)


def test_unknown_models_are_refused():
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        ModelSizes.from_config({"architectures": ["MambaForCausalLM"]})


# -- step times -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "devices", "tokens_per_second", "tolerance"),
    [
        # gpt-fast's README: bfloat16, one sequence, short prompts, A100 80GB (limited to 330 W).
        (LLAMA2_7B, 1, 104.9, 0.1),
        (LLAMA2_7B, 2, 168.84, 0.15),
        (LLAMA2_7B, 4, 254.02, 0.25),
        (LLAMA2_70B, 2, 21.32, 0.15),
        (LLAMA2_70B, 4, 38.01, 0.15),
        (LLAMA2_70B, 8, 62.5, 0.2),
    ],
)
def test_decode_speed_is_near_published_speeds(config, devices, tokens_per_second, tolerance):
    cost = Roofline(sizes=ModelSizes.from_config(config), gpu=GPUS["a100"], devices=devices)
    assert 1 / cost.decode_seconds(1, 100) == pytest.approx(tokens_per_second, rel=tolerance)


def test_decode_of_one_sequence_reads_the_weights():
    """7B in bfloat16 on an A100: 7.07 billion parameters, as only one row of the embedding is read."""
    cost = Roofline(sizes=ModelSizes.from_config(QWEN2_7B), gpu=GPUS["a100"], **IDEAL)
    assert cost.decode_seconds(1, 1) == pytest.approx(2 * 7.07e9 / 2.039e12, rel=0.002)
    # Each of 100,000 cached tokens adds 57,344 bytes.
    longer = cost.decode_seconds(1, 100_001) - cost.decode_seconds(1, 1)
    assert longer == pytest.approx(57_344 * 100_000 / 2.039e12, rel=1e-6)


def test_prefill_is_compute_bound_and_decode_memory_bound():
    sizes = ModelSizes.from_config(QWEN2_7B)
    cost = Roofline(sizes=sizes, gpu=GPUS["a100"], **IDEAL)
    compute, memory, _ = cost.times(prompt(2048, 4096))
    flops = 2048 * 13_050_576_896 + 2 * 3584 * 152064 + 4 * 3584 * 28 * (2048 * 4096 + 2048 * 2049 // 2)
    assert compute == pytest.approx(flops / 312e12)
    assert compute > 10 * memory
    compute, memory, _ = cost.times(decode(1, 1000))
    assert memory > 50 * compute
    # The ridge: 312e12 / 2.039e12 = 153 FLOPs per byte, which is 153 rows at two bytes per value.
    assert [compute > memory for compute, memory, _ in map(cost.times, map(decode, (148, 158)))] == [False, True]


def test_efficiency_factors_and_overhead_add_time():
    sizes = ModelSizes.from_config(QWEN2_7B)
    ideal = Roofline(sizes=sizes, gpu=GPUS["h100"], **IDEAL)
    real = Roofline(sizes=sizes, gpu=GPUS["h100"], mfu=0.5, mbu=0.8, overhead_seconds=0.001)
    assert real.seconds(prompt(4096)) == pytest.approx(ideal.seconds(prompt(4096)) / 0.5 + 0.001)
    assert real.seconds(decode(1)) == pytest.approx(ideal.seconds(decode(1)) / 0.8 + 0.001)


def test_padding_costs_products_but_no_attention():
    cost = Roofline(sizes=ModelSizes.from_config(QWEN2_7B), gpu=GPUS["a100"], **IDEAL)
    padded = StepShape(kind="mixed", size=2048, rows=1, tokens=1, context=1, attended=1)
    assert cost.seconds(padded) == pytest.approx((2048 * 13_050_576_896 + 2 * 3584 * 152064) / 312e12, rel=1e-5)


def test_devices_share_the_work_and_exchange_activations():
    sizes = ModelSizes.from_config(QWEN2_72B)
    shape = prompt(4096)
    one, four = (Roofline(sizes=sizes, gpu=GPUS["h100"], devices=n, **IDEAL).times(shape) for n in (1, 4))
    assert four[:2] == pytest.approx([seconds / 4 for seconds in one[:2]])
    assert one[2] == 0.0
    # Two all-reduces in each of 80 layers, each of 4,096 x 8,192 two-byte values; a device sends 2 * 3 / 4 of them.
    assert four[2] == pytest.approx(160 * 1.5 * 4096 * 8192 * 2 / 450e9)
    late = Roofline(sizes=sizes, gpu=GPUS["h100"], devices=4, **IDEAL | {"link_latency_seconds": 1e-5}).times(shape)
    assert late[2] - four[2] == pytest.approx(160 * 1e-5)


def test_kv_heads_that_do_not_divide_are_replicated():
    """With four KV heads on eight devices, each device reads one head: a quarter of the cache."""
    sizes = ModelSizes.from_config(QWEN2_7B)
    cost = Roofline(sizes=sizes, gpu=GPUS["h100"], devices=8, **IDEAL)
    more = cost.times(decode(1, 10**6 + 1))[1] - cost.times(decode(1, 1))[1]
    assert more == pytest.approx(10**6 * 57_344 / 4 / 3.35e12)


def test_fp8_halves_the_bytes_and_runs_at_the_fp8_peak_if_there_is_one():
    sizes = ModelSizes.from_config(QWEN2_7B)
    for name, faster in (("h100", 1978.9 / 989.4), ("a100", 1.0)):
        full, half = (Roofline(sizes=sizes, gpu=GPUS[name], dtype_bytes=n, **IDEAL) for n in (2, 1))
        assert full.times(decode(1))[1] == pytest.approx(2 * half.times(decode(1))[1])
        assert full.times(prompt(512))[0] == pytest.approx(faster * half.times(prompt(512))[0])


def test_int8_cache_reads_values_and_scales():
    """128 values and a float32 scale take 132 bytes; 128 bfloat16 values take 256."""
    sizes = ModelSizes.from_config(QWEN2_7B)
    full, int8 = (Roofline(sizes=sizes, gpu=GPUS["a100"], kv_bytes_per_value=n, **IDEAL) for n in (None, 132 / 128))
    read = [cost.times(decode(1, 10**6 + 1))[1] - cost.times(decode(1, 1))[1] for cost in (full, int8)]
    assert read[0] == pytest.approx(57_344 * 10**6 / 2.039e12)
    assert read[1] == pytest.approx(read[0] * 132 / 256)


def test_float32_doubles_the_bytes_and_halves_the_peak():
    """TF32 on an A100's data sheet: 156 TFLOPS."""
    sizes = ModelSizes.from_config(QWEN2_7B)
    half, full = (Roofline(sizes=sizes, gpu=GPUS["a100"], dtype_bytes=n, devices=2, **IDEAL) for n in (2, 4))
    for shape in (decode(1), prompt(512)):
        assert full.times(shape) == pytest.approx([2 * seconds for seconds in half.times(shape)])


def test_compute_bound_rows_is_the_smallest_compute_bound_batch():
    """Without a cache it is slightly above the ridge, 312e12 / 2.039e12 = 153 rows. With long contexts there is none:
    each row adds more memory time than compute time."""
    cost = Roofline(sizes=ModelSizes.from_config(QWEN2_7B), gpu=GPUS["a100"], **IDEAL)
    for context in (0, 500, 1000):
        rows = cost.compute_bound_rows(context)
        assert rows is not None
        assert [c > m for c, m, _ in (cost.times(decode(n, n * context)) for n in (rows - 1, rows))] == [False, True]
    assert cost.compute_bound_rows(0) in range(148, 158)
    assert cost.compute_bound_rows(20_000) is None


def test_one_all_reduce_by_hand():
    cost = Roofline(sizes=ModelSizes.from_config(QWEN2_72B), gpu=GPUS["h100"], devices=4)
    assert cost.all_reduce_seconds(8 << 20) == pytest.approx(10e-6 + 1.5 * (8 << 20) / (0.75 * 450e9))
    assert Roofline(sizes=SIZES_VL, gpu=GPUS["h100"]).all_reduce_seconds(8 << 20) == 0.0


def test_an_image_by_hand():
    """4,096 patches on an A100; windows reduce attention in 28 of 32 layers by a factor of 64."""
    whole, windowed = (ModelSizes.from_config(config) for config in (QWEN2_VL_7B, QWEN25_VL_7B))
    seconds = Roofline(sizes=whole, gpu=GPUS["a100"], **IDEAL).encode_seconds(4096)
    assert seconds == pytest.approx((4096 * 1_283_584_000 + 32 * 4 * 1280 * 4096**2) / 312e12)
    assert windowed.vision is not None
    seconds = Roofline(sizes=windowed, gpu=GPUS["a100"], **IDEAL).encode_seconds(4096)
    attention = 4 * 1280 * (4 * 4096**2 + 28 * 4096 * 64)
    assert seconds == pytest.approx((4096 * windowed.vision.flops_per_patch + attention) / 312e12)
    # For a small image, reading the tower's weights takes longest.
    compute, memory, _ = Roofline(sizes=whole, gpu=GPUS["a100"], **IDEAL).times(image(64))
    assert memory == pytest.approx(2 * 675.76e6 / 2.039e12, rel=1e-4)
    assert memory > compute


def test_a_prompt_runs_in_steps_of_chunk_tokens():
    cost = Roofline(sizes=ModelSizes.from_config(QWEN2_7B), gpu=GPUS["a100"], chunk_tokens=1000)
    steps = [prompt(1000, 500), prompt(1000, 1500), prompt(7, 2500)]
    assert cost.prefill_seconds(2007, 500) == pytest.approx(sum(map(cost.seconds, steps)))
    assert cost.prefill_seconds(0, 500) == 0.0


@given(
    st.sampled_from(sorted(GPUS)), st.sampled_from((1, 2, 8)), st.integers(1, 5000), st.integers(0, 10**6), st.data()
)
def test_predictions_are_positive_finite_and_never_fall(gpu, devices, count, context, data):
    cost = Roofline(sizes=SIZES_VL, gpu=GPUS[gpu], devices=devices, chunk_tokens=512)
    more, further = count + data.draw(st.integers(0, 1000)), context + data.draw(st.integers(0, 10**6))
    for predict in (cost.prefill_seconds, cost.decode_seconds):
        assert 0 < predict(count, context) <= min(predict(more, context), predict(count, further)) < math.inf
    assert 0 < cost.encode_seconds(count) <= cost.encode_seconds(more) < math.inf


# -- bad input --------------------------------------------------------------------------------------------------------


def test_error_for_an_unknown_gpu_lists_known_gpus():
    assert gpu_named("H100") is GPUS["h100"]
    with pytest.raises(ValueError, match="unknown GPU 'h1000': give one of a100-40gb, a100, h100, h200"):
        gpu_named("h1000")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0}, "devices"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"mfu": 0.0}, "mfu must be above 0 and at most 1, got 0.0"),
        ({"mbu": 1.2}, "mbu"),
        ({"link_efficiency": 2}, "link_efficiency"),
        ({"dtype_bytes": 3}, "dtype_bytes"),
        ({"kv_bytes_per_value": 0}, "kv_bytes_per_value"),
        ({"overhead_seconds": -1}, "negative"),
    ],
)
def test_errors_name_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Roofline(sizes=SIZES_VL, gpu=GPUS["a100"], **options)


def test_a_text_model_cannot_encode_images():
    with pytest.raises(ValueError, match="no vision tower"):
        Roofline(sizes=ModelSizes.from_config(QWEN2_7B), gpu=GPUS["a100"]).encode_seconds(64)
