"""How the server cuts prompts into segments: its options, and policies given on the command line."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from omni_jax.segments import make_policy

PolicySpec = str | Mapping[str, Any]  # argument of make_policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentOptions:
    """How the server cuts prompts into segments.

    Attributes:
        policy: segment policy of requests that set none; the same as the engine's.
        allow_request_policy: whether requests may set `segment_policy`.
    """

    policy: PolicySpec = "request"
    allow_request_policy: bool = False


def parse_policy(text: str) -> PolicySpec:
    """Parses a segment policy of the command line: a name, package.module:function, or JSON.

    Raises:
        ValueError: not JSON, or not a valid policy. For an unknown name, the message lists the valid ones.
    """
    spec: Any = text
    if text.lstrip().startswith("{"):
        try:
            spec = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"segment policy is not valid JSON: {error}") from None
    make_policy(spec, allow_custom=True)
    return spec
