"""Sampling agrees with numpy, which sorts. Uniform numbers are swept instead of drawn, so frequencies are exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_jax.requests import SamplingParams
from omni_jax.requests.sampling_params import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY
from omni_jax.runtime import sampling
from omni_jax.runtime.functions import StepSizes, rebuild_history
from omni_jax.runtime.packer import numbers

pytestmark = pytest.mark.smoke

VOCAB = 300  # not a multiple of the draw's blocks
SWEEP = 4096
UNIFORM = ((np.arange(SWEEP) + 0.5) / SWEEP).astype(np.float32)

_draw = jax.jit(sampling.draw)
_uniforms = jax.jit(sampling.uniforms)


def draw(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=UNIFORM):
    """Tokens of SWEEP rows; scalars and a single row of logits are broadcast to all rows."""

    def rows(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), (SWEEP,))

    logits = np.broadcast_to(np.asarray(logits, np.float32), (SWEEP, VOCAB))
    tokens = _draw(
        logits,
        rows(temperature, np.float32),
        rows(top_k, np.int32),
        rows(top_p, np.float32),
        rows(min_p, np.float32),
        rows(uniform, np.float32),
    )
    return np.asarray(tokens)


def probabilities(logits, temperature, top_k, top_p, min_p):
    """The documented distribution by sorting: temperature, top_k, top_p, min_p; ties with the last kept token stay."""
    scaled = np.asarray(logits, np.float64) / temperature
    likelihood = np.exp(scaled - scaled.max())
    if 0 < top_k < VOCAB:
        likelihood[likelihood < np.sort(likelihood)[-top_k]] = 0.0
    if top_p < 1.0:
        best_first = np.sort(likelihood)[::-1]
        mass, goal = best_first.cumsum(), top_p * best_first.sum()
        assert np.abs(mass - goal).min() > 1e-5 * goal, "rounding decides this case: choose another one"
        likelihood[likelihood < best_first[np.argmax(mass >= goal)]] = 0.0
    likelihood[likelihood < min_p] = 0.0
    return likelihood / likelihood.sum()


def random_logits(kind: str) -> np.ndarray:
    random = np.random.default_rng(sum(map(ord, kind)))
    if kind == "flat":  # cut-offs are far beyond the 20 most likely tokens
        return random.uniform(0, 2, VOCAB)
    if kind == "peaked":
        return random.normal(0, 4, VOCAB)
    return np.round(random.uniform(0, 2, VOCAB) * 4) / 4  # "ties": every value about 33 times


CUT_OFFS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 1, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.3, 20, 1.0, 0.0),
    (1.0, 21, 1.0, 0.0),
    (0.5, 50, 1.0, 0.0),
    (1.0, VOCAB, 1.0, 0.0),
    (1.0, 9_999_999, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 0.503, 0.0),
    (2.0, 0, 0.0301, 0.0),
    (1.0, 0, 1e-4, 0.0),
    (1.0, 0, 1.0, 0.3),
    (1.0, 0, 1.0, 1.0),
    (0.9, 40, 0.801, 0.0),
    (0.9, 10, 0.603, 0.2),
    (1.0, 100, 0.951, 0.4),
]


@pytest.mark.parametrize("kind", ["flat", "peaked", "ties"])
@pytest.mark.parametrize("cut_offs", CUT_OFFS, ids=str)
def test_cut_offs_keep_the_documented_tokens_with_their_probabilities(cut_offs, kind):
    logits = random_logits(kind)
    expected = probabilities(logits, *cut_offs)
    tokens = draw(logits, *cut_offs)
    counts = np.bincount(tokens, minlength=VOCAB)
    assert not counts[expected == 0].any(), "a cut-off token was drawn"
    np.testing.assert_allclose(counts, SWEEP * expected, atol=2.0)


def test_ties_with_the_last_kept_token_are_kept():
    logits = np.full(VOCAB, -5.0)
    logits[[3, 130, 131, 299]] = [2.0, 1.0, 1.0, 1.0]
    assert set(draw(logits, top_k=2)) == {3, 130, 131, 299}
    assert set(draw(logits, top_p=0.6)) == {3, 130, 131, 299}
    assert set(draw(np.zeros(VOCAB), top_k=1)) == set(range(VOCAB))


def test_api_09_rows_do_not_depend_on_the_batch():
    cases = [(kind, cut) for kind in ("flat", "peaked", "ties") for cut in [(0.0, 0, 1.0, 0.0), *CUT_OFFS]]
    logits = np.stack([random_logits(cases[i % len(cases)][0]) for i in range(SWEEP)])
    columns = np.array([cases[i % len(cases)][1] for i in range(SWEEP)])
    mixed = draw(logits, *columns.T)
    for which, (kind, cut) in enumerate(cases):
        np.testing.assert_array_equal(
            mixed[which :: len(cases)], draw(random_logits(kind), *cut)[which :: len(cases)], str(cut)
        )


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-5, 2e-5, 1e-4])
def test_api_07_tiny_temperature_is_greedy(temperature):
    logits = random_logits("peaked") * 30.0 / 12.0
    assert set(draw(logits, temperature=temperature)) == {int(np.argmax(logits))}
    assert set(draw(logits, temperature=temperature, top_p=1e-4, top_k=40, min_p=0.01)) == {int(np.argmax(logits))}


def test_greedy_takes_the_first_of_equal_tokens():
    logits = np.zeros(VOCAB)
    logits[[40, 7, 200]] = 1.0
    assert set(draw(logits, temperature=0.0)) == {7}


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(np.float32(1), np.float32(0))])
def test_the_ends_of_the_unit_interval_draw_the_first_and_the_last_kept_token(uniform):
    logits = np.full(VOCAB, -np.inf)
    logits[[130, 140, 250]] = [0.0, 1.0, -30.0]  # the last weight is below the rounding error of the sum
    tokens = set(draw(logits, uniform=uniform, top_k=2))
    assert tokens == {130 if uniform == 0 else 140}
    assert set(draw(logits, uniform=uniform)) <= {130, 140, 250}


def test_smp_04_rows_with_nan_or_infinity_do_not_affect_others():
    logits = np.tile(random_logits("flat"), (SWEEP, 1))
    whole = draw(logits, top_k=30, top_p=0.902)
    logits[1], logits[2], logits[3, 5], logits[4] = np.nan, -np.inf, np.nan, np.inf
    spoilt = draw(logits, top_k=30, top_p=0.902)
    np.testing.assert_array_equal(spoilt[5:], whole[5:])
    assert spoilt[0] == whole[0]
    assert spoilt[1:5].tolist() == [-1] * 4
    assert set(draw(logits, temperature=0.0)[1:5]) == {-1}


# -- random numbers ---------------------------------------------------------------------------------------------------


def keys(count: int) -> np.ndarray:
    return np.asarray(jax.random.key_data(jax.random.split(jax.random.key(3), count)))


def test_uniform_depends_on_key_and_position_and_nothing_else():
    some, positions = keys(64), np.arange(64, dtype=np.int32) * 7
    together = np.asarray(_uniforms(some, positions))
    backwards = np.asarray(_uniforms(some[::-1], positions[::-1]))
    np.testing.assert_array_equal(together, backwards[::-1])
    np.testing.assert_array_equal(together[5:9], np.asarray(_uniforms(some[5:9], positions[5:9])))
    assert len(np.unique(together)) > 60
    assert (np.asarray(_uniforms(some, positions + 1)) != together).all()


@pytest.mark.parametrize("along", ["positions", "keys"])
def test_uniforms_are_uniform(along):
    """Chi-square over 32 bins with fixed keys, so deterministic. By chance, 1 in 1,000 exceeds 61.1."""
    if along == "positions":
        some, positions = np.repeat(keys(1), 4096, axis=0), np.arange(4096, dtype=np.int32)
    else:
        some, positions = keys(4096), np.full(4096, 17, np.int32)
    uniform = np.asarray(_uniforms(some, positions))
    assert uniform.min() >= 0.0
    assert uniform.max() < 1.0
    counts = np.histogram(uniform, bins=32, range=(0.0, 1.0))[0]
    assert ((counts - 128.0) ** 2 / 128.0).sum() < 61.1
    assert abs(np.corrcoef(uniform[:-1], uniform[1:])[0, 1]) < 0.05


# -- penalties and biases ---------------------------------------------------------------------------------------------


def test_smp_02_penalties_count_prompt_and_output_as_documented():
    """Repetition counts prompt and output, presence and frequency only the output; each row has its own penalties."""
    random = np.random.default_rng(0)
    prompts = [[4, 4, 9], [0], [7, 8, 9, 10, 11, 12]]
    outputs = [[9, 5, 5, 5], [], [7, 40, 40]]
    repetition = np.array([1.5, 2.0, 0.8], np.float32)
    presence = np.array([0.5, 1.0, -0.25], np.float32)
    frequency = np.array([0.3, 0.7, 2.0], np.float32)
    logits = random.normal(0, 3, (3, 50)).astype(np.float32)
    expected = logits.copy()
    for row in range(3):
        for token in range(50):
            seen = prompts[row].count(token) + outputs[row].count(token)
            times = outputs[row].count(token)
            if seen:
                factor = repetition[row]
                expected[row, token] *= 1 / factor if logits[row, token] > 0 else factor
            expected[row, token] -= frequency[row] * times + presence[row] * (times > 0)

    sizes = StepSizes(rows=2, slots=4, pages_per_row=2, block_size=8, vocab_size=50)
    rebuild = jax.jit(rebuild_history(sizes))
    history = np.full((4, 50), 99, np.int32)  # left over from earlier sequences
    for row in range(3):
        buffer, field = sizes.history_layout().fresh()
        known = prompts[row] + outputs[row]
        field["tokens"][:] = 3  # left over in the buffer
        field["slot"][...], field["prompt"][...], field["known"][...] = row, len(prompts[row]), len(known)
        field["tokens"][: len(known)] = known
        history = rebuild(history, buffer)
    assert (np.asarray(history)[3] == 99).all()
    found = jax.jit(sampling.penalise)(logits, history[:3], repetition, presence, frequency)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-6, atol=1e-6)


def test_bias_is_added_and_stop_tokens_are_suppressed():
    logits = np.random.default_rng(1).normal(0, 1, (2, 50)).astype(np.float32)
    none = 50  # padding
    ids = np.array([[3, 49, none], [none, none, none]], np.int32)
    values = np.array([[100.0, -100.0, 7.0], [5.0, 5.0, 5.0]], np.float32)
    stops = np.array([[0, 3], [0, 1]], np.int32)
    expected = logits.copy()
    expected[0, 3] += 100
    expected[0, 49] -= 100
    expected[1, [0, 1]] = sampling.SUPPRESSED
    found = np.asarray(jax.jit(sampling.bias)(logits, ids, values, stops, np.array([False, True])))
    np.testing.assert_array_equal(found, expected)
    token = jax.jit(sampling.draw)(found, *(jnp.full(2, x, jnp.float32) for x in (1.0,)), *_neutral(2))
    assert int(token[1]) not in (0, 1)


# -- what sampling parameters may do to logits ------------------------------------------------------------------------

SMALL = 40  # tokens of the vocabulary below


def _edges(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers in [low, high]: any, and those next to the ends and to zero."""
    near = [low, high, *(sign * size for sign in (1, -1) for size in (0.0, 5e-324, 1e-45, 1e-40, 1e-30, 1e-9, 1.0))]
    return st.floats(low, high) | st.sampled_from([x for x in near if low <= x <= high])


