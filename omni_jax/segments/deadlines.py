"""When work is due: a request's objectives -> deadlines of its segments and of its next token."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from omni_jax.requests.media import MediaSpan
from omni_jax.requests.segment import Segment
from omni_jax.requests.slo import SLO

if TYPE_CHECKING:
    from omni_jax.cost import CostModel


def with_deadlines(
    segments: Sequence[Segment], slo: SLO, arrival: float, cost: "CostModel", *, media: Sequence[MediaSpan] = ()
) -> tuple[Segment, ...]:
    """A prompt's segments with deadlines, and with the request's priority added to their own.

    The time to the first token is shared out by predicted cost: a segment is due at
    arrival + ttft x (cost of the prompt up to its end / cost of the whole prompt). Deadlines never fall from one
    segment to the next, and the last is exactly arrival + ttft. A request that has only e2e_ms, or a smaller one, must
    have its first token by then; without either nothing is due.

    Args:
        segments: they cover the prompt, in order.
        arrival: seconds on the engine's clock.
        cost: predicts the seconds of prefill and encoder.
        media: the prompt's, in order: a span is encoded before the first segment that has a token of it.
    """
    priorities = [slo.priority + segment.priority for segment in segments]
    limits = [limit for limit in (slo.ttft_ms, slo.e2e_ms) if limit is not None]
    if not limits:
        return tuple(
            dataclasses.replace(segment, priority=priority)
            for segment, priority in zip(segments, priorities, strict=True)
        )
    seconds = min(limits) / 1000
    shares = _shares(segments, cost, media)
    return tuple(
        dataclasses.replace(segment, priority=priority, deadline=arrival + seconds * share)
        for segment, priority, share in zip(segments, priorities, shares, strict=True)
    )


def decode_deadline(slo: SLO, arrival: float, first_token_at: float, tokens_out: int) -> float:
    """When the next token is due, in seconds on the engine's clock: tpot after the last one at an even pace from the
    first, so that a token that came early leaves its time to the next ones; and never after arrival + e2e. Infinite
    without either objective.

    Args:
        first_token_at: when the first token came.
        tokens_out: tokens that have come, at least one.
    """
    pace = math.inf if slo.tpot_ms is None else first_token_at + slo.tpot_ms / 1000 * tokens_out
    return pace if slo.e2e_ms is None else min(pace, arrival + slo.e2e_ms / 1000)


def _shares(segments: Sequence[Segment], cost: "CostModel", media: Sequence[MediaSpan]) -> list[float]:
    """Predicted cost up to each segment's end over that of all of them; never falling, the last is 1."""
    encoding, encoded = 0.0, 0
    reached: list[float] = []
    for segment in segments:
        while encoded < len(media) and media[encoded].start < segment.stop:
            encoding += cost.encode_seconds(media[encoded].num_patches)
            encoded += 1
        so_far = encoding + cost.prefill_seconds(segment.stop, 0)
        reached.append(max(so_far, reached[-1]) if reached else max(so_far, 0.0))
    if not reached:
        return []
    whole = reached[-1]
    if not 0 < whole < math.inf:  # a model that has not learnt anything yet
        return [segment.stop / segments[-1].stop for segment in segments]
    return [part / whole for part in reached]
