"""Running an experiment: which files are written, which cells run, which results are refused."""

import csv
import dataclasses
import gzip
import json
import re

import pytest

from omni_jax.lab import figures
from omni_jax.lab.experiment import workload
from omni_jax.lab.measures import rate_of_completion
from omni_jax.lab.records import Run, read_run
from omni_jax.lab.run import OtherSettings, run_experiment, write_results
from omni_jax.lab.summary import REQUEST_COLUMNS, SEGMENT_COLUMNS, STEP_COLUMNS, SUMMARY_COLUMNS
from omni_jax.requests import EngineError
from tests.lab.made import MadeUpBackend, experiment, made_run


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch):
    """Figures take longer than everything else."""
    monkeypatch.setattr("omni_jax.lab.run.write_figures", lambda *_: {})


def run(out, *, backend=None, overwrite=False, **changes):
    backend = backend or MadeUpBackend()
    report = run_experiment(experiment(**changes), out, backend=backend, overwrite=overwrite, quiet=True)
    return report, backend


def cells_of(backend):
    return [tag for tag in backend.replayed if "--" in tag]


def table(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_all_files_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr("omni_jax.lab.run.write_figures", figures.write_figures)
    report, backend = run(tmp_path)
    assert len(cells_of(backend)) == 8
    assert len(list((tmp_path / "cells").iterdir())) == 8
    names = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert names >= {"requests.csv", "segments.csv", "steps.csv", "summary.csv", "measures.json", "step-times.json"}
    assert names >= {"latency-usual-80pct.png", "latency-usual-3.png", "timeline-usual.png", "p95-usual.png"}
    assert names >= {"segments.png"}
    for name in names:
        if name.endswith(".png"):
            assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
            assert f"]({name})" in report.read_text()


def test_columns_and_rows_of_the_tables(tmp_path):
    run(tmp_path)
    for name, columns in (
        ("requests", REQUEST_COLUMNS),
        ("segments", SEGMENT_COLUMNS),
        ("steps", STEP_COLUMNS),
        ("summary", SUMMARY_COLUMNS),
    ):
        header = (tmp_path / f"{name}.csv").read_text().splitlines()[0]
        assert header.split(",") == list(columns)
    requests = table(tmp_path / "requests.csv")
    assert len(requests) == 8 * 24
    for row in requests:
        latency = 1000 * (float(row["ended_at"]) - float(row["arrival"]))
        assert float(row["latency_ms"]) == pytest.approx(latency, abs=0.003)
        for column, reached in (("queue_ms", "scheduled_at"), ("ttft_ms", "first_token_at")):
            since = 1000 * (float(row[reached]) - float(row["arrival"]))
            assert float(row[column]) == pytest.approx(since, abs=0.003)
        if int(row["output_tokens"]) > 1:
            pace = 1000 * (float(row["ended_at"]) - float(row["first_token_at"])) / (int(row["output_tokens"]) - 1)
            assert float(row["tpot_ms"]) == pytest.approx(pace, abs=0.003)
        assert float(row["slowdown"]) == pytest.approx(float(row["latency_ms"]) / float(row["alone_ms"]), abs=1e-4)
        limit = {"text": 200, "image": 500, "table": None}[row["kind"]]
        expected = "" if limit is None else str(float(row["ttft_ms"]) <= limit)
        assert row["slo_met"] == expected
    assert len(table(tmp_path / "segments.csv")) == 8 * 24
    assert len(table(tmp_path / "steps.csv")) == 8 * 48


def test_arms_are_compared_request_by_request(tmp_path):
    """Each request takes half as long under C, so with shorter queues its latency is at most half of A's."""
    run(tmp_path, seeds=[1, 2, 3, 4])
    lines = {
        (row["arm"], row["rate"], row["kind"], row["metric"], row["statistic"]): row
        for row in table(tmp_path / "summary.csv")
    }
    found = lines["C", "3", "all", "latency_ms", "mean"]
    a = [row for row in table(tmp_path / "requests.csv") if (row["arm"], row["rate"]) == ("A", "3")]
    c = [row for row in table(tmp_path / "requests.csv") if (row["arm"], row["rate"]) == ("C", "3")]
    by_id = {(row["seed"], row["id"]): float(row["latency_ms"]) for row in a}
    differences = [float(row["latency_ms"]) - by_id[row["seed"], row["id"]] for row in c]
    assert float(found["difference"]) == pytest.approx(sum(differences) / len(differences), rel=1e-3)
    assert float(found["difference_low"]) <= float(found["difference"]) <= float(found["difference_high"]) < 0
    assert float(found["ratio"]) < 0.51
    assert lines["A", "3", "all", "latency_ms", "mean"]["difference"] == ""  # the baseline


def test_the_report_has_every_part_and_whole_tables(tmp_path):
    text = run(tmp_path, seeds=[1, 2, 3, 4])[0].read_text()
    assert text.startswith("# Made up\n\nFor a test.\n")
    assert "## Summary" in text
    assert re.search(r"\| C \| usual \| 3 \| 4 \| \*\*-[5-9]\d\.", text)  # at most half, and significant
    assert "| A (baseline) | request | fcfs | yes |" in text
    assert "Capacity of the baseline" in text
    assert "| text | 0 | 200 | - | - |" in text
    assert "## Results: usual, 80% of capacity (" in text
    assert not re.search(r"\bnan\b|\binf\b|\d[eE][+-]?\d", text)
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1  # as many cells in every line
    assert "Incomplete" not in text


def test_an_interrupted_run_is_resumed(tmp_path):
    whole = tmp_path / "whole"
    run(whole)
    parts = tmp_path / "parts"
    broken = MadeUpBackend(breaks_after=80)
    needed = len(run(tmp_path / "count")[1].replayed)
    broken._breaks_after = needed - 3
    with pytest.raises(KeyboardInterrupt):
        run(parts, backend=broken)
    assert len(list((parts / "cells").iterdir())) == 5
    assert "3 of 8 cells have not run" in write_results(experiment(), parts).read_text()
    _, second = run(parts)
    assert len(cells_of(second)) == 3
    assert second.replayed == cells_of(second)  # capacity and idle latencies are not measured again
    for name in ("requests.csv", "segments.csv", "steps.csv", "summary.csv", "report.md"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()


def test_finished_cells_are_not_run_again(tmp_path):
    run(tmp_path)
    _, second = run(tmp_path)
    assert second.replayed == []


def test_arms_seeds_rates_and_mixes_may_be_added(tmp_path):
    run(tmp_path)
    arms = [{"name": "A"}, {"name": "C", "segment_policy": "hybrid", "scheduling_policy": "slo"}, {"name": "E"}]
    _, second = run(tmp_path, arms=arms, seeds=[1, 2, 5])
    assert len(cells_of(second)) == 4 + 3 * 2  # E on two seeds at two rates, three arms on the new seed
    _, third = run(tmp_path, mixes={"usual": {"scaled": {"text": 0.25, "output": 0.25, "side": 0.5}}, "other": {}})
    assert len(cells_of(third)) == 8
    assert "capacity other" in third.replayed
    assert "capacity usual" not in third.replayed


def test_results_of_other_settings_are_refused_or_overwritten(tmp_path):
    run(tmp_path)
    with pytest.raises(OtherSettings, match=r"engine\.max_num_seqs was None and is now 3"):
        run(tmp_path, engine={"max_num_seqs": 3})
    with pytest.raises(OtherSettings, match="requests was 24 and is now 12"):
        run(tmp_path, requests=12)
    with pytest.raises(OtherSettings, match="rename the mix"):
        run(tmp_path, mixes={"usual": {}})
    _, again = run(tmp_path, requests=12, overwrite=True)
    assert len(cells_of(again)) == 8


def test_descriptions_may_change_without_a_run(tmp_path):
    run(tmp_path)
    report, second = run(tmp_path, about="Better words.")
    assert second.replayed == []
    assert "Better words." in report.read_text()


class FailingBackend(MadeUpBackend):
    """Some requests of each run fail at once: of cells under C, of the capacity, or of requests alone."""

    def __init__(self, where: str, count: int = 1):
        super().__init__()
        self._where, self._count = where, count

    def replay(self, arm, arrivals, *, tag="", done=None):
        whole = super().replay(arm, arrivals, tag=tag, done=done)
        if not tag.startswith(self._where):
            return whole
        failed = [
            dataclasses.replace(row, finish_reason="error", first_token_at=None, ended_at=row.arrival)
            for row in whole.requests[: self._count]
        ]
        return dataclasses.replace(whole, requests=(*failed, *whole.requests[self._count :]))


def test_a_run_with_failed_requests_ends_with_an_error_and_its_report_says_so(tmp_path):
    with pytest.raises(EngineError, match=r"more than 1 % .* 2 of 24 requests of C--usual--80pct--1 \(error\)"):
        run(tmp_path, backend=FailingBackend("C--", 2))
    text = (tmp_path / "report.md").read_text()
    assert "**Failed requests:** 2 of 24 requests of C--usual--80pct--1 (error);" in text
    rows = table(tmp_path / "requests.csv")
    failed = [row for row in rows if row["failed"] == "True"]
    assert len(failed) == 8
    assert {(row["latency_ms"], row["ttft_ms"], row["slowdown"]) for row in failed} == {("", "", "")}
    lines = {
        (row["arm"], row["metric"], row["statistic"]): row
        for row in table(tmp_path / "summary.csv")
        if (row["kind"], row["rate"]) == ("all", "3")
    }
    assert float(lines["C", "failed", "count"]["value"]) == 2
    assert lines["C", "latency_ms", "mean"]["requests"] == "44"
    assert lines["C", "latency_ms", "mean"]["paired_requests"] == "44"
    assert lines["A", "latency_ms", "mean"]["requests"] == "48"
    with pytest.raises(EngineError, match="delete its file"):
        write_results(experiment(), tmp_path)


@pytest.mark.parametrize(
    ("where", "what"), [("capacity", "the capacity of usual"), ("alone", r"the latency of \w+-\d+ on an idle engine")]
)
def test_nothing_is_measured_with_a_failed_request(tmp_path, where, what):
    with pytest.raises(EngineError, match=rf"{what} cannot be measured: request .* ended with 'error'"):
        run(tmp_path, backend=FailingBackend(where))
    assert not (tmp_path / "cells").exists()


def test_a_run_that_lost_a_request_is_an_error(tmp_path):
    class Losing(MadeUpBackend):
        def replay(self, arm, arrivals, *, tag="", done=None):
            return super().replay(arm, arrivals[1:] if "--" in tag else arrivals, tag=tag, done=done)

    with pytest.raises(EngineError, match="A--usual--80pct--1: 1 of 24 requests never ended"):
        run(tmp_path, backend=Losing())


def test_a_report_lists_every_machine_that_ran_a_part(tmp_path):
    class Elsewhere(MadeUpBackend):
        def facts(self):
            return {"machine": "another"}

    run(tmp_path)
    assert "machine: made up." in run(tmp_path)[0].read_text()
    text = run(tmp_path, seeds=[1, 2, 3], backend=Elsewhere())[0].read_text()
    assert "ran on 2 machines or versions" in text
    assert "machine: another." in text


def test_a_damaged_cell_is_named(tmp_path):
    run(tmp_path)
    path = next((tmp_path / "cells").iterdir())
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=rf"{path.name} is damaged"):
        run(tmp_path)


def test_a_cell_of_another_version_is_named(tmp_path):
    run(tmp_path)
    path = next((tmp_path / "cells").iterdir())
    content = json.loads(gzip.decompress(path.read_bytes()))
    content["requests"]["columns"][0] = "name"
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    with pytest.raises(ValueError, match="another version of omni-jax"):
        read_run(path)


def test_without_matplotlib_the_report_is_written(tmp_path, monkeypatch, caplog):
    def missing(*_, **__):
        raise figures.NoMatplotlib('figures need matplotlib: pip install "omni-jax[lab]"')

    monkeypatch.setattr("omni_jax.lab.run.write_figures", figures.write_figures)
    monkeypatch.setattr(figures, "subplots", missing)
    report, _ = run(tmp_path)
    assert "omni-jax[lab]" in caplog.text
    assert "## Figures" not in report.read_text()
    assert not list(tmp_path.glob("*.png"))


def test_capacity_leaves_out_the_first_and_last_completions():
    """Ten completions per second between a slow start and a slow end."""
    backend_run = made_run([], speed=1.0)
    assert backend_run == Run(requests=(), segments=(), steps=(), busy_seconds=0)
    template = made_run([*_arrivals(1)], speed=1.0).requests[0]
    ends = [5.0, 6.0, *(6.0 + i / 10 for i in range(1, 21)), 12.0, 15.0]
    rows = tuple(_at(template, end) for end in ends)
    assert rate_of_completion(Run(requests=rows), 2) == pytest.approx(10.0)


def _arrivals(count):
    return workload(experiment(), "usual", 1, rate=1.0, count=count)


def _at(row, end):
    return dataclasses.replace(row, ended_at=end)
