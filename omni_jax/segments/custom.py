"""Custom segment policies: loaded by dotted path, and checked at each call."""

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
    """Import the segment policy at "package.module:function".

    The function takes a PromptView and returns a list or tuple of Segments, (start, stop) or (start, stop, modality).
    What it returns is checked at each call.

    Raises:
        ValueError: The module or function does not exist, or it cannot be called. The policy itself raises
            InvalidRequest if the function fails or its segments do not cover the prompt exactly once, in order.
    """
    function = load_function(path, "segment policy")

    def policy(view: PromptView) -> tuple[Segment, ...]:
        try:
            returned = function(view)
        except Exception as error:  # an error in custom code must fail no more than one request
            raise InvalidRequest(
                f"segment policy {path} failed: {type(error).__name__}: {error}", param="segment_policy"
            ) from error
        if not isinstance(returned, (list, tuple)):
            raise InvalidRequest(
                f"segment policy {path} must return a list or tuple of segments, got {type(returned).__name__}",
                param="segment_policy",
            )
        segments = tuple(_segment(path, view, number, item) for number, item in enumerate(returned))
        try:
            check_cover(segments, view.length)
        except InvalidRequest as error:
            raise InvalidRequest(f"segment policy {path}: {error}", param="segment_policy") from None
        return segments

    return policy


def _segment(path: str, view: PromptView, number: int, item: Any) -> Segment:
    """An item that a custom policy returned, as a checked Segment."""
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


def _modality_at(view: PromptView, token: int) -> Modality:
    index = bisect.bisect_right(view.media, token, key=lambda item: item.start) - 1
    return view.media[index].modality if index >= 0 and token < view.media[index].stop else "text"
