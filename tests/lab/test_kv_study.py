"""kv-study: windows of texts, plans, measurements and the report. The engine is a fake that returns forced tokens with
logprobs and plans with the rows that each sequence holds."""

import collections
import dataclasses
import json
import math

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from omni_jax.engine.config import EngineConfig
from omni_jax.lab.figures import NoMatplotlib
from omni_jax.lab.kv_study import (
    MAX_RATIO,
    BadText,
    Measured,
    Plan,
    Window,
    cut_windows,
    full_ratio,
    measure,
    parse_plan,
    read_texts,
    study,
)
from omni_jax.lab.kv_study_files import kept_plans, plan_settings, write_plan
from omni_jax.lab.kv_study_report import summarise, table, write_results
from omni_jax.requests import Delta, EngineError, InvalidRequest, Request, Sequence, TokenLogprob
from omni_jax.telemetry.recorder import Recorder
from serving.cli import kv_study as kv_study_cli
from tests.command_line import run_command
from tests.plans import HandRow, plan_of
from tests.serving.fake_engine import FakeInfo, make_tokenizer

OFF = Plan(name="off", options={})


class StudyEngine:
    """Engine that runs all sequences in each step. The logprob of output i of window w is -(w + i / 100); each decode
    step from the third on drops `drop` rows."""

    def __init__(self, *, drop: int = 0, **info):
        # A block is 16 rows of 4 bytes.
        self.info = FakeInfo(**{"num_blocks": 64, "kv_cache_bytes": 64 * 64} | info)
        object.__setattr__(self.info, "device", "fake")
        object.__setattr__(self.info, "dtype", "float32")
        self.recorder, self.drop = Recorder(), drop
        self.running: dict[str, Sequence] = {}
        self.max_running = 0
        self.requests: list[Request] = []

    def close(self):
        self.closed = True

    def check(self, request):
        if len(request.prompt_ids) + request.params.max_tokens > self.info.max_model_len:
            raise InvalidRequest("too long")

    def add(self, request):
        self.requests.append(request)
        self.running[request.id] = Sequence(request=request, index=0, order=(0, 0), max_output=len(request.forced_ids))
        self.max_running = max(self.max_running, len(self.running))

    def step(self):
        deltas, rows = [], []
        for name, sequence in list(self.running.items()):
            place = sequence.num_output
            if place >= 3:
                sequence.dropped += self.drop
            start, count = sequence.computed, sequence.num_known - sequence.computed
            sequence.computed += count
            sequence.blocks = list(range(math.ceil(sequence.rows / self.info.block_size)))
            rows.append(self._row(sequence, start, count))
            token = sequence.request.forced_ids[place]
            sequence.output.append(token)
            entry = TokenLogprob(token_id=token, logprob=-(int(name) + place / 100))
            last = sequence.num_output == sequence.request.params.max_tokens
            reason = "length" if last else None
            deltas.append(Delta(request_id=name, token_ids=(token,), logprobs=(entry,), finish_reason=reason))
            if last:
                del self.running[name]
        self.recorder.planned(plan_of(*rows), tuple(row.sequence for row in rows), 0.0)
        return deltas

    @staticmethod
    def _row(sequence, start, count):
        return HandRow(sequence=sequence, start=start, count=count)


def windows(count=3, prompt=20, steps=5):
    return [
        Window(prompt_ids=tuple(range(prompt)), forced_ids=tuple(range(100 * w, 100 * w + steps + 1)), document=w)
        for w in range(count)
    ]


def made(plan, nll, rows, *, blocks=None, block_bytes=64, documents=None):
    return Measured(
        plan=plan,
        documents=tuple(range(len(nll))) if documents is None else documents,
        nll=np.asarray(nll, float),
        rows=np.asarray(rows),
        blocks=np.asarray(rows if blocks is None else blocks),
        block_size=16,
        block_bytes=block_bytes,
        seconds=1.0,
        device="fake",
        dtype="float32",
        machine={"CPU": "made up", "omni-jax": "0.0"},
    )


