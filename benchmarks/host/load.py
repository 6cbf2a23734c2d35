"""Time and peak memory of loading weights from safetensors and from Orbax. See docs/scale.md.

Each conversion and each load runs in its own process; peak memory is the kernel's figure for that process. Files are in
the page cache, so this measures the formats and not a disk.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.processes import ROOT

EXAMPLE = """example:
  python -m benchmarks.host.load --json load.json
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host.load",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="model directory; default: the demo model, downloaded if missing")
    parser.add_argument("--devices", type=int, default=4, help="mesh size that the second Orbax copy is cut for")
    parser.add_argument("--rounds", type=int, default=5, help="loads of each kind, in turns")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)  # the task of a child process
    args = parser.parse_args()
    if args.one:
        print(json.dumps(_one(*args.one)))
        return
    document = measure(args.model or _demo(), devices=args.devices, rounds=args.rounds)
    print(markdown(document))
    if args.json:
        args.json.write_text(json.dumps(document, indent=1))


def measure(model: Path, *, devices: int, rounds: int) -> dict[str, Any]:
    """Convert `model` to Orbax, then load each kind in turns."""
    with tempfile.TemporaryDirectory() as folder:
        kinds = {
            "safetensors": (model, None),
            "Orbax": (Path(folder) / "orbax", _run("convert", model, Path(folder) / "orbax", 1)),
            f"Orbax, cut for {devices} devices": (
                Path(folder) / "cut",
                _run("convert", model, Path(folder) / "cut", devices),
            ),
        }
        loads: dict[str, list[dict]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind, (directory, _) in kinds.items():
                loads[kind].append(_run("load", directory))
    return {
        "machine": report.machine(),
        "model": model.name,
        "bytes": next(iter(loads.values()))[0]["bytes"],
        "kinds": [
            {"kind": kind, "conversion": conversion, "loads": loads[kind]} for kind, (_, conversion) in kinds.items()
        ],
    }


def markdown(document: dict[str, Any]) -> str:
    """Return a table of medians: seconds, and peak memory above that of the process before it opens a file."""
    lines = [
        f"{document['model']}, {document['bytes'] / 1e6:.0f} MB of weights; {document['machine']['cpu']}, "
        f"{document['machine']['cores']} cores",
        "",
        "| weights in | load, s | of it opening, s | peak memory, MB | conversion, s | its peak memory, MB |",
        "|---|---|---|---|---|---|",
    ]
    for kind in document["kinds"]:
        load = {name: statistics.median(each[name] for each in kind["loads"]) for name in ("seconds", "open", "peak")}
        made = kind["conversion"]
        conversion = "| |" if made is None else f"{made['seconds']:.1f} | {made['peak'] / 1e6:.0f} |"
        lines.append(
            f"| {kind['kind']} | {load['seconds']:.2f} | {load['open']:.2f} | {load['peak'] / 1e6:.0f} | {conversion}"
        )
    return "\n".join(lines)


def _run(*task: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.host.load", "--one", *map(str, task)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def _one(what: str, source: str, *rest: str) -> dict[str, Any]:
    """Convert or load, in this process. Peaks are relative to the process after its imports."""
    import jax

    if what == "convert":
        import orbax.checkpoint  # noqa: F401  # imported before the clock starts

        from checkpoints.orbax_convert import to_orbax

        out, devices = rest
        jax.config.update("jax_num_cpu_devices", int(devices))
        jax.block_until_ready(jax.numpy.zeros(1))
        before, begin = _peak(), time.perf_counter()
        to_orbax(source, out, devices=int(devices))
        return {"seconds": time.perf_counter() - begin, "peak": _peak() - before}
    import tensorstore  # noqa: F401

    from checkpoints.reader import Checkpoint
    from omni_jax.models.config import model_config
    from omni_jax.models.weights import load_weights

    jax.block_until_ready(jax.numpy.zeros(1))
    before, begin = _peak(), time.perf_counter()
    checkpoint = Checkpoint(source)
    opened = time.perf_counter()
    config = model_config(checkpoint.config)
    _, weights = load_weights(checkpoint, config, jax.numpy.dtype(config.dtype))
    jax.block_until_ready(weights.arrays)
    return {
        "seconds": time.perf_counter() - begin,
        "open": opened - begin,
        "peak": _peak() - before,
        "bytes": checkpoint.nbytes,
    }


def _peak() -> int:
    """Peak memory of the process so far in bytes, pages of mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _demo() -> Path:
    from checkpoints.demo_model import demo_model

    return demo_model()


if __name__ == "__main__":
    main()
