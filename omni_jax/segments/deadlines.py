"""Deadlines of a request's segments and of its next token, from its objectives."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from omni_jax.requests.media import MediaSpan
from omni_jax.requests.segment import Segment
from omni_jax.requests.slo import SLO

if TYPE_CHECKING:
    from omni_jax.cost.model import CostModel


def with_deadlines(
    segments: Sequence[Segment], slo: SLO, arrival: float, cost: "CostModel", *, media: Sequence[MediaSpan] = ()
) -> tuple[Segment, ...]:
    """Give a prompt's segments deadlines, and add the request's priority to theirs.

    The time to first token is divided by predicted cost: a segment is due at
    arrival + ttft x (cost of the prompt up to its end / cost of the whole prompt). Deadlines never decrease, and the
    last one is exactly arrival + ttft. If e2e_ms is smaller than ttft_ms, or ttft_ms is None, it takes the place of
    ttft_ms. Without either, deadlines are infinite.

    Args:
        segments: Segments that cover the prompt, in order.
        slo: The request's objectives.
        arrival: Arrival in seconds on the engine's clock.
        cost: Predicts the seconds of prefill and encoder.
        media: The prompt's media, in order. A span is encoded before the first segment that contains a token of it.
    """
    limits = [limit for limit in (slo.ttft_ms, slo.e2e_ms) if limit is not None]
    if not limits and not slo.priority:
        return tuple(segments)
    deadlines = [segment.deadline for segment in segments]
    if limits:
        deadlines = [arrival + min(limits) / 1000 * share for share in _shares(segments, cost, media)]
    return tuple(  # dataclasses.replace would take twice as long, and a prompt may have thousands of segments
        [
            Segment(
                start=segment.start,
                stop=segment.stop,
                modality=segment.modality,
                label=segment.label,
                compute=segment.compute,
                priority=slo.priority + segment.priority,
                deadline=deadline,
            )
            for segment, deadline in zip(segments, deadlines, strict=True)
        ]
    )


def decode_deadline(slo: SLO, arrival: float, first_token_at: float, tokens_out: int) -> float:
    """The due time of the next output token, in seconds on the engine's clock; infinite without tpot_ms and e2e_ms.

    Token i is due at first_token_at + i x tpot, so a token that comes early leaves its time to the next ones, and no
    later than arrival + e2e.

    Args:
        first_token_at: When the first token came, in engine seconds.
        tokens_out: Number of tokens that have come, at least one.
    """
    pace = math.inf if slo.tpot_ms is None else first_token_at + slo.tpot_ms / 1000 * tokens_out
    return pace if slo.e2e_ms is None else min(pace, arrival + slo.e2e_ms / 1000)


def _shares(segments: Sequence[Segment], cost: "CostModel", media: Sequence[MediaSpan]) -> list[float]:
    """The predicted cost up to each segment's end as a share of the whole. Shares never decrease; the last is 1."""
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
    if not 0 < whole < math.inf:  # the cost model has not learnt anything yet
        return [segment.stop / segments[-1].stop for segment in segments]
    return [part / whole for part in reached]
