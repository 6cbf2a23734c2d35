"""Pieces of benchmarks.memory at toy size, without timing."""

import math
import random

import numpy as np
import pytest

from benchmarks.memory import __main__ as memory
from benchmarks.memory import report as memory_report
from benchmarks.memory.case import MemoryCase
from tests.engines import checkpoint, load_tiny, sharing


def prefix_case(with_cache, without):
    answers = {
        name: [{"first_token_seconds": list(times), "seconds": 1.0, "others": 0.0}]
        for name, times in (("with the cache", with_cache), ("without", without))
    }
    return {"title": "all at once", "answers": answers}


def prefix_part(with_cache, without):
    return {"users": 4, "system": 1500, "question": 24, "contenders": [], "cases": [prefix_case(with_cache, without)]}


def slots_part(used, allocated, sequences):
    answer = {"used": used, "allocated": allocated, "sequences": sequences, "steps": 10}
    answer["mean_length"] = used / sequences
    return {"block_size": 16, "requests": 200, "contenders": [], "answer": answer}


def rush_part(failed=0):
    draw = random.Random(0)
    base = [draw.uniform(5, 20) for _ in range(64)]
    answers = {}
    for name, factor in (("swap", 1.1), ("recompute", 1.2), ("auto", 1.0)):
        answer = {"latency_seconds": [factor * seconds for seconds in base], "failed": failed, "seconds": 30.0}
        answers[name] = [answer | {"preemptions": 7, "blocks_out": 40, "blocks_in": 40, "others": 0.25}]
    contenders = [{"name": name, "blocks": 1000, "block_size": 16} for name in answers]
    return {"sequences": 64, "tokens": 49_000, "output": 128, "contenders": contenders, "answers": answers}


class TestReport:
    @pytest.mark.parametrize(("without", "reached"), [(8.0, True), (7.9, False)])
    def test_the_first_token_must_come_eight_times_sooner(self, without, reached):
        document = {"parts": {"prefix": prefix_part([1.0, 1.0, 1.0, 1.0], [without] * 4)}}
        assert [found for _, found in memory_report.verdicts(document)] == [reached]

    def test_the_ratio_is_of_the_means(self):
        case = prefix_case([1.0, 1.0, 1.0, 3.0], [3.0, 6.0, 9.0, 12.0])
        assert memory_report.times_lower(case).value == pytest.approx(30 / 6)

    def test_intervals_are_over_rounds(self):
        """Ratios of 4, 8 and 16: their logarithms have the interval of Student's t with two degrees of freedom."""
        case = prefix_case([1.0, 3.0], [8.0, 8.0])
        rounds = [prefix_case([1.0, 3.0], [times, times])["answers"]["without"][0] for times in (8.0, 16.0, 32.0)]
        case["answers"] = {"without": rounds, "with the cache": case["answers"]["with the cache"] * 3}
        found = memory_report.times_lower(case)
        assert found.value == pytest.approx(8)
        assert math.log2(found.high / 8) == pytest.approx(4.303 / 3**0.5, rel=1e-3)
        assert math.log2(found.low / 8) == pytest.approx(-4.303 / 3**0.5, rel=1e-3)

    @pytest.mark.parametrize(("used", "reached"), [(90_000, False), (95_000, True)])
    def test_the_target_of_slots(self, used, reached):
        """1,000 sequences, summed over steps, in 100,000 slots: with 90 rows each, 7.5 / 90 + 0.01 may be unused."""
        part = slots_part(used, 100_000, 1000)
        assert memory_report.least_slot_ratio(part) == pytest.approx(1 - 7.5 / (used / 1000) - 0.01)
        assert [found for _, found in memory_report.verdicts({"parts": {"slots": part}})] == [reached]

    def test_random_lengths_reach_the_target(self):
        """Oracle of the target: sequences of random lengths in as few blocks as possible."""
        lengths = np.random.default_rng(0).integers(1, 2000, 5000)
        part = slots_part(int(lengths.sum()), int((-(-lengths // 16) * 16).sum()), len(lengths))
        assert memory_report.slot_ratio(part) == pytest.approx(1 - 7.5 / lengths.mean(), abs=1e-3)

    @pytest.mark.parametrize("failed", [0, 1])
    def test_no_request_may_fail(self, failed):
        [(target, reached)] = memory_report.verdicts({"parts": {"oversubscription": rush_part(failed)}})
        assert reached == (not failed)
        assert f"{3 * failed} failed" in target

    def test_every_part_has_its_table(self):
        machine = {"cpu": "A CPU", "cores": 2, "vectors": {}, "memory_gib": 8, "python": "3.11", "load": 0.0}
        parts = {"prefix": prefix_part([1.0] * 4, [9.0] * 4), "oversubscription": rush_part()}
        document = {"machine": machine, "model": "tiny", "parts": parts | {"slots": slots_part(95_000, 100_000, 1000)}}
        text = memory_report.markdown(document)
        assert "| 4, all at once | with the cache | 1.000 | 1.000 | 9.0 |" in text  # one round has no interval
        assert "| 1.100 |" in text
        assert "Other processes used up to 0.25 cores." in text
        assert "| 95.0 | 100.0 | 0.9500 |" in text
        rows = [line for line in text.splitlines() if line.startswith("|")]
        assert {row.count("|") for row in rows} == {6, 10, 5}


def test_bytes_per_token_are_those_of_the_cache():
    with sharing(load_tiny("main")) as directory:
        case = MemoryCase("tiny", {"model_dir": directory})
    info = case._engine.info
    per_block = memory.bytes_per_token(checkpoint("llama")) * info.block_size
    assert info.kv_cache_bytes % per_block == 0
    assert info.kv_cache_bytes // per_block == info.num_blocks


class TestCase:
    @pytest.fixture
    def case(self):
        with sharing(load_tiny("main")) as directory:
            return MemoryCase("tiny", {"model_dir": directory})

    def test_description(self, case):
        about = case.describe()
        assert about["name"] == "tiny"
        assert about["block_size"] == 16
        assert about["blocks"] == case._engine.info.num_blocks - 1

    @pytest.mark.parametrize("together", [True, False])
    def test_users_share_a_prompt_and_differ_in_their_questions(self, case, together):
        requests = []
        add = case._engine.add
        case._engine.add = lambda request: (requests.append(request), add(request))
        found = case.shared_prefix(users=5, system=40, question=7, answer=3, together=together, seed=2)
        assert len(found["first_token_seconds"]) == 5
        assert {request.prompt_ids[:40] for request in requests} == {requests[0].prompt_ids[:40]}
        assert len({request.prompt_ids[40:] for request in requests}) == 5
        assert {len(request.prompt_ids) for request in requests} == {47}

    def test_another_round_has_another_prompt(self, case):
        requests = []
        add = case._engine.add
        case._engine.add = lambda request: (requests.append(request), add(request))
        for seed in (0, 1, 0):
            case.shared_prefix(users=1, system=40, question=7, answer=2, together=True, seed=seed)
        assert requests[0].prompt_ids == requests[2].prompt_ids != requests[1].prompt_ids

    def test_all_sequences_of_a_rush_end(self, case):
        found = case.rush(prompts=[20, 35, 50], answer=6, seed=0)
        assert found["failed"] == 0
        assert len(found["latency_seconds"]) == 3
        assert max(found["latency_seconds"]) <= found["seconds"]

    def test_slots_are_counted_after_each_step(self, case):
        found = case.slots(requests=2, seed=1)
        assert 0 < found["used"] <= found["allocated"]
        assert found["allocated"] % 16 == 0
        assert found["sequences"] >= found["steps"] - 1
