"""Compiles the GPU code without a GPU, and checks the compilers' output. See benchmarks/README.md."""

import argparse
import collections
import concurrent.futures
import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # else JAX searches for GPUs at length

import jax
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_proof import kernels as gpu_proof_kernels
from benchmarks.gpu_proof import programs as gpu_proof_programs
from benchmarks.gpu_proof import record
from benchmarks.gpu_proof.finding import Finding, Proof
from benchmarks.processes import ROOT, log
from kernels_pallas import aot

UNAVAILABLE = 2  # exit code
PER_PROCESS = 16  # maximum proofs of a process, so that the last ones end together
TIMEOUT = 900  # seconds of a process
EXAMPLE = """examples:
  python -m benchmarks.gpu_proof                      the small matrix, takes minutes
  python -m benchmarks.gpu_proof --only triton-decode/h100 --json found.json
  python -m benchmarks.gpu_proof --full --list        names of all proofs

exit code: 0 all proofs hold, 1 some do not, 2 nothing can be compiled for GPUs here
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    if args.names:
        return _work(args.names)
    chosen = [p for p in all_proofs() if (p.quick or args.full) and re.search(args.only, p.name)]
    if args.list:
        print("\n".join(proof.name for proof in chosen))
        return 0
    if not chosen:
        print(f"no name of a proof matches {args.only!r}; --list and --full --list print them", file=sys.stderr)
        return 1
    reason = aot.available()
    if reason:
        print(f"GPU PROOF SKIPPED, nothing was checked: {reason}")
        return 0 if args.skip_unavailable else UNAVAILABLE
    title = f"JAX {jax.__version__}, {importlib.metadata.version('jaxlib')} of jaxlib, {aot.ptxas_version()}"
    recorded = f"{title}: {'the wide matrix' if args.full else 'the small matrix'} {args.only}".rstrip()
    if args.unless_recorded and record.holds(recorded):
        print(f"proven before for this code, not proven again: {recorded}")
        return 0
    begin = time.monotonic()
    findings = prove([proof.name for proof in chosen], args.processes)
    seconds = time.monotonic() - begin
    if args.json:
        args.json.write_text(json.dumps({"versions": title, "findings": [dataclasses.asdict(f) for f in findings]}))
    Console(width=None if sys.stdout.isatty() else 160).print(table(findings, title))
    faulty = [finding for finding in findings if finding.faults]
    for finding in faulty:
        for fault in finding.faults:
            print(f"DOES NOT HOLD  {finding.proof}: {finding.what}: {fault}")
    print(f"{len(chosen)} proofs, {len(findings)} findings, {len(faulty)} do not hold; {seconds:.0f} s")
    if args.record and not faulty:
        record.write(recorded)
    return 1 if faulty else 0


def all_proofs() -> list[Proof]:
    return [*gpu_proof_programs.proofs(), *gpu_proof_kernels.proofs()]  # the slowest first


def prove(names: Sequence[str], processes: int) -> list[Finding]:
    """Return the findings of the proofs, in their order. Each group runs in its own process: a compiler that fails may
    end its process."""
    found: dict[str, list[Finding]] = {}
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        for part in pool.map(_prove_some, _shares(names)):
            for finding in part:
                found.setdefault(finding.proof, []).append(finding)
    return [finding for name in names for finding in found[name]]


def table(findings: Sequence[Finding], title: str) -> Table:
    """Return a table of the findings."""
    out = Table("what", "GPU", "registers", "spills", "shared", "found", "s", "verdict", title=title)
    for column in out.columns[2:5]:
        column.justify = "right"
    for f in findings:
        figures = ("" if number is None else str(number) for number in (f.registers, f.spills, f.shared))
        verdict = "[red]does not hold" if f.faults else "[green]holds"
        out.add_row(f.what, f.target, *figures, f.found, f"{f.seconds:.1f}" if f.seconds else "", verdict)
    return out


def _shares(names: Sequence[str]) -> list[list[str]]:
    """Group proofs of one kind and GPU: a process takes seconds to start."""
    groups = collections.defaultdict(list)
    for name in names:
        groups[name.rpartition("/")[0]].append(name)
    return [group[at : at + PER_PROCESS] for group in groups.values() for at in range(0, len(group), PER_PROCESS)]


def _prove_some(names: list[str]) -> list[Finding]:
    """Run processes until each proof has ended, or has ended its process."""
    findings, left = [], list(names)
    while left:
        done = _run([sys.executable, "-m", "benchmarks.gpu_proof", "--prove", *left])
        ended = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        for proof in ended:
            findings += [Finding(**{**f, "faults": tuple(f["faults"])}) for f in proof["findings"]]
        left = left[len(ended) :]
        if left:  # the first of these ended the process
            kind, target, case = left[0].split("/")
            faults = (reason_of_end(done),)
            findings.append(Finding(proof=left[0], what=f"{kind} {case}", target=target, faults=faults))
            left = left[1:]
        log(f"{names[0].rpartition('/')[0]}: {len(names) - len(left)} of {len(names)}")
    return findings


def reason_of_end(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last error that a process printed, else its last line, else its exit code."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exhausted)\b|LLVM ERROR|F\d{4} ", line)]
    return (errors or lines or [f"exit code {done.returncode}"])[-1]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        return subprocess.CompletedProcess(command, 124, printed, f"not done after {TIMEOUT} s")


def _work(names: Sequence[str]) -> int:
    """Run proofs in this process, and print a line of JSON for each."""
    by_name = {proof.name: proof for proof in all_proofs()}
    for name in names:
        findings = by_name[name].run()
        print(json.dumps({"findings": [dataclasses.asdict(finding) for finding in findings]}), flush=True)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_proof",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--full", action="store_true", help="run the wide matrix too; takes an hour or so")
    parser.add_argument(
        "--only", default="", metavar="NAME", help="run proofs whose name matches this regular expression"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the proofs, and exit")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the findings")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="processes; default: one for each core"
    )
    parser.add_argument("--skip-unavailable", action="store_true", help="exit with 0 if nothing can be compiled")
    parser.add_argument("--record", action="store_true", help="if all proofs hold, store that in proven.json")
    parser.add_argument(
        "--unless-recorded", action="store_true", help="prove nothing if proven.json has these proofs for this code"
    )
    parser.add_argument("--prove", dest="names", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