# -- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("off", {}),
        ("int8", {"kv_cache_dtype": "int8"}),
        ("off+int8", {"kv_cache_dtype": "int8"}),
        ("adaptive", {"enable_adaptive_compression": True}),
        ("adaptive-0.2", {"enable_adaptive_compression": True, "kv_compress_ratio": 0.2}),
        (
            "fixed-0.4+int8",
            {
                "enable_adaptive_compression": True,
                "kv_compress_ratio": 0.4,
                "kv_compress_controller": "omni_jax.lab.kv_study:full_ratio",
                "kv_cache_dtype": "int8",
            },
        ),
        ("my.schedule:half", {"enable_adaptive_compression": True, "kv_compress_controller": "my.schedule:half"}),
    ],
)
def test_plans(text, options):
    assert parse_plan(text) == Plan(name=text, options=options)


@pytest.mark.parametrize("text", ["on", "", "int4", "off+int4", "int8+int8", "+int8", "fixed", "fixed-", "off-0.4"])
def test_an_unknown_plan_is_refused_with_the_valid_ones(text):
    with pytest.raises(ValueError, match=r"unknown plan .*expected off, adaptive"):
        parse_plan(text)


@pytest.mark.parametrize("text", ["fixed-0", "fixed-1", "adaptive--0.1", "fixed-nan"])
def test_a_ratio_out_of_range_is_refused(text):
    with pytest.raises(ValueError, match=r"must be above 0 and at most 0\.95"):
        parse_plan(text)


def test_the_controller_of_a_fixed_ratio_always_reaches_the_cap():
    assert {full_ratio(step, 256) for step in range(257)} == {MAX_RATIO}


# -- text -------------------------------------------------------------------------------------------------------------


def test_windows_follow_one_another_in_the_text():
    tokenizer = make_tokenizer()
    texts = ["To be, or not to be, that is the question.", "Whether 'tis nobler in the mind to suffer"]
    ids = tokenizer.encode("".join(text + "\n\n" for text in texts))
    found = cut_windows(enumerate(texts), tokenizer, windows=3, prompt_tokens=8, steps=3)
    assert [len(w.prompt_ids) for w in found] == [8] * 3
    assert [token for w in found for token in (*w.prompt_ids, *w.forced_ids)] == ids[:36]
    first = len(tokenizer.encode(texts[0] + "\n\n"))
    assert [w.document for w in found] == [int(start >= first) for start in (0, 12, 24)]
    assert len({w.document for w in found}) == 2


def test_each_window_begins_with_the_bos_that_the_tokenizer_adds():
    """As llama.cpp's perplexity does. The BOS is the first of the prompt's tokens, and no token of the text is lost."""
    plain, with_bos = make_tokenizer(), make_tokenizer()
    bos = next(iter(with_bos.special_ids))
    name = with_bos.token_text(bos)
    with_bos._backend.post_processor = TemplateProcessing(single=f"{name} $A {name}", special_tokens=[(name, bos)])
    text = "To be, or not to be, that is the question."
    assert with_bos.encode(text) == [bos, *plain.encode(text), bos]
    found = cut_windows(iter([(1, text)]), with_bos, windows=2, prompt_tokens=5, steps=3)
    assert [(w.prompt_ids[0], len(w.prompt_ids), len(w.forced_ids)) for w in found] == [(bos, 5, 4)] * 2
    assert [token for w in found for token in (*w.prompt_ids[1:], *w.forced_ids)] == plain.encode(text)[:16]
    (alone,) = cut_windows(iter([(1, text)]), with_bos, windows=1, prompt_tokens=1, steps=3)
    assert alone.prompt_ids == (bos,)


def test_a_short_text_is_refused_with_both_numbers():
    with pytest.raises(BadText, match=r"the text has \d+ tokens, but 50 windows of 769 need 38,450.* at most 0"):
        cut_windows(iter([(1, "short")]), make_tokenizer(), windows=50, prompt_tokens=512, steps=256)


def test_texts_are_read_only_as_far_as_needed():
    def texts():
        yield 1, "a b c d e f g h " * 20
        raise AssertionError("one text was enough")

    assert len(cut_windows(texts(), make_tokenizer(), windows=2, prompt_tokens=5, steps=2)) == 2


