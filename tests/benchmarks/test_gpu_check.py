"""benchmarks.gpu_check: all code runs, and a failing section does not affect the others."""

import json
import sys
import time

import pytest

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import numerics
from benchmarks.gpu_check.report import faults, markdown, targets
from benchmarks.gpu_check.section import Section
from tests.compilation_cache import CACHE
from tests.virtual_devices import QUICK


def dry_run(out, monkeypatch, *sections):
    """The figures of a dry run mean nothing, so LLVM need not optimise."""
    monkeypatch.setenv("XLA_FLAGS", QUICK)
    programs = str(CACHE.with_name(f"{CACHE.name}-gpu-check"))
    command = ["--dry-run", "--out", str(out), "--budget-s", "900", "--programs", programs, "--sections", *sections]
    assert gpu_check.main(command) == 0
    assert sorted(file.name for file in out.iterdir()) == ["gpu_check.json", "gpu_check.md"]
    document = json.loads((out / "gpu_check.json").read_text())
    assert list(document["sections"]) == list(sections)
    for name, section in document["sections"].items():
        assert section["error"] is None, name
        check_rows(section, name)
    return document


def check_rows(section, name):
    assert section["rows"], name
    assert not [row for row in section["rows"] if "error" in row], name
    assert "left_out" not in section["facts"], name


@pytest.mark.full
def test_a_dry_run_runs_every_section(tmp_path, capsys, monkeypatch):
    document = dry_run(tmp_path, monkeypatch, *gpu_check.SECTIONS)
    found = {row["implementation"]: row["failures"] for row in document["sections"]["numerics"]["rows"]}
    assert (found["reference"], found["triton"]) == ({}, {})
    assert "unsupported" in found["no such device"]
    report = (tmp_path / "gpu_check.md").read_text()
    assert "the figures mean nothing" in report
    assert report in capsys.readouterr().out


@pytest.mark.parametrize("sections", [("ceilings", "decode", "prefill"), ("steps",), ("engine",)], ids=" ".join)
def test_a_dry_run_of_some_sections(tmp_path, capsys, monkeypatch, sections):
    dry_run(tmp_path, monkeypatch, *sections)
    assert (tmp_path / "gpu_check.md").read_text() in capsys.readouterr().out


def test_numerics_names_what_a_device_does_not_support(tmp_path, monkeypatch):
    """All but the self-tests, which tests/kernels_pallas/test_paged_self_test.py runs."""
    monkeypatch.setattr(numerics, "DRY", {"no such device": numerics.DRY["no such device"]})
    section = made_section(tmp_path)
    numerics.numerics(section)
    check_rows({"facts": section.facts, "rows": section.rows}, "numerics")
    far, unsupported = section.rows
    assert (far["case"], far["failures"]) == (numerics.FAR, {})
    assert unsupported["failures"].keys() == {"unsupported"}


# -- what becomes of the rest -----------------------------------------------------------------------------------------

WRITES = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'facts': {'a': 1}, 'rows': [{'b': 2}]})); "


@pytest.mark.parametrize(
    ("then", "seconds", "error"),
    [
        ("sys.exit(0)", 30, None),
        ("sys.exit(3)", 30, "exit code 3"),
        ("import os; os.abort()", 30, "exit code -6"),
        ("import time; time.sleep(60)", 1.5, "stopped after 2 s"),
    ],
)
def test_written_figures_survive_the_end_of_a_section(tmp_path, then, seconds, error):
    file = tmp_path / "section.json"
    begin = time.monotonic()
    found = gpu_check.run_child([sys.executable, "-c", WRITES + then, str(file)], file, seconds)
    assert (found["facts"], found["rows"], found["error"]) == ({"a": 1}, [{"b": 2}], error)
    assert time.monotonic() - begin < 30


def test_a_section_without_a_file_is_empty(tmp_path):
    found = gpu_check.run_child([sys.executable, "-c", "raise SystemExit(1)"], tmp_path / "none.json", 30)
    assert (found["facts"], found["rows"], found["error"]) == ({}, [], "exit code 1")


def test_sections_after_a_failed_one_run_and_get_its_time(tmp_path, monkeypatch):
    shares = {}

    def run_child(command, file, seconds):
        name = command[command.index("--child") + 1]
        shares[name] = seconds
        return {"facts": {}, "rows": [], "seconds": 0.0, "error": "exit code 1" if name == "decode" else None}

    monkeypatch.setattr(gpu_check, "run_child", run_child)
    assert gpu_check.main(["--out", str(tmp_path), "--budget-s", "280"]) == 1
    assert list(shares) == list(gpu_check.SECTIONS)
    assert shares["ceilings"] == pytest.approx(20, abs=1)
    assert shares["engine"] == pytest.approx(280, abs=5)  # earlier sections used none
    report = (tmp_path / "gpu_check.md").read_text()
    assert report.count("**Failed: exit code 1.**") == 1


def test_the_report_has_the_exception_of_a_section(tmp_path, monkeypatch):
    kind = gpu_check.Kind(share=1, function="benchmarks.no_such_module:run")
    monkeypatch.setitem(gpu_check.SECTIONS, "engine", kind)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    monkeypatch.setattr("omni_jax.compat.use_compilation_cache", lambda _: None)
    with pytest.raises(ModuleNotFoundError):
        gpu_check.main(["--child", "engine", "--out", str(tmp_path), "--scratch", str(tmp_path)])
    written = json.loads((tmp_path / "gpu_check.engine.json").read_text())
    report = markdown({"dry_run": False, "sections": {"engine": {**written, "error": "exit code 1"}}})
    assert "**Failed: exit code 1; ModuleNotFoundError: No module named 'benchmarks.no_such_module'.**" in report


