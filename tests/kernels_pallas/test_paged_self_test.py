"""The start-up self-test: correct kernels pass, and each kind of fault is found."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention import PagedKernels, QuantPages, paged_attention, triton_decode, write_kv
from kernels_pallas.paged_attention import self_test as self_test_module
from kernels_pallas.paged_attention.self_test import BrokenDevice, replace_failed, self_test

ALL = PagedKernels(decode="triton", mixed="triton", write="triton")
MODEL = {"head_dim": 16, "page_size": 16, "group": 3, "dtype": jnp.float32}


def correct(*arguments, implementation, **options):
    """The reference under a kernel's name; the self-test compiles it anyway."""
    return self_test_module._reference(*arguments, **options)


def xla(*arguments, implementation, **options):
    return paged_attention(*arguments, implementation="xla", **options)


def write_xla(*arguments, implementation):
    return write_kv(*arguments, implementation="xla")


def failures(kernels=ALL, *, attention=correct, write=write_xla, **model):
    device = jax.devices()[0]
    return dict(self_test(kernels, device=device, attention=attention, write=write, **MODEL | model))


def test_a_correct_kernel_passes():
    assert failures(attention=xla, dtype=jnp.bfloat16) == {}


@pytest.mark.parametrize(
    "model", [{"page_size": 64}, {"group": 1, "kv_cache_dtype": "int8"}, {"dtype": jnp.float16, "window": 40}], ids=str
)
def test_the_reference_passes_for_every_kind_of_model(model):
    assert failures(**model) == {}


def test_xla_is_not_tested():
    def never(*_, **__):
        raise AssertionError("called")

    assert failures(PagedKernels(), attention=never, write=never) == {}


def test_the_interpreted_kernel_passes():
    def decode(query, keys, values, batch, *, scale, window, implementation):
        assert implementation == "triton"
        return triton_decode.attention(query, keys, values, batch, scale=scale, window=window, interpret=True)

    assert failures(PagedKernels(decode="triton"), attention=decode) == {}


def changed(**fields):
    """A kernel that reads changed fields of the batch."""

    def attention(query, keys, values, batch, **options):
        new = {name: change(getattr(batch, name)) for name, change in fields.items()}
        batch = type(batch)(**{name: new.get(name, getattr(batch, name)) for name in vars(batch)})
        return correct(query, keys, values, batch, **options)

    return attention


WRONG = {
    "one token too many": changed(kv_len=lambda n: n + 1),
    "one token too few": changed(kv_len=lambda n: jnp.maximum(n - 1, 1)),
    "at most 384 tokens": changed(kv_len=lambda n: jnp.minimum(n, 384)),
    "pages in another order": changed(block_tables=lambda tables: jnp.roll(tables, 1, axis=1)),
    "another row's pages": changed(block_tables=lambda tables: jnp.roll(tables, 1, axis=0)),
    "another scale": lambda *arguments, scale, **options: correct(*arguments, scale=1.1 * scale, **options),
    "swapped heads": lambda query, *rest, **options: correct(query[:, ::-1], *rest, **options),
    "a constant": lambda query, *_, **__: jnp.zeros_like(query),
    "NaN everywhere": lambda query, *_, **__: jnp.full_like(query, jnp.nan),
    "one infinite value": lambda *arguments, **options: correct(*arguments, **options).at[3, 1, 2].set(jnp.inf),
}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_wrong_kernel_is_found(fault, dtype):
    found = failures(attention=WRONG[fault], dtype=dtype)
    assert sorted(found) == ["decode", "mixed"]
    assert all(text.startswith("triton: ") for text in found.values())


def test_kv_07_wrong_products_of_ones_are_found():
    """As in openxla/xla#19780: inputs of ones may fail where random values pass."""

    def attention(query, *rest, **options):
        return correct(query, *rest, **options) * jnp.where((query == 1).all(), 0.875, 1).astype(query.dtype)

    found = failures(attention=attention, dtype=jnp.bfloat16)
    assert "of ones: error 0.125 exceeds the tolerance 0.03" in found["decode"]


def test_a_fault_with_many_rows_only_is_found():
    """Batches of few and of many rows are different programs, with and without splits."""

    def attention(query, *rest, **options):
        return correct(query, *rest, **options) + (1 if query.shape[0] == 192 else 0)

    found = failures(attention=attention)
    assert list(found) == ["decode"]
    assert "192 rows" in found["decode"]


def write_misplaced(key_pages, value_pages, key, value, page, offset, **options):
    return write_xla(key_pages, value_pages, key, value, page, jnp.where(page > 0, offset ^ 1, 0), **options)


def write_swapped(key_pages, value_pages, key, value, page, offset, **options):
    return write_xla(key_pages, value_pages, value, key, page, offset, **options)


def write_everywhere(key_pages, value_pages, *rest, **options):
    """Also writes to slots of no token."""
    clean = jax.tree.map(lambda pages: jnp.nan_to_num(pages), (key_pages, value_pages))
    return write_xla(*clean, *rest, **options)


@pytest.mark.parametrize("write", [write_misplaced, write_swapped, write_everywhere])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_a_wrong_write_is_found(write, kv_cache_dtype):
    found = failures(write=write, kv_cache_dtype=kv_cache_dtype)
    assert list(found) == ["write"]
    assert "are wrong or in wrong slots" in found["write"]


def test_int8_writes_may_round_differently():
    def write(*arguments, **options):
        keys, values = write_xla(*arguments, **options)
        assert isinstance(keys, QuantPages)
        return QuantPages(values=jnp.clip(keys.values, -127, 126) + jnp.int8(1), scales=keys.scales), values

    assert failures(write=write, kv_cache_dtype="int8") == {}


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded"),
        NotImplementedError("Unimplemented primitive: sort"),
        ValueError("not a power of 2"),
        AssertionError("m and n"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_kernel_that_does_not_compile_is_a_failure(error):
    def attention(*_, **__):
        raise error

    found = failures(attention=attention)
    assert found["decode"] == f"triton: {type(error).__name__}: {error}"
    assert replace_failed(ALL, found) == PagedKernels(decode="xla", mixed="xla", write="triton")


def test_other_errors_are_not_caught():
    def attention(*_, **__):
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        failures(attention=attention)


def test_a_device_that_is_unusable_afterwards_raises(monkeypatch):
    def attention(*_, **__):
        # After an illegal address, every later call of the process fails.
        monkeypatch.setattr(jnp, "zeros", functools.partial(broken, "CUDA_ERROR_ILLEGAL_ADDRESS"))
        raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS")

    def broken(text, *_, **__):
        raise jax.errors.JaxRuntimeError(text)

    with pytest.raises(BrokenDevice, match=r"self-test of decode with triton has made the device unusable.*xla"):
        failures(attention=attention)


def test_every_start_tests_the_same_values():
    seen = []

    def attention(query, *rest, **options):
        jax.debug.callback(lambda q: seen.append(np.asarray(q).tobytes()), query)
        return correct(query, *rest, **options)

    for _ in range(2):
        failures(PagedKernels(mixed="triton"), attention=attention)
    jax.effects_barrier()
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