@st.composite
def _admitted(draw_from) -> SamplingParams:
    tokens = st.integers(0, SMALL - 1)
    return SamplingParams(
        temperature=draw_from(_edges(0.0, 2.0)),
        top_p=draw_from(_edges(0.0, 1.0)),
        min_p=draw_from(_edges(0.0, 1.0)),
        top_k=draw_from(st.integers(-1, SMALL + 1)),
        presence_penalty=draw_from(_edges(-2.0, 2.0)),
        frequency_penalty=draw_from(_edges(-2.0, 2.0)),
        repetition_penalty=draw_from(_edges(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)),
        logit_bias=draw_from(st.dictionaries(tokens, _edges(-100.0, 100.0), max_size=4)),
        min_tokens=draw_from(st.integers(0, 1)),
    )


@jax.jit
def _choice(logits, history, numbers, top_k, bias_ids, bias_values, stop_ids, suppress, uniform):
    temperature, top_p, min_p, repetition, presence, frequency = numbers[:, None]
    wanted = sampling.penalise(logits, history, repetition, presence, frequency)
    wanted = sampling.bias(wanted, bias_ids, bias_values, stop_ids, suppress)
    return sampling.draw(wanted, temperature, top_k, top_p, min_p, uniform)[0]


@settings(max_examples=300, deadline=None)
@given(
    params=_admitted(),
    scale=st.sampled_from([1.0, 30.0, 1e4, 1e15, 1e28, 3e38]),
    seed=st.integers(0, 2**32 - 1),
    uniform=st.sampled_from([0.0, 0.5, 1 - 2**-24]),
)
def test_every_admitted_combination_of_parameters_chooses_a_token(params, scale, seed, uniform):
    """From finite logits of any size; a suppressed token only where all are suppressed."""
    random = np.random.default_rng(seed)
    logits = (random.uniform(-1, 1, (1, SMALL)) * scale).astype(np.float32)
    history = random.integers(0, 9, (1, SMALL)).astype(np.int32) * random.integers(0, 2)
    bias_ids, bias_values = np.full((1, 4), SMALL, np.int32), np.zeros((1, 4), np.float32)
    bias_ids[0, : len(params.logit_bias)] = list(params.logit_bias)
    bias_values[0, : len(params.logit_bias)] = list(params.logit_bias.values())
    stops = np.array([[3, SMALL]], np.int32)
    token = int(
        _choice(
            logits,
            history,
            np.asarray(numbers(params), np.float32),
            np.array([max(params.top_k, 0)], np.int32),
            bias_ids,
            bias_values,
            stops,
            np.array([params.min_tokens > 0]),
            np.array([uniform], np.float32),
        )
    )
    assert 0 <= token < SMALL
    assert not (params.min_tokens and token == 3)


