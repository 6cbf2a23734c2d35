"""Machine code for NVIDIA GPUs on a machine that has none, and what can be read from it.

XLA's CUDA plugin compiles for a GPU that is described to it (`targets/*.txtpb`) instead of attached; all it needs
besides is NVIDIA's assembler. Nothing runs, so nothing is known about speed or results; but whatever the compilers
decide is known: that a kernel compiles, its registers, spills and shared memory, the instructions in it, how much
memory a program takes, what it copies and what it sends to other devices.

Figures of kernels come from PTX that XLA and Mosaic leave in a dump directory, assembled again by the same assembler.
(The executable's own machine code would be closer, but the formats it lies in are private and change.)
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

TARGETS = ("a100", "h100", "h200")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_ASSEMBLER_WHEELS = ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc")
_environment = threading.Lock()  # threads share it


class ToolMissing(RuntimeError):
    """Something that compiling without a GPU needs is not installed. The message says what, and how to get it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """What one kernel takes of a multiprocessor, and what it consists of.

    Attributes:
        name: entry point. Mosaic appends `_mosaic_gpu_kernel` to the kernel's name.
        arch: such as sm_90a.
        registers: a thread.
        stack: bytes of local memory a thread, spilled registers included.
        spill_stores: bytes of instructions that spill registers.
        spill_loads: bytes of instructions that read them back.
        shared: bytes of shared memory a block, static and dynamic.
        ptx: how often each PTX instruction occurs, by full name such as cp.async.cg.shared.global.
        register_wgmma: instructions wgmma in PTX that take their left operand from registers, which ptxas before 13.3
            can miscompile (triton-lang/triton#9433): their results should be checked on a device.
        losses: what the assembler says costs time, such as wgmma instructions that it runs one after another.
    """

    name: str
    arch: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    ptx: Counter[str]
    register_wgmma: int
    losses: tuple[str, ...]

    @property
    def spills(self) -> int:
        """Bytes of spilling instructions."""
        return self.spill_stores + self.spill_loads

    def count(self, *prefixes: str) -> int:
        """PTX instructions whose names begin with one of the prefixes."""
        return sum(n for name, n in self.ptx.items() if name.startswith(prefixes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One operation between devices in a compiled program.

    Attributes:
        kind: one of COLLECTIVES.
        results: (dtype, shape) of what each device has afterwards, such as ("bf16", (8, 896)).
    """

    kind: str
    results: tuple[tuple[str, tuple[int, ...]], ...]


def available() -> str | None:
    """None if programs for GPUs can be compiled here; else the reason why not, with what to install."""
    found = [name for name in _PLUGINS if _version(name)]
    if not found:
        return f"the CUDA plugin of JAX is not installed: pip install --no-deps {_wheels('jax-cuda12-plugin')}"
    for name in (found[0], found[0].replace("plugin", "pjrt")):
        if _version(name) != jax.__version__:
            return (
                f"{name} is {_version(name) or 'not installed'}, JAX is {jax.__version__}, and they must be the same: "
                f"pip install --no-deps {_wheels(found[0])}"
            )
    try:
        ptxas()
    except ToolMissing as error:
        return str(error)
    return None


def ptxas() -> Path:
    """NVIDIA's assembler, of an installed wheel. One that lies elsewhere on the machine is not used: its version would
    be anybody's guess, and registers and spills depend on it.

    Raises:
        ToolMissing: no wheel has it.
    """
    return _tool("ptxas", _ASSEMBLER_WHEELS)


def ptxas_version() -> str:
    """Such as `ptxas 12.9.86`."""
    version = re.search(r"\bV(\d+\.\d+\.\d+)", _run(ptxas(), "--version"))
    return f"ptxas {version[1]}" if version else "ptxas of an unknown version"


def target_config(target: str) -> str:
    """The description of a GPU that XLA compiles for.

    Raises:
        ValueError: no such target.
    """
    if target not in TARGETS:
        raise ValueError(f"no target {target!r}, there are {', '.join(TARGETS)}")
    return (Path(__file__).parent / "targets" / f"{target}.txtpb").read_text()


def shared_limit(target: str) -> int:
    """Most bytes of shared memory that a block may have on a target."""
    return int(_field(target, "shared_memory_per_block_optin"))


def device_kind(target: str) -> str:
    """What JAX calls devices of a target, such as `NVIDIA H200`."""
    return _field(target, "device_description_str").strip('"')


def mesh(
    target: str,
    devices: int = 1,
    axes: tuple[str, ...] = ("data", "model"),
    shape: tuple[int, ...] | None = None,
) -> Mesh:
    """A mesh of GPUs that are not there, to compile for. Set JAX_PLATFORMS=cpu, or JAX looks for real ones at length.

    Args:
        target: one of TARGETS.
        devices: how many, on one host.
        axes: names; all are Auto.
        shape: sizes of the axes; None puts all devices on the last.

    Raises:
        ToolMissing: see `available`.
        ValueError: no such target, or the shape has another number of devices.
    """
    target_config(target)
    shape = shape or (1,) * (len(axes) - 1) + (devices,)
    if len(shape) != len(axes) or np.prod(shape) != devices:
        raise ValueError(f"{devices} devices do not make a mesh {axes} of shape {shape}")
    reason = available()
    if reason:
        raise ToolMissing(reason)
    found = np.asarray(_topology(target, devices).devices)
    return Mesh(found.reshape(shape), axes, axis_types=(AxisType.Auto,) * len(axes))


def compile_for(
    target_mesh: Mesh,
    function: Callable,
    arguments: tuple[Any, ...],
    *,
    donate: tuple[int, ...] = (),
    results: Any = None,
    dump: Path | None = None,
) -> Any:
    """Compiles a function for a mesh of `mesh`.

    Args:
        target_mesh: devices to compile for.
        function: to be traced with `arguments`.
        arguments: pytrees of ShapeDtypeStructs; those without a sharding are replicated.
        donate: which arguments may be reused for results.
        results: shardings of the results, a prefix of their pytree; None leaves them to the compiler.
        dump: a directory, empty or new, that gets what `resources` reads.

    Returns:
        The jax.stages.Compiled. It cannot be called here. `cost_analysis` is not implemented by the plugin.
    """
    everywhere = NamedSharding(target_mesh, PartitionSpec())

    def placed(x):
        return x if x.sharding is not None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)

    # Also tells kernels which GPU they are for: they see the abstract mesh.
    with jax.sharding.use_abstract_mesh(target_mesh.abstract_mesh):
        jitted = jax.jit(function, donate_argnums=donate, out_shardings=results)
        lowered = jitted.lower(*jax.tree.map(placed, arguments))
    # XLA looks for ptxas and libdevice in this directory first.
    options: dict[str, str | bool] = {"xla_gpu_cuda_data_dir": str(ptxas().parent.parent)}
    if dump is not None:
        # "ptx" is a pattern of what to write; all of it takes minutes. 0.10.2 writes PTX in any case.
        options |= {"xla_dump_to": str(dump), "xla_dump_emitter_re": "ptx"}
    with _tools_of_wheels(dump):
        return lowered.compile(compiler_options=options)


def lower_for(target: str, function: Callable, arguments: tuple[Any, ...]) -> Any:
    """Lowers a function for one GPU of a target: what JAX itself checks of a kernel, and all that can be checked
    without the plugin. What the compilers after it (Triton's, LLVM, the assembler) say of it, `compile_for` shows.

    Returns:
        The jax.stages.Lowered.
    """
    device = jax.sharding.AbstractDevice(device_kind=device_kind(target), platform="gpu", num_cores=1)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


def resources(dump: Path, pattern: str = "") -> dict[str, Resources]:
    """Kernels of a program that `compile_for` wrote to `dump`, XLA's own included, by name.

    A process that compiled the same Mosaic kernel before takes it from a cache of its own and writes nothing: compile
    what is to be looked at in a fresh process.

    Args:
        dump: the directory.
        pattern: a regular expression that is found in the names of the kernels meant.

    Raises:
        ToolMissing: no assembler.
        RuntimeError: it refuses what XLA wrote.
    """
    shared = {}
    for file in dump.glob("*thunk_sequence.txt"):
        shared |= parse_launches(file.read_text())
    found = {}
    for file in sorted(dump.glob("*.ptx")):
        text = file.read_text()
        bodies = {name: body for name, body in split_ptx(text).items() if re.search(pattern, name)}
        target = re.search(r"^\.target (\w+)", text, re.MULTILINE)
        if not bodies or target is None:  # constants, on 0.10.2
            continue
        report = _run(ptxas(), "-v", f"-arch={target[1]}", file, "-o", os.devnull)
        passes = file.with_suffix(".mlir-passes.log")  # of Mosaic, whose launches XLA does not see
        dynamic = parse_mosaic_shared(passes.read_text()) if passes.exists() else None
        for name, figures in parse_ptxas(report).items():
            static = figures.pop("static")
            if name not in bodies:
                continue
            found[name] = Resources(
                name=name,
                arch=target[1],
                shared=static + (shared.get(name, 0) if dynamic is None else dynamic),
                ptx=count_ptx(bodies[name]),
                register_wgmma=len(re.findall(r"wgmma\.mma_async\S*\s*\{[^}]*\},\s*\{", bodies[name])),
                losses=parse_losses(report, name),
                **figures,
            )
    return found


def pallas_calls(compiled: Any) -> Counter[str]:
    """How often a compiled program calls each Pallas kernel: those of the Triton route by name, all of Mosaic as
    `mosaic_gpu`."""
    calls = Counter()
    for line in compiled.as_text().splitlines():
        target = re.search(r'custom_call_target="([^"]+)"', line)
        if target is None:
            continue
        if target[1] == "__gpu$xla.gpu.triton":
            name = re.search(r'[{,] ?name = "([^"]+)"', line)
            calls[name[1] if name else "?"] += 1
        elif target[1].startswith("mosaic_gpu"):
            calls["mosaic_gpu"] += 1
    return calls


def copies_of(compiled: Any, shape: tuple[int, ...]) -> int:
    """Instructions of a compiled program that copy, transpose or convert a whole array of this shape."""
    return count_copies(compiled.as_text(), shape)


def collectives(compiled: Any) -> list[Collective]:
    """Operations between devices in a compiled program, in its order."""
    return parse_collectives(compiled.as_text())


# -- readers of what the tools write ----------------------------------------------------------------------------------


def parse_ptxas(report: str) -> dict[str, dict[str, int]]:
    """Registers, stack, spill_stores, spill_loads and static shared memory by kernel, of `ptxas -v`."""
    found = {}
    for part in report.split("Compiling entry function '")[1:]:
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        static = re.search(r"(\d+) bytes smem", part)
        if stack is None or registers is None:
            raise RuntimeError(f"ptxas reports in a form that is not known: {part[:400]}")
        found[part.partition("'")[0]] = {
            "registers": int(registers[1]),
            "stack": int(stack[1]),
            "spill_stores": int(stack[2]),
            "spill_loads": int(stack[3]),
            "static": int(static[1]) if static else 0,
        }
    return found


def parse_losses(report: str, kernel: str) -> tuple[str, ...]:
    """What `ptxas -v` says costs a kernel time."""
    losses = re.findall(r"Potential Performance Loss: (.*?) (?:in|for) the function '([^']+)'", report)
    return tuple(dict.fromkeys(loss for loss, name in losses if name == kernel))


def parse_launches(text: str) -> dict[str, int]:
    """Dynamic shared memory in bytes by kernel, of XLA's list of thunks."""
    launches = re.findall(r"(\S+) grid: \[.*shared_memory: (\d+) bytes", text)
    return {name: max(int(size) for other, size in launches if other == name) for name, _ in launches}


def parse_mosaic_shared(passes: str) -> int:
    """Dynamic shared memory in bytes, of Mosaic's log of passes. A constant's name holds its value."""
    return max((int(size) for size in re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", passes)), default=0)


def split_ptx(text: str) -> dict[str, str]:
    """Bodies of the kernels in PTX, without comments, by name."""
    parts = re.split(r"\.entry\s+([\w$]+)", re.sub(r"//[^\n]*", "", text))
    return {name: body[body.find("{") :] for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def count_ptx(body: str) -> Counter[str]:
    """How often each instruction occurs in the body of a kernel."""
    return Counter(
        re.findall(r"(?:^|[;{}])\s*(?:@!?%?\w+\s+)?([a-z]\w*(?:(?:\.|::)\w+)*)(?=[\s;])", body, re.MULTILINE)
    )


def count_copies(hlo: str, shape: tuple[int, ...]) -> int:
    """See `copies_of`."""
    dimensions = ",".join(map(str, shape))
    return len(re.findall(rf"= \(?\w+\[{dimensions}\][^=]*? (?:copy|copy-start|transpose|convert)\(", hlo))


def parse_collectives(hlo: str) -> list[Collective]:
    """See `collectives`. The second half of one that runs beside others is not counted."""
    found = []
    for results, kind in re.findall(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", hlo):
        if results.startswith("(("):  # what it begins with, and what it leaves
            results = results.partition("), ")[2]
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", results)
        shapes = tuple((dtype, tuple(int(n) for n in sizes.split(",") if n)) for dtype, sizes in arrays)
        found.append(Collective(kind=kind, results=shapes))
    return found


# -- tools ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _topology(target: str, devices: int):
    # Partitions x hosts x devices.
    return topologies.get_topology_desc(platform="cuda", target_config=target_config(target), topology=f"1x1x{devices}")


@contextlib.contextmanager
def _tools_of_wheels(dump: Path | None) -> Iterator[None]:
    """Compilers use the wheels' tools meanwhile, and Mosaic writes to `dump`. Mosaic looks for libdevice under a root,
    and along PATH for the assembler, whose version decides that of its PTX."""
    tools = ptxas().parent
    wanted = {
        "MOSAIC_GPU_CUDA_ROOT": str(tools.parent),
        "PATH": os.pathsep.join((str(tools), os.environ.get("PATH", ""))),
    }
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        wanted |= {"MOSAIC_GPU_DUMP_TO": str(dump)}
    with _environment:
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _field(target: str, name: str) -> str:
    match = re.search(rf"\b{name}: (.*)", target_config(target))
    if match is None:
        raise ValueError(f"the description of {target} has no {name}")
    return match[1]


def _run(tool: Path, *arguments: str | Path) -> str:
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{tool.name} {' '.join(map(str, arguments))} failed: {done.stderr.strip()}")
    return done.stdout + done.stderr


def _tool(name: str, wheels: tuple[str, ...]) -> Path:
    for wheel in wheels:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for file in importlib.metadata.files(wheel) or ():
                if file.name == name:
                    return Path(str(file.locate()))
    raise ToolMissing(f"no wheel with {name} is installed: pip install --no-deps {wheels[0]}")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wheels(plugin: str) -> str:
    return " ".join(f"{name}=={jax.__version__}" for name in (plugin, plugin.replace("plugin", "pjrt")))
