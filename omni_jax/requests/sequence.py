"""One continuation of a request, while it is being computed."""

import bisect
import dataclasses
from typing import Any

from omni_jax.requests.outputs import FinishReason
from omni_jax.requests.request import Request
from omni_jax.requests.segment import Segment

Parcel = Any  # what a scheduling.blocks.Swap knows swapped blocks by


@dataclasses.dataclass(frozen=True, kw_only=True)
class Swapped:
    """Blocks of a sequence that are not on the device.

    Attributes:
        parcel: what the Swap knows them by.
        first: place of the first of them among the sequence's blocks.
        count: how many.
        computed, dropped: the sequence's, once they are back.
    """

    parcel: Parcel
    first: int
    count: int
    computed: int
    dropped: int


@dataclasses.dataclass(kw_only=True, eq=False)
class Sequence:
    """What the scheduler knows of one continuation.

    Tokens are `known` (the host has read them) or `pending` (sampled on the device, not read yet). `computed` of them
    have their keys and values in the cache. Prefill, chunks of it, decode and recomputation are all the same:
    computed chases known + pending.

    Attributes:
        request: what is being continued.
        index: which of the request's n continuations.
        order: smaller goes first: (arrival number of the request, index).
        max_output: most tokens it may generate; 0 for a request that only scores its prompt.
        known: prompt and output ids.
        pending: tokens sampled by steps whose result was not read; at most 1 whenever a step is planned.
        computed: tokens in the cache, counting steps that were dispatched and not read.
        blocks: blocks of the cache it holds, in order.
        on_device: its slot's sampling state was written.
        on_device_blocks: how many of its blocks the device's block table lists.
        slot: its row of sampling state on the device while it runs.
        digests: of its full blocks, as far as they were needed; see memory.prefix.
        registered: blocks, from the first on, that the prefix cache has looked at or been given.
        dropped: rows of the cache that compression has taken: it holds computed - dropped.
        cached: prompt tokens that it found in the prefix cache.
        swapped: what it has on the host.
        children: siblings that wait for this one's prefill, to share its full blocks.
        scored: prompt tokens whose logprobs were handed out (with prompt_logprobs).
        media_passed: spans of the request's media that computed tokens have left behind.
        media_held: spans whose features it has asked for; those from media_passed on it holds a reference to.
        scheduled_at: when it first left the queue, in the engine's seconds.
        served_at: when it was last given tokens of a step, or its arrival.
        admitted_class: the class it stood in when it got its slot, waiting counted in; smaller is more urgent.
        most_urgent: the smallest priority that any part of it has.
        first_token_at: when its first token was read.
        paused: it had begun its prompt, and a step went by without it.
        finish_reason: set once; then it holds neither blocks nor slot.
    """

    request: Request
    index: int
    order: tuple[int, int]
    max_output: int
    known: list[int]
    pending: int = 0
    computed: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    on_device: bool = False
    on_device_blocks: int = 0
    slot: int | None = None
    digests: list[bytes] = dataclasses.field(default_factory=list)
    registered: int = 0
    dropped: int = 0
    cached: int = 0
    swapped: Swapped | None = None
    children: list["Sequence"] = dataclasses.field(default_factory=list)
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
    def num_output(self) -> int:
        """Output tokens the host has read."""
        return len(self.known) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens still to be sampled, those in flight not counted."""
        return self.max_output - self.num_output - self.pending

    @property
    def uncomputed(self) -> int:
        """Tokens that must pass through the model before the next one can be sampled."""
        return len(self.known) + self.pending - self.computed

    @property
    def rows(self) -> int:
        """Rows of the cache it holds."""
        return self.computed - self.dropped

    @property
    def reached(self) -> int:
        """Tokens that need not be computed again: those in the cache, or what there will be once the rest is back."""
        return self.computed if self.swapped is None else self.swapped.computed

    def segment_at(self, place: int) -> Segment | None:
        """The segment that a place of the prompt lies in; None behind the prompt, and without segments."""
        index = bisect.bisect_right(self.request.segment_stops, place)
        return self.request.segments[index] if index < len(self.request.segments) else None

    @property
    def segment(self) -> Segment | None:
        """The segment that is computed next."""
        return self.segment_at(self.computed)

    @property
    def priority(self) -> int:
        """That of what is computed next; smaller is more urgent."""
        segment = self.segment
        if segment is not None:
            return segment.priority
        return 0 if self.request.slo is None else self.request.slo.priority

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the next tokens to compute are prompt positions to be scored. Siblings leave it to the first."""
        if self.request.params.prompt_logprobs is None or self.index:
            return False
        done = max(self.scored, self.computed)  # what a step in flight scores is computed and not handed out yet
        return done < self.num_prompt - 1
