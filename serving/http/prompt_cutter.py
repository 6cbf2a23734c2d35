"""Cuts prompts into segments with the policy of the request or the server."""

import collections
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omni_jax.requests import InvalidRequest, MediaSpan
from omni_jax.requests.segment import Segment
from omni_jax.segments.policies import POLICIES, make_policy
from serving.http.request_models import GenerationRequest

if TYPE_CHECKING:
    from omni_jax.engine.async_engine import AsyncEngine

PolicySpec = str | Mapping[str, Any]  # argument of make_policy
MAX_POLICY_MESSAGE = 800  # characters of an error about a policy, which may quote the client and ends with advice


class PromptCutter:
    """Cuts prompts into segments and counts them. Thread-safe."""

    def __init__(self, engine: "AsyncEngine", policy: PolicySpec, *, allow_request_policy: bool):
        """`policy` is the engine's; requests may set another one if `allow_request_policy`."""
        self._engine, self._policy, self._allow_request_policy = engine, policy, allow_request_policy
        self._lock = threading.Lock()
        self._prompts: collections.Counter[str] = collections.Counter()
        self._segments: collections.Counter[str] = collections.Counter()

    def check(self, request: GenerationRequest) -> None:
        """Raises InvalidRequest if the request sets a segment policy that is invalid or not allowed."""
        if (spec := request.segment_policy) is None:
            return
        if not self._allow_request_policy:
            raise InvalidRequest(
                "segment_policy is not allowed by this server (--allow-request-segment-policy)", param="segment_policy"
            )
        try:
            make_policy(spec)
        except ValueError as error:
            raise InvalidRequest(_shortened(str(error)), param="segment_policy") from None

    def cut(self, ids: tuple[int, ...], media: tuple[MediaSpan, ...], spec: PolicySpec | None) -> tuple[Segment, ...]:
        """The segments of a prompt.

        Args:
            spec: the request's policy, already checked; None takes the server's.

        Raises:
            InvalidRequest: the policy fails, or its segments do not cover each token exactly once.
        """
        segments = self._engine.cut(ids, media, spec)
        name = policy_name(self._policy if spec is None else spec)
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
    """Label under which a policy is counted: its name, "custom" for a custom function, or "per modality"."""
    if isinstance(spec, Mapping):
        if "policy" not in spec:
            return "per modality"
        spec = str(spec["policy"])
    return spec if spec in POLICIES else "custom"


def _shortened(message: str) -> str:
    if len(message) <= MAX_POLICY_MESSAGE:
        return message
    return f"{message[: MAX_POLICY_MESSAGE // 4]} ... {message[-MAX_POLICY_MESSAGE * 3 // 4 :]}"
