"""Speed of images on this CPU: preprocessing and the vision tower beside transformers, and the gaps of a text stream
while images are encoded. See benchmarks/README.md."""

import argparse
import dataclasses
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import report
from benchmarks.processes import Worker, log
from benchmarks.rounds import Series, largest_gap_allowed, largest_slice
from benchmarks.vision import model as vision_model
from benchmarks.vision import report as vision_report
from benchmarks.vision.images import write_jpegs, write_patches

PARTS = ("preprocess", "tower", "gaps")
SIZES = ((448, 448), (640, 480), (1280, 960), (1920, 1080))  # pixels, (width, height)
GRIDS = ((32, 32), (64, 64), (34, 46))  # patches, (rows, columns): 1,024, 4,096, and 640 x 480 pixels in a padded call
COUNT = 24  # images in a round of preprocessing
THREADS = 2  # threads in the last case of preprocessing, as in a server on two cores
LARGE = (1280, 960)
IN_STREAM, ALONE = 8, 3  # large images during the stream, and before it on an idle engine
MAX_DIFFERENCE = 1e-2  # largest difference of float32 features
AFTER = 100  # tokens of the stream before the images arrive
EXAMPLE = """example, two minutes on a quiet machine (everything takes a quarter of an hour):
  python -m benchmarks.vision --parts preprocess --rounds 1

everything, with a Python interpreter that has torch, transformers and torchvision:
  python -m benchmarks.vision --torch-python .venv-torch/bin/python --markdown table.md
"""


