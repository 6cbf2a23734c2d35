"""Speed of attention as a share of the device's ceilings: decode by the bytes of keys and values it must read, ragged
prefill by its floating-point operations. First with the current settings, then with candidates."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_check.measure import calls_for, compile_each, in_turn, loop
from benchmarks.gpu_check.section import Section
from kernels_pallas.paged_attention import PagedBatch, mosaic, paged_attention, triton_decode, triton_mixed
from kernels_pallas.paged_attention.self_test import CANNOT_RUN
from kernels_pallas.paged_attention.settings import DecodeSettings, MixedSettings, decode_settings, mixed_settings
from omni_jax.cost.model import causal_pairs

PAGE = 16
MAX_BYTES = 18e9  # largest keys and values of a case
COLD_BYTES = 1 << 30  # smallest pool, so that a call finds nothing of the last one in the L2 cache
SHAPES = {  # heads, KV heads, head_dim
    "7B": (28, 4, 128),  # Qwen2.5-7B, a group of 7
    "8B": (32, 8, 128),  # Llama-3-8B, a group of 4
    "group 8": (64, 8, 128),  # a 70B on one device
    "0.5B": (14, 2, 64),  # Qwen2-0.5B
}
DRY_SHAPES = {"7B": (4, 2, 16)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A batch of rows of `context` tokens, of which the last `queries` are computed; 1: a decode batch."""

    shape: str
    rows: int
    context: int
    queries: int = 1
    implementation: str = "triton"
    settings: DecodeSettings | MixedSettings | None = None

    @property
    def name(self) -> str:
        queries = "" if self.queries == 1 else f", {self.queries} queries"
        return f"{self.shape}: {self.rows} x {self.context}{queries}"


# -- decode -----------------------------------------------------------------------------------------------------------


def decode(section: Section) -> None:
    """Add rows of (case, implementation, settings, microseconds, TB/s, share of the copy ceiling)."""
    if section.dry_run:
        _run(section, [Case(shape="7B", rows=2, context=32, implementation="reference")])
        _tune(section, Case(shape="7B", rows=2, context=32), _decode_candidates)
        return
    cases = [Case(shape="7B", rows=n, context=c) for c in (2048, 8192, 32768, 512) for n in (64, 8, 1, 256)]
    cases += [
        Case(shape=shape, rows=n, context=c)
        for shape in ("8B", "group 8", "0.5B")
        for c in (2048, 8192)
        for n in (64, 1)
    ]
    cases += [Case(shape="7B", rows=n, context=c, implementation="mosaic") for c in (2048, 8192) for n in (64, 8, 1)]
    cases += [Case(shape="0.5B", rows=64, context=2048, implementation="mosaic")]
    cases += [Case(shape="7B", rows=64, context=2048, implementation="xla")]
    _run(section, [case for case in cases if _bytes(SHAPES, case) <= MAX_BYTES])
    for shape, rows, context in (("7B", 64, 2048), ("0.5B", 64, 2048), ("7B", 1, 8192), ("7B", 8, 32768)):
        if section.has_time(15, for_=f"candidates of {shape} {rows} x {context}"):
            _tune(section, Case(shape=shape, rows=rows, context=context), _decode_candidates)


