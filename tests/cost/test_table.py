"""TableCost recovers known step times despite noise and delays, and its predictions are always plausible."""

import functools
import itertools
import json
import math
import random
import statistics
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_jax.cost.model import StepShape, causal_pairs
from omni_jax.cost.table import TableCost

SIZES = {"decode": (1, 2, 4, 8, 16), "mixed": (32, 128, 512), "encode": (256, 1024)}


def decode(size: int, context: int) -> StepShape:
    return StepShape(kind="decode", size=size, rows=size, tokens=size, context=context, attended=context)


def mixed(size: int, context: int = 0, attended: int = 0) -> StepShape:
    return StepShape(kind="mixed", size=size, rows=1, tokens=size, context=context, attended=attended)


def encode(size: int, attended: int = 0) -> StepShape:
    return StepShape(kind="encode", size=size, rows=1, tokens=size, context=0, attended=attended)


class Machine:
    """A machine with known, linear step times: 10 ms, plus 0.5 ms per token, plus 6 us per token of context in decode
    steps, or 2 us per token of context and 0.4 us per pair in mixed steps."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def shape(self) -> StepShape:
        draw = self.random
        kind = draw.choice(sorted(SIZES))
        size = draw.choice(SIZES[kind])
        if kind == "encode":
            return encode(size, draw.randint(size, size**2))
        decoding = [int(2 ** draw.uniform(4, 12)) for _ in range(size if kind == "decode" else draw.randint(0, 8))]
        if kind == "decode":
            return decode(size, sum(decoding))
        before = draw.choice((0, 0, int(2 ** draw.uniform(4, 12))))
        return mixed(size, sum(decoding) + before + size, sum(decoding) + causal_pairs(size, before))

    def seconds(self, shape: StepShape) -> float:
        per_context, per_pair = {"decode": (6e-6, 0), "mixed": (2e-6, 4e-7), "encode": (0, 1e-7)}[shape.kind]
        return 0.01 + 5e-4 * shape.size + per_context * shape.context + per_pair * shape.attended

    def measure(self, shape: StepShape, noise: float, delayed: float) -> float:
        """A time with relative deviation `noise`. A share `delayed` of the steps takes far longer, or no time, like the
        step after one that was read late."""
        took = self.seconds(shape) * self.random.lognormvariate(0, noise)
        return took * self.random.choice((5, 50, 500, 0)) if self.random.random() < delayed else took


# -- learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_known_step_times_are_recovered_despite_noise_and_delays(seed):
    machine, table = Machine(seed), TableCost(SIZES)
    for _ in range(1500):
        shape = machine.shape()
        table.observe(shape, machine.measure(shape, noise=0.1, delayed=0.03))
    off = [abs(table.seconds(s) / machine.seconds(s) - 1) for s in (machine.shape() for _ in range(500))]
    assert statistics.median(off) < 0.04
    assert statistics.quantiles(off, n=20)[-1] < 0.1


def test_without_noise_a_table_is_found_closely():
    machine, table = Machine(0), TableCost(SIZES)
    for _ in range(1500):
        shape = machine.shape()
        table.observe(shape, machine.seconds(shape))
    for _ in range(300):
        shape = machine.shape()
        assert table.seconds(shape) == pytest.approx(machine.seconds(shape), rel=0.02)


def test_the_first_step_sets_the_base():
    table = TableCost(SIZES)
    table.observe(decode(8, 0), 0.25)
    assert table.seconds(decode(8, 0)) == pytest.approx(0.25)


def test_the_second_step_replaces_a_delayed_first_one():
    table = TableCost(SIZES)
    for seconds in (7.0, 0.01):
        table.observe(decode(8, 0), seconds)
    assert table.seconds(decode(8, 0)) == pytest.approx(0.01)


@pytest.mark.parametrize("outlier", [0.0, 1e-5, 1.0, 1e4])
def test_an_outlier_at_any_context_changes_nothing(outlier):
    table = TableCost(SIZES)
    for i in range(60):
        context = 100 * 2 ** (i % 6)
        table.observe(decode(8, context), 0.01 + 1e-6 * context)
    shapes = [decode(size, context) for size in SIZES["decode"] for context in (0, 500, 50_000)]
    before = [table.seconds(shape) for shape in shapes]
    for context in (100, 1600, 3200, 100_000):
        table.observe(decode(8, context), outlier)
    assert [table.seconds(shape) for shape in shapes] == pytest.approx(before, rel=0.01)


def test_steps_that_seem_to_take_no_time_do_not_outweigh_the_others():
    """Two of an octave's three steps take no time: unlimited relative errors would outweigh all other points."""
    table = TableCost(SIZES)
    for i in range(70):
        context = (100, 200, 400, 1600, 3200, 6400, 12_800)[i % 7]
        table.observe(decode(8, context), 0.01 + 1e-6 * context)
    for seconds in (0.0, 0.0, 0.0108):
        table.observe(decode(8, 800), seconds)
    for context in (0, 1000, 12_800):
        assert table.seconds(decode(8, context)) == pytest.approx(0.01 + 1e-6 * context, rel=0.15)


