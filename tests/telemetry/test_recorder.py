"""Records and statistics of made-up steps with known times, and of the real scheduler."""

import dataclasses
import json
import logging
import math
import random
import statistics

import pytest

from omni_jax.engine import core_stats
from omni_jax.engine.core_stats import CoreStats
from omni_jax.engine.messages import Stats
from omni_jax.engine.stats import EngineStats
from omni_jax.requests import Request, SamplingParams, Sequence
from omni_jax.requests.segment import Segment
from omni_jax.requests.slo import SLO
from omni_jax.scheduling.discipline import SLOFirst
from omni_jax.scheduling.events import Event
from omni_jax.scheduling.plan import StepPlan
from omni_jax.scheduling.scheduler import Accepted
from omni_jax.telemetry import recorder as recorder_module
from omni_jax.telemetry.figures import BOUNDS, SECONDS, Histogram, attained
from omni_jax.telemetry.recorder import WINDOW, Recorder, log_event, request_class
from omni_jax.telemetry.records import RequestRecord, SegmentRecord
from tests.plans import HandRow
from tests.plans import plan_of as plan_by_hand
from tests.scheduling.loop import Loop, image_span


def sequence_of(prompt=10, *, id="r", arrival=0.0, queued=None, segments=(), media=(), slo=None, index=0) -> Sequence:
    request = Request(
        id=id,
        prompt_ids=tuple(range(prompt)),
        params=SamplingParams(),
        arrival=arrival,
        queued_at=queued,
        segments=tuple(segments),
        media=tuple(media),
        slo=slo,
    )
    return Sequence(request=request, index=index, order=(0, index), max_output=99)


Made = tuple[StepPlan, tuple[Sequence, ...]]  # a plan, and the sequence of each row


def plan_of(*parts: tuple[Sequence, int, int]) -> Made:
    rows = [HandRow(sequence=sequence, start=start, count=count) for sequence, start, count in parts]
    return plan_by_hand(*rows), tuple(sequence for sequence, _, _ in parts)


def read(made: Made) -> tuple[StepPlan, list[Accepted]]:
    """The plan, and its rows as the scheduler accepts them."""
    plan, sequences = made
    return plan, [Accepted(row, sequence, None) for row, sequence in enumerate(sequences)]


def cut(*stops: int, **fields) -> list[Segment]:
    starts = (0, *stops[:-1])
    return [
        Segment(start=a, stop=b, modality="text", label=f"sentence {n}", **fields)
        for n, (a, b) in enumerate(zip(starts, stops, strict=True), 1)
    ]


def end(recorder, sequence, now, *, reason="stop", scheduled=None, first=None, outputs=0):
    sequence.scheduled_at, sequence.first_token_at = scheduled, first
    sequence.output += [0] * outputs
    sequence.finish_reason = reason
    recorder.finished(sequence, now)


def of(records, kind) -> list:
    return [record for record in records if isinstance(record, kind)]


def test_a_segment_lasts_from_the_plan_of_its_first_token_to_the_commit_of_its_last():
    records = []
    recorder = Recorder(segments=True, sink=records.append)
    s = sequence_of(10, arrival=1.0, segments=cut(4, 6, 10))
    recorder.planned(*(first := plan_of((s, 0, 3))), 2.0)
    recorder.planned(*(second := plan_of((s, 3, 5))), 2.5)  # planned one step ahead
    recorder.committed(*read(first), 3.0)
    assert not records  # no segment has ended
    recorder.committed(*read(second), 3.5)
    recorder.planned(*(third := plan_of((s, 8, 2))), 7.0)  # after a pause
    recorder.committed(*read(third), 8.0)
    spans = [(r.number, r.start, r.stop, r.queued_at, r.started_at, r.ended_at, r.steps) for r in records]
    assert spans == [
        (0, 0, 4, 1.0, 2.0, 3.5, 2),
        (1, 4, 6, 2.5, 2.5, 3.5, 1),
        (2, 6, 10, 2.5, 2.5, 8.0, 2),
    ]
    assert [record.label for record in records] == ["sentence 1", "sentence 2", "sentence 3"]


