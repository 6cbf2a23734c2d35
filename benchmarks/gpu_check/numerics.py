"""Compares every kernel with the float32 reference, for many head sizes, page sizes, groups and dtypes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_check.measure import compile_each
from benchmarks.gpu_check.section import Section
from kernels_pallas.paged_attention import PagedBatch, PagedKernels, paged_attention, triton_decode, write_kv
from kernels_pallas.paged_attention.choose import choose
from kernels_pallas.paged_attention.self_test import CANNOT_RUN, self_test


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    head_dim: int
    page_size: int = 16
    group: int = 4
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    window: int | None = None

    def __str__(self) -> str:
        parts = [f"head {self.head_dim}", f"page {self.page_size}", f"group {self.group}", self.dtype]
        parts += ["int8 pages"] if self.kv_cache_dtype == "int8" else []
        return ", ".join(parts + ([f"window {self.window}"] if self.window else []))


CASES = (
    Case(head_dim=128, group=7),  # Qwen2.5-7B
    Case(head_dim=64, group=7),  # Qwen2-0.5B
    Case(head_dim=128, group=8),
    Case(head_dim=256),
    Case(head_dim=128, group=1),
    Case(head_dim=64, group=16),
    *(Case(head_dim=128, page_size=size) for size in (32, 64, 128)),
    Case(head_dim=128, dtype="float16"),
    Case(head_dim=64, group=7, kv_cache_dtype="int8"),
    Case(head_dim=128, kv_cache_dtype="int8", page_size=64),
    Case(head_dim=128, window=100),
    Case(head_dim=64, page_size=64, window=33, kv_cache_dtype="int8"),
    Case(head_dim=64, dtype="float32"),
    Case(head_dim=256, page_size=128, group=16),
)
FAR = "pages beyond 2**31 numbers"
FAR_NUMBERS = 2**31  # numbers in an array of pages, beyond which offsets need 64 bits
TRITON = PagedKernels(decode="triton", mixed="triton", write="triton")
DRY_KERNELS = PagedKernels(decode="reference", mixed="reference")
DRY_CASE = Case(head_dim=16, group=3, dtype="float32")


def numerics(section: Section) -> None:
    """Add a row of failures for each case and implementation."""
    device = jax.devices()[0]
    if section.dry_run:
        jobs: list[Any] = [((FAR, "reference"), functools.partial(_far, DRY_KERNELS, 1 << 16, kv_heads=1, head_dim=16))]
        jobs += [((DRY_CASE, name), functools.partial(test, device, DRY_CASE)) for name, test in DRY.items()]
    else:
        jobs: list[Any] = [((FAR, "triton"), functools.partial(_far, TRITON, FAR_NUMBERS))]
        jobs += [((case, "xla"), functools.partial(_named, "xla", device, case)) for case in CASES[:2]]
        for case in CASES:
            for name in ("triton", "mosaic"):
                jobs.append(((case, name), functools.partial(_chosen, name, device, case)))
    for (case, name), found in compile_each(jobs):
        if isinstance(found, CANNOT_RUN):
            found = {"all": f"{type(found).__name__}: {found}"}
        elif isinstance(found, BaseException):
            raise found
        section.add(case=str(case), implementation=name, failures=found)


def _named(name: str, device: Any, case: Case) -> dict[str, str]:
    """Return the failures of an implementation that the start does not test: XLA's, the fallback."""

    def attention(*arguments, implementation, **options):
        return paged_attention(*arguments, implementation=name, **options)

    kernels = PagedKernels(decode="named", mixed="named")
    return dict(self_test(kernels, device=device, attention=attention, **dataclasses.asdict(case)))


def _interpreted(device: Any, case: Case) -> dict[str, str]:
    def attention(*arguments, implementation, **options):
        return triton_decode.attention(*arguments, interpret=True, **options)

    names = PagedKernels(decode="interpreted")
    return dict(self_test(names, device=device, attention=attention, **dataclasses.asdict(case)))


def _far(kernels: PagedKernels, numbers: int, *, kv_heads: int = 4, head_dim: int = 128) -> dict[str, str]:
    """Return the failures with pages whose offsets need 64 bits, which the small pool of a self-test cannot show.

    The same pages at the end of a large pool, and alone, must give the same result."""
    page, rows, pages_per_row = 16, 4, 8
    few = rows * pages_per_row
    many = few + -(-numbers // (kv_heads * page * head_dim))
    shape = (few, kv_heads, page, head_dim)
    keys, values = (jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed in (0, 1))
    query = jax.random.normal(jax.random.key(2), (rows, 4 * kv_heads, head_dim), jnp.bfloat16)
    new = jax.random.normal(jax.random.key(3), (rows, kv_heads, head_dim), jnp.bfloat16)
    tables = jnp.arange(few, dtype=jnp.int32).reshape(rows, pages_per_row)
    last = jnp.full((rows,), page * pages_per_row - 1, jnp.int32)
    starts = {"decode": jnp.arange(rows + 1, dtype=jnp.int32), "mixed": jnp.asarray([0, rows, rows, rows, rows])}

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(keys, values, first):
        at = tables + first
        keys, values = write_kv(keys, values, new, new, at[:, -1], last % page, implementation=kernels.write)
        found: dict[str, Any] = {"write": jax.tree.map(lambda pages: pages[-few:], keys)}
        for op, start in starts.items():
            batch = PagedBatch(query_start=start, kv_len=last + 1, block_tables=at, decode=op == "decode")
            found[op] = paged_attention(
                query, keys, values, batch, scale=head_dim**-0.5, implementation=getattr(kernels, op)
            )
        return found, keys, values

    def at_the_end(pages):
        return jax.jit(lambda pages: jnp.zeros((many, *shape[1:]), pages.dtype).at[-few:].set(pages))(pages)

    far = step(at_the_end(keys), at_the_end(values), jnp.int32(many - few))[0]
    near = step(keys, values, jnp.int32(0))[0]
    return {op: "differs" for op in near if not jnp.array_equal(far[op], near[op])}


def _chosen(name: str, device: Any, case: Case) -> dict[str, str]:
    """Return the failures of the kernels that `choose` returns for a name, or why it refuses the name."""
    kv_heads = 2
    try:
        kernels, _ = choose(
            platform=device.platform,
            device_kind=device.device_kind,
            compute_capability=getattr(device, "compute_capability", None),
            head_dim=case.head_dim,
            page_size=case.page_size,
            heads=kv_heads * case.group,
            kv_heads=kv_heads,
            dtype=jnp.dtype(case.dtype),
            kv_cache_dtype=case.kv_cache_dtype,
            backend=name,
        )
    except ValueError as error:
        return {"unsupported": str(error)}
    if name == "mosaic":
        kernels = PagedKernels(decode=kernels.decode)  # the rest is Triton's, which has its own rows
    return dict(self_test(kernels, device=device, **dataclasses.asdict(case)))


DRY = {
    "reference": functools.partial(_named, "reference"),
    "triton": _interpreted,
    "no such device": functools.partial(_chosen, "triton"),
}
