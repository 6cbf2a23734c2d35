"""One request, as the engine takes it: tokens in, parameters, and a name."""

import dataclasses

from omni_jax.requests.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What the engine is asked to continue.

    Attributes:
        id: unique among live requests; the engine refuses a second one of the same name.
        prompt_ids: token ids, at least one.
        params: sampling and stopping parameters.
        arrival: seconds on the engine's clock; orders the queue and times the first token.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival: float = 0.0