def test_histograms_of_requests_and_steps_have_vllms_meaning():
    recorder = Recorder()
    recorder.planned(*plan_of((sequence_of(), 0, 9)), 1.0)
    end(recorder, sequence_of(arrival=1.0, queued=2.0), 20.0, scheduled=4.0, first=12.0, outputs=5)
    end(recorder, sequence_of(arrival=1.0), 3.0, scheduled=2.0)  # scores its prompt only
    end(recorder, sequence_of(arrival=1.0), 99.0, reason="abort", scheduled=4.0, first=12.0, outputs=5)
    end(recorder, sequence_of(arrival=1.0), 99.0, reason="error")
    both = Recorder.of([recorder.state(), recorder.state()])
    found = {name: (sum(counts), total) for name, (counts, total) in recorder.totals().items()}
    assert found == {
        "request_queue_time_seconds": (2, 2.0 + 1.0),
        "request_prefill_time_seconds": (2, 8.0 + 1.0),
        "request_decode_time_seconds": (2, 8.0 + 0.0),
        "request_inference_time_seconds": (2, 16.0 + 1.0),
        "request_time_per_output_token_seconds": (1, 2.0),
        "iteration_tokens_total": (1, 9.0),
    }
    for name, (counts, total) in both.totals().items():
        assert (sum(counts), total) == (2 * found[name][0], 2 * found[name][1])
    assert recorder.totals()["iteration_tokens_total"][0].index(1) == BOUNDS["iteration_tokens_total"].index(16)


def test_states_with_the_records_since_the_one_before_give_the_whole_window(monkeypatch):
    """As the client of a core puts them together."""
    monkeypatch.setattr(recorder_module, "WINDOW", 7)
    monkeypatch.setattr(core_stats, "WINDOW", 7)
    recorder, told, after = Recorder(segments=True), CoreStats(), (0, 0)
    for new in (0, 1, 3, 0, 9, 2):
        for _ in range(new):
            end(recorder, sequence_of(), 5.0, scheduled=1.0, first=2.0, outputs=2)
        state = recorder.state(after=after)
        assert (len(state.requests), after[0] + new) == (min(new, 7), state.num_requests)
        after = state.num_requests, state.num_segments
        told.take(Stats(EngineStats(), state))
        assert told.records(window=True) == recorder.state()
        assert told.records(window=False) == recorder.state(after=after)


def test_shares_of_the_window_are_counted_and_not_searched(monkeypatch):
    """They equal those of a search through the latest requests, at every step."""
    monkeypatch.setattr(recorder_module, "WINDOW", 7)
    recorder, records, rng = Recorder(sink=lambda record: records.append(record)), [], random.Random(0)
    for _ in range(60):
        slo = rng.choice([None, SLO(ttft_ms=1500), SLO(e2e_ms=4000, tpot_ms=400)])
        end(recorder, sequence_of(slo=slo), rng.uniform(3, 6), scheduled=1.0, first=rng.uniform(1, 2), outputs=5)
        shares = {name: each["share"] for name, each in attained(records[-7:]).items()}
        assert recorder.attainment() == ({"text": shares} if shares else {})


def test_a_segment_is_queued_from_the_plan_that_ends_the_one_before():
    records = []
    recorder = Recorder(segments=True, sink=records.append)
    s = sequence_of(8, segments=cut(4, 8))
    for at, plan in ((1.0, plan_of((s, 0, 4))), (5.0, plan_of((s, 4, 4)))):
        recorder.planned(*plan, at)
        recorder.committed(*read(plan), at + 0.5)
    assert [(r.queued_at, r.started_at, r.ended_at) for r in records] == [(0.0, 1.0, 1.5), (1.0, 5.0, 5.5)]


def test_recomputation_after_a_preemption_is_not_recorded_twice():
    records = []
    recorder = Recorder(segments=True, sink=records.append)
    s = sequence_of(8, segments=cut(4, 8))
    recorder.planned(*(plan := plan_of((s, 0, 6))), 1.0)
    recorder.committed(*read(plan), 2.0)
    recorder.event(Event(kind="preempt", sequence=s, cause="blocks", by="x[0]", blocks=3), 2.0)
    assert (recorder.preemptions["blocks"], recorder.swapped["blocks"]) == (1, 0)
    recorder.planned(*(plan := plan_of((s, 0, 8))), 5.0)
    recorder.committed(*read(plan), 6.0)
    assert [(r.number, r.started_at, r.ended_at, r.steps) for r in records] == [(0, 1.0, 2.0, 1), (1, 1.0, 6.0, 2)]


