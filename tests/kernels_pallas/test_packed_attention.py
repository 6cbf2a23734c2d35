"""Packed attention against each segment alone in numpy, over random segments, padding, poison and windows."""

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
    """Tiles that the slots do not fill evenly. Tests of the real ones use other numbers of slots, so that they share no
    trace with these."""
    monkeypatch.setattr(xla, "QUERY_TILE", 20)
    monkeypatch.setattr(xla, "KEY_TILE", 16)
    monkeypatch.setattr(xla, "SEGMENTS", 3)


def make_case(segments, *, slots=SLOTS, seed=0, dtype=jnp.float32, poison=np.nan):
    """`segments` are lengths, negative ones are runs of padding; padding holds `poison`, and so does what is left."""
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
    """Softmax attention of one segment after the other, in float64; zeros elsewhere."""
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
def packings(draw, most):
    """Lengths of at most `most`, with padding in between and behind, up to all slots."""
    segments, left = [], SLOTS
    for _ in range(draw(st.integers(0, 12))):
        length = draw(st.integers(1, most)) * draw(st.sampled_from([1, 1, 1, -1]))
        left -= abs(length)
        if left < 0:
            break
        segments.append(length)
    return segments


@settings(max_examples=60, deadline=None)
@given(segments=packings(SLOTS), seed=st.integers(0, 99))
def test_mm_segments_equal_each_alone(segments, seed):
    check(make_case(segments, seed=seed))


@settings(max_examples=60, deadline=None)
@given(segments=packings(16), seed=st.integers(0, 99))
def test_windows_equal_each_alone(segments, seed):
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
    [20, 20, 20, 20, 16],  # exactly the query tiles
    [16] * 6,  # exactly the key tiles
    [-40, 16, -40],  # whole tiles of padding before
    [1] * SLOTS,
    [15, 1, 17, 63],
]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("segments", EDGES, ids=str)
def test_padding_is_zero_and_reaches_nothing(segments, poison):
    case = make_case(segments, poison=poison)
    check(case)
    check(case, longest=SLOTS)


@pytest.mark.parametrize("longest", [None, 24])
@pytest.mark.parametrize("poisoned", range(3))
def test_query_key_or_value_alone_is_poisoned(poisoned, longest):
    segments = [5, 24, -3, 17, -9, 20]
    clean = make_case(segments, poison=0.0)
    mixed = list(clean)
    mixed[poisoned] = make_case(segments)[poisoned]
    got, want = (np.asarray(run(*c, scale=SCALE, longest=longest)) for c in (mixed, clean))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("longest", [None, 32])
def test_bfloat16(longest):
    check(make_case([7, 32, 30, -5, 20], dtype=jnp.bfloat16), longest=longest, tolerance=2e-2)


def test_real_tiles(monkeypatch):
    """The tile sizes in use, at a size that none of them divides, with images across their edges."""
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
    """Scores around 5,000, of which float32 keeps three decimals."""
    query, key, value, first, last = make_case([50, 30])
    check((query * 30, key * 30, value, first, last), tolerance=1e-3)
    check((query * 30, key * 30, value, first, last), longest=50, tolerance=1e-3)


@pytest.mark.parametrize("longest", [None, 64])
def test_nothing_is_patches_by_patches(longest, monkeypatch):
    """No array of the program has two axes of n, and temporaries grow with n and not with its square."""
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


def test_work_follows_the_data(monkeypatch):
    """Key tiles outside of a query tile's images are not read, nor are tiles behind the last image: their trips are
    counted."""
    trips = []
    slots = xla._slots

    def counted(x, group, start, size):
        jax.debug.callback(lambda: trips.append(size))
        return slots(x, group, start, size)

    monkeypatch.setattr(xla, "_slots", counted)
    monkeypatch.setattr(xla, "HEADS", HEADS)
    attention = jax.jit(functools.partial(packed_attention, scale=SCALE))

    def count(segments):
        trips.clear()
        jax.block_until_ready(attention(*make_case(segments, slots=100, poison=0.0)))
        jax.effects_barrier()
        return trips.count(20), trips.count(16) // 2

    assert count([100]) == (5, 5 * 7)
    assert count([]) == (0, 0)
    assert count([16, 16]) == (2, 2 + 1)  # slots 0 to 19 see both key tiles, 20 to 39 the second one
    assert count([-40, 32]) == (4, 2 * 3)  # slots 40 to 71 lie in the key tiles from 32 to 79


def test_shapes_that_do_not_fit_are_named():
    query, key, value, first, last = make_case([5])
    with pytest.raises(ValueError, match=r"of one dtype.*got float32\[96, 6, 20\], bfloat16\[96, 6, 20\], float"):
        packed_attention(query, key.astype(jnp.bfloat16), value, first, last, scale=1.0)
    with pytest.raises(ValueError, match=r"no implementation 'cuda', there are \['reference', 'xla'\]"):
        packed_attention(query, key, value, first, last, scale=1.0, implementation="cuda")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        packed_attention(query, key, value, first, last, scale=1.0, longest=0)
