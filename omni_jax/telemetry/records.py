"""Records of segments and requests, written by the recorder. Plain frozen data."""

import dataclasses
import math

from omni_jax.requests.outputs import FinishReason
from omni_jax.requests.segment import Compute, Modality


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRecord:
    """A computed segment: of a prompt (prefill), an image in the vision tower (encode), or a whole output (decode).
    Times are seconds on the engine's clock.

    Attributes:
        request_id: Id of the request.
        index: Index of the continuation.
        number: Index among the prompt's segments. An image has that of the segment that it starts in, an output the
            number after the last.
        modality, label, compute, priority, deadline, start, stop: As in the segment. An output is due when its last
            token is.
        queued_at: When all tokens before it were planned; for the first segment, `Request.queued`. Until it
            starts it counts as queued, even while its image is being encoded.
        started_at: When the first step with tokens of it was planned.
        ended_at: When the step with its last token was read. Recomputation after that changes nothing.
        steps: Number of steps with tokens of it.
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
        """Whether it ended by its deadline; None without a deadline."""
        return None if self.deadline == math.inf else self.ended_at <= self.deadline


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """A continuation that ended. Times are seconds on the engine's clock, None if the event did not happen.

    The stages add up to the whole time. Time in the queue and up to the first token in which an image is in the vision
    tower belongs to the stage encode, not to queue or prefill.

    Attributes:
        request_id: Id of the request.
        index: Index of the continuation.
        modality: Class of the request (`request_class`).
        priority: Priority of the request; smaller is more urgent.
        arrival: When it arrived.
        queued_at: When its inputs were ready, and it began to wait.
        scheduled_at: When it first left the queue.
        first_token_at: When its first token was read.
        ended_at: When it ended.
        prompt_tokens, output_tokens: Number of tokens.
        finish_reason: stop, length, abort or error.
        pauses: Number of pauses.
        preemptions: Number of preemptions.
        input_seconds: Duration of the first stage: from the arrival until its inputs were ready.
        queue_seconds, encode_seconds, prefill_seconds, decode_seconds: Durations of the other stages.
        ttft_met, tpot_met, e2e_met: Whether the objective was met. None if there was none, if the client disconnected
            before it was missed, and for tpot if the output has fewer than two tokens.
    """

    request_id: str
    index: int
    modality: Modality
    priority: int
    arrival: float
    queued_at: float
    scheduled_at: float | None
    first_token_at: float | None
    ended_at: float
    prompt_tokens: int
    output_tokens: int
    finish_reason: FinishReason
    pauses: int
    preemptions: int
    input_seconds: float
    queue_seconds: float
    encode_seconds: float
    prefill_seconds: float | None
    decode_seconds: float | None
    ttft_met: bool | None
    tpot_met: bool | None
    e2e_met: bool | None

    @property
    def completed(self) -> bool:
        """Whether it ended by stop or length. Statistics of times leave the others out."""
        return self.finish_reason not in ("abort", "error")

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token, or to the end of a request that only scores its prompt."""
        if self.first_token_at is not None:
            return self.first_token_at - self.arrival
        return self.e2e if self.completed else None

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first; None with fewer than two."""
        if self.first_token_at is None or self.output_tokens < 2:
            return None
        return (self.ended_at - self.first_token_at) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        return self.ended_at - self.arrival


Record = SegmentRecord | RequestRecord
