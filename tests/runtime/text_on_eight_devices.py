"""Meshes of 2, 4 and 8 virtual devices give the results of one device. test_sharding.py runs this file, and the other
*_on_eight_devices.py here, in processes of their own, since the number of devices is fixed when JAX starts; or by hand:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 pytest tests/runtime/text_on_eight_devices.py
"""

import dataclasses
import functools
import re
from unittest import mock

import jax
import numpy as np
import pytest

from omni_jax.models import weights as weights_module
from omni_jax.runtime.sharding import RULES, make_mesh, spec_of
from tests import tiny
from tests.engines import Setup, assert_idle, compile_tiny, greedy, make_engine, request, run

TOLERANCE = 1e-4
FOUR = pytest.param(4, marks=pytest.mark.full)  # between the others: KV heads are whole on 2, repeated on 4 and 8
SIZES = (2, FOUR, 8)
TEXT = Setup(variant="eight_heads", decode=(8,), mixed=(64,), heads=("greedy", "sample", "full"))
GREEDY = dataclasses.replace(TEXT, heads=("greedy",))
BLOCKS = {"swap_space": 0.05, "preemption_mode": "swap"}


@functools.cache
def text(size: int):
    setup = TEXT if size in (1, 8) else GREEDY  # compiling is what takes the time here
    return compile_tiny(setup, tensor_parallel_size=size, **BLOCKS)


def requests(**params):
    return [
        request(f"r{n}", tiny.prompt(n), greedy(max_tokens=16, logprobs=20, prompt_logprobs=20, **params))
        for n in (1, 17, 33, 150)
    ]


def same(found, expected, tolerance=TOLERANCE):
    """Tokens are equal, and all logprobs within the tolerance."""
    assert found.keys() == expected.keys()
    for key, answer in expected.items():
        assert found[key].tokens == answer.tokens, key
        for theirs, ours in (
            (found[key].logprobs, answer.logprobs),
            ((found[key].prompt_logprobs or ())[1:], (answer.prompt_logprobs or ())[1:]),
        ):
            assert [entry.token_id for entry in theirs] == [entry.token_id for entry in ours]
            for one, other in zip(theirs, ours, strict=True):
                assert [token for token, _ in one.top] == [token for token, _ in other.top]
                values = np.asarray([one.logprob, *(value for _, value in one.top)])
                wanted = np.asarray([other.logprob, *(value for _, value in other.top)])
                np.testing.assert_allclose(values, wanted, atol=tolerance, rtol=0)


# -- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_md_01_eight_heads_and_two_kv_heads_equal_one_device(size):
    """At 4 and 8 devices the two KV heads are repeated, and each device has one."""
    same(run(make_engine(text(size)), *requests()), run(make_engine(text(1)), *requests()))
    assert text(size).runner._model.num_key_value_heads == max(2, size)


@pytest.mark.parametrize("size", SIZES)
def test_md_01_whole_logits_equal_one_device(size):
    found, expected = (all_logits(text(n).runner) for n in (size, 1))
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


def all_logits(runner) -> np.ndarray:
    """[64, vocab] of a prompt: from the body's hidden states, which are whole, and the output matrix put together."""
    from tests.runtime.with_blocks import make_row, make_sequence, mixed

    runner.reset()
    kept = {}
    body = runner._executables["mixed", 64]

    def keep(*arguments):
        kept["results"] = body(*arguments)
        return kept["results"]

    with mock.patch.dict(runner._executables, {("mixed", 64): keep}):
        sequence = make_sequence(tiny.prompt(64), [1, 2, 3, 4])
        runner.dispatch(mixed(make_row(sequence, 0, 64, admit=True))).read()
    return np.asarray(kept["results"][3]) @ np.asarray(runner._weights.output_matrix).T


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 2.0, "top_k": 60, "top_p": 0.9},
        {"temperature": 1.5, "top_p": 0.99, "min_p": 0.01},
        {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {5: 3.0, 300: 4.0, 511: -100.0}},
        {"temperature": 1.0, "min_tokens": 12, "stop_token_ids": [*range(240, 272)]},
    ],
    ids=["plain", "few", "searched_k", "searched_p", "penalties", "bias", "suppressed"],
)
def test_sampled_tokens_equal_one_device(params):
    items = [request(f"r{n}", tiny.prompt(n), greedy(max_tokens=24, seed=n, **params)) for n in (1, 9, 33, 40, 90)]
    found, expected = (run(make_engine(text(n)), *items) for n in (8, 1))
    assert {key: answer.tokens for key, answer in found.items()} == {k: answer.tokens for k, answer in expected.items()}
    assert len({token for answer in found.values() for token in answer.tokens}) > 4


@pytest.mark.parametrize("size", [2, 8])
def test_swapped_blocks_come_back(size):
    """Whole engine, with too few blocks for all: what was swapped out and in changes nothing."""
    items = [request(f"r{n}", [7 + n, *tiny.prompt(30 + 9 * n)], greedy(max_tokens=60)) for n in range(6)]
    expected = run(make_engine(text(1)), *items)
    engine = make_engine(text(size), num_blocks=26, max_model_len=24 * 16, options=BLOCKS)
    found = run(engine, *items)
    assert engine.stats().blocks_swapped_in > 0
    assert {key: answer.tokens for key, answer in found.items()} == {k: answer.tokens for k, answer in expected.items()}
    assert_idle(engine)
    engine.close()


