"""The start-up self-test: the chosen kernels against the float32 reference, on the device.

A newer compiler or driver may miscompile a kernel or fail to compile it: Triton once computed two chained products
wrongly on an H100 (openxla/xla#19780), even for inputs of ones. So each kernel runs once at start-up with the model's
head size, group, page size and dtype, over a pool of a few pages whose unwritten slots are NaN.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir

from kernels_pallas.paged_attention import reference
from kernels_pallas.paged_attention.api import PagedBatch, PagedKernels, paged_attention, write_kv
from kernels_pallas.paged_attention.pages import Pages, QuantPages, quantise, storage_dtype, write_pages

# The errors that JAX raises if it cannot compile or run a kernel. Other errors are bugs of this project, not caught.
# - JaxRuntimeError (a RuntimeError) comes from XLA while compiling or running: no ptxas (UNAVAILABLE), too much shared
#   memory (RESOURCE_EXHAUSTED), a fault in the kernel (INTERNAL).
# - NotImplementedError (a RuntimeError) and ValueError come from Pallas while lowering: an operation that the target
#   does not support, a size that is not a power of two, too much shared memory. Mosaic's lowering also has assertions:
#   a tile of 24 keys is a ValueError in JAX 0.10 and an AssertionError in 0.12.
# - MLIRError comes from MLIR: the dialect's verifier rejects a module.
CANNOT_RUN = (RuntimeError, ValueError, AssertionError, ir.MLIRError)

# Tolerances for values around 1: kernels round weights to the dtype, the reference does not. A wrong mask, page or
# scale causes errors of 0.1 and more.
TOLERANCES = {"bfloat16": 0.03, "float16": 0.006, "float32": 0.006}  # float32: a GPU may multiply in TF32
CONTEXT = 443  # tokens of the longest row: its loop over keys has more trips than stages
FEW_ROWS, MANY_ROWS = 8, 192  # rows of a decode batch: with and without splits of a row's keys
MIXED = ((70, 70), (CONTEXT, 45), (130, 1), (17, 17), (1, 1))  # (kv_len, queries); 134 queries
MIXED_TOKENS = 160  # tokens of the mixed batch, including padding
QUERY_DEVIATION = 3.0  # large, so that attention focuses on few tokens and a missing token changes the result
WRITE_TOKENS = 40


_reference = jax.jit(reference.attention, static_argnames=("scale", "window"))


class BrokenDevice(RuntimeError):
    """A kernel has made the device unusable for this process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Model:
    """The sizes that a kernel is compiled for."""

    head_dim: int
    page_size: int
    group: int
    dtype: np.dtype
    quantised: bool
    window: int | None

    kv_heads = 2  # enough to detect mixed-up heads

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.dtype.name]


def self_test(
    kernels: PagedKernels,
    *,
    device: Any,
    head_dim: int,
    page_size: int,
    group: int,
    dtype: Any,
    kv_cache_dtype: str = "auto",
    window: int | None = None,
    attention: Callable = paged_attention,
    write: Callable = write_kv,
) -> Mapping[str, str]:
    """Test every kernel that is not XLA's. Takes one or two seconds after compilation.

    Args:
        kernels: the chosen kernels.
        device: the device to run on.
        head_dim, page_size, group, dtype, kv_cache_dtype, window: as in `choose`; `group` is heads per KV head.
        attention, write: the API's functions, or replacements for tests.

    Returns:
        Failures: "decode", "mixed" or "write" -> a sentence. Empty if all kernels passed.

    Raises:
        BrokenDevice: a kernel has made the device unusable; restart with another backend.
    """
    model = _Model(
        head_dim=head_dim,
        page_size=page_size,
        group=group,
        dtype=np.dtype(dtype),
        quantised=kv_cache_dtype == "int8",
        window=window,
    )
    tests = {"decode": (_test_decode, attention), "mixed": (_test_mixed, attention), "write": (_test_write, write)}
    failures = {}
    with jax.default_device(device):
        for op, (test, function) in tests.items():
            name = getattr(kernels, op)
            if name == "xla":
                continue
            try:
                fault = test(model, device.platform, functools.partial(function, implementation=name))
            except CANNOT_RUN as error:
                fault = f"{type(error).__name__}: {error}"
                _check_alive(op, name, error)
            if fault is not None:
                failures[op] = f"{name}: {fault}"
    return failures


def replace_failed(kernels: PagedKernels, failures: Mapping[str, str]) -> PagedKernels:
    """Replace the kernels that failed by XLA's."""
    return dataclasses.replace(kernels, **dict.fromkeys(failures, "xla"))


def _check_alive(op: str, name: str, error: Exception) -> None:
    """Raise BrokenDevice if the device no longer works: a fault, for example an illegal address, breaks it for the
    process."""
    try:
        jax.block_until_ready(jnp.zeros(8) + 1)
    except jax.errors.JaxRuntimeError:
        raise BrokenDevice(
            f"the self-test of {op} with {name} has made the device unusable for this process: restart with another "
            f"attention backend, for example xla; the fault was {type(error).__name__}: {error}"
        ) from error


# -- tests: each returns a fault, or None -----------------------------------------------------------------------------


def _test_decode(model: _Model, platform: str, attention: Callable) -> str | None:
    page = model.page_size
    lengths = (1, page, page + 1, CONTEXT)
    for rows in (FEW_ROWS, MANY_ROWS):
        row = np.arange(rows) % len(lengths)  # many rows read the same pages
        for ones in (False, True):
            keys, values, tables = _pools(model, platform, lengths, ones)
            batch = _batch(np.arange(rows + 1), np.asarray(lengths)[row], tables[row], decode=True)
            fault = _compare(model, attention, _query(model, rows, ones), keys, values, batch, rows)
            if fault is not None:
                return f"{rows} rows{' of ones' if ones else ''}: {fault}"
    return None