def test_smp_05_top_p_zero_takes_the_first_of_the_most_likely_tokens():
    logits = np.zeros(VOCAB)
    logits[[40, 7, 200]] = 1.0
    temperature, top_p, *_ = numbers(SamplingParams(top_p=0))
    assert set(draw(logits, temperature=temperature, top_p=top_p)) == {7}
    logits[40] = 1.1
    for top_p in (0.0, 5e-324, 1e-45, 1e-9):
        assert set(draw(logits, top_p=top_p)) == {40}


def _neutral(rows):
    """top_k, top_p, min_p without effect, and a uniform number that draws the first token."""
    return jnp.zeros(rows, jnp.int32), jnp.ones(rows), jnp.zeros(rows), jnp.zeros(rows)


@pytest.mark.parametrize("numbers", [300, 20 * 256, 20 * 256 + 1, 9_999])
@pytest.mark.parametrize("kind", ["distinct", "ties", "few finite", "all equal", "not a number"])
def test_top_k_by_chunks_equals_top_k(numbers, kind):
    """The top-k for GPUs returns the same as lax.top_k, the order of ties included."""
    rng = np.random.default_rng(numbers)
    values = rng.normal(size=(6, numbers)).astype(np.float32)
    if kind == "ties":
        values = np.round(values)
    elif kind == "few finite":
        values[rng.random(values.shape) > 5 / numbers] = -np.inf
    elif kind == "all equal":
        values[:] = 1.5
    elif kind == "not a number":
        values[2, numbers // 2] = np.nan
    found = jax.jit(lambda x: sampling.top_k_by_chunks(x, 20))(values)
    for mine, expected in zip(found, jax.lax.top_k(values, 20), strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_most_likely_is_sorted_with_ties_by_lower_id():
    logits = np.random.default_rng(2).normal(0, 1, (3, VOCAB)).astype(np.float32).round(1)
    values, ids = jax.jit(lambda x: sampling.most_likely(x, 20))(logits)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :20]
    np.testing.assert_array_equal(np.asarray(ids), order)
    np.testing.assert_array_equal(np.asarray(values), np.take_along_axis(logits, order, axis=-1))