def test_each_line_is_a_document_and_so_is_a_plain_file(tmp_path):
    rows, plain = tmp_path / "a.jsonl", tmp_path / "a.txt"
    rows.write_text('{"text": "one\\ntwo"}\n\n{"text": "three", "id": 3}\n')
    plain.write_text("one\ntwo\n\n\n\nthree\n")
    assert list(read_texts(rows)) == [(1, "one\ntwo"), (3, "three")]
    assert list(read_texts(plain)) == [(1, "one\ntwo"), (1, "three")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "whole"}\n{"text": ', r"line 2 is not JSON"),
        (b'{"prompt": "x"}\n', r'line 1: expected an object with a string "text", got \{"prompt"'),
        (b"[]\n", r"line 1: expected"),
        (b'{"text": "\xff"}\n', r"not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line)
    with pytest.raises(BadText, match=message):
        list(read_texts(path))


# -- measuring --------------------------------------------------------------------------------------------------------


def test_each_decode_step_has_a_logprob_and_rows():
    """The first output token is left out. The step at index i computes output i and predicts output i + 1."""
    found = measure(StudyEngine(), OFF, windows())
    assert found.nll == pytest.approx(np.array([[w + i / 100 for i in range(1, 6)] for w in range(3)]))
    assert found.rows.tolist() == [[21, 22, 23, 24, 25]] * 3
    assert found.blocks.tolist() == [[2] * 5] * 3
    assert (found.block_size, found.block_bytes) == (16, 64)


def test_dropped_rows_are_not_held():
    found = measure(StudyEngine(drop=4), OFF, windows())
    assert found.rows.tolist() == [[21, 22, 23 - 4, 24 - 8, 25 - 12]] * 3
    assert found.blocks.tolist() == [[2, 2, 2, 1, 1]] * 3


def test_requests_have_forced_tokens_and_logprobs():
    engine = StudyEngine()
    measure(engine, OFF, windows())
    for request, window in zip(engine.requests, windows(), strict=True):
        assert (request.prompt_ids, request.forced_ids) == (window.prompt_ids, window.forced_ids)
        params = request.params
        assert params.greedy
        assert params.ignore_eos
        assert params.logprobs == 0
        assert not params.skip_special_tokens
        assert params.max_tokens == len(window.forced_ids)


def test_only_windows_that_fit_the_cache_run_at_once():
    engine = StudyEngine(num_blocks=8, kv_cache_bytes=8 * 64)  # a window of 26 rows takes 2 blocks and one in advance
    measure(engine, OFF, windows(count=7))
    assert engine.max_running == 2


def test_progress_counts_windows_that_ended():
    counts = []
    measure(StudyEngine(max_num_seqs=2), OFF, windows(), done=lambda done, of: counts.append((done, of)))
    assert counts == [(1, 3), (2, 3), (3, 3)]


def test_a_missing_logprob_is_an_error():
    class Silent(StudyEngine):
        def step(self):
            return [
                delta if delta.request_id != "1" else Delta(request_id="1", finish_reason=delta.finish_reason)
                for delta in super().step()
            ]

    with pytest.raises(EngineError, match="1 windows lack some of their 6 logprobs"):
        measure(Silent(), OFF, windows())


def test_a_recomputed_decode_step_is_an_error():
    class Preempting(StudyEngine):
        def _row(self, sequence, start, count):
            if start == 22:
                start, count = 0, 23
            return super()._row(sequence, start, count)

    with pytest.raises(EngineError, match="3 of 15 decode steps were not recorded"):
        measure(Preempting(), OFF, windows())


def test_a_window_that_fails_is_named():
    class Failing(StudyEngine):
        def step(self):
            return [Delta(request_id="2", finish_reason="error", error="logits are not numbers")]

    with pytest.raises(EngineError, match="window 2 of plan off: logits are not numbers"):
        measure(Failing(), OFF, windows())


def test_each_plan_has_an_engine_with_its_own_settings(tmp_path):
    made_of, engines, seen = [], [], []

    def make(config):
        made_of.append(config)
        engines.append(StudyEngine())
        return engines[-1]

    plans = [OFF, Plan(name="small", options={"block_size": 8})]
    shared = {"model_dir": tmp_path, "max_model_len": 26}
    results = study(plans, windows(), shared, make=make, measured=lambda some: seen.append(len(some)))
    assert made_of == [EngineConfig(**shared), EngineConfig(**shared, block_size=8)]
    assert [found.plan for found in results] == ["off", "small"]
    assert seen == [1, 2]
    assert all(engine.closed for engine in engines)


def test_a_refused_plan_is_named_before_any_plan_runs(tmp_path):
    plans = [OFF, Plan(name="odd", options={"block_size": 3})]
    with pytest.raises(ValueError, match="plan odd: block_size must be a power of two"):
        study(plans, windows(), {"model_dir": tmp_path}, make=pytest.fail, measured=pytest.fail)


def test_a_plan_that_the_model_cannot_run_is_named(tmp_path):
    def make(config):
        raise ValueError("this model keeps no keys that could be dropped")

    with pytest.raises(ValueError, match="plan off: this model keeps no keys"):
        study([OFF], windows(), {"model_dir": tmp_path}, make=make, measured=pytest.fail)


# -- report -----------------------------------------------------------------------------------------------------------


def test_lines_equal_results_worked_out_by_hand():
    base = made("off", [[2.0, 4.0], [1.0, 1.0]], [[10, 10], [10, 10]])
    half = made("half", [[2.2, 4.4], [1.1, 1.1]], [[10, 5], [5, 4]], blocks=[[10, 10], [8, 4]])
    int8 = made("int8", base.nll, base.rows, block_bytes=17)
    off, compressed, quantised = summarise([base, half, int8])
    assert off.nll.value == 2.0
    assert off.saved == 0.0
    assert off.of_bfloat16 == 2.0
    assert compressed.against.ratio.value == pytest.approx(1.1)
    assert compressed.against.ratio.low == pytest.approx(1.1) == compressed.against.ratio.high  # in every window
    assert compressed.kv_bytes == 8 * 64
    assert compressed.saved == pytest.approx(0.2)
    assert compressed.rows_saved == pytest.approx(0.4)
    assert quantised.of_bfloat16 == pytest.approx(17 / 32)
    assert quantised.saved == pytest.approx(1 - 17 / 64)


def test_the_interval_is_over_documents():
    """Oracle: Student's interval of the logarithms of 20 documents' ratios, each of which holds for all its windows."""
    rng, documents = np.random.default_rng(0), 20
    factors = rng.uniform(1.0, 1.1, documents)
    base = made("off", np.ones((100, 4)), np.ones((100, 4)), documents=tuple(range(documents)) * 5)
    worse = made("worse", base.nll * np.tile(factors, 5)[:, None], base.rows, documents=base.documents)
    found = summarise([base, worse])[1].against.ratio
    assert found.runs == documents
    logs = np.log(factors)
    half = 2.093 * logs.std(ddof=1) / math.sqrt(documents)
    assert (math.log(found.low), math.log(found.high)) == pytest.approx(
        (logs.mean() - half, logs.mean() + half), rel=1e-3
    )


def test_each_document_counts_once():
    """Three windows of one document are no more than one of another."""
    base = made("off", [[1.0], [1.0], [1.0], [1.0]], [[1]] * 4, documents=(4, 4, 4, 9))
    found = summarise([base, made("x", [[1.0], [1.0], [1.0], [4.0]], [[1]] * 4, documents=base.documents)])[1]
    assert found.nll.value == pytest.approx(2.5)
    assert found.against.ratio.value == pytest.approx(2.0)


def test_one_document_is_measured_by_its_windows_and_the_report_says_so(tmp_path):
    base = made("off", np.random.default_rng(1).uniform(2, 4, (4, 8)), np.ones((4, 8)), documents=(1,) * 4)
    assert summarise([base])[0].nll.runs == 4
    text = write_results(tmp_path, [base], FACTS).read_text()
    assert "The unit is the window" in text
    assert "does not cover other documents" in text


def test_the_baseline_comes_first():
    with pytest.raises(ValueError, match="must be off, got int8"):
        summarise([made("int8", [[1.0]], [[1]])])


FACTS = {"model": "tiny", "text": "text.jsonl", "prompt_tokens": 20, "decode_steps": 2, "plans": ["off", "half"]}


def results_of_two():
    draw = np.random.default_rng(1)
    nll = draw.uniform(2, 4, (4, 40))
    return [
        made("off", nll, np.tile(np.arange(40) + 20, (4, 1))),
        made("half", nll * 1.05, np.tile(np.arange(40) // 2 + 20, (4, 1))),
    ]


def test_all_files_are_written(tmp_path):
    report = write_results(tmp_path, results_of_two(), FACTS)
    text = report.read_text()
    assert "| half | " in text
    assert "+5.00 % [+5.00, +5.00]" in text
    assert "kv-study.png" in text
    assert (tmp_path / "kv-study.png").read_bytes().startswith(b"\x89PNG")
    assert "**Only 4 documents:**" in text
    assert "4 windows of text.jsonl" in text
    assert "Student's t" in text
    assert "CPU: made up; omni-jax: 0.0." in text
    assert "Incomplete" not in text
    study = json.loads((tmp_path / "study.json").read_text())
    plans = study["plans"]
    assert study["unit"] == "document"
    assert plans[1]["against"]["ratio"]["runs"] == 4
    assert [plan["plan"] for plan in plans] == ["off", "half"]
    assert len(plans[0]["nll_by_step"]) == 40
    assert len(plans[0]["nll_by_window"]) == 4
    assert plans[1]["rows_by_step"][-1] == 39


def test_files_of_a_single_window_are_json_without_bounds(tmp_path):
    """NaN is no JSON: pandas and others refuse it."""
    one = made("off", [[2.0, 4.0]], [[1, 1]])
    write_results(tmp_path, [one], FACTS)

    def refuse(name):
        raise AssertionError(name)

    (plan,) = json.loads((tmp_path / "study.json").read_text(), parse_constant=refuse)["plans"]
    assert (plan["nll"]["value"], plan["nll"]["low"]) == (3.0, None)


def test_a_report_names_missing_plans(tmp_path):
    report = write_results(tmp_path, results_of_two()[:1], FACTS)
    assert "**Incomplete:** half have not run" in report.read_text()


def test_without_matplotlib_the_report_is_written(tmp_path, monkeypatch, caplog):
    def missing(*_, **__):
        raise NoMatplotlib('figures need matplotlib: pip install "omni-jax[lab]"')

    monkeypatch.setattr("omni_jax.lab.kv_study_report.subplots", missing)
    report = write_results(tmp_path, results_of_two(), FACTS)
    assert "omni-jax[lab]" in caplog.text
    assert "kv-study.png" not in report.read_text()


def test_the_table_has_a_row_for_each_plan():
    rows = table(summarise(results_of_two())).splitlines()
    assert len(rows) == 4
    assert len({row.count("|") for row in rows}) == 1


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs `kv-study MODEL -i text.jsonl -o out` with further arguments and fake engines. `command.made` lists the
    settings of the engines."""
    configs = []

    def make(config, progress=None):
        configs.append(config)
        return StudyEngine(drop=2 if config.block_size == 16 else 0)

    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "unset")  # put back after the test
    monkeypatch.setattr("omni_jax.engine.engine.Engine", make)
    monkeypatch.setattr("omni_jax.inputs.tokenizer.Tokenizer.from_directory", lambda path: make_tokenizer())
    monkeypatch.setattr(kv_study_cli, "log_to_stderr", lambda level: None)
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "To be, or not to be, that is the question. " * 30}) + "\n")
    small = ["--windows", "3", "--prompt-tokens", "20", "--decode-steps", "5"]

    def run(*arguments):
        return run_command("kv-study", tmp_path, "-i", text, "-o", tmp_path / "out", *small, *arguments)

    return collections.namedtuple("Command", "run made out text")(run, configs, tmp_path / "out", text)


def stderr_of(result):
    """Return standard error on one line, without the frame."""
    return " ".join(result.stderr.replace("│", " ").split())


def test_the_command_writes_a_study(command):
    result = command.run("--plan", "off", "--max-num-seqs", "2")
    assert result.exit_code == 0, result.output
    assert f"wrote {command.out / 'report.md'}" in result.stdout
    assert "off: NLL 1.0300" in result.stderr  # (0 + 1 + 2) / 3 and (1 + ... + 5) / 500
    assert command.made == [EngineConfig(model_dir=command.out.parent, max_model_len=26, max_num_seqs=2)]
    assert (command.out / "study.json").exists()


def test_the_command_as_json(command):
    result = command.run("--plan", "off", "--json")
    assert json.loads(result.stdout) == {"report": str(command.out / "report.md"), "plans": {"off": 0.0}}


def test_finished_plans_are_kept_and_others_may_be_added(command):
    assert command.run("--plan", "off").exit_code == 0
    again = command.run("--plan", "off")
    assert again.exit_code == 0
    assert len(command.made) == 1
    assert command.run("--plan", "int8").exit_code == 0
    assert [config.kv_cache_dtype for config in command.made] == [command.made[0].kv_cache_dtype, "int8"]
    assert "| int8 |" in (command.out / "report.md").read_text()


def test_results_of_other_settings_are_refused_or_overwritten(command):
    assert command.run("--plan", "off").exit_code == 0
    other = command.run("--plan", "off", "--block-size", "32")
    assert other.exit_code == 2
    assert "engine.block_size was None and is now 32" in stderr_of(other)
    assert "was run with other settings (windows was 3 and is now 2)" in stderr_of(command.run("--windows", "2"))
    command.text.write_text(command.text.read_text().replace("not", "yes"))
    assert "text was" in stderr_of(command.run("--plan", "off"))
    assert len(command.made) == 1
    assert command.run("--plan", "off", "--overwrite").exit_code == 0
    assert len(command.made) == 2


def test_an_older_study_is_not_replaced_in_silence(command):
    command.out.mkdir()
    (command.out / "study.json").write_text("{}")
    refused = command.run("--plan", "off")
    assert refused.exit_code == 2
    assert "has a study of an older version" in stderr_of(refused)


def test_an_interrupted_study_goes_on_and_equals_an_uninterrupted_one(command, monkeypatch):
    """Finished plans are kept. Seconds are measured, so they are set to one value."""
    monkeypatch.setattr("omni_jax.lab.kv_study.time.perf_counter", lambda: 0.0)
    plans = ["--plan", "fixed-0.4", "int8"]
    whole = command.out.with_name("whole")
    assert command.run(*plans, "-o", str(whole)).exit_code == 0
    step, calls = StudyEngine.step, []

    def interrupting(engine):
        calls.append(engine)
        if len(calls) == 10:  # in the second plan: one takes six steps
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(StudyEngine, "step", interrupting)
    stopped = command.run(*plans)
    assert stopped.exit_code == 130
    assert "interrupted; repeat the command to resume: finished plans are in" in stderr_of(stopped)
    assert "**Incomplete:** fixed-0.4, int8 have not run" in (command.out / "report.md").read_text()
    before = len(command.made)
    assert command.run(*plans).exit_code == 0
    assert len(command.made) - before == 2
    for name in ("study.json", "report.md"):
        assert (command.out / name).read_bytes() == (whole / name).read_bytes()
    for path in (whole / "plans").iterdir():
        assert (command.out / "plans" / path.name).read_bytes() == path.read_bytes()


def test_results_of_a_plan_are_read_as_they_were_written(tmp_path):
    found = results_of_two()[1]
    odd = dataclasses.replace(found, plan="../my.schedules:half+int8")
    settings = plan_settings(OFF, windows(), {"model_dir": tmp_path})
    write_plan(tmp_path, odd, settings)
    (back,) = kept_plans(tmp_path, {odd.plan: settings}, overwrite=False).values()
    assert {path.parent for path in tmp_path.rglob("*.gz")} == {tmp_path / "plans"}
    for field in dataclasses.fields(Measured):
        np.testing.assert_array_equal(getattr(back, field.name), getattr(odd, field.name))


def test_usage_errors_of_the_command(command):
    unknown = command.run("--plan", "int4")
    assert unknown.exit_code == 2
    assert "unknown plan 'int4'" in stderr_of(unknown)
    assert command.run("--windows", "1").exit_code == 2
    short = command.run("--windows", "50", "--prompt-tokens", "512")
    assert short.exit_code == 1
    assert "give more text" in stderr_of(short)
    assert not command.made
    assert not command.out.exists()


def test_help_has_an_example(command):
    result = run_command("kv-study", "--help", env={"COLUMNS": "200"})
    assert "omni-jax kv-study ~/models/SmolLM2-135M-Instruct -i text.jsonl" in result.output
