"""Speed of the engine beside a bare JAX loop, transformers and other engines, on this CPU. See benchmarks/README.md."""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks import models, report
from benchmarks.cpu import cases
from benchmarks.cpu.cases import CASES, Case
from benchmarks.cpu.peers_case import PEERS
from benchmarks.processes import Worker, log
from benchmarks.rounds import Series, first_difference, long_row_ratio

LAYOUTS = ("in, out", "out, in")
WARMUP = 2  # decode steps of each contender before the first round
EXAMPLE = """example, about a minute:
  python -m benchmarks.cpu --model smollm2 --dtype float32 --cases decode-8 --rounds 1

with transformers in another environment, and llama.cpp with its own file of the same weights:
  python -m benchmarks.cpu --model smollm2 --torch-python .venv-goldens/bin/python \\
      --peer llama.cpp=.venv-llama/bin/python:smollm2-f32.gguf --markdown table.md
"""


@dataclasses.dataclass(kw_only=True)
class Measured:
    """Results of a model in a dtype."""

    model: str
    dtype: str
    contenders: list[dict]
    missing: list[str]
    rows: list[dict]


def main() -> None:
    args = _parse()
    chosen = [case for case in CASES if case.name in args.cases]
    machine = report.machine()
    log(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']}")
    results = []
    for model in models.MODELS if args.model == "all" else [args.model]:
        directory = models.locate(model, args.directory)
        for dtype in ("float32", "bfloat16") if args.dtype == "all" else [args.dtype]:
            results.append(_measure(args, model, directory, dtype, chosen))
            document = {"machine": machine, "steps": args.steps, "results": [dataclasses.asdict(r) for r in results]}
            if args.json:
                args.json.write_text(json.dumps(document, indent=1))
            if args.markdown:
                args.markdown.write_text(report.markdown(document))
    print(report.markdown(document))


def _measure(args, model: str, directory: Path, dtype: str, chosen: list[Case]) -> Measured:
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as logs:
        measured = Measured(model=model, dtype=dtype, contenders=[], missing=[], rows=[])
        if short := [case for case in chosen if case.kind != "long"]:
            workers = _start(args, directory, dtype, Path(logs), measured)
            for case in short:
                running = [w for w in workers if case.all_contenders or w.name.startswith(("omni-jax", "bare"))]
                measure = _prefill if case.kind == "prefill" else _decode
                measured.rows.append(measure(args, case, cases.prompts(case.lengths, vocab_size), running))
                log(report.line(measured.rows[-1]), indent=1)
            for worker in workers:
                worker.stop()
        for case in (case for case in chosen if case.kind == "long"):
            log(f"{model} {dtype}: starting the engine with a long context")
            worker = Worker(_engine(directory, dtype, 8192), Path(logs) / "long.log")
            measured.rows.append(_long_row(args, case, vocab_size, worker))
            log(report.line(measured.rows[-1]), indent=1)
            worker.stop()
    return measured


def _engine(directory: Path, dtype: str, max_model_len: int) -> list[str]:
    module = [sys.executable, "-m", "benchmarks.cpu.engine_case", str(directory)]
    return [*module, "--dtype", dtype, "--max-model-len", str(max_model_len)]


def _start(args, directory: Path, dtype: str, logs: Path, measured: Measured) -> list[Worker]:
    commands = {"omni-jax": _engine(directory, dtype, 1024)}
    for layout in LAYOUTS:
        loop = [sys.executable, "-m", "benchmarks.cpu.bare_loop", str(directory)]
        commands[f"bare loop [{layout}]"] = [*loop, "--dtype", dtype, "--layout", layout]
    torch = [args.torch_python or sys.executable, "-m", "benchmarks.cpu.hf_case", str(directory)]
    commands["transformers"] = [*torch, "--dtype", dtype]
    for name in PEERS:
        python, _, path = args.peer.get(name, sys.executable).partition(":")
        peer = [python, "-m", "benchmarks.cpu.peers_case", path or str(directory)]
        commands[name] = [*peer, "--dtype", dtype, "--peer", name]
    workers = []
    for i, (name, command) in enumerate(commands.items()):
        log(f"{measured.model} {dtype}: starting {name}")
        worker = Worker(command, logs / f"{i}.log")
        if "missing" in worker.about:
            log(worker.about["missing"], indent=1)
            measured.missing.append(f"{name}: {worker.about['missing']}")
        else:
            workers.append(worker)
            measured.contenders.append(worker.about)
    return workers


def _decode(args, case: Case, prompts: list[list[int]], workers: list[Worker]) -> dict:
    """Prefill each contender once, then run rounds of `steps` tokens, one contender after another."""
    room = args.rounds * args.steps + WARMUP
    prefills, answers = {}, {worker.name: [] for worker in workers}
    for worker in workers:
        log(f"{case.title}: {worker.name} prefills")
        prefills[worker.name] = worker.ask("open", prompts=prompts, room=room)["seconds"]
        worker.ask("decode", steps=WARMUP)
    for i in range(args.rounds):
        log(f"{case.title}: decode, round {i + 1} of {args.rounds}")
        for worker in workers:
            answers[worker.name].append(worker.ask("decode", steps=args.steps))
    series = [_series(name, args.steps * len(prompts), found) for name, found in answers.items()]
    closed = {worker.name: worker.ask("close") for worker in workers}
    mine = workers[0].name
    last = answers[mine][-1]
    return _row(
        case,
        series,
        closed,
        prefill_seconds=prefills,
        prompt_tokens=sum(case.lengths),
        engine={
            "step_seconds": statistics.median(a["step_seconds"] for a in answers[mine]),
            "host_gap_seconds": statistics.median(a["host_gap_seconds"] for a in answers[mine]),
            "compiles_after_warmup": last["compiles_after_warmup"],
        },
        differences={
            name: first_difference(closed[mine]["tokens"], found["tokens"])
            for name, found in closed.items()
            if name != mine
        },
    )


def _prefill(args, case: Case, prompts: list[list[int]], workers: list[Worker]) -> dict:
    """Run rounds of one prefill each, after one to warm up."""
    answers = {worker.name: [] for worker in workers}
    for i in range(-1, args.rounds):
        log(f"{case.title}: " + (f"round {i + 1} of {args.rounds}" if i >= 0 else "warm-up"))
        for worker in workers:
            found = worker.ask("open", prompts=prompts, room=WARMUP)
            closed = worker.ask("close")
            if i >= 0:
                answers[worker.name].append(found | {"peak_mib": closed["peak_mib"]})
    series = [_series(name, sum(case.lengths), found) for name, found in answers.items()]
    return _row(case, series, {name: found[-1] for name, found in answers.items()})


def _long_row(args, case: Case, vocab_size: int, worker: Worker) -> dict:
    """Measure a decode step of the long row among short ones, of as many short ones, and of the long one alone."""
    batches = {"mixed": case.lengths, "short": (min(case.lengths),) * len(case.lengths), "alone": (max(case.lengths),)}
    seconds, prefills, peak = {}, {}, 0
    for name, lengths in batches.items():
        log(f"{case.title}: {name}, {len(lengths)} rows")
        prompts = cases.prompts(lengths, vocab_size)
        prefills[name] = worker.ask("open", prompts=prompts, room=args.rounds * args.steps + WARMUP)["seconds"]
        worker.ask("decode", steps=WARMUP)
        rounds = [worker.ask("decode", steps=args.steps) for _ in range(args.rounds)]
        seconds[name] = statistics.median(found["seconds"] / args.steps for found in rounds)
        peak = worker.ask("close")["peak_mib"]
    return {
        "case": case.name,
        "title": case.title,
        "kind": case.kind,
        "step_seconds": seconds,
        "prefill_seconds": prefills,
        "peak_mib": {worker.name: peak},
        "ratio": long_row_ratio(**seconds),
    }


def _series(name: str, amount: int, answers: list[dict]) -> Series:
    return Series(
        name=name,
        amount=amount,
        seconds=tuple(a["seconds"] for a in answers),
        others=tuple(a["others"] for a in answers),
    )


def _row(case: Case, series: list[Series], closed: dict[str, dict], **more) -> dict:
    return {
        "case": case.name,
        "title": case.title,
        "kind": case.kind,
        "series": [dataclasses.asdict(s) for s in series],
        "peak_mib": {name: found["peak_mib"] for name, found in closed.items()},
        **more,
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [case.name for case in CASES]
    parser.add_argument("--model", choices=(*models.MODELS, "all"), default="smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "all"), default="all")
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each case (5)")
    parser.add_argument("--steps", type=int, default=12, help="tokens of each sequence in a decode round (12)")
    parser.add_argument("--directory", type=Path, help="Hugging Face directory of the model instead of the cached one")
    parser.add_argument("--torch-python", help="Python interpreter with torch and transformers")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=PYTHON[:MODEL]",
        help=f"Python interpreter with another engine ({', '.join(PEERS)}), and the model in that engine's format",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="OUT", help="file for all figures")
    parser.add_argument("--markdown", type=Path, metavar="OUT", help="file for the tables")
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    if args.directory and args.model == "all":
        parser.error("--directory needs --model to name its model")
    given = dict(peer.split("=", 1) for peer in args.peer if "=" in peer)
    if len(given) != len(args.peer) or given.keys() - PEERS.keys():
        parser.error(f"--peer must be NAME=PYTHON[:MODEL] with NAME one of {', '.join(PEERS)}, got {args.peer}")
    args.peer = given
    return args


if __name__ == "__main__":
    main()
