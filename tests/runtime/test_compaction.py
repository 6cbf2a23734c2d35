"""A sequence that lost cache rows continues as if their columns were masked, at unchanged positions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from omni_jax.runtime.functions import logits_of
from tests.plans import HandRow, plan_of
from tests.runtime.with_blocks import block_runner, make_row, make_sequence, mixed, prefill, prompt

SINKS, WINDOW = 4, 16


class Oracle:
    """The model without a cache: attention over the whole text, with dropped columns masked for all later queries."""

    def __init__(self, runner, text, positions=None):
        self.runner, self.text = runner, text
        self.positions = np.arange(len(text)) if positions is None else positions
        model = runner._model
        shape = (model.num_hidden_layers, model.num_key_value_heads, len(text), len(text))
        self.visible = np.broadcast_to(np.tril(np.ones((len(text), len(text)), bool)), shape).copy()

    def run(self):
        """Logits [tokens, vocab], and the rotated keys of each layer [tokens, kv_heads, head_dim]."""
        decoder, keys = self.runner._weights.decoder, []

        def attend(layer, query, key, value):
            keys.append(key)
            group = query.shape[1] // key.shape[1]
            key, value = (jnp.repeat(x, group, axis=1) for x in (key, value))
            scores = jnp.einsum("qhd,khd->hqk", query, key) * query.shape[2] ** -0.5
            scores = jnp.where(jnp.repeat(self.visible[layer], group, axis=0), scores, -1e30)
            return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), value)

        @jax.jit
        def logits(leaves, tokens, positions):
            hidden = decoder.merge(leaves)(tokens, positions, attend)
            return logits_of(hidden, self.runner._weights.output_matrix), tuple(keys)

        return jax.tree.map(np.asarray, logits(decoder.leaves, jnp.asarray(self.text), jnp.asarray(self.positions)))

    def compact(self, computed: int, keep: int) -> None:
        """After `computed` tokens, keep `keep` of the columns that the last token attends to."""
        for layer, keys in enumerate(self.run()[1]):
            for head in range(keys.shape[1]):
                attended = np.flatnonzero(self.visible[layer, head, computed - 1])
                between = attended[SINKS : len(attended) - WINDOW]
                fractions, exponents = np.frexp(np.square(keys[between, head]).sum(-1))
                norms = np.ldexp(np.floor(fractions * 1024 + 0.5), exponents)  # rounded, see kv_compaction
                dropped = between[np.argsort(norms, kind="stable")[keep - SINKS - WINDOW :]]
                self.drop(computed, dropped, layer, head)

    def drop(self, computed: int, columns, layer=slice(None), head=slice(None)) -> None:
        self.visible[layer, head, computed:, columns] = False


def check(found, expected):
    """Compare results of a step [rows, 2 + 2 * alternatives] with logits [rows, vocab]."""
    wanted = np.asarray(jax.nn.log_softmax(expected, axis=-1))
    count = (found.shape[1] - 2) // 2
    ids, logprobs = found[:, 2 : 2 + count], np.ascontiguousarray(found[:, 2 + count :]).view(np.float32)
    np.testing.assert_allclose(logprobs, np.take_along_axis(wanted, ids, axis=-1), atol=1e-4)
    np.testing.assert_allclose(logprobs, np.sort(wanted, axis=-1)[:, ::-1][:, :count], atol=1e-4)


def decode(runner, sequence, place, *, admit=False):
    """The result for the token at `place`."""
    row = make_row(sequence, place, 1, sample=True, admit=admit)
    return np.array(runner.dispatch(plan_of(row, decode=True, size=1)).read()[0])[:1]


def compact(runner, sequence, computed, keep, target):
    """Compact as the scheduler does: fewer blocks, and a new block table with the next row."""
    rows = computed - sequence.dropped
    runner.compact(sequence.blocks, rows, keep, target, sinks=SINKS, window=WINDOW)
    sequence.dropped += rows - keep
    sequence.blocks = list(target)


@pytest.fixture(params=["main", "qwen2_vl"])
def case(request):
    """A runner, a sequence of 150 tokens of which none is computed, and the oracle. The model with M-RoPE has different
    positions on its three axes."""
    runner = block_runner(request.param)
    runner.reset()
    text = prompt(150)
    sequence, positions = make_sequence(text, list(range(1, 11))), None
    if request.param == "qwen2_vl":
        place = np.arange(150, dtype=np.int32)
        positions = np.stack([place // 3, place // 2, place])
        sequence.request = dataclasses.replace(sequence.request, positions=positions)
    return runner, sequence, Oracle(runner, text, positions)


def drop_by_hand(runner, sequence, columns):
    """Move rows of the pool on the host, the same ones for all heads."""
    size = runner.config.block_size
    kept = np.setdiff1d(np.arange(len(sequence.blocks) * size), columns)

    def moved(array):
        array = np.array(array)
        rows = array[sequence.blocks].swapaxes(1, 2).reshape(-1, *array.shape[1:2], *array.shape[3:])
        new = np.full_like(rows, np.nan)
        new[: len(kept)] = rows[kept]
        blocks = new.reshape(-1, size, *new.shape[1:]).swapaxes(1, 2)
        array[sequence.blocks] = blocks
        return jax.device_put(array)

    runner._pool = jax.tree.map(moved, runner._pool)
    sequence.dropped += len(columns)


def test_kvc_01_positions_include_dropped_rows(case):
    """Rows are moved by hand, without the compaction op; then decode steps and a chunk."""
    runner, sequence, oracle = case
    prefill(runner, sequence, 90)
    columns = [*range(3, 30), 41, 55, 56, 71]
    drop_by_hand(runner, sequence, columns)
    oracle.drop(90, columns)
    logits, _ = oracle.run()
    for place in range(90, 95):
        check(decode(runner, sequence, place), logits[place : place + 1])
    row = make_row(sequence, 95, 50, sample=True, score=True)
    sampled, scored = runner.dispatch(mixed(row)).read()
    check(np.array(scored)[:50], logits[95:145])
    check(np.array(sampled)[:1], logits[144:145])
    check(decode(runner, sequence, 145), logits[145:146])


@pytest.mark.parametrize("in_place", [True, False])
def test_kvc_01_decoding_after_compaction_equals_dense_attention_with_the_columns_masked(case, in_place):
    """Compacts twice between decode steps; rows kept the first time may be dropped the second time."""
    runner, sequence, oracle = case
    prefill(runner, sequence, 120)
    compact(runner, sequence, 120, 75, sequence.blocks[:6] if in_place else range(20, 26))
    oracle.compact(120, 75)
    found = [decode(runner, sequence, place, admit=place == 120) for place in range(120, 126)]
    compact(runner, sequence, 126, 48, sequence.blocks[:4] if in_place else range(31, 35))
    oracle.compact(126, 48)
    sequence.blocks += [40, 41]
    found += [decode(runner, sequence, place, admit=place == 126) for place in range(126, 150)]
    logits, _ = oracle.run()
    check(np.concatenate(found), logits[120:])
    assert sequence.dropped == 45 + 33
    kept = oracle.visible[:, :, -1]
    assert (kept[0, 0] != kept[0, 1]).any()
    assert (kept[0] != kept[1]).any()


def test_kvc_02_chunks_after_compaction_attend_to_the_kept_keys(case):
    """Chunks of several queries, whose cache has fewer rows than positions."""
    runner, sequence, oracle = case
    prefill(runner, sequence, 80)
    compact(runner, sequence, 80, 30, sequence.blocks[:2])
    oracle.compact(80, 30)
    sequence.blocks += [50, 51, 52, 53, 54]
    rows = [make_row(sequence, 80, 16, score=True, admit=True), make_row(sequence, 96, 54, sample=True, score=True)]
    logits, _ = oracle.run()
    check(np.array(runner.dispatch(mixed(rows[0], size=16)).read()[1])[:16], logits[80:96])
    sampled, scored = runner.dispatch(mixed(rows[1])).read()
    check(np.array(scored)[:53], logits[96:149])
    check(np.array(sampled)[:1], logits[149:])


def test_kvc_02_keeping_all_rows_changes_no_bit(case):
    runner, sequence, _ = case
    prefill(runner, sequence, 100)
    wanted = decode(runner, sequence, 100)
    compact(runner, sequence, 100, 100, [25, 24, 23, 22, 21, 20, 19])
    assert sequence.dropped == 0
    np.testing.assert_array_equal(decode(runner, sequence, 100, admit=True), wanted)


def test_a_moved_row_gets_a_new_table_and_keeps_its_history():
    """The history on the device includes the token in flight, which the host does not know: it must not be rebuilt."""
    runner = block_runner("main")
    runner.reset()
    sequence = make_sequence(prompt(60), [1, 2, 3, 4])
    params = dataclasses.replace(sequence.request.params, presence_penalty=0.5)
    sequence.request = dataclasses.replace(sequence.request, params=params)
    runner.dispatch(mixed(make_row(sequence, 0, 60, admit=True, sample=True))).read()
    before = np.array(runner._history[0])
    [in_flight] = np.flatnonzero(before >= 2)
    runner.compact(sequence.blocks, 60, 30, [7, 8], sinks=SINKS, window=WINDOW)
    sequence.blocks, sequence.dropped = [7, 8], 30
    row = HandRow(sequence=sequence, start=60, count=1, sample=True, feedback=True, moved=True)
    sampled, _ = runner.dispatch(plan_of(row, decode=True, size=1)).read()
    before[int(sampled[0, 0])] += 2
    np.testing.assert_array_equal(np.asarray(runner._history[0]), before)
    assert before[in_flight] >= 2
    assert np.asarray(runner._tables[0, :3]).tolist() == [7, 8, 0]


def test_compaction_and_steps_run_in_the_order_of_dispatch():
    """A step before and a step after a compaction give the same result with and without waits."""
    runner = block_runner("main")

    def once(wait):
        runner.reset()
        sequence = make_sequence(prompt(150), list(range(1, 11)))
        prefill(runner, sequence, 64)
        first = runner.dispatch(mixed(make_row(sequence, 64, 60)))
        if wait:
            first.read()
        compact(runner, sequence, 124, 64, sequence.blocks[:4])
        if wait:
            jax.block_until_ready(runner._pool)
        sequence.blocks += [30]
        return decode(runner, sequence, 124, admit=True)

    wanted = once(wait=True)
    for _ in range(5):
        np.testing.assert_array_equal(once(wait=False), wanted)


@pytest.mark.parametrize(
    ("source", "rows", "keep", "target", "sinks", "window"),
    [
        ([1, 2], 33, 20, [1, 2], 4, 8),  # rows do not fit the source blocks
        ([1, 2], 32, 20, [1], 4, 8),  # kept rows do not fit the target blocks
        ([1, 2], 20, 21, [1, 2], 4, 8),  # more rows to keep than there are
        ([1, 2], 20, 11, [1], 4, 8),  # fewer rows to keep than sinks and window
        ([1, 2], 20, 0, [1], 0, 0),
    ],
)
def test_impossible_compactions_are_refused(source, rows, keep, target, sinks, window):
    with pytest.raises(ValueError, match=rf"compaction from {rows} rows in 2 blocks of 16 to {keep} in {len(target)}"):
        block_runner("main").compact(source, rows, keep, target, sinks=sinks, window=window)