# -- where things lie -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 8])
def test_no_device_ever_holds_a_whole_sharded_tensor(size):
    """Each shard is put on its device from the host by itself, and has the size that the rules give it."""
    put = []
    callback = jax.make_array_from_callback

    def watched(shape, sharding, data):
        def part(index):
            put.append((shape, data(index).shape))
            return data(index)

        return callback(shape, sharding, part)

    with (
        mock.patch.object(weights_module.jax, "make_array_from_callback", watched),
        mock.patch.object(weights_module.jax, "device_put", side_effect=AssertionError("a whole tensor was placed")),
    ):
        from checkpoints.reader import Checkpoint
        from omni_jax.models.config import model_config
        from omni_jax.models.weights import load_weights
        from omni_jax.runtime.sharding import fit, sharding_of
        from tests.engines import checkpoint

        stored, mesh = Checkpoint(checkpoint("eight_heads")), make_mesh(jax.devices(), model=size)
        config = fit(model_config(stored.config), size)
        names, rules = [], sharding_of(mesh)

        def noted(name, shape):
            names.append((name, shape))
            return rules(name, shape)

        _, loaded = load_weights(stored, config, np.dtype(np.float32), sharding_of=noted)

    whole = [name for name, shape in names if spec_of(name, shape, size) == RULES["packed"]]
    assert len(put) == size * (len(names) - len(whole)) + len(whole), "what is whole is read once"
    sharded = 0
    for (name, shape), leaf in zip(names, loaded.decoder.leaves, strict=True):
        parts = [shard.data.shape for shard in leaf.addressable_shards]
        sharded += name not in whole
        assert {int(np.prod(part)) for part in parts} == {int(np.prod(shape)) // (1 if name in whole else size)}, name
        assert {got for wanted, got in put if wanted == shape} == {*parts}, name
    assert sharded > 0.6 * len(names)


@pytest.mark.parametrize("size", SIZES)
def test_the_pool_is_shared_out_by_kv_heads(size):
    runner = text(size).runner
    for array in jax.tree.leaves(runner._pool):
        assert {shard.data.shape[1] for shard in array.addressable_shards} == {max(1, 2 // size)}
    history = runner._history
    assert {shard.data.shape[1] for shard in history.addressable_shards} == {history.shape[1] // size}


# -- what the programs exchange ---------------------------------------------------------------------------------------


def collectives(executable) -> list[tuple[str, int]]:
    """(operation, elements of its result) of each in the compiled program."""
    found = []
    pattern = (
        r"= \(?(\w+\[[\d,]*\].*?)\s(all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    )
    for shapes, operation in re.findall(pattern, executable.compiled.as_text()):
        sizes = [int(np.prod([int(n) for n in dims.split(",") if n])) for dims in re.findall(r"\[([\d,]*)\]", shapes)]
        found.append((operation, sum(sizes)))
    return found


@pytest.mark.parametrize("size", [2, 8])
def test_a_layer_has_two_all_reduces_and_the_body_nothing_else(size):
    runner = text(size).runner
    layers, hidden = runner._model.num_hidden_layers, runner._model.hidden_size
    for key, tokens in ((("decode", 8), 8), (("mixed", 64), 64)):
        found = collectives(runner._executables[key])
        assert {operation for operation, _ in found} == {"all-reduce"}
        assert sum(elements for _, elements in found) == (2 * layers + 1) * tokens * hidden


@pytest.mark.parametrize("size", [FOUR, 8])
def test_heads_exchange_a_few_numbers_a_row_and_never_logits(size):
    runner = text(size).runner
    for key, executable in runner._executables.items():
        if key[0] not in ("head", "score"):
            continue
        rows = key[1] if key[0] == "head" else 64
        found = collectives(executable)
        assert found, key
        for operation, elements in found:
            assert elements <= rows * 20 * size * 2, (key, operation, elements)
            assert operation in ("all-gather", "all-reduce")


@pytest.mark.parametrize("size", [2])
def test_blocks_move_without_any_exchange(size):
    for key, executable in text(size).runner._executables.items():
        if key[0] in ("read", "write", "admit", "history"):
            assert not collectives(executable), key


@pytest.mark.parametrize("size", [1, 2, 8])
def test_the_pool_is_updated_in_place_on_every_device(size):
    runner = text(size).runner
    pool = sum(array.nbytes for array in jax.tree.leaves(runner._pool)) // size
    for key in (("decode", 8), ("mixed", 64)):
        analysis = runner._executables[key].compiled.memory_analysis()
        assert analysis.alias_size_in_bytes == pool + runner._tables.nbytes
        assert analysis.temp_size_in_bytes < 4 << 20


def test_a_mesh_that_does_not_divide_the_model_is_refused_with_the_sizes():
    with pytest.raises(ValueError, match=r"128 intermediate columns, 512 tokens .* 1, 2, 4, 8"):
        compile_tiny(TEXT, tensor_parallel_size=3)


def test_more_devices_than_there_are_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"needs 16 devices, but there are 8"):
        compile_tiny(TEXT, tensor_parallel_size=16)
