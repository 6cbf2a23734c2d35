"""Compilation for NVIDIA GPUs on a machine without one, and analysis of the compiled programs.

XLA's CUDA plugin compiles for a GPU from its description (`targets/*.txtpb`); it needs NVIDIA's assembler, but no GPU.
Nothing runs, so speed and results stay unknown. Known is what the compilers decide: whether a kernel compiles, its
registers, spills, shared memory and instructions, and a program's memory, copies and collectives.

The figures of kernels come from the PTX that XLA and Mosaic write to a dump directory, assembled again by the same
assembler. (The executable's machine code would be more direct, but its formats are private and change.)
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
_environment = threading.Lock()  # guards os.environ, which threads share


class ToolMissing(RuntimeError):
    """A tool for compiling without a GPU is not installed. The message names it and how to install it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources and instructions of one kernel.

    Attributes:
        name: entry point. Mosaic appends `_mosaic_gpu_kernel` to the kernel's name.
        arch: target architecture, for example sm_90a.
        registers: registers per thread.
        stack: bytes of local memory per thread, including spilled registers.
        spill_stores: bytes of instructions that spill registers.
        spill_loads: bytes of instructions that read them back.
        shared: bytes of shared memory per block, static and dynamic.
        ptx: number of PTX instructions by full name, for example cp.async.cg.shared.global.
        register_wgmma: number of wgmma instructions with their left operand in registers, which ptxas before 13.3 can
            miscompile (triton-lang/triton#9433). Check their results on a device.
        losses: the assembler's performance warnings, for example serialised wgmma instructions.
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
        """Number of PTX instructions whose names begin with one of the prefixes."""
        return sum(n for name, n in self.ptx.items() if name.startswith(prefixes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective operation in a compiled program.

    Attributes:
        kind: one of COLLECTIVES.
        results: (dtype, shape) of each device's results, for example ("bf16", (8, 896)).
    """

    kind: str
    results: tuple[tuple[str, tuple[int, ...]], ...]


def available() -> str | None:
    """None if programs for GPUs can be compiled here; otherwise the reason and what to install."""
    found = [name for name in _PLUGINS if _version(name)]
    if not found:
        return f"the CUDA plugin of JAX is not installed: pip install --no-deps {_wheels('jax-cuda12-plugin')}"
    for name in (found[0], found[0].replace("plugin", "pjrt")):
        if _version(name) != jax.__version__:
            return (
                f"{name} is {_version(name) or 'not installed'} but JAX is {jax.__version__}; they need one version: "
                f"pip install --no-deps {_wheels(found[0])}"
            )
    try:
        ptxas()
    except ToolMissing as error:
        return str(error)
    return None


def ptxas() -> Path:
    """NVIDIA's assembler from an installed wheel.

    Other copies on the machine are not used: registers and spills depend on the assembler's version.

    Raises:
        ToolMissing: no installed wheel has it.
    """
    return _tool("ptxas", _ASSEMBLER_WHEELS)


def ptxas_version() -> str:
    """The assembler's name and version, for example `ptxas 12.9.86`."""
    version = re.search(r"\bV(\d+\.\d+\.\d+)", _run(ptxas(), "--version"))
    return f"ptxas {version[1]}" if version else "ptxas of an unknown version"


def target_config(target: str) -> str:
    """The description of a GPU that XLA compiles for.

    Raises:
        ValueError: no such target.
    """
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {target!r}")
    return (Path(__file__).parent / "targets" / f"{target}.txtpb").read_text()


def shared_limit(target: str) -> int:
    """Maximum bytes of shared memory per block on a target."""
    return int(_field(target, "shared_memory_per_block_optin"))


def device_kind(target: str) -> str:
    """JAX's `device_kind` for a target, for example `NVIDIA H200`."""
    return _field(target, "device_description_str").strip('"')


def mesh(
    target: str,
    devices: int = 1,
    axes: tuple[str, ...] = ("data", "model"),
    shape: tuple[int, ...] | None = None,
) -> Mesh:
    """A mesh of described GPUs to compile for. Set JAX_PLATFORMS=cpu, or JAX spends long looking for real ones.

    Args:
        target: one of TARGETS.
        devices: number of devices, on one host.
        axes: names of the axes, all of type Auto.
        shape: sizes of the axes. Default: all devices on the last axis.

    Raises:
        ToolMissing: see `available`.
        ValueError: there is no such target, or the shape has another number of devices.
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
    """Compile a function for a mesh from `mesh`.

    Args:
        target_mesh: devices to compile for.
        function: the function; traced with `arguments`.
        arguments: pytrees of ShapeDtypeStructs; those without a sharding are replicated.
        donate: indices of donated arguments.
        results: shardings of the results, a prefix of their pytree. Default: chosen by the compiler.
        dump: an empty or new directory for the files that `resources` reads.

    Returns:
        The jax.stages.Compiled. It cannot be called, and the plugin does not implement `cost_analysis`.
    """
    everywhere = NamedSharding(target_mesh, PartitionSpec())

    def placed(x):
        return x if x.sharding is not None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)

    # Kernels read the GPU they are compiled for from the abstract mesh.
    with jax.sharding.use_abstract_mesh(target_mesh.abstract_mesh):
        jitted = jax.jit(function, donate_argnums=donate, out_shardings=results)
        lowered = jitted.lower(*jax.tree.map(placed, arguments))
    # XLA looks for ptxas and libdevice in this directory first.
    options: dict[str, str | bool] = {"xla_gpu_cuda_data_dir": str(ptxas().parent.parent)}
    if dump is not None:
        # "ptx" is a pattern of what to dump; a full dump takes minutes. JAX 0.10.2 always dumps PTX.
        options |= {"xla_dump_to": str(dump), "xla_dump_emitter_re": "ptx"}
    with _tools_from_wheels(dump):
        return lowered.compile(compiler_options=options)


def lower_for(target: str, function: Callable, arguments: tuple[Any, ...]) -> Any:
    """Lower a function for one GPU of a target: JAX's own checks of a kernel, which do not need the plugin.

    The later compilers (Triton's, LLVM, the assembler) run in `compile_for`.

    Returns:
        The jax.stages.Lowered.
    """
    device = jax.sharding.AbstractDevice(device_kind=device_kind(target), platform="gpu", num_cores=1)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))


def resources(dump: Path, pattern: str = "") -> dict[str, Resources]:
    """Kernels of a program that `compile_for` wrote to `dump`, including XLA's own, by name.

    Mosaic has a cache per process and dumps nothing for a kernel that it has compiled before: compile in a new process.

    Args:
        dump: the directory.
        pattern: a regular expression to search for in the names of kernels. Default: all kernels.

    Raises:
        ToolMissing: there is no assembler.
        RuntimeError: the assembler fails.
    """
    shared = {}
    for file in dump.glob("*thunk_sequence.txt"):
        shared |= parse_launches(file.read_text())
    found = {}
    for file in sorted(dump.glob("*.ptx")):
        text = file.read_text()
        bodies = {name: body for name, body in split_ptx(text).items() if re.search(pattern, name)}
        target = re.search(r"^\.target (\w+)", text, re.MULTILINE)
        if not bodies or target is None:  # JAX 0.10.2 also dumps files that hold only constants
            continue
        report = _run(ptxas(), "-v", f"-arch={target[1]}", file, "-o", os.devnull)
        passes = file.with_suffix(".mlir-passes.log")  # Mosaic's; XLA's thunks do not list its launches
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
    """Number of calls of each Pallas kernel in a compiled program: Triton kernels by name, all Mosaic kernels as
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
    """Number of instructions in a compiled program that copy, transpose or convert a whole array of this shape."""
    return count_copies(compiled.as_text(), shape)


def collectives(compiled: Any) -> list[Collective]:
    """The collective operations of a compiled program, in order."""
    return parse_collectives(compiled.as_text())


# -- parsers of the tools' output -------------------------------------------------------------------------------------


def parse_ptxas(report: str) -> dict[str, dict[str, int]]:
    """Registers, stack, spill_stores, spill_loads and static shared memory by kernel, from `ptxas -v`."""
    found = {}
    for part in report.split("Compiling entry function '")[1:]:
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        registers = re.search(r"Used (\d+) registers", part)
        static = re.search(r"(\d+) bytes smem", part)
        if stack is None or registers is None:
            raise RuntimeError(f"unknown format of ptxas's report: {part[:400]}")
        found[part.partition("'")[0]] = {
            "registers": int(registers[1]),
            "stack": int(stack[1]),
            "spill_stores": int(stack[2]),
            "spill_loads": int(stack[3]),
            "static": int(static[1]) if static else 0,
        }
    return found


def parse_losses(report: str, kernel: str) -> tuple[str, ...]:
    """A kernel's performance warnings, from `ptxas -v`."""
    losses = re.findall(r"Potential Performance Loss: (.*?) (?:in|for) the function '([^']+)'", report)
    return tuple(dict.fromkeys(loss for loss, name in losses if name == kernel))


def parse_launches(text: str) -> dict[str, int]:
    """Dynamic shared memory in bytes by kernel, from XLA's list of thunks."""
    launches = re.findall(r"(\S+) grid: \[.*shared_memory: (\d+) bytes", text)
    return {name: max(int(size) for other, size in launches if other == name) for name, _ in launches}


def parse_mosaic_shared(passes: str) -> int:
    """Dynamic shared memory in bytes, from Mosaic's log of passes, where a constant's name contains its value."""
    return max((int(size) for size in re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", passes)), default=0)


def split_ptx(text: str) -> dict[str, str]:
    """The kernels' bodies in PTX by name, without comments."""
    parts = re.split(r"\.entry\s+([\w$]+)", re.sub(r"//[^\n]*", "", text))
    return {name: body[body.find("{") :] for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def count_ptx(body: str) -> Counter[str]:
    """Number of occurrences of each instruction in a kernel's body."""
    return Counter(
        re.findall(r"(?:^|[;{}])\s*(?:@!?%?\w+\s+)?([a-z]\w*(?:(?:\.|::)\w+)*)(?=[\s;])", body, re.MULTILINE)
    )


def count_copies(hlo: str, shape: tuple[int, ...]) -> int:
    """See `copies_of`."""
    dimensions = ",".join(map(str, shape))
    return len(re.findall(rf"= \(?\w+\[{dimensions}\][^=]*? (?:copy|copy-start|transpose|convert)\(", hlo))


def parse_collectives(hlo: str) -> list[Collective]:
    """See `collectives`. An asynchronous operation is counted by its start only."""
    found = []
    for results, kind in re.findall(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", hlo):
        if results.startswith("(("):  # an asynchronous start returns (operands, results)
            results = results.partition("), ")[2]
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", results)
        shapes = tuple((dtype, tuple(int(n) for n in sizes.split(",") if n)) for dtype, sizes in arrays)
        found.append(Collective(kind=kind, results=shapes))
    return found


# -- tools ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _topology(target: str, devices: int):
    # The topology is partitions x hosts x devices.
    return topologies.get_topology_desc(platform="cuda", target_config=target_config(target), topology=f"1x1x{devices}")


@contextlib.contextmanager
def _tools_from_wheels(dump: Path | None) -> Iterator[None]:
    """Set the environment so that compilers use the wheels' tools and Mosaic dumps to `dump`.

    Mosaic looks for libdevice under MOSAIC_GPU_CUDA_ROOT and for the assembler on PATH; the assembler's version selects
    the version of its PTX.
    """
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
    raise ToolMissing(f"no installed wheel has {name}: pip install --no-deps {wheels[0]}")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wheels(plugin: str) -> str:
    return " ".join(f"{name}=={jax.__version__}" for name in (plugin, plugin.replace("plugin", "pjrt")))
