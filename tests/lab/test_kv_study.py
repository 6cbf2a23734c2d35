"""kv-study: windows of texts, plans, measurements and the report. The engine is a fake that returns forced tokens with
logprobs and plans with the rows that each sequence holds."""

import collections
import json
import math

import numpy as np
import pytest

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
from omni_jax.lab.kv_study_report import summarise, table, write_results
from omni_jax.requests import Delta, InvalidRequest, Request, Sequence, TokenLogprob
from omni_jax.scheduling.plan import Row, StepPlan
from omni_jax.telemetry.recorder import Recorder
from serving.cli import kv_study as kv_study_cli
from tests.command_line import run_command
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
        self.running[request.id] = Sequence(
            request=request, index=0, order=(0, 0), max_output=len(request.forced_ids), known=list(request.prompt_ids)
        )
        self.max_running = max(self.max_running, len(self.running))

    def step(self):
        deltas, rows = [], []
        for name, sequence in list(self.running.items()):
            place = sequence.num_output
            if place >= 3:
                sequence.dropped += self.drop
            start, count = sequence.computed, len(sequence.known) - sequence.computed
            sequence.computed += count
            sequence.blocks = list(range(math.ceil(sequence.rows / self.info.block_size)))
            rows.append(self._row(sequence, start, count))
            token = sequence.request.forced_ids[place]
            sequence.known.append(token)
            entry = TokenLogprob(token_id=token, logprob=-(int(name) + place / 100))
            last = sequence.num_output == sequence.request.params.max_tokens
            reason = "length" if last else None
            deltas.append(Delta(request_id=name, token_ids=(token,), logprobs=(entry,), finish_reason=reason))
            if last:
                del self.running[name]
        self.recorder.planned(StepPlan(rows=tuple(rows), decode=False, size=1), 0.0)
        return deltas

    @staticmethod
    def _row(sequence, start, count):
        return Row(
            sequence=sequence,
            slot=0,
            start=start,
            count=count,
            dropped=sequence.dropped,
            feedback=False,
            sample=True,
            score=False,
            admit=False,
            first_new_block=0,
            new_blocks=(),
        )


def windows(count=3, prompt=20, steps=5):
    return [
        Window(prompt_ids=tuple(range(prompt)), forced_ids=tuple(range(100 * w, 100 * w + steps + 1)))
        for w in range(count)
    ]


def made(plan, nll, rows, *, blocks=None, block_bytes=64):
    return Measured(
        plan=plan,
        nll=np.asarray(nll, float),
        rows=np.asarray(rows),
        blocks=np.asarray(rows if blocks is None else blocks),
        block_size=16,
        block_bytes=block_bytes,
        seconds=1.0,
        device="fake",
        dtype="float32",
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
    found = cut_windows(iter(texts), tokenizer, windows=3, prompt_tokens=8, steps=3)
    assert [len(w.prompt_ids) for w in found] == [8] * 3
    assert [token for w in found for token in (*w.prompt_ids, *w.forced_ids)] == ids[:36]


def test_a_short_text_is_refused_with_both_numbers():
    with pytest.raises(BadText, match=r"the text has \d+ tokens, but 50 windows of 769 need 38,450.* at most 0"):
        cut_windows(iter(["short"]), make_tokenizer(), windows=50, prompt_tokens=512, steps=256)


def test_texts_are_read_only_as_far_as_needed():
    def texts():
        yield "a b c d e f g h " * 20
        raise AssertionError("one text was enough")

    assert len(cut_windows(texts(), make_tokenizer(), windows=2, prompt_tokens=5, steps=2)) == 2


def test_texts_of_jsonl_and_of_a_plain_file(tmp_path):
    rows, plain = tmp_path / "a.jsonl", tmp_path / "a.txt"
    rows.write_text('{"text": "one\\ntwo"}\n\n{"text": "three", "id": 3}\n')
    plain.write_text("one\ntwo\n\n\n\nthree\n")
    assert list(read_texts(rows)) == list(read_texts(plain)) == ["one\ntwo", "three"]


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

    with pytest.raises(RuntimeError, match="1 windows lack some of their 6 logprobs"):
        measure(Silent(), OFF, windows())


def test_a_recomputed_decode_step_is_an_error():
    class Preempting(StudyEngine):
        def _row(self, sequence, start, count):
            if start == 22:
                start, count = 0, 23
            return super()._row(sequence, start, count)

    with pytest.raises(RuntimeError, match="3 of 15 decode steps were not recorded"):
        measure(Preempting(), OFF, windows())


def test_a_window_that_fails_is_named():
    class Failing(StudyEngine):
        def step(self):
            return [Delta(request_id="2", finish_reason="error", error="logits are not numbers")]

    with pytest.raises(RuntimeError, match="window 2 of plan off: logits are not numbers"):
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


def test_the_interval_is_over_windows():
    """Oracle: the normal interval of the mean of 2,000 windows, each of which changes by one factor in all steps."""
    factors = np.random.default_rng(0).uniform(1.0, 1.1, (2000, 1))
    base = made("off", np.ones((2000, 4)), np.ones((2000, 4)))
    worse = made("worse", base.nll * factors, base.rows)
    found = summarise([base, worse])[1].against.ratio
    assert found.low < found.value < found.high
    assert found.high - found.low == pytest.approx(2 * 1.96 * 0.1 / math.sqrt(12 * 2000), rel=0.3)


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
    assert "**Only 4 windows:**" in text
    assert "Incomplete" not in text
    plans = json.loads((tmp_path / "study.json").read_text())["plans"]
    assert [plan["plan"] for plan in plans] == ["off", "half"]
    assert len(plans[0]["nll_by_step"]) == 40
    assert len(plans[0]["nll_by_window"]) == 4
    assert plans[1]["rows_by_step"][-1] == 39


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
    monkeypatch.setattr("omni_jax.inputs.Tokenizer.from_directory", lambda path: make_tokenizer())
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


def test_a_study_is_replaced_only_with_overwrite(command):
    assert command.run("--plan", "off").exit_code == 0
    again = command.run("--plan", "off")
    assert again.exit_code == 2
    assert "has a study" in stderr_of(again)
    assert command.run("--plan", "off", "--overwrite").exit_code == 0


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
