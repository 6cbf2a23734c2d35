"""The scheduling state of one continuation of a request."""

import bisect
import dataclasses
from typing import Any

from omni_jax.requests.outputs import FinishReason
from omni_jax.requests.request import Request
from omni_jax.requests.segment import Modality, Segment

Parcel = Any  # the handle that a scheduling.blocks.Swap returns for swapped blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Swapped:
    """Blocks of a sequence that were swapped out of the device.

    Attributes:
        parcel: Handle of the blocks in the Swap.
        first: Index of the first of them among the sequence's blocks.
        count: Number of blocks.
        computed, dropped: Values that the sequence's attributes have again once the blocks are back.
    """

    parcel: Parcel
    first: int
    count: int
    computed: int
    dropped: int


@dataclasses.dataclass(kw_only=True, eq=False)
class Sequence:
    """The scheduling state of one continuation.

    Its tokens are known (those of the prompt, and `output`) or `pending` (sampled on the device, not read yet). The
    first `computed` of them have their keys and values in the cache. Prefill, chunked prefill, decode and recomputation
    are the same operation: they advance `computed` towards known + pending.

    Attributes:
        request: The request that it continues.
        index: Index of the continuation, 0 to n - 1.
        order: (arrival number of the request, index); smaller arrived earlier.
        max_output: Maximum number of output tokens; 0 if the request only scores its prompt.
        output: Output token ids that the host has read. With the prompt's they are its known tokens.
        pending: Number of tokens sampled by steps whose results were not read; at most 1 when a step is planned.
        computed: Number of tokens in the cache, including those of steps in flight.
        blocks: Cache blocks that it holds, in order.
        on_device: Whether the sampling state of its slot has been written.
        on_device_blocks: Number of its blocks in the device's block table.
        slot: Index of its sampling state on the device while it runs; None while it waits.
        digests: Digests of its first full blocks, computed as needed; see memory.prefix.
        registered: Number of leading blocks that are registered in the prefix cache or were found there.
        dropped: Number of cache rows removed by compression; computed - dropped remain.
        mixture: Number of its prompt's tokens by modality; set when rows are dropped.
        cached: Number of prompt tokens found in the prefix cache.
        swapped: Its blocks in host memory or on disk.
        scored: Number of prompt tokens whose logprobs were returned (with prompt_logprobs).
        media_passed: Number of leading media spans whose tokens are all computed.
        media_held: Number of leading media spans whose features it has requested; it holds a reference to the features
            of those from media_passed on.
        scheduled_at: Engine time in seconds when it first left the queue.
        served_at: Engine time in seconds when a step last computed tokens of it; initially its arrival.
        admitted_class: Class, aging included, at which it was admitted to its slot; smaller is more urgent.
        most_urgent: Smallest priority among its segments.
        first_token_at: Engine time in seconds when its first output token was read.
        paused: Whether its prompt is partly computed and a step went by without it.
        finish_reason: Set once, at its end; from then on it holds neither blocks nor a slot.
    """

    request: Request
    index: int
    order: tuple[int, int]
    max_output: int
    output: list[int] = dataclasses.field(default_factory=list)
    pending: int = 0
    computed: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    on_device: bool = False
    on_device_blocks: int = 0
    slot: int | None = None
    digests: list[bytes] = dataclasses.field(default_factory=list)
    registered: int = 0
    dropped: int = 0
    mixture: dict[Modality, int] = dataclasses.field(default_factory=dict)
    cached: int = 0
    swapped: Swapped | None = None
    scored: int = 0
    media_passed: int = 0
    media_held: int = 0
    scheduled_at: float | None = None
    served_at: float = dataclasses.field(init=False)
    admitted_class: float = float("inf")
    first_token_at: float | None = None
    paused: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_prompt: int = dataclasses.field(init=False)
    most_urgent: int = dataclasses.field(init=False)

    def __post_init__(self):
        self.num_prompt = len(self.request.prompt_ids)
        self.served_at = self.request.arrival
        of_request = 0 if self.request.slo is None else self.request.slo.priority
        self.most_urgent = min([segment.priority for segment in self.request.segments] or [of_request])

    @property
    def name(self) -> str:
        """Name for logs: request id[index]."""
        return f"{self.request.id}[{self.index}]"

    @property
    def num_known(self) -> int:
        """Number of prompt tokens and of output tokens that the host has read."""
        return self.num_prompt + len(self.output)

    @property
    def known(self) -> list[int]:
        """Prompt and output token ids, in a new list."""
        return [*self.request.prompt_ids, *self.output]

    def tokens(self, start: int, stop: int) -> tuple[int, ...] | list[int]:
        """The known token ids from start to stop."""
        prompt = self.num_prompt
        if start >= prompt:
            return self.output[start - prompt : stop - prompt]
        ids = self.request.prompt_ids[start:stop]
        return ids if stop <= prompt else (*ids, *self.output[: stop - prompt])

    @property
    def num_output(self) -> int:
        """Number of output tokens that the host has read."""
        return len(self.output)

    @property
    def remaining(self) -> int:
        """Number of tokens still to be sampled, not counting those in flight."""
        return self.max_output - self.num_output - self.pending

    @property
    def uncomputed(self) -> int:
        """Number of tokens that must pass through the model before the next one can be sampled."""
        return self.num_known + self.pending - self.computed

    @property
    def rows(self) -> int:
        """Number of cache rows that it holds."""
        return self.computed - self.dropped

    @property
    def reached(self) -> int:
        """Number of tokens that need not be computed again: those in the cache, once swapped blocks are back."""
        return self.computed if self.swapped is None else self.swapped.computed

    def segment_at(self, index: int) -> Segment | None:
        """The segment that contains the token at `index`; None after the prompt, or if there are no segments."""
        number = bisect.bisect_right(self.request.segment_stops, index)
        return self.request.segments[number] if number < len(self.request.segments) else None

    @property
    def segment(self) -> Segment | None:
        """The segment to compute next."""
        return self.segment_at(self.computed)

    @property
    def priority(self) -> int:
        """The priority of the tokens to compute next; smaller is more urgent."""
        segment = self.segment
        if segment is not None:
            return segment.priority
        return 0 if self.request.slo is None else self.request.slo.priority

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the next tokens to compute are prompt tokens to score. Only the first continuation scores them."""
        if self.request.params.prompt_logprobs is None or self.index:
            return False
        done = max(self.scored, self.computed)  # a step in flight scores tokens that count as computed, not as scored
        return done < self.num_prompt - 1
