"""The decoder's logits with dense attention against transformers, and checkpoints that must not load."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.reader import Checkpoint, CheckpointError
from omni_jax.models.config import UnsupportedModel, model_config
from omni_jax.models.decoder import project
from omni_jax.models.weights import load_weights
from tests import tiny
from tests.goldens import make

pytestmark = pytest.mark.smoke


def dense_attention(layer, query, key, value):
    """Causal attention over one whole sequence, without pages or tiles."""
    tokens, heads, head_dim = query.shape
    key, value = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (key, value))
    scores = jnp.einsum("qhd,khd->hqk", query, key) * head_dim**-0.5
    visible = jnp.tril(jnp.ones((tokens, tokens), bool))[None]
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1), value)


def dense_logits(directory, prompts):
    checkpoint = Checkpoint(directory)
    _, weights = load_weights(checkpoint, model_config(checkpoint.config), np.dtype(np.float32))

    @jax.jit
    def logits(leaves, tokens):
        hidden = weights.decoder.merge(leaves)(tokens, jnp.arange(tokens.shape[0]), dense_attention)
        return project(hidden, weights.output_matrix, out_in=True)

    return [np.asarray(logits(weights.decoder.leaves, jnp.asarray(prompt, jnp.int32))) for prompt in prompts]


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_logits_equal_transformers(variant, tmp_path):
    golden = make.load(variant)
    lengths = [1, 17, int(golden["scored_length"]), 150, *tiny.LONG_PROMPTS.get(variant, ())]
    found = dense_logits(tiny.write_tiny(tmp_path, variant), [tiny.prompt(n) for n in lengths])
    for length, logits in zip(lengths, found, strict=True):
        row = golden["lengths"].tolist().index(length)
        np.testing.assert_allclose(logits[-1], golden["logits"][row], atol=1e-4, rtol=0)
    scored = found[2].astype(np.float64)
    logsumexp = np.log(np.exp(scored - scored.max(-1, keepdims=True)).sum(-1)) + scored.max(-1)
    np.testing.assert_allclose(logsumexp, golden["scored_logsumexp"], atol=1e-4)


def test_sharded_checkpoint_gives_the_same_logits(tmp_path):
    whole = dense_logits(tiny.write_tiny(tmp_path / "a", "qwen2"), [tiny.prompt(17)])[0]
    shards = tiny.write_shards(tiny.write_tiny(tmp_path / "b", "qwen2"))
    np.testing.assert_array_equal(dense_logits(shards, [tiny.prompt(17)])[0], whole)


def edit_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


def load(directory):
    checkpoint = Checkpoint(directory)
    return load_weights(checkpoint, model_config(checkpoint.config), np.dtype(np.float32))


def test_ck_01_missing_and_extra_tensors_are_named(tmp_path):
    def change(tensors):
        tensors["model.layers.9.mlp.up_proj.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)  # ignored

    with pytest.raises(CheckpointError) as error:
        load(edit_tensors(tiny.write_tiny(tmp_path, "llama"), change))
    assert "missing tensor model.layers.1.mlp.up_proj.weight" in str(error.value)
    assert "tensor model.layers.9.mlp.up_proj.weight [128, 64] is not part of LlamaForCausalLM" in str(error.value)
    assert "inv_freq" not in str(error.value)


def test_the_error_for_a_wrong_shape_has_both_shapes(tmp_path):
    def change(tensors):
        tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((64, 100), np.float32)

    with pytest.raises(CheckpointError, match=r"down_proj.weight has shape \[64, 100\] .* implies \[64, 128\]"):
        load(edit_tensors(tiny.write_tiny(tmp_path, "llama"), change))


@pytest.mark.parametrize(("tied", "head"), [(True, "equal"), (True, "different"), (False, "different")])
def test_ck_03_head_and_tie_flag(tied, head, tmp_path, caplog):
    """The checkpoint's head is always used; a head equal to the embedding keeps the two tied."""
    directory = tiny.write_tiny(tmp_path, "llama")
    tensors = load_file(directory / "model.safetensors")
    if head == "equal":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (directory / "config.json").write_text(json.dumps(config))
    loaded, weights = load(directory)
    np.testing.assert_array_equal(np.asarray(weights.output_matrix), tensors["lm_head.weight"])
    assert loaded.tie_word_embeddings == (head == "equal")
    assert ("lm_head.weight differs" in caplog.text) == (tied and head == "different")