def test_sections_can_be_chosen_and_unknown_ones_are_refused(tmp_path, monkeypatch):
    seen = []

    def run_child(command, file, seconds):
        seen.append(command[command.index("--child") + 1])
        return {"facts": {}, "rows": [], "seconds": 0.0, "error": None}

    monkeypatch.setattr(gpu_check, "run_child", run_child)
    assert gpu_check.main(["--out", str(tmp_path), "--sections", "engine", "decode"]) == 0
    assert seen == ["engine", "decode"]
    with pytest.raises(SystemExit):
        gpu_check.main(["--out", str(tmp_path), "--sections", "training"])


def made_section(folder) -> Section:
    places = {"file": folder / "s.json", "scratch": folder, "programs": folder}
    return Section(**places, dry_run=True, deadline=time.monotonic() + 100, ceilings={})


def test_a_section_begins_nothing_it_has_no_time_for(tmp_path):
    section = made_section(tmp_path)
    assert section.has_time(10, for_="this")
    assert not section.has_time(200, for_="that")
    section.add(b=2)
    assert json.loads((tmp_path / "s.json").read_text()) == {"facts": {"left_out": ["that"]}, "rows": [{"b": 2}]}


# -- the report -------------------------------------------------------------------------------------------------------


def attention(case, share, *, rows=64, context=2048, implementation="triton", **more):
    settings = {"table": "cases", "settings": None, "shape": "7B", "queries": 1, "microseconds": 10.0, "rate": 3.0}
    same = {"case": case, "rows": rows, "context": context, "implementation": implementation, "share": share}
    return settings | same | more


def section(*rows, **facts):
    return {"facts": facts, "rows": list(rows), "seconds": 1.0, "error": None}


def test_targets_and_their_verdicts():
    sections = {
        "decode": section(
            attention("a", 0.9),
            attention("b", 0.6),
            attention("b", 0.8, implementation="mosaic"),  # the better kernel counts
            attention("c", 0.1, context=512),  # too short to count
            attention("d", 0.5, rows=1),
            attention("e", 0.01, implementation="xla"),
            {"table": "cases", "case": "f", "error": "RESOURCE_EXHAUSTED"},
        ),
        "prefill": section(
            attention("g", 0.4, rows=1, context=16384, queries=16384, rate=351.0),
            attention("h", 0.4, rows=1, context=16384, queries=16384, rate=999.0, shape="0.5B"),
        ),
        "steps": section({"model": "Qwen2.5-7B", "step": "decode of 64", "times_roofline": 1.3}),
        "engine": section(
            {"workload": "one request at a time", "host_gap": 0.5}, {"workload": "192", "host_gap": 0.02}
        ),
    }
    found = [(row["found"], row["verdict"]) for row in targets(sections)]
    assert found == [(0.5, "missed"), (0.8, "reached"), (351.0, "reached"), (1.3, "missed"), (0.02, "reached")]
    assert {row["verdict"] for row in targets({})} == {"not measured"}


FAULTY = {
    "wrong numbers": ({"case": "head 64", "implementation": "triton", "failures": {"decode": "off by 1"}}, "decode is"),
    "no program": ({"table": "cases", "case": "b", "implementation": "mosaic", "error": "RESOURCE_EXHAUSTED"}, "RESO"),
    "late compilation": ({"workload": "one", "host_gap": 0.1, "compiles_after_warmup": 2}, "2 programs were compiled"),
}
HARMLESS = (
    {"case": "head 64", "implementation": "mosaic", "failures": {"unsupported": "needs a newer GPU"}},
    {"case": "head 64", "implementation": "triton", "failures": {}},
    {"table": "candidates", "case": "b", "implementation": "triton", "error": "RESOURCE_EXHAUSTED"},
    {"workload": "one request at a time", "host_gap": 0.1, "compiles_after_warmup": 0},
)


@pytest.mark.parametrize("name", FAULTY)
def test_the_exit_code_is_1_where_a_result_is_wrong(tmp_path, monkeypatch, capsys, name):
    row, message = FAULTY[name]
    results = {"numerics": section(*HARMLESS, row), "decode": section(attention("a", 0.1))}
    monkeypatch.setattr(gpu_check, "markdown", lambda _: "")
    monkeypatch.setattr(gpu_check, "run_child", lambda command, *_: results[command[command.index("--child") + 1]])
    command = ["--out", str(tmp_path), "--sections", "numerics", "decode"]
    assert gpu_check.main(command) == 1
    (fault,) = faults(results)
    assert message in fault
    results["numerics"] = section(*HARMLESS)  # a missed target is none either
    assert gpu_check.main(command) == 0


def test_the_report_has_failures_errors_and_candidates():
    wrong = {"case": "head 64", "implementation": "triton", "failures": {"decode": "off by 1"}}
    candidate = attention("a", 0.5, table="candidates", settings={"key_tile": 32, "num_warps": 4})
    failed = {"table": "cases", "case": "b", "implementation": "mosaic", "settings": None, "error": "a | b\nc"}
    sections = {"numerics": section(wrong), "decode": section(attention("a", None), failed, candidate)}
    sections["decode"] |= {"error": "stopped after 9 s", "facts": {"left_out": ["cases of 8B"]}}
    report = markdown({"dry_run": False, "sections": sections})
    assert "| head 64 | triton | **wrong:** decode: off by 1 |" in report
    assert "**Failed: stopped after 9 s.**" in report
    assert "Left out for lack of time: cases of 8B." in report
    assert "| b | mosaic |  |  |  | a \\| b c |" in report
    assert "| a | key_tile 32, num_warps 4 | 10 | 3 | 0.5 |" in report