def test_a_request_that_ends_with_its_first_token_has_all_its_segments():
    records = []
    recorder = Recorder(segments=True, sink=records.append)
    s = sequence_of(8, segments=cut(4, 8))
    recorder.planned(*(plan := plan_of((s, 0, 8))), 1.0)
    end(recorder, s, 2.0, scheduled=1.0, first=2.0, outputs=1)
    recorder.committed(*read(plan), 2.0)
    assert [(r.compute, r.start, r.stop) for r in of(records, SegmentRecord)] == [
        ("prefill", 0, 4),
        ("prefill", 4, 8),
        ("decode", 8, 9),
    ]


def test_an_aborted_request_has_only_its_computed_segments():
    records = []
    recorder = Recorder(segments=True, sink=records.append)
    s = sequence_of(8, segments=cut(4, 8))
    recorder.planned(*(plan := plan_of((s, 0, 6))), 1.0)
    recorder.committed(*read(plan), 2.0)
    end(recorder, s, 3.0, reason="abort", scheduled=1.0)
    assert [(r.start, r.stop) for r in of(records, SegmentRecord)] == [(0, 4)]


def test_a_prompt_without_segments_is_one_segment():
    records = []
    recorder = Recorder(segments=True, sink=records.append)
    s = sequence_of(8, media=[image_span("a", 2, 4)])
    recorder.planned(*(plan := plan_of((s, 0, 8))), 1.0)
    recorder.committed(*read(plan), 2.0)
    assert [(r.start, r.stop, r.modality, r.label) for r in records] == [(0, 8, "image", "request")]


def test_the_stages_of_a_request_add_up_to_its_duration():
    records = []
    recorder = Recorder(segments=True, sink=records.append)
    media = [image_span("a", 1, 2), image_span("b", 4, 2), image_span("a", 7, 2)]
    s = sequence_of(10, arrival=10.0, media=media)
    recorder.encoding([media[0]], 11.0)
    recorder.encoded([media[0]], 13.0)
    recorder.encoding([media[1]], 14.5)
    recorder.encoded([media[1]], 17.0)
    end(recorder, s, 30.0, scheduled=15.0, first=20.0, outputs=6)
    (record,) = of(records, RequestRecord)
    assert record.queue_seconds == pytest.approx(5.0 - 2.0 - 0.5)
    assert record.encode_seconds == pytest.approx(2.0 + 2.5)
    assert record.prefill_seconds == pytest.approx(5.0 - 2.0)
    assert record.decode_seconds == 10.0
    stages = (record.queue_seconds, record.encode_seconds, record.prefill_seconds, record.decode_seconds)
    assert sum(stages) == pytest.approx(record.e2e) == pytest.approx(20.0)
    assert (record.ttft, record.tpot) == (10.0, 2.0)
    encoded = [r for r in of(records, SegmentRecord) if r.compute == "encode"]
    assert [(r.start, r.started_at, r.ended_at) for r in encoded] == [(1, 11, 13), (4, 14.5, 17), (7, 11, 13)]


def test_the_time_until_the_inputs_are_ready_is_a_stage_and_counts_in_every_latency():
    records = []
    recorder = Recorder(segments=True, sink=records.append)
    media = [image_span("a", 1, 2)]
    slo = SLO(ttft_ms=3500, e2e_ms=9500)
    s = sequence_of(10, arrival=10.0, queued=12.0, media=media, slo=slo)
    recorder.encoding(media, 11.0)  # for another request, while this one fetched the same image
    recorder.encoded(media, 12.5)
    recorder.planned(*(plan := plan_of((s, 0, 10))), 13.0)
    recorder.committed(*read(plan), 14.0)
    end(recorder, s, 20.0, scheduled=13.0, first=14.0, outputs=6)
    (record,) = of(records, RequestRecord)
    assert (record.input_seconds, record.queue_seconds, record.encode_seconds) == (2.0, 0.5, 0.5)
    assert (record.prefill_seconds, record.decode_seconds) == (1.0, 6.0)
    assert (record.ttft, record.e2e) == (4.0, 10.0)
    assert (record.ttft_met, record.e2e_met) == (False, False)
    first, *_ = of(records, SegmentRecord)
    assert (first.queued_at, first.started_at) == (12.0, 13.0)
    assert recorder.summary()["requests"]["by_class"]["image"]["input_ms"]["mean"] == 2000


def test_images_that_share_a_call_of_the_tower_count_its_time_once():
    records = []
    recorder = Recorder(sink=records.append)
    media = [image_span("a", 1, 2), image_span("b", 4, 2)]
    recorder.encoding(media, 1.0)
    recorder.encoded(media, 3.0)
    end(recorder, sequence_of(10, media=media), 9.0, scheduled=4.0, first=8.0, outputs=2)
    assert (records[0].encode_seconds, records[0].queue_seconds) == (2.0, 2.0)


