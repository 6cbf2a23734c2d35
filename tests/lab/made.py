"""Experiments and runs for tests, without an engine or a clock."""

import dataclasses
from collections.abc import Sequence

from omni_jax.lab.experiment import Arm, Experiment, parse_experiment
from omni_jax.lab.records import RequestRow, Run, SegmentRow, StepRow
from omni_jax.simulation.workload import Arrival

EXPERIMENT = {
    "name": "Made up",
    "about": "For a test.",
    "slo": {"text": {"ttft_ms": 200, "priority": 0}, "image": {"ttft_ms": 500, "priority": 1}},
    "arms": [
        {"name": "A"},
        {"name": "C", "segment_policy": "hybrid", "scheduling_policy": "slo", "about": "the other one"},
    ],
    "mixes": {"usual": {"scaled": {"text": 0.25, "output": 0.25, "side": 0.5}}},
    "rates": ["80%", 3],
    "requests": 24,
    "seeds": [1, 2],
}


def experiment(**changes) -> Experiment:
    """Return EXPERIMENT with some keys replaced."""
    return parse_experiment(EXPERIMENT | changes)


class MadeUpBackend:
    """Backend in which a request takes 1 ms a token, and half of that under C. It lists the tags of its runs."""

    def __init__(self, *, breaks_after: int | None = None):
        self.replayed: list[str] = []
        self._breaks_after = breaks_after

    def replay(self, arm: Arm, arrivals: Sequence[Arrival], *, tag: str = "", done=None) -> Run:
        if self._breaks_after is not None and len(self.replayed) >= self._breaks_after:
            raise KeyboardInterrupt
        self.replayed.append(tag)
        return made_run(arrivals, speed=2.0 if arm.name == "C" else 1.0)

    def max_running(self, arm: Arm) -> int:
        return 4

    def facts(self):
        return {"machine": "made up"}

    def step_times(self):
        return {"format": "made up"}


def made_run(arrivals: Sequence[Arrival], *, speed: float) -> Run:
    """Return a run of one request after another, in which a prompt is one segment and one step."""
    free, requests, segments, steps = 0.0, [], [], []
    for number, arrival in enumerate(arrivals):
        begun = max(free, arrival.at)
        first = begun + arrival.text_tokens / 1000 / speed
        free = first + arrival.output_tokens / 1000 / speed
        requests.append(
            RequestRow(
                id=arrival.id,
                kind=arrival.kind,
                priority=0 if arrival.slo is None else arrival.slo.priority,
                arrival=arrival.at,
                prompt_tokens=arrival.text_tokens,
                image_tokens=0,
                output_tokens=arrival.output_tokens,
                scheduled_at=begun,
                first_token_at=first,
                ended_at=free,
                finish_reason="length",
            )
        )
        segments.append(
            SegmentRow(
                request_id=arrival.id,
                number=0,
                modality=arrival.kind,
                label="request",
                start=0,
                stop=arrival.text_tokens,
                priority=0,
                deadline=None,
                started_at=begun,
                ended_at=first,
                steps=1,
                seconds=first - begun,
            )
        )
        prefill = StepRow(
            step=2 * number,
            started_at=begun,
            ended_at=first,
            kind="mixed",
            size=256,
            compute="prefill",
            request_id=arrival.id,
            segment=0,
            modality=arrival.kind,
            tokens=arrival.text_tokens,
        )
        decode = {"step": 2 * number + 1, "started_at": first, "ended_at": free, "compute": "decode", "kind": "decode"}
        decode |= {"request_id": "", "segment": -1, "size": 1, "tokens": arrival.output_tokens}
        steps += [prefill, dataclasses.replace(prefill, **decode)]
    return Run(
        requests=tuple(requests),
        segments=tuple(segments),
        steps=tuple(steps),
        busy_seconds=sum(row.ended_at - row.scheduled_at for row in requests),
    )
