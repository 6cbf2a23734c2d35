"""Every kernel against the float32 reference, in many head sizes, page sizes, groups and dtypes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_check_measure import compile_each
from benchmarks.gpu_check_section import Section
from kernels_pallas.paged_attention import PagedKernels, paged_attention, triton_decode
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
DRY_CASE = Case(head_dim=16, group=3, dtype="float32")


def numerics(section: Section) -> None:
    """A row for each case and implementation: what failed, empty if nothing did."""
    device = jax.devices()[0]
    if section.dry_run:
        jobs = [((DRY_CASE, name), functools.partial(test, device, DRY_CASE)) for name, test in DRY.items()]
    else:
        jobs = [((case, "xla"), functools.partial(_xla, device, case)) for case in CASES[:2]]
        for case in CASES:
            for name in ("triton", "mosaic"):
                jobs.append(((case, name), functools.partial(_chosen, name, device, case)))
    for (case, name), found in compile_each(jobs):
        if isinstance(found, CANNOT_RUN):
            found = {"all": f"{type(found).__name__}: {found}"}
        elif isinstance(found, BaseException):
            raise found
        section.add(case=str(case), implementation=name, failures=found)


def _xla(device: Any, case: Case) -> dict[str, str]:
    """Failures of XLA's: it stands in for kernels that fail, and is not tested at an engine's start."""

    def attention(*arguments, implementation, **options):
        return paged_attention(*arguments, implementation="xla", **options)

    names = PagedKernels(decode="of XLA", mixed="of XLA")
    return dict(self_test(names, device=device, attention=attention, **dataclasses.asdict(case)))


def _interpreted(device: Any, case: Case) -> dict[str, str]:
    def attention(*arguments, implementation, **options):
        return triton_decode.attention(*arguments, interpret=True, **options)

    names = PagedKernels(decode="interpreted")
    return dict(self_test(names, device=device, attention=attention, **dataclasses.asdict(case)))


def _chosen(name: str, device: Any, case: Case) -> dict[str, str]:
    """Failures of what `choose` makes of a name; or why it is nothing."""
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
            asked=name,
        )
    except ValueError as error:
        return {"unsupported": str(error)}
    if name == "mosaic":
        kernels = PagedKernels(decode=kernels.decode)  # the rest is Triton's, which has rows of its own
    return dict(self_test(kernels, device=device, **dataclasses.asdict(case)))


DRY = {"xla": _xla, "triton": _interpreted, "no such device": functools.partial(_chosen, "triton")}