def test_images_encoded_before_a_request_arrived_count_no_time():
    records = []
    recorder = Recorder(segments=True, sink=records.append)
    media = [image_span("a", 1, 2)]
    recorder.encoding(media, 1.0)
    recorder.encoded(media, 3.0)
    end(recorder, sequence_of(10, arrival=5.0, media=media), 9.0, scheduled=6.0, first=8.0, outputs=2)
    (record,) = of(records, RequestRecord)
    assert (record.queue_seconds, record.encode_seconds) == (1.0, 0.0)
    assert not [r for r in of(records, SegmentRecord) if r.compute == "encode"]


@pytest.mark.parametrize(
    ("ended", "met"),
    [
        # (reason, scheduled, first, end, outputs) -> ttft, tpot and e2e met; the objectives are 2 s, 0.5 s and 8 s
        (("stop", 1.0, 2.0, 3.0, 3), (True, True, True)),
        (("stop", 1.0, 2.5, 3.0, 1), (False, None, True)),
        (("length", 1.0, 2.0, 9.0, 3), (True, False, False)),
        (("length", 1.0, None, 3.0, 0), (False, None, True)),  # scored only: ttft is measured to the end
        (("abort", None, None, 1.0, 0), (None, None, None)),  # aborted while there was time
        (("abort", None, None, 9.0, 0), (False, None, False)),  # aborted after the objective was missed
        (("abort", 1.0, 2.0, 9.0, 3), (True, False, False)),
        (("error", 1.0, None, 1.5, 0), (False, False, False)),
        (("error", 1.0, 1.5, 1.6, 2), (True, True, False)),
    ],
)
def test_which_objectives_are_met(ended, met):
    records = []
    recorder = Recorder(sink=records.append)
    reason, scheduled, first, at, outputs = ended
    s = sequence_of(slo=SLO(ttft_ms=2000, tpot_ms=500, e2e_ms=8000))
    end(recorder, s, at, reason=reason, scheduled=scheduled, first=first, outputs=outputs)
    (record,) = records
    assert (record.ttft_met, record.tpot_met, record.e2e_met) == met


def test_without_objectives_none_is_met_or_missed():
    records = []
    recorder = Recorder(sink=records.append)
    end(recorder, sequence_of(), 99.0, scheduled=1.0, first=2.0, outputs=5)
    assert (records[0].ttft_met, records[0].tpot_met, records[0].e2e_met) == (None, None, None)
    assert recorder.attainment() == {}


def test_an_output_has_the_deadline_of_its_last_token():
    records = []
    recorder = Recorder(segments=True, sink=records.append)
    end(recorder, sequence_of(slo=SLO(tpot_ms=1000)), 6.5, scheduled=1.0, first=2.0, outputs=5)
    (record,) = of(records, SegmentRecord)
    assert (record.deadline, record.deadline_met) == (6.0, False)
    assert dataclasses.replace(record, ended_at=6.0).deadline_met
    assert dataclasses.replace(record, deadline=math.inf).deadline_met is None


def test_the_class_of_a_request_is_its_rarest_modality():
    text, table = Segment(start=0, stop=5, modality="text"), Segment(start=5, stop=10, modality="table")
    image = image_span("a", 2, 2)
    video = dataclasses.replace(image, modality="video")
    assert request_class(sequence_of().request) == "text"
    assert request_class(sequence_of(segments=[text, table]).request) == "table"
    assert request_class(sequence_of(segments=[text, table], media=[image]).request) == "image"
    assert request_class(sequence_of(segments=[text, table], media=[image, video]).request) == "video"


