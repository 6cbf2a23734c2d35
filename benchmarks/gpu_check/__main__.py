"""Checks that need a GPU, in at most ten minutes: correctness and speed of kernels, speed of steps and of the engine,
and the error of the cost model.

    python -m benchmarks.gpu_check --out results/

DIR/gpu_check.md has tables, with targets and results; DIR/gpu_check.json has all figures. Both are written after every
section. The most useful sections come first, each in its own process and with a share of the time: a section that
crashes, hangs or runs out of time loses only what it had not written yet. Unused time goes to the following sections.

Exit codes: 0 all results are right (targets of speed may be missed), 1 a section failed or a result is wrong, 2 wrong
arguments.

It needs JAX 0.10.2 or newer with CUDA, and no network: weights are random. Kernels also need jaxtyping, steps also
flax, and the engine all dependencies of the project. `--dry-run` runs all code on a CPU in a minute, with tiny sizes
and interpreted kernels; its figures mean nothing.
"""

import argparse
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.report import faults, markdown
from benchmarks.gpu_check.section import Section, write_atomically
from benchmarks.processes import ROOT

BUDGET_S = 560.0
MARGIN = 0.92  # share of its time after which a section begins nothing new


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A section of the check.

    Attributes:
        share: seconds of BUDGET_S; other budgets are divided in proportion.
        function: "module:function", called with a Section in the section's process. Only that process imports JAX: two
            do not fit a GPU's memory.
    """

    share: float
    function: str


SECTIONS = {
    "ceilings": Kind(share=40, function="benchmarks.gpu_check.ceilings:ceilings"),
    "numerics": Kind(share=100, function="benchmarks.gpu_check.numerics:numerics"),
    "decode": Kind(share=100, function="benchmarks.gpu_check.kernels:decode"),
    "prefill": Kind(share=90, function="benchmarks.gpu_check.kernels:prefill"),
    "steps": Kind(share=120, function="benchmarks.gpu_check.steps:steps"),
    "engine": Kind(share=110, function="benchmarks.gpu_check.engine:engine"),
}


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.child:
        return run_here(args.child, args)
    return check(args)


def check(args: argparse.Namespace) -> int:
    """Run the sections, each in a child process. Returns exit code 1 if one failed or a result is wrong, else 0."""
    begin = time.monotonic()
    document: dict[str, Any] = {"dry_run": args.dry_run, "budget_s": args.budget_s, "sections": {}}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        for number, name in enumerate(args.sections):
            left = begin + args.budget_s - time.monotonic()
            shares = [SECTIONS[later].share for later in args.sections[number:]]
            seconds = max(0.0, left * shares[0] / sum(shares))
            print(f"== {name}: {seconds:.0f} s", flush=True)
            result = run_child(_command(name, args, seconds, Path(scratch)), _file(args.out, name), seconds)
            document["sections"][name] = result
            document["seconds"] = round(time.monotonic() - begin, 1)
            write_atomically(args.out / "gpu_check.json", json.dumps(document, indent=1) + "\n")
            write_atomically(args.out / "gpu_check.md", markdown(document))
            _file(args.out, name).unlink(missing_ok=True)
            if result["error"]:
                print(f"   {name} failed: {result['error']}", flush=True)
    print((args.out / "gpu_check.md").read_text())
    return int(bool(faults(document["sections"])))


def run_child(command: list[str], file: Path, seconds: float) -> dict[str, Any]:
    """Run a section. Returns what it has written: `facts`, `rows`, `seconds`, and `error` (None if it succeeded)."""
    begin = time.monotonic()
    child = subprocess.Popen(command, cwd=ROOT, start_new_session=True)  # a process group, with its compilers
    try:
        code = child.wait(seconds)
        error = None if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        error = f"stopped after {seconds:.0f} s"
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    written = json.loads(file.read_text()) if file.exists() else {"facts": {}, "rows": []}
    return {**written, "seconds": round(time.monotonic() - begin, 1), "error": error}


def run_here(name: str, args: argparse.Namespace) -> int:
    """Run a section in this process."""
    if args.dry_run:
        os.environ["JAX_PLATFORMS"] = "cpu"  # before the import of JAX, so that it leaves a GPU alone
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    from benchmarks.gpu_check.measure import describe_device
    from omni_jax.compat import use_compilation_cache

    document = args.out / "gpu_check.json"
    so_far = json.loads(document.read_text())["sections"] if document.exists() else {}
    section = Section(
        file=_file(args.out, name),
        dry_run=args.dry_run,
        deadline=time.monotonic() + MARGIN * args.child_s,
        scratch=args.scratch,
        programs=args.programs or args.scratch / "xla",
        ceilings=so_far.get("ceilings", {}).get("facts", {}),
    )
    use_compilation_cache(section.programs)
    section.state(**describe_device())
    module, _, function = SECTIONS[name].function.partition(":")
    try:
        run: Callable[[Section], None] = getattr(importlib.import_module(module), function)
        run(section)
    finally:
        if (error := sys.exception()) is not None:  # the traceback goes to stderr, which may be lost
            section.state(raised=f"{type(error).__name__}: {error}")
    return 0


def _command(name: str, args: argparse.Namespace, seconds: float, scratch: Path) -> list[str]:
    words = ["--child", name, "--child-s", str(seconds), "--scratch", str(scratch), "--out", str(args.out)]
    words += ["--programs", str(args.programs)] if args.programs else []
    return [sys.executable, "-m", "benchmarks.gpu_check", *words, *(["--dry-run"] if args.dry_run else [])]


def _file(out: Path, name: str) -> Path:
    return out / f"gpu_check.{name}.json"


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description="Measure what only a GPU can show, in ten minutes."
    )
    parser.add_argument("--out", type=_path, default=Path(".").resolve(), metavar="DIR", help="output directory")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help=f"seconds for all sections ({BUDGET_S:.0f})")
    names = list(SECTIONS)
    parser.add_argument("--sections", nargs="+", choices=names, default=names, help="sections to run, in this order")
    parser.add_argument("--dry-run", action="store_true", help="run all code on a CPU, with tiny sizes")
    parser.add_argument("--programs", type=_path, metavar="DIR", help="keep compiled programs there for the next run")
    parser.add_argument("--child", choices=list(SECTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--child-s", type=float, default=BUDGET_S, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _path(text: str) -> Path:
    return Path(text).resolve()  # children have another working directory


if __name__ == "__main__":
    raise SystemExit(main())