def test_ck_03_untied_config_without_a_head_is_refused(tmp_path):
    directory = edit_tensors(tiny.write_tiny(tmp_path, "llama"), lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing tensor lm_head.weight.*tie_word_embeddings"):
        load(directory)


@pytest.mark.parametrize("how", ["tied", "sharing_noted"])
def test_ck_10_tied_weights_stored_only_as_the_head(tmp_path, how):
    """safetensors' save_model keeps the alphabetically first of two names of one tensor, and notes the other one."""
    directory = tiny.write_tiny(tmp_path, "llama3", tie_word_embeddings=how == "tied")
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    notes = {"model.embed_tokens.weight": "lm_head.weight"} if how == "sharing_noted" else {}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"} | notes)
    config, weights = load(directory)
    assert config.tie_word_embeddings == (how == "tied")
    np.testing.assert_array_equal(np.asarray(weights.output_matrix), tensors["lm_head.weight"])
    embeds = [array for array in weights.arrays if array.shape == (512, 64)]
    assert len(embeds) == (1 if how == "tied" else 2)
    for embed in embeds:
        np.testing.assert_array_equal(embed, tensors["lm_head.weight"])


def test_ck_10_only_a_head_without_the_tie_is_refused(tmp_path):
    directory = edit_tensors(
        tiny.write_tiny(tmp_path, "llama"), lambda tensors: tensors.pop("model.embed_tokens.weight")
    )
    with pytest.raises(CheckpointError, match=r"missing tensor model.embed_tokens.weight; config.json has tie_word"):
        load(directory)


@pytest.mark.parametrize("rows", [512, 500])
def test_ck_03_a_head_of_another_shape_is_used_or_refused_by_its_shape(tmp_path, caplog, rows):
    head = np.ones((rows, 64), np.float32)
    directory = edit_tensors(
        tiny.write_tiny(tmp_path, "llama3"), lambda tensors: tensors.update({"lm_head.weight": head})
    )
    if rows == 512:
        np.testing.assert_array_equal(np.asarray(load(directory)[1].output_matrix), head)
        assert "lm_head.weight differs" in caplog.text
    else:
        with pytest.raises(CheckpointError, match=r"lm_head.weight has shape \[500, 64\] .* implies \[512, 64\]"):
            load(directory)


@pytest.mark.parametrize(
    "renamed",
    [
        lambda name: name.removeprefix("model."),  # Qwen3-Embedding: a decoder without its head
        lambda name: name.replace("model.", "model.language_model."),
        lambda name: f"language_model.{name}",
    ],
)
def test_public_prefixes_of_tensors_are_known(tmp_path, renamed):
    plain = load(tiny.write_tiny(tmp_path / "plain", "llama"))[1]
    other = tiny.write_tiny(tmp_path / "other", "llama")
    tensors = load_file(other / "model.safetensors")
    save_file({renamed(name): tensor for name, tensor in tensors.items()}, other / "model.safetensors")
    for mine, expected in zip(load(other)[1].arrays, plain.arrays, strict=True):
        np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize("kind", ["int8", "uint8", "int32", "float8_e4m3fn", "bool"])
def test_quantised_numbers_are_not_loaded_as_plain_weights(tmp_path, kind):
    name = "model.layers.0.mlp.up_proj.weight"
    change = lambda tensors: tensors.update({name: tensors[name].astype(getattr(ml_dtypes, kind, kind))})  # noqa: E731
    with pytest.raises(CheckpointError, match=rf"1 tensors belong to quantised weights.*{name} \({kind}\), expected"):
        load(edit_tensors(tiny.write_tiny(tmp_path, "llama"), change))


@pytest.mark.parametrize("suffix", ["qweight", "scales", "weight_scale", "weight_scale_inv", "weight.absmax", "SCB"])
def test_tensors_of_quantised_formats_are_named_in_one_sentence(tmp_path, suffix):
    def change(tensors):
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name.removesuffix("weight") + suffix] = np.ones(3, np.int32)

    with pytest.raises(CheckpointError) as error:
        load(edit_tensors(tiny.write_tiny(tmp_path, "llama"), change))
    assert len(error.value.faults) == 1
    assert "14 tensors belong to quantised weights" in str(error.value)


def test_unknown_architecture_lists_the_supported_ones():
    with pytest.raises(
        UnsupportedModel, match=r"MambaForCausalLM.*LlamaForCausalLM.*Qwen2ForCausalLM.*Qwen3ForCausalLM"
    ):
        model_config({"architectures": ["MambaForCausalLM"]})


@pytest.mark.parametrize(
    "change", [{"hidden_act": "gelu"}, {"use_sliding_window": True}, {"rope_parameters": {"rope_type": "longrope"}}]
)
def test_unsupported_options_are_refused(change):
    with pytest.raises(ValueError, match="not supported"):
        model_config(tiny.config("qwen2") | change)


def test_rope_config_of_transformers_4_gives_the_same_model():
    new = tiny.config("llama3")
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    old |= {
        "rope_theta": 10000.0,
        "rope_scaling": {k: v for k, v in new["rope_parameters"].items() if k != "rope_theta"},
    }
    assert dataclasses.asdict(model_config(old)) == dataclasses.asdict(model_config(new))
