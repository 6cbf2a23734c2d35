"""Proofs of kernels: each compiles for each GPU without spills, fits shared memory, and uses the right instructions."""

import dataclasses
import functools
import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_proof.finding import COPY, MMA, TMA, WGMMA, Finding, Proof, kernel_faults
from kernels_pallas import aot
from kernels_pallas.paged_attention import PagedBatch, QuantPages, paged_attention, write_kv

CONTEXT = 4096  # maximum tokens of a row
ROWS, TOKENS, KV_HEADS, PAGES = 16, 512, 2, 1024
KERNELS = ("triton-decode", "triton-mixed", "triton-write", "mosaic-decode")
HOPPER = ("h100", "h200")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes that a kernel is compiled for.

    Attributes:
        head_dim: head size of keys and values.
        page_size: tokens in a page.
        group: query heads of a KV head.
        dtype: dtype of queries and pages.
        int8: whether pages hold int8 and scales instead.
        window: tokens that a query attends to; None: all.
    """

    head_dim: int
    page_size: int = 16
    group: int = 7
    dtype: str = "bfloat16"
    int8: bool = False
    window: int | None = None

    def __str__(self) -> str:
        name = f"d{self.head_dim}-p{self.page_size}-g{self.group}-{self.dtype}"
        return name + "-int8" * self.int8 + (f"-w{self.window}" if self.window else "")


QUICK = (
    Case(head_dim=64),
    Case(head_dim=128),
    Case(head_dim=256, page_size=64, group=8),
    Case(head_dim=64, page_size=128, group=1, dtype="float16"),
    Case(head_dim=128, page_size=32, group=16, window=1024),
    Case(head_dim=128, int8=True),
)
WIDE = (
    *(
        Case(head_dim=head_dim, page_size=page_size, group=group)
        for head_dim, page_size, group in itertools.product((64, 128, 256), (16, 32, 64, 128), (1, 2, 4, 7, 8, 16))
    ),
    *(
        Case(head_dim=head_dim, dtype=dtype, int8=int8, window=window)
        for head_dim, dtype, int8, window in itertools.product(
            (64, 128, 256), ("bfloat16", "float16"), (False, True), (None, 1024)
        )
    ),
)


def proofs() -> Iterator[Proof]:
    """Yield all proofs, those of the wide matrix included."""
    for kernel in KERNELS:
        for target in HOPPER if kernel.startswith("mosaic") else aot.TARGETS:
            for case in dict.fromkeys((*QUICK, *WIDE)):
                if computes(kernel, case):
                    yield Proof(
                        name=f"{kernel}/{target}/{case}",
                        target=target,
                        quick=case in QUICK,
                        run=functools.partial(prove, kernel, target, case),
                    )


def prove(kernel: str, target: str, case: Case) -> list[Finding]:
    """Compile a kernel and check it."""
    begin = time.perf_counter()
    mesh = aot.mesh(target)
    function, arguments, donate = program(kernel, case)
    with tempfile.TemporaryDirectory() as folder:
        compiled = aot.compile_for(mesh, function, arguments, donate=donate, dump=Path(folder))
        kernels = aot.resources(Path(folder), "paged|write_kv")
    seconds = time.perf_counter() - begin
    name = f"{kernel}/{target}/{case}"
    if not kernels:
        return [Finding(proof=name, what=f"{kernel} {case}", target=target, faults=("no Pallas kernel was compiled",))]
    findings = []
    for entry, found in sorted(kernels.items(), key=lambda item: len(item[0])):
        # Kernels that merge partial results, or write, do not use tensor cores.
        main = "merge" not in entry
        expected = _expected(kernel, case) if main else {}
        counts = {word: found.count(*names) for word, names in (expected or {"copy": COPY}).items()}
        if found.register_wgmma:
            counts["wgmma from registers"] = found.register_wgmma
        faults = kernel_faults(found, limit=aot.shared_limit(target), expected=expected)
        findings.append(
            Finding(
                proof=name,
                what=f"{kernel} {case}" if main else f"  and its {entry}",
                target=target,
                registers=found.registers,
                spills=found.spills,
                shared=found.shared,
                found=", ".join(f"{count} {word}" for word, count in counts.items() if count),
                seconds=seconds,
                faults=faults + _write_faults(compiled, case) if kernel == "triton-write" else faults,
            )
        )
        seconds = 0.0  # counted once
    return findings


def computes(kernel: str, case: Case) -> bool:
    """Return whether a kernel supports the case and depends on it."""
    if kernel == "triton-write":
        return case.window is None and case.group in (7, 8)  # it depends on neither
    return not (kernel == "mosaic-decode" and case.int8)


def _expected(kernel: str, case: Case) -> Mapping[str, tuple[str, ...]]:
    if kernel == "triton-write":
        return {}
    if kernel == "mosaic-decode":
        return {"TMA": TMA, "wgmma": WGMMA}
    # int8 is converted on its way to the tensor cores, so it passes through registers.
    return {"mma": MMA} if case.int8 else {"cp.async": COPY, "mma": MMA}


def program(kernel: str, case: Case):
    """Return (function, arguments, indices of donated arguments) to compile."""
    shape = (PAGES, KV_HEADS, case.page_size, case.head_dim)
    array: Any = jax.ShapeDtypeStruct
    if case.int8:
        pages = QuantPages(values=array(shape, jnp.int8), scales=array(shape[:-1], jnp.float32))
    else:
        pages = array(shape, case.dtype)
    implementation, _, operation = kernel.partition("-")
    if operation == "write":
        new, place = array((TOKENS, KV_HEADS, case.head_dim), case.dtype), array((TOKENS,), jnp.int32)
        return (
            functools.partial(write_kv, implementation=implementation),
            (pages, pages, new, new, place, place),
            (0, 1),
        )
    decode = operation == "decode"

    def attention(query, keys, values, query_start, kv_len, block_tables):
        batch = PagedBatch(query_start=query_start, kv_len=kv_len, block_tables=block_tables, decode=decode)
        scale = case.head_dim**-0.5
        return paged_attention(
            query, keys, values, batch, scale=scale, window=case.window, implementation=implementation
        )

    query = array((ROWS if decode else TOKENS, KV_HEADS * case.group, case.head_dim), case.dtype)
    rows = (array((ROWS + 1,), jnp.int32), array((ROWS,), jnp.int32))
    return attention, (query, pages, pages, *rows, array((ROWS, CONTEXT // case.page_size), jnp.int32)), ()


def _write_faults(compiled, case: Case) -> tuple[str, ...]:
    """Return the faults of a write that is not in place."""
    _, (pages, *_), _ = program("triton-write", case)
    donated = 2 * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages))
    memory = compiled.memory_analysis()
    faults = []
    if memory.alias_size_in_bytes != donated:
        faults.append(f"{memory.alias_size_in_bytes} bytes are written in place, expected the {donated} donated")
    if aot.copies_of(compiled, pages.shape):
        faults.append("the pages are copied")
    return tuple(faults)
