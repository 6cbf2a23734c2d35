"""Service level objectives of a request."""

import dataclasses

from omni_jax.requests.errors import InvalidRequest

_DAY_MS = 24 * 60 * 60 * 1000.0
_MAX_PRIORITY = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SLO:
    """Service level objectives of one request. None means no objective.

    Attributes:
        ttft_ms: Milliseconds from arrival to the first token.
        tpot_ms: Milliseconds per output token after the first, on average.
        e2e_ms: Milliseconds from arrival to the last token.
        priority: Smaller is more urgent, as in vLLM.

    Raises:
        InvalidRequest: A time is not above 0 and at most 24 hours, or the priority is not an int32.
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
                    f"{name} must be a number of milliseconds above 0 and at most {_DAY_MS:.0f} (a day), got {value!r}",
                    param=name,
                )
        if (
            isinstance(self.priority, bool)
            or not isinstance(self.priority, int)
            or not -_MAX_PRIORITY <= self.priority <= _MAX_PRIORITY
        ):
            raise InvalidRequest(
                f"priority must be an integer from {-_MAX_PRIORITY} to {_MAX_PRIORITY} (smaller is more urgent), "
                f"got {self.priority!r}",
                param="priority",
            )
