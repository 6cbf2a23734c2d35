"""What is proven about GPU code without a GPU: the form of a proof, of what it finds, and when that is a fault."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from kernels_pallas.aot import Collective, Resources

# What must occur in a kernel: beginnings of names of PTX instructions. In machine code they are LDGSTS, UTMALDG, HGMMA
# and HMMA.
COPY = ("cp.async.c",)  # from global to shared memory, while something else is computed
TMA = ("cp.async.bulk.tensor",)  # the same by boxes, from Hopper on
WGMMA = ("wgmma.mma_async",)  # tensor cores of Hopper, by four warps together
MMA = ("mma.sync", *WGMMA)  # tensor cores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found about one kernel or program.

    Attributes:
        proof: name of the proof.
        what: the kernel or program.
        target: GPU it was compiled for.
        registers: a thread; None for a program.
        spills: bytes of instructions that spill registers.
        shared: bytes of shared memory a block.
        found: what else is worth reading.
        seconds: what compiling and reading took.
        faults: sentences that say what does not hold; none if all does.
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
    """Something to be shown.

    Attributes:
        name: unique, such as triton-decode/h100/d64-p16-g7-bfloat16.
        target: GPU to compile for.
        quick: is part of the small matrix.
        run: compiles and looks.
    """

    name: str
    target: str
    quick: bool
    run: Callable[[], list[Finding]]


def kernel_faults(kernel: Resources, *, limit: int, expected: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """What does not hold of a kernel.

    Args:
        limit: most bytes of shared memory a block may have.
        expected: instructions that must occur, by a word for them: beginnings of their names.
    """
    faults = []
    if kernel.spills:
        faults.append(
            f"{kernel.registers} registers do not do: {kernel.spill_stores} bytes of stores and {kernel.spill_loads} "
            "bytes of loads spill to memory"
        )
    if kernel.shared > limit:
        faults.append(f"{kernel.shared} bytes of shared memory, a block may have {limit}")
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
    """What does not hold of a compiled program. All bytes are those of one device.

    Args:
        aliased: bytes of arguments that results lie in.
        donated: bytes of arguments that may be.
        temporaries: bytes.
        bound: most bytes of temporaries.
        arguments: bytes of arguments, of a program that reads all of them (XLA leaves out the others).
        planned: what they should be.
        pool_copies: instructions that copy an array of the KV pool.
        calls: of Pallas kernels, by name.
        layers: of the model; each calls all of the kernels once.
        expected: each of these words is in the name of a kernel that is called.
    """
    faults = []
    if arguments != planned:
        faults.append(f"{arguments} bytes of arguments a device, planned {planned}")
    if aliased != donated:
        faults.append(
            f"{aliased} bytes are computed in place, {donated} were donated: the rest is copied at every call"
        )
    if pool_copies:
        faults.append(f"{pool_copies} instructions copy an array of the size of a layer's keys")
    if temporaries > bound:
        faults.append(f"{temporaries} bytes of temporaries, expected at most {bound}")
    calls = calls or {}
    faults += [
        f"no kernel is called that has {word!r} in its name"
        for word in expected
        if not any(word in name for name in calls)
    ]
    faults += [f"{count} calls of {name} in {layers} layers" for name, count in calls.items() if count != layers]
    return tuple(faults)


def collective_faults(exchanged: Sequence[Collective], *, sums: int | None, largest: int) -> tuple[str, ...]:
    """What does not hold of what devices send each other.

    Args:
        exchanged: all of a program.
        sums: how many all-reduces there must be; None leaves it open.
        largest: most numbers that one of them may leave on a device: the logits and the pool are larger.
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