def test_statistics_equal_those_of_the_statistics_module():
    rng = random.Random(3)
    recorder = Recorder()
    seconds: dict[str, list[float]] = {"text": [], "image": []}
    for n in range(200):
        kind = rng.choice(["text", "image"])
        seconds[kind].append(rng.expovariate(2.0))
        media = [image_span("a", 1, 2)] if kind == "image" else []
        s = sequence_of(arrival=float(n), media=media, slo=SLO(e2e_ms=700, priority=n % 3))
        end(recorder, s, n + seconds[kind][-1], scheduled=float(n), first=float(n), outputs=2)
    end(recorder, sequence_of(), 1e6, reason="abort")  # its times are not counted
    summary = json.loads(json.dumps(recorder.summary(), allow_nan=False))
    for kind, values in seconds.items():
        ms = [1000 * value for value in values]
        percentiles = statistics.quantiles(ms, n=100, method="inclusive")
        assert summary["requests"]["by_class"][kind]["e2e_ms"] == {
            "count": len(ms),
            "mean": pytest.approx(statistics.fmean(ms)),
            "std": pytest.approx(statistics.pstdev(ms)),
            "p50": pytest.approx(statistics.median(ms)),
            "p95": pytest.approx(percentiles[94]),
            "p99": pytest.approx(percentiles[98]),
        }
        share = sum(value <= 0.7 for value in values) / len(values)
        assert recorder.attainment()[kind]["e2e"] == pytest.approx(share)
    assert summary["requests"]["by_class"]["text"]["finish_reasons"]["abort"] == 1
    assert sorted(summary["requests"]["by_priority"]) == ["0", "1", "2"]
    assert sum(group["requests"] for group in summary["requests"]["by_priority"].values()) == 201


def test_memory_and_summary_are_bounded():
    recorder = Recorder(segments=True)
    for n in range(WINDOW + 500):
        s = sequence_of(2, slo=SLO(priority=n))
        recorder.planned(*plan_of((s, 0, 2)), 1.0)
        recorder.event(Event(kind="pause", sequence=s, cause="budget"), 1.0)
        end(recorder, s, 3.0, scheduled=1.0, first=2.0, outputs=2)
        recorder.event(Event(kind="resume", sequence=s, cause="turn"), 4.0)
    summary = recorder.summary()
    assert (summary["requests"]["finished"], summary["requests"]["window"]) == (WINDOW + 500, WINDOW)
    assert (summary["segments"]["finished"], summary["segments"]["window"]) == (2 * (WINDOW + 500), WINDOW)
    assert len(summary["requests"]["by_priority"]) <= 17
    assert summary["requests"]["by_class"]["text"]["pauses"] == WINDOW
    held = [value for value in vars(recorder).values() if isinstance(value, dict)]
    assert all(len(value) <= 8 for value in held), "state of ended requests is kept"
    for n in range(20_000):
        recorder.encoding([span := image_span(str(n), 0, 1)], n)
        recorder.encoded([span], n)
    assert len(recorder._images) < 10_000


def test_histograms_count_each_segment_in_its_bucket():
    recorder = Recorder(segments=True)
    took = [0.0005, SECONDS[0], 0.3, 0.3, 1000.0]
    for seconds in took:
        s = sequence_of(4)
        recorder.planned(*(plan := plan_of((s, 0, 4))), 2.0)
        recorder.committed(*read(plan), 2.0 + seconds)
    counts, total = recorder.histograms()["text", "prefill"]
    assert total == pytest.approx(sum(took))
    assert counts[-1] == 1
    assert [sum(counts[: n + 1]) for n in range(len(SECONDS))] == [
        sum(seconds <= bound + 1e-9 for seconds in took) for bound in SECONDS
    ]
    assert recorder.histograms()["text", "queue"][0][SECONDS.index(2.5)] == len(took)


def test_the_bound_of_a_bucket_belongs_to_it():
    histogram = Histogram()
    histogram.add(SECONDS[3])
    assert histogram.counts.index(1) == 3


def test_the_table_of_a_request_has_a_line_per_segment(caplog):
    recorder = Recorder(log_segments=True)
    media = [image_span("a", 4, 2)]
    segments = cut(4, 10, deadline=3.5)
    s = sequence_of(10, id="chat-1", segments=segments, media=media, slo=SLO(ttft_ms=1))
    recorder.encoding(media, 0.5)
    recorder.encoded(media, 0.75)
    for at, plan in ((1.0, plan_of((s, 0, 4))), (3.0, plan_of((s, 4, 6)))):
        recorder.planned(*plan, at)
        recorder.committed(*read(plan), at + 0.7)
    with caplog.at_level(logging.INFO, logger="omni_jax.telemetry.recorder"):
        end(recorder, s, 5.0, scheduled=1.0, first=3.7, outputs=3)
    heading, names, *lines = caplog.messages
    assert "chat-1[0]" in heading
    assert [name in names for name in ("label", "tokens", "queue ms", "encode ms", "prefill ms")] == [True] * 5
    assert [line.split() for line in lines] == [
        ["0", "text", "'sentence", "1'", "4", "1000.0", "-", "700.0", "-", "1", "met"],
        ["1", "image", "'sentence", "2'", "2", "-", "250.0", "-", "-", "1", "met"],
        ["1", "text", "'sentence", "2'", "6", "2000.0", "-", "700.0", "-", "1", "missed"],
        ["2", "image", "'output'", "3", "-", "-", "-", "1300.0", "3", "none"],
    ]


