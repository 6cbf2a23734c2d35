"""Descriptions of steps match an example and what the runner packs for the device."""

import re

import numpy as np

from omni_jax.requests import Request, SamplingParams, Sequence
from omni_jax.requests.segment import Segment
from omni_jax.telemetry.debug import describe
from tests.engine.test_vision import vision_request
from tests.engines import greedy, load_tiny, make_engine, request
from tests.plans import HandRow, plan_of


def sequence_of(name: str, length: int, **fields) -> Sequence:
    item = Request(id=name, prompt_ids=tuple(range(1000, 1000 + length)), params=SamplingParams(), **fields)
    return Sequence(request=item, index=0, order=(0, 0), max_output=9, slot=3)


def test_description_of_an_example_step():
    segments = [
        Segment(start=0, stop=130, modality="text", label="sentence 1"),
        Segment(start=130, stop=150, modality="table", label="table 1"),
        Segment(start=150, stop=200, modality="text"),
    ]
    one = sequence_of("r7", 200, segments=tuple(segments))
    one.blocks = [4, 9]
    other = sequence_of("r8", 3)
    other.output += [7, 8]
    other.blocks = [5]
    other.dropped, other.slot = 2, 4
    plan = plan_of(
        HandRow(sequence=one, start=120, count=32, new_slot=True),
        HandRow(sequence=other, start=5, count=1, feedback=True, sample=True),
    )
    assert describe(plan, (one, other)).splitlines() == [
        "step: mixed, 2 rows, 33 tokens in a bucket of 64",
        "r7[0]: tokens 120..151 (prompt 200, output 0); places 0..31; slot 3, new in slot",
        "  input ids  1120 1121 1122 1123 ... 24 more ... 1148 1149 1150 1151",
        "  segments   0 (text 'sentence 1'): 120..129; 1 (table 'table 1'): 130..149; 2 (text): 150..151",
        "  positions  120..151",
        "  keys       0..120 for token 120, to 0..151 for token 151",
        "  blocks     4 9 (2)",
        "r8[0]: token 5 (prompt 3, output 2); places 32; slot 4, samples",
        "  input ids  (on the device)",
        "  segments   1 (output): 5",
        "  positions  5",
        "  keys       0..5, without 2 that compression dropped",
        "  blocks     5 (1)",
        "padding: places 33..63; written to page 0, which no sequence holds",
    ]


def test_positions_of_an_image_and_the_output_after_it_are_runs():
    positions = np.array([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]], np.int32)
    sequence = sequence_of("r", 6, positions=positions)
    sequence.output += [5]
    text = describe(plan_of(HandRow(sequence=sequence, start=0, count=7), size=7), (sequence,))
    assert "padding" not in text
    (line,) = re.findall(r"positions  (.*)", text)
    assert line == ("(time, height, width) (0, 0, 0)..(1, 1, 1); (1, 1, 2); (1, 2, 1); (1, 2, 2); (3, 3, 3)..(4, 4, 4)")


def test_descriptions_match_what_is_packed():
    """Ids, places, positions and lengths of every step of real requests: chunks, decode steps, an image."""
    loaded = load_tiny("qwen2_vl")
    engine = make_engine(loaded)
    runner, packed, described = engine.core.runner, [], []
    pack, dispatch = runner._packer.body, runner.dispatch

    def packing(plan):
        call = pack(plan)
        width = plan.size if plan.decode else runner.sizes.rows
        packed.append({k: v.copy() for k, v in runner.sizes.body_layout(plan.size, width).views(call[2]).items()})
        return call

    def dispatching(plan):
        described.append(describe(plan, engine.core.scheduler.sequences_in(plan)))
        return dispatch(plan)

    runner._packer.body, runner.dispatch = packing, dispatching
    try:
        for item in (vision_request(loaded, "one_image"), request("t", 90, greedy(max_tokens=5))):
            engine.add(item)
        while engine.has_work:
            engine.step()
    finally:
        del runner._packer.body, runner.dispatch
    assert len(described) == len(packed) > 5
    rows = on_device = images = 0
    for text, fields in zip(described, packed, strict=True):
        for n, block in enumerate(re.split(r"\n(?=\S)", text)[1:]):
            if block.startswith("padding"):
                assert (fields["tokens"][int(re.search(r"places (\d+)", block)[1]) :] == 0).all()
                continue
            rows += 1
            first, last = (int(x) for x in re.search(r"places (\d+)(?:\.\.(\d+))?", block).groups(default=-1))
            last = max(first, last)
            shown = re.search(r"input ids  (.*)", block)[1]
            ids = fields["tokens"][first : last + 1].tolist()
            if "on the device" in shown:
                on_device += 1
                assert ids == [-1 - int(re.search(r"slot (\d+)", block)[1])]
            else:
                head, _, tail = shown.partition(" ... ")
                head = [int(x) for x in head.split()]
                tail = [int(x) for x in tail.rpartition("... ")[2].split()]
                assert ids[: len(head)] == head
                assert ids[len(ids) - len(tail) :] == tail
            assert fields["row_slot"][n] == int(re.search(r"slot (\d+)", block)[1])
            keys = re.search(r"keys       (.*)", block)[1]
            assert fields["kv_len"][n] - 1 == int(re.findall(r"0\.\.(\d+)", keys)[-1])
            runs = re.search(r"positions  (.*)", block)[1]
            triples = [[int(x) for x in found] for found in re.findall(r"\((\d+), (\d+), (\d+)\)", runs)]
            if triples:
                images += "features" in block
                assert fields["rotary"][:, first].tolist() == triples[0]
                assert fields["rotary"][:, last].tolist() == triples[-1]
            else:
                ends = [int(x) for x in runs.split("..")]
                assert fields["rotary"][0, [first, last]].tolist() == [ends[0], ends[-1]]
    assert rows > 6
    assert on_device
    assert images
