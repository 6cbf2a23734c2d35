"""Effect of the engine's memory features on this CPU: a shared system prompt, more sequences than the KV cache holds,
and the used share of allocated slots. See benchmarks/README.md."""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import models, report
from benchmarks.memory import report as memory_report
from benchmarks.processes import Worker, log
from checkpoints.reader import Checkpoint
from omni_jax.lab.model import tiny_vl

PARTS = ("prefix", "oversubscription", "slots")
MODELS = ("smollm2", "tiny")
USERS, SYSTEM, QUESTION, ANSWER = 20, 1500, 24, 8  # users and tokens of the shared-prefix load
SEQUENCES, SHORTEST, LONGEST, OUTPUT = 64, 256, 1024, 128  # sequences and tokens of the oversubscription load
MODES = ("swap", "recompute", "auto")
SLOT_BLOCK = 16  # block size
REQUESTS = 200  # requests of the part slots
GIB = 1 << 30
EXAMPLE = """example, a few minutes with a small random model:
  python -m benchmarks.memory --model tiny --rounds 3

everything, with SmolLM2:
  python -m benchmarks.memory --markdown table.md --json all.json
"""


def main() -> None:
    args = _parse()
    machine = report.machine()
    log(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']}")
    document = {"machine": machine, "model": args.directory.name if args.directory else args.model, "parts": {}}
    measure: dict[str, Callable[[argparse.Namespace, Path], dict]] = {
        "prefix": prefix,
        "oversubscription": oversubscription,
        "slots": slots,
    }
    for part in PARTS:
        if part not in args.parts:
            continue
        with tempfile.TemporaryDirectory() as folder:
            document["parts"][part] = measure[part](args, Path(folder))
        if args.json:
            args.json.write_text(json.dumps(document, indent=1))
        if args.markdown:
            args.markdown.write_text(memory_report.markdown(document))
    print(memory_report.markdown(document))
    if args.check and not all(reached for _, reached in memory_report.verdicts(document)):
        sys.exit(1)


def prefix(args: argparse.Namespace, folder: Path) -> dict:
    """Run two engines in turns, with the prefix cache and without. Each round has a new system prompt, which is not
    cached yet."""
    options = _options(args, max_model_len=2048, kv_cache_memory_bytes=2 * GIB)
    found: dict = {"users": USERS, "system": SYSTEM, "question": QUESTION, "contenders": [], "cases": []}
    workers = _start(
        {
            "with the cache": options | {"enable_prefix_caching": True},
            "without": options | {"enable_prefix_caching": False},
        },
        folder,
        found,
    )
    for title, together in (("all at once", True), ("one after another", False)):
        ask = {"users": USERS, "system": SYSTEM, "question": QUESTION, "answer": ANSWER, "together": together}
        answers = _rounds(args, f"prefix, {title}", workers, "shared_prefix", ask)
        found["cases"].append({"title": title, "answers": answers})
        log(memory_report.prefix_line(found["cases"][-1]), indent=1)
    _stop(workers)
    return found


def oversubscription(args: argparse.Namespace, folder: Path) -> dict:
    """Run three engines in turns, which differ in the preemption mode."""
    draw = random.Random(SEQUENCES)
    prompts = [draw.randint(SHORTEST, LONGEST) for _ in range(SEQUENCES)]
    tokens = sum(prompts) + SEQUENCES * OUTPUT
    options = _options(
        args,
        max_model_len=2048,
        max_num_seqs=SEQUENCES,
        block_size=SLOT_BLOCK,
        kv_cache_memory_bytes=tokens // 2 * bytes_per_token(_directory(args)),
        enable_prefix_caching=False,
    )
    found: dict = {"sequences": SEQUENCES, "tokens": tokens, "output": OUTPUT, "contenders": []}
    contenders = {
        mode: options | {"preemption_mode": mode, "swap_space": 0.0 if mode == "recompute" else 4.0} for mode in MODES
    }
    workers = _start(contenders, folder, found)
    ask = {"prompts": prompts, "answer": OUTPUT}
    found["answers"] = _rounds(args, "oversubscription", workers, "rush", ask)
    _stop(workers)
    return found


def slots(args: argparse.Namespace, folder: Path) -> dict:
    """Run one engine, without timing."""
    options = _options(args, max_model_len=4096, block_size=SLOT_BLOCK, max_num_seqs=16)
    if args.model == "tiny" and args.directory is None:
        options["max_pixels"] = 401408
    found: dict = {"block_size": SLOT_BLOCK, "requests": REQUESTS, "contenders": []}
    [worker] = _start({"omni-jax": options}, folder, found)
    log("slots")
    found["answer"] = worker.ask("slots", requests=REQUESTS, seed=1)
    _stop([worker])
    return found


def bytes_per_token(directory: Path) -> int:
    """Return the bytes of a token in a float32 KV cache, for a model in Hugging Face layout."""
    config = Checkpoint(directory).config
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * 4


def _directory(args: argparse.Namespace) -> Path:
    if args.directory is None and args.model == "tiny":
        return tiny_vl()
    return models.locate("smollm2", args.directory)


def _options(args: argparse.Namespace, **options) -> dict:
    return {"model_dir": str(_directory(args).resolve()), "dtype": "float32", **options}


def _start(contenders: dict[str, dict], folder: Path, found: dict) -> list[Worker]:
    workers = []
    for i, (name, options) in enumerate(contenders.items()):
        log(f"starting {name}")
        command = [sys.executable, "-m", "benchmarks.memory.case", name, json.dumps(options)]
        worker = Worker(command, folder / f"{i}.log")
        if "missing" in worker.about:
            raise SystemExit(worker.about["missing"])
        workers.append(worker)
        found["contenders"].append(worker.about)
    return workers


def _stop(workers: list[Worker]) -> None:
    for worker in workers:
        worker.stop()


def _rounds(args: argparse.Namespace, title: str, workers: list[Worker], do: str, ask: dict) -> dict[str, list[dict]]:
    """Run each contender in turn, `rounds` times. All contenders of a round have the same seed."""
    answers: dict[str, list[dict]] = {worker.name: [] for worker in workers}
    for number in range(args.rounds):
        for worker in workers:
            answers[worker.name].append(worker.ask(do, **ask, seed=number))
            log(f"{title}, round {number + 1}: {worker.name} {answers[worker.name][-1]['seconds']:.1f} s", indent=1)
    return answers


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="smollm2, or a small random model")
    parser.add_argument("--directory", type=Path, help="model in Hugging Face layout instead")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of timed parts (3)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="file for all figures")
    parser.add_argument("--markdown", type=Path, metavar="OUT", help="file for the tables")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    return args


if __name__ == "__main__":
    main()
