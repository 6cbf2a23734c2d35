"""How requests say how their prompts are cut and when they are due, and what the server counts of it."""

import collections
import dataclasses
import json
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omni_jax.requests import InvalidRequest, MediaSpan
from omni_jax.requests.segment import Segment
from omni_jax.segments import POLICIES, make_policy
from serving.http.protocol import GenerationRequest

if TYPE_CHECKING:
    from omni_jax.engine.async_engine import AsyncEngine

PolicySpec = str | Mapping[str, Any]  # what make_policy takes

_MOST_WORDS = 800  # characters of an error about a policy; it may repeat what the client sent, and ends with advice


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentOptions:
    """The operator's choices.

    Attributes:
        policy: how prompts are cut where the request does not say; the engine has the same.
        allow_request_policy: whether a request may say.
    """

    policy: PolicySpec = "request"
    allow_request_policy: bool = False


class Cutter:
    """Cuts prompts with the engine's policies, and counts. Any thread may call it."""

    def __init__(self, engine: "AsyncEngine", options: SegmentOptions):
        self._engine, self._options = engine, options
        self._lock = threading.Lock()
        self._prompts: collections.Counter[str] = collections.Counter()
        self._segments: collections.Counter[str] = collections.Counter()

    def check(self, request: GenerationRequest) -> None:
        """Raises InvalidRequest when the request's policy is not allowed, or is none."""
        if (spec := request.segment_policy) is None:
            return
        if not self._options.allow_request_policy:
            raise InvalidRequest(
                "segment_policy is not allowed by this server (--allow-request-segment-policy)", param="segment_policy"
            )
        try:
            make_policy(spec)
        except ValueError as error:
            raise InvalidRequest(_shortened(str(error)), param="segment_policy") from None

    def cut(self, ids: tuple[int, ...], media: tuple[MediaSpan, ...], spec: PolicySpec | None) -> tuple[Segment, ...]:
        """The prompt's segments by a request's policy, which was checked, or by the server's.

        Raises:
            InvalidRequest: the policy does not cover this prompt exactly once, or fails.
        """
        segments = self._engine.cut(ids, media, spec)
        name = policy_name(self._options.policy if spec is None else spec)
        with self._lock:
            self._prompts[name] += 1
            self._segments[name] += len(segments)
        return segments

    def counts(self) -> dict[str, dict[str, int]]:
        """Prompts and segments so far, by policy_name."""
        with self._lock:
            return {
                name: {"prompts": count, "segments": self._segments[name]}
                for name, count in sorted(self._prompts.items())
            }


def policy_name(spec: PolicySpec) -> str:
    """What a policy is counted as: its name, "custom" for anybody's own function, or "per modality"."""
    if isinstance(spec, Mapping):
        if "policy" not in spec:
            return "per modality"
        spec = str(spec["policy"])
    return spec if spec in POLICIES else "custom"


def parse_policy(text: str) -> PolicySpec:
    """A policy as it is given on the command line: a name, package.module:function, or JSON.

    Raises ValueError that says what is wrong, and lists the valid policies where the name is.
    """
    spec: Any = text
    if text.lstrip().startswith("{"):
        try:
            spec = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"segment policy: not JSON: {error}") from None
    make_policy(spec, allow_custom=True)
    return spec


def _shortened(message: str) -> str:
    if len(message) <= _MOST_WORDS:
        return message
    return f"{message[: _MOST_WORDS // 4]} ... {message[-_MOST_WORDS * 3 // 4 :]}"
