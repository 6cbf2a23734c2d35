"""Results of benchmarks.cpu in Markdown, and the description of the machine for all benchmarks."""

import os
import platform
import re
from pathlib import Path

from benchmarks.rounds import Series, faster, speedup

ENGINE, LOOP = "omni-jax", "bare loop"
VECTORS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def machine() -> dict:
    """Return the CPU, its vector instructions, memory, Python, and the load before the start."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    flags = set(re.search(r"^flags\s*:(.*)$", cpuinfo, re.M)[1].split()) if "flags" in cpuinfo else set()
    name = re.search(r"^model name\s*:\s*(.*)$", cpuinfo, re.M)
    family = [
        found[1] for key in ("cpu family", "model") if (found := re.search(rf"^{key}\s*:\s*(\d+)$", cpuinfo, re.M))
    ]
    return {
        "cpu": (name[1] if name else platform.processor()) + f" (family {', model '.join(family)})" * bool(family),
        "cores": os.cpu_count(),
        "vectors": {flag: flag in flags for flag in VECTORS},
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def markdown(document: dict) -> str:
    """Return the machine and, for each model and dtype, a table of decode and prefill with ratios."""
    lines = [machine_line(document["machine"])]
    for result in document["results"]:
        lines += ["", f"### {result['model']}, {result['dtype']}", ""]
        if result["dtype"] == "bfloat16" and not document["machine"]["vectors"]["avx512_bf16"]:
            lines += [
                "This CPU has no bfloat16 instructions: every program converts bfloat16 before it multiplies.",
                "",
            ]
        lines += _tables(result, document["steps"])
    return "\n".join(lines) + "\n"


def line(row: dict) -> str:
    """Return a case in one line, for progress."""
    if row["kind"] == "long":
        return f"{row['title']}: {_long(row)}"
    series = [Series(**s) for s in row["series"]]
    speeds = ", ".join(f"{s.name} {s.per_second:.1f}" for s in series)
    return f"{row['title']}: {speeds} tokens/s; {_ratios(series)}"


def machine_line(found: dict) -> str:
    """Return the result of `machine` as a sentence."""
    vectors = ", ".join(f"{'' if there else 'no '}{flag}" for flag, there in found["vectors"].items())
    return (
        f"Machine: {found['cpu']}, {found['cores']} cores, {vectors}, {found['memory_gib']} GiB; "
        f"Python {found['python']}; load {found['load']} before the start."
    )


def _tables(result: dict, steps: int) -> list[str]:
    names = [about["name"] for about in result["contenders"]]
    lines = []
    for about in result["contenders"]:
        more = (
            f"; weights {about['weight_mib']} MiB, KV cache {about['kv_cache_mib']} MiB"
            if "weight_mib" in about
            else ""
        )
        lines.append(f"- {about['name']}: {about['version']}{more}")
    lines += [f"- {missing}" for missing in result["missing"]]
    measured = [row for row in result["rows"] if row["kind"] != "long"]
    if measured:
        lines += ["", "| tokens/s | " + " | ".join(names) + " | engine / faster loop | engine / transformers |"]
        lines += ["|---" * (len(names) + 3) + "|"]
    for row in measured:
        series = {s["name"]: Series(**s) for s in row["series"]}
        speeds = [f"{series[n].per_second:.1f}" if n in series else "" for n in names]
        kind = "" if row["kind"] == "prefill" else "decode, "
        lines.append(
            f"| {kind}{row['title']} | {' | '.join(speeds)} | {_loop_ratio(series)} | {_torch_ratio(series)} |"
        )
        if row["kind"] == "decode":
            once = {n: row["prompt_tokens"] / seconds for n, seconds in row["prefill_seconds"].items()}
            loops = [once[n] for n in once if n.startswith(LOOP)]
            speeds = [f"{once[n]:.1f}" if n in once else "" for n in names]
            torch = f"{once[ENGINE] / once['transformers']:.2f}" if "transformers" in once else ""
            ratio = f"{once[ENGINE] / max(loops):.2f}" if loops else ""
            lines.append(f"| its prefill, once | {' | '.join(speeds)} | {ratio} | {torch} |")
    peaks = {name: max(row["peak_mib"].get(name, 0) for row in measured) for name in names} if measured else {}
    if peaks:
        lines.append(f"| most memory, MiB | {' | '.join(str(peaks[n]) for n in names)} | | |")
    lines.append("")
    for row in result["rows"]:
        lines += _notes(row)
    return lines


def _notes(row: dict) -> list[str]:
    if row["kind"] == "long":
        return [f"- {row['title']}: {_long(row)}"]
    busiest = max((o for s in row["series"] for o in s["others"]), default=0.0)
    notes = [f"other processes used up to {busiest:.2f} cores"] if busiest > 0.1 else []
    if row["kind"] == "decode":
        engine = row["engine"]
        share = engine["host_gap_seconds"] / engine["step_seconds"]
        notes.insert(
            0,
            f"step {engine['step_seconds'] * 1e3:.1f} ms, host gap {share:.1%} of it, "
            f"{engine['compiles_after_warmup']} compilations after warm-up",
        )
        for name, found in row["differences"].items():
            if found:
                first = min(found.values())
                notes.append(f"{len(found)} rows differ from {name}, the first at token {first}")
        if not any(row["differences"].values()):
            notes.append("all contenders generated the same tokens")
    return [f"- {row['title']}: {'; '.join(notes)}"] if notes else []


def _long(row: dict) -> str:
    steps = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in row["step_seconds"].items())
    return f"a decode step takes {steps}: mixed / (short + alone) = {row['ratio']:.2f}"


def _ratios(series: list[Series]) -> str:
    by_name = {s.name: s for s in series}
    found = {"engine / faster loop": _loop_ratio(by_name), "engine / transformers": _torch_ratio(by_name)}
    return ", ".join(f"{name} {ratio}" for name, ratio in found.items() if ratio)


def _loop_ratio(series: dict[str, Series]) -> str:
    loops = [s for name, s in series.items() if name.startswith(LOOP)]
    if not loops or ENGINE not in series:
        return ""
    best = faster(loops)
    return f"{speedup(series[ENGINE], best):.2f} {best.name.removeprefix(LOOP).strip()}"


def _torch_ratio(series: dict[str, Series]) -> str:
    return f"{speedup(series[ENGINE], series['transformers']):.2f}" if "transformers" in series else ""
