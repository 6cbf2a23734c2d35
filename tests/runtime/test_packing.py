"""Packed buffers of many fields, and the ring that keeps them from being refilled too early."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from omni_jax.runtime.packing import RING, Layout, Ring

pytestmark = pytest.mark.smoke

LAYOUT = Layout(
    fields={
        "slot": ((), jnp.int32),
        "seed": ((2,), jnp.uint32),
        "numbers": ((3, 2), jnp.float32),
        "tokens": ((37,), jnp.int32),
    }
)


def aligned(count: int) -> np.ndarray:
    """int32 zeros aligned to 64 bytes."""
    raw = np.zeros(count * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count * 4].view(np.int32)


def test_unpacked_fields_equal_packed_fields_bit_for_bit():
    buffer, field = LAYOUT.fresh()
    assert buffer.shape == (LAYOUT.size,) == LAYOUT.abstract().shape == (1 + 2 + 6 + 37,)
    field["slot"][...] = -5
    field["seed"][:] = (2**32 - 1, 7)
    field["numbers"][:] = [[1.5, -0.0], [np.inf, np.nan], [1e-44, 3.0]]
    field["tokens"][:] = np.arange(37)
    found = jax.jit(LAYOUT.unpack)(buffer)
    assert set(found) == set(LAYOUT.fields)
    for name, value in found.items():
        assert np.asarray(value).tobytes() == field[name].tobytes(), name
        assert (value.shape, value.dtype) == LAYOUT.fields[name]


def test_a_ring_returns_its_buffers_in_turn():
    ring = Ring(LAYOUT)
    taken = [ring.take() for _ in range(2 * RING)]
    buffers = [buffer for buffer, _ in taken]
    assert RING == 3
    assert len({buffer.ctypes.data for buffer in buffers[:RING]}) == RING
    assert [b.ctypes.data for b in buffers[:RING]] == [b.ctypes.data for b in buffers[RING:]]
    for buffer, field in taken:
        field["tokens"][:] = 9
        assert (buffer[-37:] == 9).all()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only a CPU can alias the host's buffer")
def test_refilling_an_aliased_buffer_early_corrupts_a_step_and_a_ring_prevents_it():
    """Packs three steps before any of them runs, into one buffer and into three (decision 2)."""
    compiled = jax.jit(lambda gate, packed: packed + gate.astype(jnp.int32)).lower(
        jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((4096,), jnp.int32)
    )
    step = compiled.compile()
    slow = jax.jit(lambda x: jnp.tanh(jax.lax.fori_loop(0, 300, lambda _, y: jnp.sin(y @ y), x)).sum() * 0.0)
    gate_of = slow.lower(jax.ShapeDtypeStruct((128, 128), jnp.float32)).compile()
    ones = np.ones((128, 128), np.float32)

    def run(buffers):
        """Values in the results of three steps that wait for the same slow step."""
        gate = gate_of(ones)
        results = []
        for i in range(3):
            buffer = buffers[i % len(buffers)]
            buffer[:] = i + 1
            results.append(step(gate, buffer))
        return [np.unique(np.asarray(result)).tolist() for result in results]

    assert run([aligned(4096) for _ in range(3)]) == [[1], [2], [3]]
    # Several tries, because on a busy machine the slow step may finish before the host continues.
    assert any(run([aligned(4096)]) != [[1], [2], [3]] for _ in range(20)), "JAX no longer aliases: no ring is needed"