def test_a_lasting_change_is_followed():
    table = TableCost(SIZES)
    for _ in range(200):
        table.observe(decode(8, 1000), 0.01)
    for _ in range(25):
        table.observe(decode(8, 1000), 0.03)
    assert table.seconds(decode(8, 1000)) == pytest.approx(0.03)


def test_rare_long_contexts_are_learnt_and_remembered():
    """One step in fifty takes twenty times as long because of its context: it is neither an outlier nor forgotten."""
    table, draw = TableCost(SIZES), random.Random(1)
    for i in range(1000):
        pairs = 1_000_000 + draw.randint(0, 200_000) if i % 50 == 0 else draw.randint(2000, 30_000)
        table.observe(mixed(128, 128, pairs), 0.02 + 4e-7 * pairs)
    for _ in range(500):
        pairs = draw.randint(2000, 30_000)
        table.observe(mixed(128, 128, pairs), 0.02 + 4e-7 * pairs)
    assert table.seconds(mixed(128, 128, 1_000_000)) == pytest.approx(0.42, rel=0.03)
    assert table.seconds(mixed(128, 128, 5000)) == pytest.approx(0.022, rel=0.03)


@pytest.mark.parametrize("seed", range(10))
def test_similar_contexts_give_no_steep_slope(seed):
    """With contexts that hardly differ, noise must not be fitted as a slope and extrapolated."""
    table, draw = TableCost(SIZES), random.Random(seed)
    for _ in range(200):
        table.observe(decode(8, draw.randint(4000, 4200)), 0.01 * draw.lognormvariate(0, 0.1))
    assert table.seconds(decode(8, 4100)) == pytest.approx(0.01, rel=0.05)
    assert table.seconds(decode(8, 8200)) < 0.02


# -- sizes without steps ----------------------------------------------------------------------------------------------


def test_the_prior_is_linear_in_size():
    table = TableCost(SIZES, overhead=16, seconds_per_token=1e-3)
    assert table.seconds(decode(4, 10_000)) == pytest.approx(0.020)
    assert table.seconds(mixed(512, 512, 512)) == pytest.approx(0.528)


def test_unmeasured_sizes_follow_their_measured_neighbours():
    table = TableCost(SIZES, overhead=16)
    for _ in range(5):
        table.observe(decode(2, 0), 0.010)
        table.observe(decode(8, 0), 0.016)
    assert table.seconds(decode(4, 0)) == pytest.approx(0.012)  # a third of the way
    assert table.seconds(decode(1, 0)) == pytest.approx(0.010 * 17 / 18)
    assert table.seconds(decode(16, 0)) == pytest.approx(0.016 * 32 / 24)
    assert table.seconds(decode(5, 0)) == pytest.approx(0.013)  # not a compiled size


def test_kinds_without_steps_are_scaled_like_the_others():
    table = TableCost(SIZES, overhead=16, seconds_per_token=1e-3)
    table.observe(decode(8, 0), 0.024 * 5)  # five times the prior
    assert table.seconds(mixed(512)) == pytest.approx(0.528 * 5)


def test_pooled_bases_are_weighted_by_their_numbers_of_steps():
    table = TableCost(SIZES)
    for _ in range(100):
        table.observe(decode(8, 0), 0.010)
    table.observe(decode(16, 0), 0.004)  # implausible: a larger step cannot be faster
    assert table.seconds(decode(8, 0)) == pytest.approx(0.010, rel=0.02)
    assert table.seconds(decode(16, 0)) == table.seconds(decode(8, 0))


# -- predictions ------------------------------------------------------------------------------------------------------


def test_a_prompt_costs_its_cheapest_steps():
    """The expected cost is the minimum over all ways to cover the tokens by buckets."""
    table = TableCost(SIZES, overhead=16, seconds_per_token=1e-3)

    @functools.cache
    def cheapest(tokens: int) -> float:
        if tokens <= 0:
            return 0.0
        return min((size + 16) * 1e-3 + cheapest(tokens - size) for size in SIZES["mixed"])

    for tokens in range(1, 1600):
        assert table.prefill_seconds(tokens, 0) == pytest.approx(cheapest(tokens)), tokens
    assert table.prefill_seconds(0, 100) == 0.0


def test_a_prompt_costs_its_context_and_pairs():
    table = TableCost({"mixed": (100,)})
    for context, attended in [(100, 5000), (3000, 5000), (100, 400_000), (3000, 400_000)] * 20:
        table.observe(mixed(100, context, attended), 0.1 + 1e-5 * context + 1e-6 * attended)
    # 250 tokens after 1,000: three steps, which read 1,100, 1,200 and 1,250 tokens.
    expected = 3 * 0.1 + 1e-5 * (1100 + 1200 + 1250) + 1e-6 * (250 * 1000 + 250 * 251 / 2)
    assert table.prefill_seconds(250, 1000) == pytest.approx(expected, rel=0.02)


