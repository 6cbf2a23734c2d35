"""What became of one segment and of one request: plain frozen data, written by the recorder."""

import dataclasses
import math

from omni_jax.requests.outputs import FinishReason
from omni_jax.requests.segment import Compute, Modality


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRecord:
    """One segment that has been computed: of a prompt; an image in the vision tower (encode); or a continuation's
    whole output (decode). Times are seconds on the engine's clock.

    Attributes:
        request_id: whose.
        index: of which continuation.
        number: place among the prompt's segments, from 0; an image has that of the segment it begins in, an output
            the one behind the last.
        modality, label, compute, priority, deadline, start, stop: the segment's own. An output is due when its last
            token is.
        queued_at: when all tokens before it had been given to steps; for the first, when the request arrived. Until
            it starts it is in the queue, also while an image of it is in the tower.
        started_at: when the first step with tokens of it was planned.
        ended_at: when the step with its last token was read. What is computed again after a preemption changes nothing
            in a segment that had ended.
        steps: how many had tokens of it.
    """

    request_id: str
    index: int
    number: int
    modality: Modality
    label: str
    compute: Compute
    priority: int
    deadline: float
    start: int
    stop: int
    queued_at: float
    started_at: float
    ended_at: float
    steps: int

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at

    @property
    def deadline_met(self) -> bool | None:
        """None where nothing was due."""
        return None if self.deadline == math.inf else self.ended_at <= self.deadline


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """One continuation that has ended. Times are seconds on the engine's clock; None where it did not come to that.

    The stages follow each other and add up to the whole time: while one of its images is in the vision tower before
    its first token, a request is in the stage encode, and neither in queue nor in prefill.

    Attributes:
        request_id: whose.
        index: of which continuation.
        modality: its class (`request_class`).
        priority: the request's; smaller is more urgent.
        arrival: when it came.
        scheduled_at: when it first left the queue.
        first_token_at: when its first token was read.
        ended_at: when it ended.
        prompt_tokens, output_tokens: how many.
        finish_reason: stop, length, abort or error.
        pauses: times it lost its turn.
        preemptions: times it lost its slot or blocks.
        queue_seconds, encode_seconds, prefill_seconds, decode_seconds: see above.
        ttft_met, tpot_met, e2e_met: whether the objective was met; None where there was none, where the client left
            before it was missed, and for tpot where an output had fewer than two tokens.
    """

    request_id: str
    index: int
    modality: Modality
    priority: int
    arrival: float
    scheduled_at: float | None
    first_token_at: float | None
    ended_at: float
    prompt_tokens: int
    output_tokens: int
    finish_reason: FinishReason
    pauses: int
    preemptions: int
    queue_seconds: float
    encode_seconds: float
    prefill_seconds: float | None
    decode_seconds: float | None
    ttft_met: bool | None
    tpot_met: bool | None
    e2e_met: bool | None

    @property
    def completed(self) -> bool:
        """Whether it came to its own end; times of others are in no figure."""
        return self.finish_reason not in ("abort", "error")

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token, or to the end of a prompt that was only scored."""
        if self.first_token_at is not None:
            return self.first_token_at - self.arrival
        return self.e2e if self.completed else None

    @property
    def tpot(self) -> float | None:
        """Seconds from one token to the next, on average; None with fewer than two."""
        if self.first_token_at is None or self.output_tokens < 2:
            return None
        return (self.ended_at - self.first_token_at) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        return self.ended_at - self.arrival


Record = SegmentRecord | RequestRecord
