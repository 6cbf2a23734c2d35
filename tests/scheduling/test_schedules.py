"""Random schedules on the fake device: each sequence gives the output that it gives alone."""

import dataclasses
import functools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omni_jax.requests.segment import Segment
from omni_jax.requests.slo import SLO
from omni_jax.scheduling.buckets import Buckets
from omni_jax.scheduling.discipline import SLOFirst
from tests.scheduling.loop import Loop, image_span

LENGTHS = {"a": 1, "b": 2, "c": 3, "d": 6}  # of images, by name


@dataclasses.dataclass(frozen=True)
class Event:
    """An event at a step: `add` of the request `what`, or another kind that affects live request number `which`."""

    step: int
    kind: str
    what: dict | None = None
    which: int = 0


class SizeCost:
    """A cost model that depends only on the size of the bucket."""

    def seconds(self, shape):
        return 0.1 * shape.size


class PairsCost:
    """A cost model in which all that a shape has takes time."""

    def seconds(self, shape):
        return 0.01 * shape.size + 0.02 * shape.rows + 0.05 * shape.context + 0.05 * shape.attended


RATIOS = (lambda step, total: 0.5, lambda step, total: min(0.1 * step, 0.6), lambda step, total: 0.8 * step / total)


@st.composite
def scenarios(draw, images=False, slo=False, memory=False):
    """(arguments of Loop, events). Pools and numbers are small, so that limits are reached often."""
    block_size = draw(st.integers(1, 5))
    max_model_len = draw(st.integers(2, 26))
    max_num_seqs = draw(st.integers(1, 6))
    budget = draw(st.integers(max_num_seqs, max_num_seqs + 4) | st.integers(max_num_seqs, 24))
    edges = st.lists(st.integers(1, 24), max_size=3)
    loop = {
        "blocks": -(-max_model_len // block_size) + draw(st.sampled_from([0, 0, 0, 1, 2, 4, 9])),
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget,
        "buckets": Buckets(
            decode=tuple(sorted({e for e in draw(edges) if e < max_num_seqs} | {max_num_seqs})),
            mixed=tuple(sorted({e for e in draw(edges) if e < budget} | {budget})),
            overhead=draw(st.integers(0, 20)),
        ),
        "eos": draw(st.sets(st.integers(0, 6), max_size=1)),
    }
    if images:
        loop |= {
            "feature_rows": draw(st.integers(max(LENGTHS.values()), 12)),
            "max_patches": draw(st.integers(max(LENGTHS.values()), 12)),
            "slices": draw(st.integers(1, 4)),
        }
    if slo:
        loop["discipline"] = SLOFirst(aging_seconds=draw(st.sampled_from([1, 3, 10, 1000])))
        loop["cost"] = draw(st.sampled_from([None, SizeCost(), PairsCost()]))
    if memory:
        loop["prefix_caching"] = draw(st.booleans())
        loop["swap"] = draw(st.none() | st.integers(0, 1000))
        loop["ratio"] = draw(st.sampled_from([None, None, *RATIOS]))
    events = draw(st.lists(_events(block_size, max_model_len, images, slo), min_size=1, max_size=12))
    return loop, sorted(events, key=lambda event: event.step)


@st.composite
def _events(draw, block_size, max_model_len, images=False, slo=False):
    step = draw(st.integers(0, 12))
    kind = draw(st.sampled_from(["add"] * 8 + ["abort", "abort between", "stop between", "raise", "raise late"]))
    if kind != "add":
        return Event(step, kind, which=draw(st.integers(0, 9)))
    whole_blocks = st.integers(1, max(1, (max_model_len - 1) // block_size)).map(lambda blocks: blocks * block_size)
    prompt = min(draw(st.integers(1, max_model_len) | whole_blocks), max_model_len)
    output = st.integers(0, max_model_len) if prompt < max_model_len else st.just(0)
    salt = draw(st.integers(0, 6))
    max_tokens = draw(output if prompt == max_model_len else output | st.none())
    what = {
        "prompt": [(salt * i + i * i // 3) % 7 for i in range(prompt)],
        "n": draw(st.sampled_from([1, 1, 1, 2, 4])),
        "max_tokens": max_tokens,
        "min_tokens": draw(st.integers(0, 9 if max_tokens is None else min(9, max_tokens))),
        "stop_token_ids": draw(st.lists(st.integers(0, 6), max_size=1)),
        "ignore_eos": draw(st.booleans()),
        "prompt_logprobs": draw(st.sampled_from([None, None, 0])),
        "stop_pair": draw(st.none() | st.tuples(st.integers(0, 6), st.integers(0, 6))),
        "nan_at": draw(st.sampled_from([None] * 9 + [0, 2])),
    }
    if images:
        what["media"] = draw(_images(prompt))
    if slo:
        what["segments"] = draw(_segments(prompt))
        what["slo"] = SLO(tpot_ms=draw(st.sampled_from([None, 100, 3000])), priority=draw(st.integers(-1, 2)))
    return Event(step, kind, what)


@st.composite
def _images(draw, prompt):
    """Images in a prompt, some of them equal, adjacent or with text between."""
    media, at = [], 0
    for name in draw(st.lists(st.sampled_from(sorted(LENGTHS)), max_size=4)):
        at += draw(st.integers(0, 4))
        if at + LENGTHS[name] > prompt:
            break
        media.append(image_span(name, at, LENGTHS[name]))
        at += LENGTHS[name]
    return media


@st.composite
def _segments(draw, prompt):
    """Random segments of a prompt, or none."""
    edges = sorted({0, prompt} | draw(st.sets(st.integers(0, prompt), max_size=4)))
    due = sorted(draw(st.lists(st.integers(0, 30), min_size=len(edges) - 1, max_size=len(edges) - 1)))
    return draw(
        st.sampled_from(
            [
                (),
                tuple(
                    Segment(start=a, stop=b, modality="text", priority=draw(st.integers(-1, 2)), deadline=float(d))
                    for a, b, d in zip(edges, edges[1:], due, strict=False)
                ),
            ]
        )
    )


def play(loop: Loop, events: list[Event]) -> None:
    now = 0
    for event in events:
        while now < event.step and loop.step():
            now += 1
        now = event.step
        live = list(dict.fromkeys(s.request.id for s in loop.sequences if s.finish_reason is None))
        if event.kind == "add":
            loop.add(**event.what)
        elif event.kind.startswith("raise"):
            loop.fail_step(dispatched=event.kind == "raise late")
        elif live:
            chosen = live[event.which % len(live)]
            family = loop.scheduler.sequences(chosen)
            if event.kind == "abort":
                loop.abort(chosen)
            elif event.kind == "abort between":
                loop.step(between=functools.partial(loop.abort, chosen))
            else:
                loop.step(between=functools.partial(loop.scheduler.finish, family[event.which % len(family)], "abort"))
    loop.run()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(scenarios())
def test_any_schedule_gives_the_output_of_each_alone(scenario):
    arguments, events = scenario
    loop = Loop(**arguments)
    play(loop, events)
    loop.check_endings()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(scenarios(images=True))
def test_any_schedule_with_images_gives_the_output_of_each_alone(scenario):
    """The encoder cache is small, so images are evicted, reclaimed and encoded again."""
    arguments, events = scenario
    loop = Loop(**arguments)
    play(loop, events)
    loop.check_endings()


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.booleans().flatmap(lambda images: scenarios(images=images, slo=True)))
def test_any_schedule_by_deadline_gives_the_output_of_each_alone(scenario):
    """Segments and priorities decide when work runs, never its result."""
    arguments, events = scenario
    loop = Loop(**arguments)
    play(loop, events)
    loop.check_endings()


@settings(max_examples=800, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    st.tuples(st.booleans(), st.booleans()).flatmap(lambda some: scenarios(images=some[0], slo=some[1], memory=True))
)
def test_pre_01_pre_03_any_schedule_with_shared_swapped_and_compressed_blocks_gives_the_output_of_each_alone(scenario):
    """The fake device checks each entry that it reads, and would detect a foreign, stale or lost one."""
    arguments, events = scenario
    loop = Loop(**arguments)
    play(loop, events)
    loop.check_endings()
