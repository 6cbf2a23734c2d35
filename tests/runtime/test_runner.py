"""Compiled steps update the pool in place, never use unwritten slots, and compute each row independently."""

import dataclasses

import jax
import numpy as np
import pytest

from omni_jax.requests import Sequence
from omni_jax.runtime.executables import compile_all
from omni_jax.runtime.runner import Runner
from tests import tiny
from tests.engines import alone, greedy, load_tiny, make_engine, request, run
from tests.plans import HandRow, plan_of

pytestmark = pytest.mark.smoke

MIB = 1 << 20


@pytest.fixture(scope="module", params=["main", "bfloat16"])
def loaded(request):
    return load_tiny(request.param)


def memory(executable):
    return executable.compiled.memory_analysis()


def pool_bytes(runner) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(runner._pool))


def test_the_pool_is_updated_in_place_and_temporaries_do_not_grow_with_it(loaded):
    """Alias bytes alone would not reveal that XLA converts the whole pool around every scatter (decision 8)."""
    runner = loaded.runner
    config = dataclasses.replace(runner.config, num_pages=2 * runner.config.num_pages)
    larger = Runner(runner._model, runner._weights, config, runner.mesh)
    bodies = [("mixed", 16), ("decode", 8)]
    twice = compile_all([job for job in larger.jobs() if job.key in bodies])
    tables = runner._tables.nbytes
    for key in bodies:
        once = memory(runner._executables[key])
        assert once.alias_size_in_bytes == pool_bytes(runner) + tables
        assert memory(twice[key]).alias_size_in_bytes == 2 * pool_bytes(runner) + tables
        assert once.temp_size_in_bytes == memory(twice[key]).temp_size_in_bytes < 64 * MIB
    for key, executable in runner._executables.items():
        assert memory(executable).temp_size_in_bytes < 64 * MIB, key


def test_state_of_heads_is_updated_in_place(loaded):
    runner = loaded.runner
    for key, executable in runner._executables.items():
        if key[0] == "head":
            history = runner._history.nbytes if key[2] == "full" else 0
            assert memory(executable).alias_size_in_bytes == runner._last_token.nbytes + history
        if key[0] == "admit":
            slots = sum(array.nbytes for array in jax.tree.leaves(runner._slots))
            assert memory(executable).alias_size_in_bytes == slots + runner._tables.nbytes


def test_a_bfloat16_pool_is_stored_as_uint16_on_a_cpu():
    assert {array.dtype for array in load_tiny("bfloat16").runner._pool} == {np.dtype(np.uint16)}
    assert {array.dtype for array in load_tiny("main").runner._pool} == {np.dtype(np.float32)}


def test_kv_01_a_pool_full_of_nan_changes_nothing(loaded):
    """Unwritten slots are never used: in the last page of a row, in page 0, and past the end of a table."""
    items = [request(str(n), n, greedy(max_tokens=20, logprobs=1, prompt_logprobs=1)) for n in (1, 2, 15, 16, 17, 150)]
    clean = run(make_engine(loaded), *items)
    engine = make_engine(loaded)
    runner = loaded.runner

    def nan(array):
        if array.dtype == np.uint16:
            return jax.device_put(np.full(array.shape, 0x7FC0, np.uint16))
        return jax.device_put(np.full(array.shape, np.nan, array.dtype))

    runner._pool = tuple(map(nan, runner._pool))
    assert run(engine, *items) == clean


def test_kv_01_reused_blocks_change_nothing(loaded):
    items = [request(str(n), n, greedy(max_tokens=20, logprobs=1)) for n in (5, 40)]
    clean = run(make_engine(loaded, num_blocks=8, max_model_len=7 * 16), *items)
    engine = make_engine(loaded, num_blocks=8, max_model_len=7 * 16)
    run(engine, *(request(f"before {i}", 60, greedy(max_tokens=30)) for i in range(3)))
    assert run(engine, *items) == clean