def _decode_candidates(case: Case, sizes: dict[str, int], kind: str) -> Iterable[DecodeSettings]:
    """Yield the current settings, then others near them."""
    usual = decode_settings(kind, rows=case.rows, max_context=case.context, **sizes)
    yield usual
    for key_tile, num_warps, num_stages in (
        *((32, 2, 3), (32, 4, 4), (32, 4, 3), (64, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3)),
        *((128, 4, 2), (128, 4, 3), (128, 8, 2), (128, 8, 3)),
    ):
        yield dataclasses.replace(usual, key_tile=key_tile, num_warps=num_warps, num_stages=num_stages)
    for splits in (usual.splits // 2, usual.splits * 2, usual.splits * 4):
        if splits >= 1:
            yield dataclasses.replace(usual, splits=splits)


# -- prefill ----------------------------------------------------------------------------------------------------------


def prefill(section: Section) -> None:
    """Add rows of (case, implementation, settings, microseconds, TFLOP/s, share of the product ceiling)."""
    if section.dry_run:
        _tune(section, Case(shape="7B", rows=1, context=32, queries=32), _mixed_candidates)
        return
    whole = ((1, 16384), (1, 2048), (1, 8192), (1, 32768), (8, 2048), (16, 512))
    cases = [Case(shape=shape, rows=n, context=c, queries=c) for shape in ("8B", "7B") for n, c in whole]
    cases += [
        Case(shape="7B", rows=1, context=32768, queries=2048),
        Case(shape="7B", rows=8, context=8192, queries=256),
    ]
    cases += [Case(shape=shape, rows=1, context=c, queries=c) for shape in ("group 8", "0.5B") for c in (16384, 2048)]
    cases += [Case(shape="7B", rows=1, context=2048, queries=2048, implementation="xla")]
    _run(section, cases)
    for shape, rows, context in (("8B", 1, 16384), ("0.5B", 1, 16384), ("7B", 8, 2048)):
        if section.has_time(20, for_=f"candidates of {shape} {rows} x {context}"):
            _tune(section, Case(shape=shape, rows=rows, context=context, queries=context), _mixed_candidates)


def _mixed_candidates(case: Case, sizes: dict[str, int], kind: str) -> Iterable[MixedSettings]:
    usual = mixed_settings(kind, tokens=case.rows * case.queries, rows=case.rows, max_context=case.context, **sizes)
    yield usual
    for query_tile, key_tile, num_warps, num_stages in (
        *((64, 32, 4, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 32, 4, 3), (128, 32, 8, 3)),
        *((128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (256, 64, 8, 2)),
    ):
        yield MixedSettings(query_tile=query_tile, key_tile=key_tile, num_warps=num_warps, num_stages=num_stages)


# -- both -------------------------------------------------------------------------------------------------------------


def _run(section: Section, cases: list[Case]) -> None:
    """Add a row for each case, in order. Cases of one shape share a pool and are compiled together."""
    for shape in dict.fromkeys(case.shape for case in cases):
        mine = [case for case in cases if case.shape == shape]
        if section.has_time(5 + len(mine), for_=f"{len(mine)} cases of {shape}"):
            _measure(section, mine, table="cases")


def _tune(section: Section, case: Case, candidates: Callable) -> None:
    """Add a row for each candidate, the fastest first."""
    heads, kv_heads, head_dim = (DRY_SHAPES if section.dry_run else SHAPES)[case.shape]
    sizes = {"kv_heads": kv_heads, "group": heads // kv_heads, "head_dim": head_dim, "page_size": PAGE, "itemsize": 2}
    found = dict.fromkeys(candidates(case, sizes, jax.devices()[0].device_kind))
    _measure(
        section,
        [dataclasses.replace(case, settings=each) for each in list(found)[: 1 if section.dry_run else None]],
        table="candidates",
    )


def _measure(section: Section, cases: list[Case], *, table: str) -> None:
    shapes = DRY_SHAPES if section.dry_run else SHAPES
    heads, kv_heads, head_dim = shapes[cases[0].shape]
    used = max(case.rows * -(-case.context // PAGE) for case in cases)
    page_bytes = PAGE * kv_heads * head_dim * 2 * 2  # keys and values, bfloat16
    pages = used + 1 if section.dry_run else max(used + 1, COLD_BYTES // page_bytes)
    keys, values = _pool((pages, kv_heads, PAGE, head_dim))

    jobs = []
    for case in cases:
        amount = _flops(shapes, case) if case.queries > 1 else _bytes(shapes, case)
        ceiling = section.ceilings.get("matmul_flops" if case.queries > 1 else "copy_bytes_per_s")
        usual = (3e14 if case.queries > 1 else 2.5e12) / (100 if case.implementation == "xla" else 1)
        calls = calls_for(amount / usual, dry_run=section.dry_run)
        query = jax.random.normal(jax.random.key(1), (case.rows * case.queries, heads, head_dim), jnp.bfloat16)
        arguments = (query, keys, values, _tables(case, pages))
        step = functools.partial(_attend, case, _function(case, section.dry_run))
        job = functools.partial(_compiled, loop(step, calls), arguments)
        jobs.append(((case, amount, ceiling, calls, arguments), job))
    ready: dict[Case, Callable] = {}
    known = {}
    for (case, amount, ceiling, calls, arguments), program in compile_each(jobs):
        try:
            if isinstance(program, BaseException):
                raise program
            jax.block_until_ready(program(*arguments))
        except CANNOT_RUN as error:
            section.add(table=table, **_columns(case), error=f"{type(error).__name__}: {str(error)[:300]}")
        else:
            ready[case], known[case] = functools.partial(program, *arguments), (amount, ceiling, calls)
    seconds = in_turn(ready)
    for case in sorted(ready, key=seconds.__getitem__) if table == "candidates" else ready:
        amount, ceiling, calls = known[case]
        rate = amount * calls / seconds[case]
        section.add(
            table=table,
            **_columns(case),
            microseconds=1e6 * seconds[case] / calls,
            rate=rate / 1e12,
            share=None if ceiling is None else rate / ceiling,
        )


def _columns(case: Case) -> dict[str, Any]:
    columns = {name: getattr(case, name) for name in ("shape", "rows", "context", "queries", "implementation")}
    settings = None if case.settings is None else dataclasses.asdict(case.settings)
    return {"case": case.name, **columns, "settings": settings}


def _function(case: Case, dry_run: bool) -> Callable:
    if case.implementation in ("xla", "reference"):
        return functools.partial(paged_attention, implementation=case.implementation)
    if case.implementation == "mosaic":
        return functools.partial(mosaic.attention, settings=case.settings)
    kernel = triton_decode if case.queries == 1 else triton_mixed
    return functools.partial(kernel.attention, settings=case.settings, interpret=dry_run)


def _attend(case: Case, attention: Callable, trip, query, keys, values, tables):
    """Call the kernel on the result of the last call; for a decode batch, on pages that the last calls did not read."""
    pages = keys.shape[0]
    shifted = tables if case.queries > 1 else (tables + trip * tables.size) % pages
    batch = PagedBatch(
        query_start=case.queries * jnp.arange(case.rows + 1, dtype=jnp.int32),
        kv_len=jnp.full((case.rows,), case.context, jnp.int32),
        block_tables=shifted,
        decode=case.queries == 1,
    )
    return attention(query, keys, values, batch, scale=query.shape[-1] ** -0.5)


def _compiled(function: Callable, arguments: tuple) -> Callable:
    return jax.jit(function).lower(*arguments).compile()


def _tables(case: Case, pages: int) -> jax.Array:
    """Return block tables of pages in random order."""
    width = -(-case.context // PAGE)
    order = np.random.default_rng(0).permutation(pages)[: case.rows * width]
    return jnp.asarray(order.reshape(case.rows, width), jnp.int32)


def _pool(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return random keys and values: a random page times a random factor for each. Drawing all of them would need three
    times the memory."""

    @jax.jit
    def pages(key):
        few = jax.random.normal(key, (1, *shape[1:]), jnp.bfloat16)
        factor = jax.random.uniform(key, (shape[0], 1, 1, 1), jnp.bfloat16, 0.5, 1.5)
        return few * factor

    return pages(jax.random.key(2)), pages(jax.random.key(3))


def _bytes(shapes: dict[str, tuple[int, int, int]], case: Case) -> int:
    """Return the bytes of bfloat16 keys and values that must be read."""
    _, kv_heads, head_dim = shapes[case.shape]
    return case.rows * case.context * kv_heads * head_dim * 2 * 2


def _flops(shapes: dict[str, tuple[int, int, int]], case: Case) -> int:
    """Return the FLOPs: for each visible pair, a product for the score and one for the value."""
    heads, _, head_dim = shapes[case.shape]
    return 4 * heads * head_dim * case.rows * causal_pairs(case.queries, case.context - case.queries)
