"""Cuts prompts into segments with the policy of the request or the server."""

from collections.abc import Callable, Mapping
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
    """Cuts prompts into segments. Thread-safe."""

    def __init__(
        self,
        engine: "AsyncEngine",
        policy: PolicySpec,
        *,
        allow_request_policy: bool,
        count: Callable[[str, int], object],
    ):
        """
        Args:
            policy: the engine's.
            allow_request_policy: whether requests may set another one.
            count: called for each prompt with the policy_name and the number of segments.
        """
        self._engine, self._policy, self._allow_request_policy = engine, policy, allow_request_policy
        self._count = count

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
        self._count(policy_name(self._policy if spec is None else spec), len(segments))
        return segments


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