def test_a_pause_and_a_preemption_are_logged_with_ids_and_reason(caplog):
    s = sequence_of(id="chat-7", index=2)
    with caplog.at_level(logging.INFO, logger="omni_jax.telemetry.recorder"):
        log_event(Event(kind="pause", sequence=s, cause="budget"))
        log_event(Event(kind="preempt", sequence=s, cause="class", by="chat-9[0]", blocks=3))
        log_event(Event(kind="resume", sequence=s, cause="turn"))
    pause, preemption = caplog.messages
    assert "chat-7[2]" in pause
    assert "more urgent segments" in pause
    for word in ("chat-7[2]", "chat-9[0] is of a more urgent class", "3 blocks"):
        assert word in preemption


class RecordedLoop:
    """A loop that calls a recorder as the engine does."""

    def __init__(self, loop: Loop, recorder: Recorder):
        self.loop, self.recorder = loop, recorder
        self.recorded: set[Sequence] = set()
        commit = loop.scheduler.commit

        def committing(plan, tokens, now):
            accepted = commit(plan, tokens, now)
            recorder.committed(plan, accepted, now)
            return accepted

        loop.scheduler.commit = committing

    @property
    def now(self) -> float:
        return float(self.loop.pool.step)

    def step(self) -> bool:
        before = len(self.loop.plans)

        def planned():
            for plan in self.loop.plans[before:]:
                self.recorder.planned(plan, self.loop.scheduler.sequences_in(plan), self.now)
            for event in self.loop.scheduler.events:
                self.recorder.event(event, self.now)
            self.loop.scheduler.events.clear()

        busy = self.loop.step(between=planned)
        for sequence in self.loop.sequences:
            if sequence.finish_reason is not None and sequence not in self.recorded:
                self.recorded.add(sequence)
                self.recorder.finished(sequence, self.now)
        return busy


@pytest.mark.parametrize("discipline", [None, SLOFirst(aging_seconds=50)])
def test_with_the_real_scheduler_each_segment_is_recorded_once_and_each_preemption_has_a_cause(discipline):
    records = []
    recorder = Recorder(segments=True, sink=records.append)
    loop = Loop(
        blocks=14, block_size=4, max_model_len=48, max_num_seqs=4, max_num_batched_tokens=8, discipline=discipline
    )
    recorded = RecordedLoop(loop, recorder)
    rng = random.Random(1)
    for wave in range(8):
        for _ in range(3):
            length = rng.randrange(8, 24)
            stops = sorted({*rng.sample(range(1, length), 3), length})
            priority = 7 - wave
            loop.add(
                length,
                segments=cut(*stops, priority=priority),
                slo=SLO(priority=priority, ttft_ms=5000),
                max_tokens=rng.randrange(1, 20),
                ignore_eos=True,
                n=1 + (wave == 2),
            )
        for _ in range(4):
            recorded.step()
    while recorded.step():
        assert recorded.now < 10_000
    counts = recorder.preemptions
    assert counts["blocks"]
    assert (counts["class"] > 0) == (recorder.pauses > 0) == (discipline is not None)
    assert sum(counts.values()) >= loop.scheduler.num_preemptions  # waiting sequences may lose blocks too

    ended = of(records, RequestRecord)
    assert len(ended) == len(loop.sequences)
    assert sum(record.preemptions for record in ended) == sum(counts.values())
    for record in ended:
        stages = (record.queue_seconds, record.encode_seconds, record.prefill_seconds, record.decode_seconds)
        assert min(stages) >= 0
        assert sum(stages) == pytest.approx(record.e2e)
    of_prompt = [r for r in of(records, SegmentRecord) if r.compute == "prefill"]
    for sequence in loop.sequences:
        mine = [r.number for r in of_prompt if (r.request_id, r.index) == (sequence.request.id, sequence.index)]
        assert mine == sorted(set(mine))
        if sequence.index == 0:  # siblings do not compute the blocks that they share
            assert mine == list(range(len(sequence.request.segments)))
