"""Scheduler properties over many random steps. `make soak` runs a million."""

import random

import pytest

from omni_jax.scheduling.buckets import default_buckets
from omni_jax.scheduling.discipline import SLOFirst
from omni_jax.scheduling.limits import SchedulerConfig
from tests.scheduling import soak
from tests.scheduling.soak import Report, Setting, play


@pytest.mark.parametrize("steps", [30_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_properties_hold_for_many_steps(steps):
    report = soak.soak(steps, seed=2)
    # Each kind of event occurred often.
    often = steps // 100
    assert report.steps >= steps
    assert report.max_rows >= 60
    assert report.max_live >= 65
    assert report.longest_wait > 0.2
    assert min(report.ended[reason] for reason in ("length", "stop", "abort")) > often
    assert min(report.events[kind] for kind in ("pause", "resume", "preempt")) > often
    assert report.encoded > often
    assert report.cached > often
    assert report.resets > steps // 10_000


def test_without_aging_a_sequence_starves(monkeypatch):
    """Many urgent requests keep the others from being served, and the soak detects it."""
    monkeypatch.setattr(SLOFirst, "cohort", lambda self, s: s.priority)
    monkeypatch.setattr(SLOFirst, "level", lambda self, cohort, now: cohort)
    monkeypatch.setattr(SLOFirst, "due", lambda self, s: 0.0)
    monkeypatch.setattr(SLOFirst, "rank", lambda self, s, now, at=None: (s.priority, 0.0, s.order))
    setting = Setting(
        config=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=24,
            buckets=default_buckets(max_num_seqs=4, max_num_batched_tokens=16),
            eos_token_ids=frozenset({soak.EOS}),
        ),
        blocks=24,
        block_size=4,
        images=False,
        target_live=16,
        urgent=0.95,
        caching=False,
        aging=5.0,
        step_cost=0.0,
    )
    with pytest.raises(AssertionError, match=r"starved for \d+"):
        play(setting, random.Random(0), Report(), 5000)
    monkeypatch.undo()
    play(setting, random.Random(0), Report(), 5000)