@pytest.mark.parametrize(
    "params",
    [greedy(), greedy(temperature=1.0, seed=3), greedy(temperature=1.0, seed=3, presence_penalty=0.7)],
    ids=["greedy", "sample", "full"],
)
def test_forced_tokens_are_taken_scored_and_continued(params):
    """Forced tokens get the same logprobs and continuation as in the prompt. Other rows of the step do not change."""
    loaded, forced = load_tiny("main"), (5, 300, 17, 17, 511, 7)
    prompt = tiny.prompt(20)
    wanted = alone(loaded, request("p", [*prompt, *forced], greedy(max_tokens=9, logprobs=1, prompt_logprobs=1)))
    given = dataclasses.replace(params, max_tokens=15, logprobs=1)
    item = dataclasses.replace(request("f", prompt, given), forced_ids=forced)
    other = request("other", 33, dataclasses.replace(given, seed=5))
    both = run(make_engine(loaded), item, other)
    answer = both["f", 0]
    assert answer.tokens[:6] == list(forced)
    logprobs = [entry.logprob for entry in wanted.prompt_logprobs[20:]]
    assert [entry.logprob for entry in answer.logprobs[:6]] == pytest.approx(logprobs, abs=1e-4)
    if params.greedy:
        assert answer.tokens[6:] == wanted.tokens
    assert both["other", 0].tokens == alone(loaded, other).tokens


# -- rows by hand -----------------------------------------------------------------------------------------------------


def sequences(runner, count: int, length: int) -> list[Sequence]:
    """Sequences with their own slots and blocks, computed except for the last token."""
    blocks = -(-length // runner.config.block_size)
    found = []
    for i in range(count):
        item = request(str(i), tiny.prompt(length, seed=i), greedy())
        sequence = Sequence(request=item, index=0, order=(i, 0), max_output=9, slot=i)
        sequence.blocks = list(range(1 + i * blocks, 1 + (i + 1) * blocks))
        runner.dispatch(plan_of(HandRow(sequence=sequence, start=0, count=length - 1, new_slot=True))).read()
        found.append(sequence)
    return found


def decode(runner, chosen: list[Sequence], size: int) -> np.ndarray:
    """Tokens and bits of logprobs [rows, ...] of one decode step."""
    rows = [HandRow(sequence=s, start=s.num_known - 1, count=1, sample=True) for s in chosen]
    sampled, _ = runner.dispatch(plan_of(*rows, decode=True, size=size)).read()
    return np.array(sampled[: len(rows)])


def test_bfloat16_rows_are_bit_identical_in_decode_buckets_of_2_and_8():
    runner = load_tiny("bfloat16").runner
    runner.reset()
    batch = sequences(runner, 8, 50)
    whole = decode(runner, batch, 8)
    for first in range(0, 8, 2):
        np.testing.assert_array_equal(decode(runner, batch[first : first + 2], 2), whole[first : first + 2])
    np.testing.assert_array_equal(decode(runner, batch[3:4], 2), whole[3:4])
    np.testing.assert_array_equal(decode(runner, batch[::-1], 8), whole[::-1])
    assert len(np.unique(whole[:, 0])) > 4


def test_float32_rows_agree_in_decode_buckets_of_1_and_8():
    runner = load_tiny("main").runner
    runner.reset()
    batch = sequences(runner, 8, 50)
    whole = decode(runner, batch, 8)
    for i, sequence in enumerate(batch):
        [single] = decode(runner, [sequence], 1)
        assert single[0] == whole[i, 0]
        assert single[1:2].view(np.float32) == pytest.approx(whole[i, 1:2].view(np.float32), abs=1e-5)


def test_rows_of_a_step_do_not_affect_each_other(loaded):
    """A row's result depends neither on its place nor on its neighbours, sequences or padding."""
    runner = loaded.runner
    runner.reset()
    batch = sequences(runner, 8, 50)
    expected = decode(runner, batch[2:6], 8)
    mixed = decode(runner, [batch[0], *batch[2:6], batch[7]], 8)
    np.testing.assert_array_equal(mixed[1:5], expected)