def main() -> None:
    args = _parse()
    machine = report.machine()
    log(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']}")
    directory = vision_model.locate(args.directory).resolve()
    document = {"machine": machine, "parts": {}}
    measure: dict[str, Callable] = {"preprocess": _preprocess, "tower": _tower, "gaps": _gaps}
    for part in PARTS:
        if part not in args.parts:
            continue
        with tempfile.TemporaryDirectory() as folder:
            document["parts"][part] = measure[part](args, directory, Path(folder))
        if args.json:
            args.json.write_text(json.dumps(document, indent=1))
        if args.markdown:
            args.markdown.write_text(vision_report.markdown(document))
    print(vision_report.markdown(document))
    if args.check and not all(reached for _, reached in vision_report.verdicts(document)):
        sys.exit(1)


def _preprocess(args, directory: Path, folder: Path) -> dict:
    """Run rounds of COUNT images of each size, from JPEG bytes and decoded, and finally of all sizes in threads."""
    ours = [sys.executable, "-m", "benchmarks.vision.case", str(directory), "--part", "preprocess"]
    transformers = [args.torch_python or sys.executable, "-m", "benchmarks.vision.hf_case", str(directory)]
    commands = {"omni-jax": ours}
    for backend in ("pil", "torchvision"):
        commands[f"transformers ({backend})"] = [*transformers, "--part", "preprocess", "--backend", backend]
    workers, part = _start(commands, folder)
    files = write_jpegs(folder, list(SIZES))
    found = {worker.name: worker.ask("open", files=files)["found"] for worker in workers}
    for name, theirs in found.items():
        for size, (grid, mean), (their_grid, their_mean) in zip(SIZES, found["omni-jax"], theirs, strict=True):
            if grid != their_grid or not math.isclose(mean, their_mean, abs_tol=0.5):
                raise SystemExit(
                    f"{size[0]} x {size[1]} pixels: omni-jax makes {grid} patches with a mean of {mean:.2f}, "
                    f"{name} {their_grid} with {their_mean:.2f}; expected the same"
                )
    for i, (width, height) in enumerate(SIZES):
        for decoded in (False, True):
            title = f"{width} x {height}, " + ("decoded" if decoded else "JPEG")
            ask = {"which": [i] * COUNT, "decoded": decoded, "threads": 1}
            part["rows"].append(_rounds(args, title, COUNT, workers, "prepare", ask))
    mixed = {"which": list(range(len(SIZES))) * (COUNT // len(SIZES)), "decoded": False, "threads": THREADS}
    title = f"all sizes, JPEG, {THREADS} threads"
    part["rows"].append(_rounds(args, title, COUNT, workers, "prepare", mixed))
    _stop(workers)
    return part


def _tower(args, directory: Path, folder: Path) -> dict:
    """Run rounds of one image each."""
    ours = [sys.executable, "-m", "benchmarks.vision.case", str(directory), "--part", "tower"]
    transformers = [args.torch_python or sys.executable, "-m", "benchmarks.vision.hf_case", str(directory)]
    workers, part = _start({"omni-jax": ours, "transformers": [*transformers, "--part", "tower"]}, folder)
    files = write_patches(folder, list(GRIDS))
    opened = {}
    for worker in workers:
        log(f"tower: {worker.name} compiles and encodes once")
        opened[worker.name] = worker.ask("open", files=files, grids=GRIDS)
    mine = opened.pop(workers[0].name)
    part["differences"] = {name: _difference(mine["found"], theirs["found"]) for name, theirs in opened.items()}
    if any(most > MAX_DIFFERENCE for most in part["differences"].values()):
        raise SystemExit(f"features differ by up to {part['differences']}, expected at most {MAX_DIFFERENCE}")
    for i, (rows, columns) in enumerate(GRIDS):
        bucket = mine["buckets"][i]
        title = f"{rows * columns:,} patches" + ("" if bucket == rows * columns else f", computed as {bucket:,}")
        part["rows"].append(_rounds(args, title, 1, workers, "encode", {"which": i, "times": 1}))
    _stop(workers)
    return part


def _gaps(args, directory: Path, folder: Path) -> dict:
    """Run a stream alone, and one during which images arrive."""
    command = [sys.executable, "-m", "benchmarks.vision.gaps_case", str(directory), "--max-model-len", "4096"]
    [worker], part = _start({"omni-jax": command}, folder)
    worker.ask("open", files=write_jpegs(folder, [LARGE] * (ALONE + IN_STREAM)))
    log(f"gaps: {ALONE} images on the idle engine")
    alone = worker.ask("alone", which=list(range(ALONE)))
    answers = {}
    for name, images in (("plain", []), ("images", list(range(ALONE, ALONE + IN_STREAM)))):
        log(f"gaps: {args.tokens} tokens" + (f" with {len(images)} images" if images else ""))
        answers[name] = worker.ask("stream", tokens=args.tokens, images=images, after=AFTER)
    _stop([worker])
    step = statistics.median(answers["plain"]["step_seconds"])
    part |= {"tokens": args.tokens, "size": LARGE, "step_seconds": step, "alone": alone, **answers}
    # Slices on the idle engine are the strict measure: during the stream, their seconds include steps.
    part["slice_seconds"] = largest_slice(alone["slice_seconds"])
    part["allowed"] = largest_gap_allowed(step=step, longest_slice=part["slice_seconds"])
    part["allowed_beside"] = largest_gap_allowed(step=step, longest_slice=max(answers["images"]["slice_seconds"]))
    log(vision_report.gaps_line(part), indent=1)
    return part


def _start(commands: dict[str, list[str]], folder: Path) -> tuple[list[Worker], dict]:
    """Return the contenders that started, and an empty document for their results."""
    workers, part = [], {"contenders": [], "missing": [], "rows": []}
    for i, (name, command) in enumerate(commands.items()):
        log(f"starting {name}")
        worker = Worker(command, folder / f"{i}.log")
        if "missing" in worker.about:
            log(worker.about["missing"], indent=1)
            part["missing"].append(f"{name}: {worker.about['missing']}")
        else:
            workers.append(worker)
            part["contenders"].append(worker.about)
    return workers, part


def _stop(workers: list[Worker]) -> None:
    for worker in workers:
        worker.stop()


def _rounds(args, title: str, amount: int, workers: list[Worker], do: str, arguments: dict) -> dict:
    """Run each contender in turn, `rounds` times after a warm-up."""
    answers = {worker.name: [] for worker in workers}
    for i in range(-1, args.rounds):
        for worker in workers:
            answer = worker.ask(do, **arguments)
            if i >= 0:
                answers[worker.name].append(answer)
    series = [
        Series(
            name=name,
            amount=amount,
            seconds=tuple(a["seconds"] for a in found),
            others=tuple(a["others"] for a in found),
        )
        for name, found in answers.items()
    ]
    peaks = {name: max(a["peak_mib"] for a in found) for name, found in answers.items()}
    row = {"title": title, "series": [dataclasses.asdict(s) for s in series], "peak_mib": peaks}
    log(vision_report.line(row), indent=1)
    return row


def _difference(mine: list, theirs: list) -> float:
    """Return the largest difference between numbers in nested lists of one shape."""
    if isinstance(mine, list):
        return max(_difference(one, other) for one, other in zip(mine, theirs, strict=True))
    return abs(mine - theirs)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vision",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each case of preprocess and tower (5)")
    parser.add_argument("--tokens", type=int, default=1001, help="tokens of the stream, one more than its gaps (1001)")
    parser.add_argument("--directory", type=Path, help="Qwen2-VL in Hugging Face layout instead of the random one")
    parser.add_argument("--torch-python", help="Python interpreter with torch, transformers and perhaps torchvision")
    parser.add_argument("--json", type=Path, metavar="OUT", help="file for all figures")
    parser.add_argument("--markdown", type=Path, metavar="OUT", help="file for the tables")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    if args.tokens <= 2 * AFTER:
        parser.error(f"--tokens must be above {2 * AFTER}, got {args.tokens}: images arrive after {AFTER}")
    return args


if __name__ == "__main__":
    main()
