"""A policy somebody else wrote: found by its dotted path, and checked at each call."""

import bisect
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

from omni_jax.requests import InvalidRequest
from omni_jax.requests.segment import MODALITIES, Modality, Segment
from omni_jax.segments.cover import check_cover
from omni_jax.segments.prompt_view import PromptView
from omni_jax.user_code import load_function


def custom(path: str) -> Callable[[PromptView], tuple[Segment, ...]]:
    """A policy of one's own, "package.module:function", imported now.

    The function is given a PromptView and returns a list or tuple of Segments, or of (start, stop) or
    (start, stop, modality); what it returns is checked at each call.

    Raises:
        ValueError: no such module or function, or it cannot be called. The policy itself raises InvalidRequest when
            the function fails, or its segments do not cover the prompt exactly once, in order.
    """
    function = load_function(path, "segment policy")

    def policy(view: PromptView) -> tuple[Segment, ...]:
        try:
            returned = function(view)
        except Exception as error:  # somebody else's code, and it shall cost one request at most
            raise InvalidRequest(
                f"segment policy {path} failed: {type(error).__name__}: {error}", param="segment_policy"
            ) from error
        if not isinstance(returned, (list, tuple)):
            raise InvalidRequest(
                f"segment policy {path} must return a list or tuple of segments, got {type(returned).__name__}",
                param="segment_policy",
            )
        segments = tuple(_segment(path, view, number, item) for number, item in enumerate(returned))
        check_cover(segments, view.length)
        return segments

    return policy


def _segment(path: str, view: PromptView, number: int, item: Any) -> Segment:
    """What somebody's function returned, as a Segment of plain numbers."""
    try:
        if isinstance(item, Segment):
            start, stop = operator.index(item.start), operator.index(item.stop)
            segment = dataclasses.replace(item, start=start, stop=stop, priority=operator.index(item.priority))
        elif isinstance(item, tuple) and len(item) in (2, 3):
            start, stop = operator.index(item[0]), operator.index(item[1])
            modality = item[2] if len(item) == 3 else _modality_at(view, start)
            segment = Segment(start=start, stop=stop, modality=modality)
        else:
            raise TypeError
        if segment.modality not in MODALITIES or segment.compute != "prefill" or not isinstance(segment.label, str):
            raise ValueError
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"segment policy {path}: item {number} is {item!r}; expected a Segment of a prompt (compute 'prefill'), or "
            f"(start, stop) or (start, stop, modality); modalities are {', '.join(MODALITIES)}",
            param="segment_policy",
        ) from error
    return segment


def _modality_at(view: PromptView, place: int) -> Modality:
    index = bisect.bisect_right(view.media, place, key=lambda item: item.start) - 1
    return view.media[index].modality if index >= 0 and place < view.media[index].stop else "text"
