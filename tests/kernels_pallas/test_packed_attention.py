"""Packed attention against numpy on each segment alone, over random segments, windows and NaN in padding."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.packed_attention import packed_attention, xla

pytestmark = pytest.mark.smoke

SLOTS, HEADS, HEAD_DIM, SCALE = 96, 6, 20, 0.3
run = jax.jit(packed_attention, static_argnames=("scale", "longest", "implementation"))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Use tile sizes that do not divide SLOTS. Tests of the real sizes use other numbers of slots, so that they are
    traced again."""
    monkeypatch.setattr(xla, "QUERY_TILE", 20)
    monkeypatch.setattr(xla, "KEY_TILE", 16)
    monkeypatch.setattr(xla, "SEGMENTS", 3)


def make_case(segments, *, slots=SLOTS, seed=0, dtype=jnp.float32, poison=np.nan):
    """Arguments for segments of these lengths. Negative lengths are padding; padding and the rest hold `poison`."""
    rng = np.random.default_rng(seed)
    arrays = np.full((3, slots, HEADS, HEAD_DIM), poison, np.float32)
    first, last, at = np.zeros(slots, np.int32), np.zeros(slots, np.int32), 0
    for length in segments:
        stop = at + abs(length)
        if length > 0:
            arrays[:, at:stop] = rng.standard_normal((3, length, HEADS, HEAD_DIM))
            first[at:stop], last[at:stop] = at, stop
        else:
            first[at:stop] = last[at:stop] = rng.integers(0, slots)
        at = stop
    assert at <= slots
    return (*(jnp.asarray(x, dtype) for x in arrays), jnp.asarray(first), jnp.asarray(last))


def each_alone(case):
    """Softmax attention segment by segment, in float64; zeros elsewhere."""
    query, key, value = (np.asarray(x, np.float64) for x in case[:3])
    first, last = (np.asarray(x) for x in case[3:])
    out = np.zeros_like(query)
    for start, stop in sorted({(f, s) for f, s in zip(first, last, strict=True) if f < s}):
        scores = np.einsum("qhd,khd->hqk", query[start:stop], key[start:stop]) * SCALE
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[start:stop] = np.einsum("hqk,khd->qhd", weights, value[start:stop])
    return out


def check(case, *, longest=None, implementation=None, tolerance=2e-6):
    got = run(*case, scale=SCALE, longest=longest, implementation=implementation)
    assert got.dtype == case[0].dtype
    got, want = np.asarray(got, np.float64), each_alone(case)
    np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)
    padding = np.asarray(case[3] == case[4])
    assert (got[padding] == 0).all()


@st.composite
def packings(draw, max_length):
    """Lengths of up to `max_length`, with padding between and after them, up to all slots."""
    segments, left = [], SLOTS
    for _ in range(draw(st.integers(0, 12))):
        length = draw(st.integers(1, max_length)) * draw(st.sampled_from([1, 1, 1, -1]))
        left -= abs(length)
        if left < 0:
            break
        segments.append(length)
    return segments


@settings(max_examples=60, deadline=None)
@given(segments=packings(SLOTS), seed=st.integers(0, 99))
def test_mm_packed_segments_equal_each_alone(segments, seed):
    check(make_case(segments, seed=seed))


@settings(max_examples=60, deadline=None)
@given(segments=packings(16), seed=st.integers(0, 99))
def test_packed_windows_equal_each_alone(segments, seed):
    case = make_case(segments, seed=seed)
    check(case, longest=16)
    check(case)


@settings(max_examples=20, deadline=None)
@given(segments=packings(40), seed=st.integers(0, 99))
def test_reference_equals_each_alone(segments, seed):
    check(make_case(segments, seed=seed), implementation="reference")


EDGES = [
    [],
    [1],
    [SLOTS],
    [-SLOTS],
    [20, 20, 20, 20, 16],  # equal to the query tiles
    [16] * 6,  # equal to the key tiles
    [-40, 16, -40],  # whole tiles of padding
    [1] * SLOTS,
    [15, 1, 17, 63],
]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("segments", EDGES, ids=str)
def test_padding_is_zero_and_does_not_affect_results(segments, poison):
    case = make_case(segments, poison=poison)
    check(case)
    check(case, longest=SLOTS)


