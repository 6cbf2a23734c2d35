"""Service level objectives of a request."""

import dataclasses

from omni_jax.requests.errors import InvalidRequest

_DAY_MS = 24 * 60 * 60 * 1000.0
_MOST_PRIORITY = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SLO:
    """What a client is promised: service level objectives of one request. None promises nothing.

    Attributes:
        ttft_ms: from arrival to the first token.
        tpot_ms: from each token to the next, on average.
        e2e_ms: from arrival to the last token.
        priority: smaller is more urgent, as in vLLM.

    Raises InvalidRequest for times that are not positive and at most 24 hours, and for a priority that is no int32.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    priority: int = 0

    def __post_init__(self):
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _DAY_MS:
                raise InvalidRequest(
                    f"{name} must be milliseconds, more than 0 and at most {_DAY_MS:.0f} (24 hours), got {value!r}",
                    param=name,
                )
        if (
            isinstance(self.priority, bool)
            or not isinstance(self.priority, int)
            or not -_MOST_PRIORITY <= self.priority <= _MOST_PRIORITY
        ):
            raise InvalidRequest(
                f"priority must be a whole number from {-_MOST_PRIORITY} to {_MOST_PRIORITY} (smaller is more urgent), "
                f"got {self.priority!r}",
                param="priority",
            )
