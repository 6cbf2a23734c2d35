"""A request as the engine takes it."""

import dataclasses
import functools

import numpy as np

from omni_jax.requests.media import MediaSpan
from omni_jax.requests.sampling_params import SamplingParams
from omni_jax.requests.segment import Segment
from omni_jax.requests.slo import SLO


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to continue, and how.

    Attributes:
        id: Unique among live requests; the engine rejects a duplicate.
        prompt_ids: Token ids, at least one. Media placeholders are among them, one per feature.
        params: Sampling and stopping parameters.
        arrival: When it arrived, in seconds on the engine's clock (time.monotonic for the real engine). Latencies, time
            to first token and deadlines are measured from it. 0 means: when it is given to the engine.
        queued_at: When its inputs were ready, such as fetched images and token ids; None means at its arrival.
        media: Images and video that replace the placeholders, in order, without overlap.
        positions: int32 [3, prompt], rotary positions (time, height, width) of the prompt's tokens, for models with
            M-RoPE. None means 0, 1, 2, ... on all three axes.
        segments: Segments of the prompt, in order, with deadlines. Empty is the same as one that covers it all.
        slo: Service level objectives, if any.
        cache_salt: Requests share cached blocks only with requests that have the same salt.
        digests: Digests of the prompt's full blocks, see memory.prefix.prompt_digests. The engine makes those it lacks.
        drop_shares: Shares of its cache that compression may drop at its decode steps, if there is a custom controller;
            see memory.compression.Schedule.table.
        processed: Whether engine.InputProcessor has checked and completed it.
        forced_ids: Output tokens that are given instead of sampled (teacher forcing): output i is forced_ids[i].
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival: float = 0.0
    queued_at: float | None = None
    media: tuple[MediaSpan, ...] = ()
    positions: np.ndarray | None = dataclasses.field(default=None, compare=False)
    segments: tuple[Segment, ...] = ()
    slo: SLO | None = None
    cache_salt: str = ""
    digests: tuple[bytes, ...] = dataclasses.field(default=(), compare=False, repr=False)
    drop_shares: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)
    processed: bool = dataclasses.field(default=False, compare=False, repr=False)
    forced_ids: tuple[int, ...] = ()

    @property
    def queued(self) -> float:
        """When it began to wait for its first step, in seconds on the engine's clock."""
        return self.arrival if self.queued_at is None else self.queued_at

    @functools.cached_property
    def position_delta(self) -> int:
        """Offset from the index of a generated token to its rotary position.

        Rotary positions go on after the largest one in the prompt, which with images is less than its token count.
        """
        return 0 if self.positions is None else int(self.positions.max()) + 1 - len(self.prompt_ids)

    @functools.cached_property
    def parts_stop(self) -> int:
        """The stop index of the last part of the prompt that counts under another modality than text: media and table
        segments; 0 if there are none."""
        tables = [segment.stop for segment in self.segments if segment.modality == "table"]
        return max([*tables[-1:], *(span.stop for span in self.media[-1:])], default=0)

    @functools.cached_property
    def segment_stops(self) -> tuple[int, ...]:
        """The stop index of each segment."""
        return tuple(segment.stop for segment in self.segments)
