"""Proofs about GPU code, their findings, and what counts as a fault."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from kernels_pallas.aot import Collective, Resources

# Prefixes of PTX instructions that must occur in kernels. In machine code they are LDGSTS, UTMALDG, HGMMA and HMMA.
COPY = ("cp.async.c",)  # asynchronous copy from global to shared memory
TMA = ("cp.async.bulk.tensor",)  # the same for boxes of a tensor, from Hopper on
WGMMA = ("wgmma.mma_async",)  # tensor cores of Hopper, used by four warps together
MMA = ("mma.sync", *WGMMA)  # tensor cores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Finding about a kernel or program.

    Attributes:
        proof: name of the proof.
        what: name of the kernel or program.
        target: GPU that it was compiled for.
        registers: registers of a thread; None for a program.
        spills: bytes of instructions that spill registers.
        shared: bytes of shared memory of a block.
        found: further figures.
        seconds: duration of compiling and checking.
        faults: what does not hold, a sentence each.
    """

    proof: str
    what: str
    target: str
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    found: str = ""
    seconds: float = 0.0
    faults: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """A check of compiled code.

    Attributes:
        name: unique name, such as triton-decode/h100/d64-p16-g7-bfloat16.
        target: GPU to compile for.
        quick: whether the small matrix has it.
        run: compiles and checks.
    """

    name: str
    target: str
    quick: bool
    run: Callable[[], list[Finding]]


def kernel_faults(kernel: Resources, *, limit: int, expected: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the faults of a kernel.

    Args:
        limit: maximum bytes of shared memory of a block.
        expected: prefixes of instructions that must occur, by a name for them.
    """
    faults = []
    if kernel.spills:
        faults.append(
            f"{kernel.registers} registers are too few: {kernel.spill_stores} bytes of stores and {kernel.spill_loads} "
            "bytes of loads spill to memory"
        )
    if kernel.shared > limit:
        faults.append(f"{kernel.shared} bytes of shared memory, expected at most {limit} a block")
    faults += kernel.losses
    faults += [f"no {word} instruction" for word, names in expected.items() if not kernel.count(*names)]
    return tuple(faults)


def program_faults(
    *,
    aliased: int,
    donated: int,
    temporaries: int,
    bound: int,
    arguments: int = 0,
    planned: int = 0,
    pool_copies: int = 0,
    calls: Mapping[str, int] | None = None,
    layers: int = 0,
    expected: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the faults of a compiled program. All bytes are those on one device.

    Args:
        aliased: bytes of arguments that results reuse.
        donated: bytes of donated arguments.
        temporaries: bytes of temporaries.
        bound: maximum bytes of temporaries.
        arguments: bytes of arguments that the program reads (XLA leaves out the others).
        planned: expected bytes of arguments.
        pool_copies: number of instructions that copy an array of the KV pool.
        calls: number of calls of each Pallas kernel, by name.
        layers: number of layers of the model, each of which calls every kernel once.
        expected: words that must each be in the name of a called kernel.
    """
    faults = []
    if arguments != planned:
        faults.append(f"{arguments} bytes of arguments on a device, expected {planned}")
    if aliased != donated:
        faults.append(
            f"{aliased} bytes are written in place, expected the {donated} donated: each call copies the rest"
        )
    if pool_copies:
        faults.append(f"{pool_copies} instructions copy an array of the size of a layer's keys")
    if temporaries > bound:
        faults.append(f"{temporaries} bytes of temporaries, expected at most {bound}")
    calls = calls or {}
    faults += [
        f"no called kernel has {word!r} in its name" for word in expected if not any(word in name for name in calls)
    ]
    faults += [f"{count} calls of {name} in {layers} layers" for name, count in calls.items() if count != layers]
    return tuple(faults)


def collective_faults(exchanged: Sequence[Collective], *, sums: int | None, largest: int) -> tuple[str, ...]:
    """Return the faults of the collectives of a program.

    Args:
        exchanged: collectives of the program.
        sums: expected number of all-reduces; None: any.
        largest: maximum numbers in a collective's result on a device; logits and pool are larger.
    """
    faults = []
    found = sum(len(each.results) for each in exchanged if each.kind == "all-reduce")
    if sums is not None and found != sums:
        faults.append(f"{found} all-reduces, expected {sums}")
    for each in exchanged:
        numbers = max(math.prod(shape) for _, shape in each.results)
        if numbers > largest:
            faults.append(f"{each.kind} of {each.results}: {numbers} numbers, expected at most {largest}")
    return tuple(faults)