@pytest.mark.parametrize("longest", [None, 24])
@pytest.mark.parametrize("poisoned", range(3))
def test_nan_in_the_padding_of_one_argument_changes_nothing(poisoned, longest):
    segments = [5, 24, -3, 17, -9, 20]
    clean = make_case(segments, poison=0.0)
    mixed = list(clean)
    mixed[poisoned] = make_case(segments)[poisoned]
    got, want = (np.asarray(run(*c, scale=SCALE, longest=longest)) for c in (mixed, clean))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("longest", [None, 32])
def test_bfloat16_is_close_to_float64(longest):
    check(make_case([7, 32, 30, -5, 20], dtype=jnp.bfloat16), longest=longest, tolerance=2e-2)


def test_real_tile_sizes(monkeypatch):
    """The number of slots is not a multiple of any tile size, and segments cross tile edges."""
    monkeypatch.undo()
    case = make_case([700, 12, 300, -50, 64, 9], slots=1200)
    check(case, tolerance=5e-6)
    check(make_case([64, 64, 16, 32, 64, 4] * 5, slots=1300), longest=64)


@pytest.mark.parametrize(("heads", "head_dim"), [(16, 80), (1, 8), (5, 16)])
def test_any_number_of_heads(heads, head_dim):
    rng = np.random.default_rng(1)
    arrays = jnp.asarray(rng.standard_normal((3, 40, heads, head_dim)), jnp.float32)
    first, last = jnp.asarray([0] * 30 + [30] * 10), jnp.asarray([30] * 30 + [40] * 10)
    for longest in (None, 30):
        check((*arrays, first, last), longest=longest, tolerance=5e-6)


def test_large_scores_do_not_overflow():
    """Scores are around 5,000, for which float32 has three decimals."""
    query, key, value, first, last = make_case([50, 30])
    check((query * 30, key * 30, value, first, last), tolerance=1e-3)
    check((query * 30, key * 30, value, first, last), longest=50, tolerance=1e-3)


@pytest.mark.parametrize("longest", [None, 64])
def test_memory_is_not_quadratic_in_the_patches(longest, monkeypatch):
    """No array of the program has two axes of n, and temporaries grow linearly with n."""
    monkeypatch.undo()

    def compiled(n):
        array, slots = jax.ShapeDtypeStruct((n, 4, 16), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.int32)
        call = functools.partial(packed_attention, scale=SCALE, longest=longest)
        return jax.jit(call).lower(array, array, array, slots, slots).compile()

    small, large = 4096, 8192
    program = compiled(large)
    shapes = [tuple(map(int, s.split(","))) for s in re.findall(r"\w\[([\d,]+)\]", program.as_text())]
    assert (large, 4, 16) in shapes
    assert not [s for s in shapes if sum(size >= large for size in s) > 1]
    grown = program.memory_analysis().temp_size_in_bytes / compiled(small).memory_analysis().temp_size_in_bytes
    assert grown < 2.2


def test_only_tiles_of_the_own_segments_are_read(monkeypatch):
    """Loop trips are counted: key tiles outside a query tile's segments and tiles after the last segment have none."""
    trips = []
    slots = xla._slots

    def counting(x, group, start, size):
        jax.debug.callback(lambda: trips.append(size))
        return slots(x, group, start, size)

    monkeypatch.setattr(xla, "_slots", counting)
    monkeypatch.setattr(xla, "HEADS", HEADS)
    attention = jax.jit(functools.partial(packed_attention, scale=SCALE))

    def count(segments):
        trips.clear()
        jax.block_until_ready(attention(*make_case(segments, slots=100, poison=0.0)))
        jax.effects_barrier()
        return trips.count(20), trips.count(16) // 2

    assert count([100]) == (5, 5 * 7)
    assert count([]) == (0, 0)
    assert count([16, 16]) == (2, 2 + 1)  # slots 0 to 19 need both key tiles, 20 to 39 the second one
    assert count([-40, 32]) == (4, 2 * 3)  # slots 40 to 71 lie in the key tiles from 32 to 79


def test_errors_for_mismatched_shapes_have_the_shapes():
    query, key, value, first, last = make_case([5])
    with pytest.raises(ValueError, match=r"of one dtype.*got float32\[96, 6, 20\], bfloat16\[96, 6, 20\], float"):
        packed_attention(query, key.astype(jnp.bfloat16), value, first, last, scale=1.0)
    with pytest.raises(ValueError, match=r"no implementation 'cuda'; available: \['reference', 'xla'\]"):
        packed_attention(query, key, value, first, last, scale=1.0, implementation="cuda")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        packed_attention(query, key, value, first, last, scale=1.0, longest=0)
