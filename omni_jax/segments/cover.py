"""The check that segments cover a prompt."""

from collections.abc import Iterable

from omni_jax.requests.errors import InvalidRequest
from omni_jax.requests.segment import Segment


def check_cover(segments: Iterable[Segment], length: int) -> None:
    """Check that non-empty segments cover tokens [0, length) exactly once, in order.

    Raises:
        InvalidRequest: They do not; the message gives the first token at which they fail.
    """
    segments = tuple(segments)
    covered = 0
    for number, segment in enumerate(segments):
        here = f"segment {number}, [{segment.start}, {segment.stop}),"
        if segment.stop <= segment.start:
            raise _uncovered(segment.start, f"{here} is empty")
        if segment.start < 0:
            raise _uncovered(segment.start, f"{here} begins before the prompt")
        if segment.stop > length:
            raise _uncovered(max(length, segment.start), f"{here} goes beyond the prompt's {length} tokens")
        if segment.start > covered:
            if any(later.start <= covered < later.stop for later in segments[number + 1 :]):
                raise _uncovered(covered, f"{here} is out of order: the tokens before it come later")
            raise _uncovered(covered, f"tokens [{covered}, {segment.start}) are in no segment")
        if segment.start < covered:
            before = segments[number - 1]
            fault = "is out of order: it lies before" if segment.stop <= before.start else "overlaps"
            raise _uncovered(segment.start, f"{here} {fault} segment {number - 1}, [{before.start}, {before.stop})")
        covered = segment.stop
    if covered < length:
        raise _uncovered(covered, f"tokens [{covered}, {length}) are in no segment")


def _uncovered(index: int, fault: str) -> InvalidRequest:
    return InvalidRequest(
        f"segments must cover the prompt exactly once, in order; at token {index}: {fault}", param="segment_policy"
    )
