"""Results of benchmarks.vision in Markdown, with the verdict on each target."""

import statistics
from collections.abc import Sequence

from benchmarks.report import ENGINE, machine_line
from benchmarks.rounds import Series, faster, percentile, speedup

TARGETS = {"preprocess": 0.9, "tower": 1.0}  # minimum speed over that of the fastest other contender
NOTES = {
    "preprocess": "omni-jax's patches stay uint8: the tower rescales and normalises them on the device. transformers' "
    "figures include both, omni-jax's do not.",
    "tower": "omni-jax starts from uint8 patches, transformers from normalised ones.",
}
TITLES = {"preprocess": "Preprocessing", "tower": "Vision tower", "gaps": "Gaps between tokens"}


def markdown(document: dict) -> str:
    """Return the machine, and a table for each part."""
    lines = [machine_line(document["machine"])]
    for part, found in document["parts"].items():
        lines += ["", f"### {TITLES[part]}", ""]
        for about in found["contenders"]:
            lines.append(f"- {about['name']}: {about['version']}")
        lines += [f"- {missing}" for missing in found["missing"]]
        lines += ["", NOTES[part]] if part in NOTES else []
        lines += ["", *(_gaps(found) if part == "gaps" else _speeds(found))]
        verdict = [_verdict(target, reached) for target, reached in verdicts({"parts": {part: found}})]
        lines += ["", *(verdict or ["No other contender to compare with."])]
    return "\n".join(lines) + "\n"


def verdicts(document: dict) -> list[tuple[str, bool]]:
    """Return (target, whether it was reached) for each target. A part must reach its target in every row."""
    found = []
    for part, measured in document["parts"].items():
        if part == "gaps":
            largest, allowed = max(measured["images"]["gaps"]), measured["allowed"]
            found.append((f"largest gap at most {_ms(allowed)}: {_ms(largest)}", largest <= allowed))
            continue
        ratios = {row["title"]: ratio for row in measured["rows"] if (ratio := _ratio(row)) is not None}
        if ratios:
            missed = [f"{ratio:.2f} at {title}" for title, ratio in ratios.items() if ratio < TARGETS[part]]
            target = f"{TITLES[part].lower()} at least {TARGETS[part]} times the fastest other"
            found.append((f"{target}: {' and '.join(missed) or f'{min(ratios.values()):.2f} or more'}", not missed))
    return found


def line(row: dict) -> str:
    """Return a row in one line, for progress."""
    series = _series(row)
    speeds = ", ".join(f"{name} {one.per_second:.3g}" for name, one in series.items())
    ratio = _ratio(row)
    return f"{row['title']}: {speeds} images/s" + ("" if ratio is None else f"; {ratio:.2f} of the fastest other")


def gaps_line(part: dict) -> str:
    """Return the part in one line, for progress."""
    plain, beside = (max(part[name]["gaps"]) for name in ("plain", "images"))
    return f"largest gap {_ms(plain)}, with images {_ms(beside)}; {_ms(part['allowed'])} allowed"


def _speeds(part: dict) -> list[str]:
    names = [about["name"] for about in part["contenders"]]
    others = [name for name in names if name != ENGINE]
    head = ["images/s", *names, *(f"engine / {name}" for name in others)]
    lines = [_cells(head), "|---" * len(head) + "|"]
    for row in part["rows"]:
        series = _series(row)
        ratios = [f"{speedup(series[ENGINE], series[name]):.2f}" for name in others]
        lines.append(_cells([row["title"], *(f"{series[name].per_second:.3g}" for name in names), *ratios]))
    peaks = [max(row["peak_mib"][name] for row in part["rows"]) for name in names]
    lines.append(_cells(["most memory, MiB", *peaks, *("" for _ in others)]))
    notes = [
        f"Features differ from those of {name} by at most {largest:.1e}."
        for name, largest in part.get("differences", {}).items()
    ]
    busiest = max(other for row in part["rows"] for s in row["series"] for other in s["others"])
    if busiest > 0.1:
        notes.append(f"Other processes used up to {busiest:.2f} cores.")
    return [*lines, "", *notes] if notes else lines


def _gaps(part: dict) -> list[str]:
    plain, beside = part["plain"], part["images"]
    during = [gap for gap, work in zip(beside["gaps"], beside["during"], strict=True) if work]
    count = len(beside["first_token_seconds"])
    rows = {
        "plain": plain["gaps"],
        f"with {count} images": beside["gaps"],
        "of these, while images were in progress": during,
    }
    lines = [_cells(["gaps of the stream, ms", "number", "p50", "p95", "p99", "max"]), "|---" * 6 + "|"]
    for name, gaps in rows.items():
        at = [percentile(gaps, share) for share in (0.5, 0.95, 0.99, 1.0)] if gaps else []
        lines.append(_cells([name, len(gaps), *(f"{1e3 * gap:.1f}" for gap in at)]))
    width, height = part["size"]
    firsts = beside["first_token_seconds"]
    alone = part["alone"]["slice_seconds"]
    lines += [
        "",
        f"- A plain step takes {_ms(part['step_seconds'])} (median).",
        f"- The longest slice of the tower takes {_ms(part['slice_seconds'])} for an image of {width} x {height} on "
        f"the idle engine (median of {len(alone)} images). During the stream, waiting for steps included, it took "
        f"{_ms(max(beside['slice_seconds']))}, which would allow {_ms(part['allowed_beside'])}.",
        f"- First tokens of the image requests came after {min(firsts):.1f} to {max(firsts):.1f} s "
        f"(median {statistics.median(firsts):.1f} s), the last of their answers ended after "
        f"{beside['images_seconds']:.1f} s.",
        f"- {beside['compiles_after_warmup']} compilations after warm-up.",
    ]
    busiest = max(plain["others"], beside["others"])
    return [*lines, f"- Other processes used up to {busiest:.2f} cores."] if busiest > 0.1 else lines


def _series(row: dict) -> dict[str, Series]:
    return {s["name"]: Series(**s) for s in row["series"]}


def _ratio(row: dict) -> float | None:
    """Return the speed over that of the fastest other contender; None without another."""
    series = _series(row)
    others = [one for name, one in series.items() if name != ENGINE]
    return speedup(series[ENGINE], faster(others)) if others else None


def _verdict(target: str, reached: bool) -> str:
    return f"{target[0].upper()}{target[1:]}: " + ("**reached**." if reached else "**missed**.")


def _cells(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"
