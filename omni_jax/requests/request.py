"""One request, as the engine takes it: tokens in, parameters, and a name."""

import dataclasses
import functools

import numpy as np

from omni_jax.requests.media import MediaSpan
from omni_jax.requests.sampling_params import SamplingParams
from omni_jax.requests.segment import Segment
from omni_jax.requests.slo import SLO


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What the engine is asked to continue.

    Attributes:
        id: unique among live requests; the engine refuses a second one of the same name.
        prompt_ids: token ids, at least one; placeholders of media are among them, one a feature.
        params: sampling and stopping parameters.
        arrival: seconds on the engine's clock; orders the queue and times the first token.
        media: what replaces the placeholders, in order; no two overlap.
        positions: int32 [3, prompt], rotary positions (time, height, width) of the prompt's tokens, for a model with
            M-RoPE; None is 0, 1, 2, ... on all three.
        segments: the prompt's, in order, with deadlines; none is the same as one that covers it all.
        slo: what the client was promised; None is nothing.
        cache_salt: requests share blocks of the prefix cache only with those of the same salt.
        forced_ids: output tokens that are given and not sampled (teacher forcing): output i is forced_ids[i].
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival: float = 0.0
    media: tuple[MediaSpan, ...] = ()
    positions: np.ndarray | None = dataclasses.field(default=None, compare=False)
    segments: tuple[Segment, ...] = ()
    slo: SLO | None = None
    cache_salt: str = ""
    forced_ids: tuple[int, ...] = ()

    @functools.cached_property
    def position_delta(self) -> int:
        """What is added to the place of a generated token to get its rotary position. The position behind the prompt
        is one more than the largest in it, which for images is less than the number of tokens."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - len(self.prompt_ids)

    @functools.cached_property
    def segment_stops(self) -> tuple[int, ...]:
        """Where each segment ends."""
        return tuple(segment.stop for segment in self.segments)
