"""Results of benchmarks.gpu_check in Markdown: targets first, then a table for each section. Imports no JAX."""

from collections.abc import Callable, Iterable
from typing import Any

Row = dict[str, Any]


def markdown(document: dict[str, Any]) -> str:
    """Return the report of a document that `check` writes."""
    sections = document["sections"]
    lines = ["# GPU check", ""]
    facts = next((section["facts"] for section in sections.values() if "device" in section["facts"]), {})
    if document["dry_run"]:
        lines += ["**A dry run on a CPU: the figures mean nothing.**", ""]
    if facts:
        versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        lines += [f"{facts['device']}; {versions}; {document.get('seconds', 0):.0f} s in total.", ""]
    wrong = faults(sections)
    lines += [f"**{len(wrong)} faults:**", "", *(f"- {fault}" for fault in wrong), ""] if wrong else []
    lines += [*_table(targets(sections)), ""]
    for name, section in sections.items():
        lines += [f"## {name.capitalize()}", "", *_remarks(section), *_TABLES[name](section), ""]
    return "\n".join(lines)


def targets(sections: dict[str, Any]) -> list[Row]:
    """Return the targets for H100 and H200, with results and verdicts."""
    copy, product = "of copy bandwidth", "TFLOP/s"
    return [
        _target(
            "decode attention, context 2k and above, the worst case", _worst_decode(sections), 0.7, copy, at_least=True
        ),
        _target("the same, with at least 8 rows", _worst_decode(sections, rows=8), 0.7, copy, at_least=True),
        _target("ragged prefill, head size 128, 16k", _best_prefill(sections), 350.0, product, at_least=True),
        _target("decode step of a 7B, 64 rows", _step_of_7b(sections), 1.25, "times its roofline", at_least=False),
        _target("host gap between steps, many requests", _host_gap(sections), 0.03, "of the time", at_least=False),
    ]


def faults(sections: dict[str, Any]) -> list[str]:
    """Return a sentence for each wrong result.

    None of these is one: a missed target, what a device does not support, candidate settings that do not run.
    """
    found = []
    for name, section in sections.items():
        if section["error"]:
            found.append(f"{name}: {section['error']}")
        for row in section["rows"]:
            what = " ".join(
                str(row[key]) for key in ("case", "implementation", "model", "step", "workload") if key in row
            )
            if "error" in row and row.get("table") != "candidates":
                found.append(f"{name}, {what}: {row['error']}")
            wrong = {op: fault for op, fault in row.get("failures", {}).items() if op != "unsupported"}
            found += [f"{name}, {what}: {op} is wrong: {fault}" for op, fault in wrong.items()]
            if row.get("compiles_after_warmup"):
                found.append(f"{name}, {what}: {row['compiles_after_warmup']:g} programs were compiled after the start")
    return found


def _target(what: str, found: float | None, wanted: float, unit: str, *, at_least: bool) -> Row:
    verdict = "not measured"
    if found is not None:
        verdict = "reached" if (found >= wanted if at_least else found <= wanted) else "missed"
    bound = f"{'at least' if at_least else 'at most'} {wanted:g} {unit}"
    return {"target": what, "wanted": bound, "found": found, "verdict": verdict}


def _rows(sections: dict[str, Any], name: str, **fields: Any) -> list[Row]:
    rows = sections.get(name, {}).get("rows", [])
    return [row for row in rows if "error" not in row and all(row.get(key) == value for key, value in fields.items())]


def _worst_decode(sections: dict[str, Any], *, rows: int = 1) -> float | None:
    """Return the worst share over cases, each with its better kernel."""
    best: dict[str, float] = {}
    for row in _rows(sections, "decode", table="cases"):
        if (
            row["context"] >= 2048
            and row["rows"] >= rows
            and row["implementation"] != "xla"
            and row["share"] is not None
        ):
            best[row["case"]] = max(row["share"], best.get(row["case"], 0.0))
    return min(best.values(), default=None)


def _best_prefill(sections: dict[str, Any]) -> float | None:
    rows = _rows(sections, "prefill", context=16384, queries=16384, rows=1)
    return max((row["rate"] for row in rows if row["shape"] != "0.5B"), default=None)


def _step_of_7b(sections: dict[str, Any]) -> float | None:
    rows = _rows(sections, "steps", model="Qwen2.5-7B", step="decode of 64")
    return min((row["times_roofline"] for row in rows if row["times_roofline"] is not None), default=None)


def _host_gap(sections: dict[str, Any]) -> float | None:
    found = [row["host_gap"] for row in _rows(sections, "engine") if row["workload"] != "one request at a time"]
    return max(found, default=None)


# -- sections ---------------------------------------------------------------------------------------------------------


def _remarks(section: dict[str, Any]) -> list[str]:
    errors = "; ".join(text for text in (section["error"], section["facts"].get("raised")) if text)
    lines = [f"**Failed: {errors}.**", ""] if errors else []
    left_out = section["facts"].get("left_out", [])
    return lines + ([f"Left out for lack of time: {'; '.join(left_out)}.", ""] if left_out else [])


def _plain(section: dict[str, Any]) -> list[str]:
    return _table(section["rows"])


def _numerics(section: dict[str, Any]) -> list[str]:
    def verdict(failures: dict[str, str]) -> str:
        if "unsupported" in failures:
            return f"not supported: {failures['unsupported']}"
        return "**wrong:** " + "; ".join(f"{op}: {fault}" for op, fault in failures.items()) if failures else "right"

    return _table({**row, "failures": verdict(row["failures"])} for row in section["rows"])


def _kernels(section: dict[str, Any]) -> list[str]:
    def chosen(table: str, names: tuple[str, ...]) -> Iterable[Row]:
        for row in section["rows"]:
            if row["table"] == table:
                settings = row["settings"]
                shown = {} if settings is None else {"settings": ", ".join(f"{k} {v}" for k, v in settings.items())}
                yield {name: (row | shown).get(name) for name in (*names, *(["error"] if "error" in row else []))}

    names = ("case", "implementation", "microseconds", "rate", "share")
    lines = _table(chosen("cases", names))
    candidates = list(chosen("candidates", ("case", "settings", *names[2:])))
    return [*lines, "", "Candidate settings, the fastest first:", "", *_table(candidates)] if candidates else lines


def _engine(section: dict[str, Any]) -> list[str]:
    names = ("start_s", "executables", "compile_s", "kv_tokens", "attention", "attention_fallbacks", "starting")
    facts = [f"{name}: {section['facts'][name]}" for name in names if section["facts"].get(name)]
    return ["; ".join(facts) + ".", "", *_table(section["rows"])] if facts else _table(section["rows"])


_TABLES: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "ceilings": _plain,
    "numerics": _numerics,
    "decode": _kernels,
    "prefill": _kernels,
    "steps": _plain,
    "engine": _engine,
}


def _table(rows: Iterable[Row]) -> list[str]:
    rows = list(rows)
    if not rows:
        return ["Nothing."]
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(_cell(row.get(name)) for name in names) + " |" for row in rows]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)
    if isinstance(value, float) and abs(value) >= 1000:
        text = f"{value:,.0f}"
    return text.replace("|", "\\|").replace("\n", " ")