def _test_mixed(model: _Model, platform: str, attention: Callable) -> str | None:
    lengths, queries = zip(*MIXED, strict=True)
    padding = 3  # rows without queries, whose tables have page 0
    start = np.cumsum([0, *queries, *[0] * padding])
    for ones in (False, True):
        keys, values, tables = _pools(model, platform, lengths, ones)
        tables = np.concatenate([tables, np.zeros_like(tables[:padding])])
        batch = _batch(start, np.asarray([*lengths, *[1] * padding]), tables, decode=False)
        fault = _compare(model, attention, _query(model, MIXED_TOKENS, ones), keys, values, batch, sum(queries))
        if fault is not None:
            return f"rows of {', '.join(map(str, queries))} queries{' of ones' if ones else ''}: {fault}"
    return None


def _test_write(model: _Model, platform: str, write: Callable) -> str | None:
    """Write to slots in random order, and several padding tokens to one slot of page 0."""
    rng = np.random.default_rng(0)
    pages = -(-WRITE_TOKENS // model.page_size) + 1
    slot = rng.permutation(np.arange(model.page_size, (1 + pages) * model.page_size))[:WRITE_TOKENS]
    slot[-4:] = 0
    place = jnp.asarray(slot // model.page_size, jnp.int32), jnp.asarray(slot % model.page_size, jnp.int32)
    shape = (WRITE_TOKENS, model.kv_heads, model.head_dim)
    rows = [jnp.asarray(rng.standard_normal(shape), model.dtype) for _ in range(2)]
    empty = np.full((1 + pages, model.kv_heads, model.page_size, model.head_dim), np.nan, np.float32)
    expected = [write_pages(_stored(model, platform, empty), new, *place) for new in rows]
    pools = [_stored(model, platform, empty) for _ in rows]
    got = jax.jit(write, donate_argnums=(0, 1))(*pools, *rows, *place)
    for name, found, right in zip(("keys", "values"), got, expected, strict=True):
        if isinstance(right, QuantPages):
            close = np.abs(np.int32(found.values[1:]) - np.int32(right.values[1:])).max() <= 1  # rounding may differ
            same = close and np.allclose(found.scales[1:], right.scales[1:], rtol=1e-6, atol=0, equal_nan=True)
        else:
            same = _bits(found[1:]) == _bits(right[1:])
        if not same:
            return f"written {name} are wrong or in wrong slots"
    return None


def _compare(
    model: _Model, attention: Callable, query: jax.Array, keys: Pages, values: Pages, batch: PagedBatch, real: int
) -> str | None:
    # Implementations are jitted already: random values and ones use the same program.
    got, want = (
        np.asarray(function(query, keys, values, batch, scale=model.head_dim**-0.5, window=model.window), np.float32)
        for function in (attention, _reference)
    )
    got, want = got[:real], want[:real]
    if not np.isfinite(got).all():
        return f"{np.count_nonzero(~np.isfinite(got))} of {got.size} values are not finite"
    worst = float((np.abs(got - want) / np.maximum(1, np.abs(want))).max())
    if worst > model.tolerance:
        return f"error {worst:.3g} exceeds the tolerance {model.tolerance}"
    return None


# -- inputs -----------------------------------------------------------------------------------------------------------


def _query(model: _Model, tokens: int, ones: bool) -> jax.Array:
    shape = (tokens, model.kv_heads * model.group, model.head_dim)
    drawn = QUERY_DEVIATION * np.random.default_rng(1).standard_normal(shape)
    return jnp.asarray(np.ones(shape) if ones else drawn, model.dtype)


def _batch(query_start: np.ndarray, kv_len: np.ndarray, block_tables: np.ndarray, *, decode: bool) -> PagedBatch:
    start, lengths, tables = (jnp.asarray(array, jnp.int32) for array in (query_start, kv_len, block_tables))
    return PagedBatch(query_start=start, kv_len=lengths, block_tables=tables, decode=decode)


def _pools(model: _Model, platform: str, lengths: tuple[int, ...], ones: bool) -> tuple[Pages, Pages, np.ndarray]:
    """Keys and values of rows of these lengths in randomly ordered pages, and the rows' block tables."""
    rng = np.random.default_rng(2)
    page = model.page_size
    used = [-(-length // page) for length in lengths]
    content = np.full((2, 1 + sum(used), model.kv_heads, page, model.head_dim), np.nan, np.float32)
    content[:, 0, :, 0] = 0.5  # where padding is written
    tables = np.zeros((len(lengths), max(used)), np.int32)
    free = iter(rng.permutation(sum(used)) + 1)
    for row, length in enumerate(lengths):
        for at in range(used[row]):
            tables[row, at] = number = next(free)
            rows = content[:, number, :, : length - at * page]
            rows[...] = 1 if ones else rng.standard_normal(rows.shape)
    keys, values = (_stored(model, platform, pages) for pages in content)
    return keys, values, tables


def _stored(model: _Model, platform: str, content: np.ndarray) -> Pages:
    """Convert float32 pages to the pool's storage; scales of quantised pages are NaN where the content is."""
    if model.quantised:
        values, scales = quantise(jnp.asarray(content))
        return QuantPages(values=values, scales=jnp.where(np.isnan(content[..., 0]), jnp.nan, scales))
    stored = content.astype(model.dtype)
    kept = storage_dtype(model.dtype, platform)
    return jnp.asarray(stored if kept == model.dtype else stored.view(kept))


def _bits(array: jax.Array) -> bytes:
    return np.asarray(array).tobytes()