def test_decode_and_encode_use_the_smallest_bucket_that_fits():
    table = TableCost(SIZES, overhead=0, seconds_per_token=1e-3)
    assert table.decode_seconds(5, 100) == pytest.approx(0.008)
    assert table.encode_seconds(257) == pytest.approx(1.024)
    assert table.decode_seconds(40, 100) == pytest.approx(0.040)  # beyond the largest


def test_errors_are_of_predictions_made_before_the_step():
    table = TableCost(SIZES, overhead=0, seconds_per_token=1e-3)
    assert table.errors()["decode"].median is None
    for _ in range(3):
        table.observe(decode(8, 0), 0.016)  # predicted at half of it the first time, correctly afterwards
    assert (table.errors()["decode"].steps, table.errors()["mixed"].steps) == (3, 0)
    assert table.errors()["decode"].median == pytest.approx(0.0)
    table.observe(mixed(512), 0.512)  # predicted at twice that, by the scale of decode steps
    assert table.errors()["mixed"].median == pytest.approx(1.0)


# -- invariants -------------------------------------------------------------------------------------------------------

counts = st.integers(0, 2**40)
seconds = st.one_of(st.floats(0, 1e6), st.floats(1e-4, 1.0), st.just(0.0))
observations = st.lists(
    st.one_of(
        st.tuples(st.builds(decode, st.sampled_from((1, 2, 3, 8, 300)), counts), seconds),
        st.tuples(st.builds(mixed, st.sampled_from((32, 100, 512)), counts, counts), seconds),
        st.tuples(st.builds(encode, st.sampled_from((256, 300)), counts), seconds),
        # Repeated shapes, so that there are enough steps for points and slopes.
        st.tuples(st.builds(decode, st.just(8), st.sampled_from((10, 1000, 50_000))), seconds),
        st.tuples(st.builds(mixed, st.just(32), st.sampled_from((32, 900)), st.sampled_from((528, 30_000))), seconds),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=150)
@given(observations)
def test_predictions_are_positive_finite_and_never_fall(steps):
    table = TableCost(SIZES)
    for shape, took in steps:
        table.observe(shape, took)

    def rises(values):
        values = list(values)
        assert all(0 < value < math.inf for value in values), values
        # Sums of floats in another order may differ in the last digits.
        assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(values)), values

    grown = (0, 1, 1000, 10**6, 10**12)
    rises(table.seconds(decode(size, 1000)) for size in range(1, 40))
    rises(table.seconds(mixed(size, 1000, 5000)) for size in range(1, 1200, 7))
    rises(table.seconds(decode(8, context)) for context in grown)
    rises(table.seconds(mixed(32, 0, attended)) for attended in grown)
    rises(table.prefill_seconds(tokens, 100) for tokens in range(1, 1200, 3))
    rises(table.prefill_seconds(200, context) for context in grown)
    rises(table.decode_seconds(rows, 1000) for rows in range(1, 40))
    rises(table.encode_seconds(patches) for patches in range(1, 3000, 50))


@settings(deadline=None, max_examples=50)
@given(observations, observations)
def test_a_table_survives_a_round_trip_through_json(before, after):
    table = TableCost(SIZES, overhead=7, seconds_per_token=0.002)
    for shape, took in before:
        table.observe(shape, took)
    again = TableCost.from_json(table.to_json())
    for shape, took in [*before, *after]:
        assert again.seconds(shape) == pytest.approx(table.seconds(shape), rel=1e-6)
        again.observe(shape, took)  # the loaded table goes on learning
        table.observe(shape, took)
    assert again.prefill_seconds(700, 50) == pytest.approx(table.prefill_seconds(700, 50), rel=1e-6)


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{}", "[1, 2]", json.dumps({"format": "omni-jax step times 0"})])
def test_text_of_another_format_is_refused(text):
    with pytest.raises(ValueError, match="not a table of step times"):
        TableCost.from_json(text)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"decode": (1,)}, {}, 'sizes must have "mixed"'),
        ({"mixed": (0, 5)}, {}, "positive integers, got 0"),
        ({"mixed": (5,), "prefill": (5,)}, {}, "kinds are decode, mixed, encode, got 'prefill'"),
        ({"mixed": (5,)}, {"seconds_per_token": 0}, "seconds_per_token"),
        ({"mixed": (5,)}, {"overhead": -1}, "overhead"),
    ],
)
def test_errors_name_bad_arguments(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        TableCost(sizes, **options)


@pytest.mark.parametrize("took", [-0.1, math.nan, math.inf])
def test_impossible_seconds_are_refused_and_change_nothing(took):
    table = TableCost(SIZES)
    with pytest.raises(ValueError, match="must be finite and at least 0"):
        table.observe(decode(8, 0), took)
    assert table.errors()["decode"].steps == 0
    assert table.seconds(decode(8, 0)) == pytest.approx(0.024)


def test_cost_does_not_import_jax():
    """The scheduler imports cost, and must not import JAX."""
    code = "import sys, omni_jax.cost; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
