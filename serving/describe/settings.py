"""Settings of the batch client."""

import dataclasses
import math
from typing import Annotated

from annotated_types import Ge, Gt, Lt

from omni_jax.settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescribeSettings(Settings):
    """How a server is asked about each image.

    Attributes:
        server: Base URL of an OpenAI-compatible server.
        model: Model to ask. Default: the first that the server lists.
        api_key: Key that is sent as a bearer token. Default: the variable OPENAI_API_KEY.
        system: System prompt.
        max_tokens: Maximum number of tokens of a text.
        temperature: Randomness of the texts; 0 is greedy. Default: the server's.
        concurrency: Maximum number of requests in flight.
        rate: Maximum number of requests a second, retries included; 0 is no limit.
        retries: Maximum number of further attempts after a 429, a 5xx, a broken connection or a timeout.
        timeout: Seconds of an attempt.
        retry_failed: Ask again about images that failed in an earlier run.
        overwrite: Discard the results that the output file holds.
        limit: Maximum number of images to send in this run. Default: all.
    """

    server: str = "http://127.0.0.1:8000/v1"
    model: str | None = None
    api_key: str | None = None
    system: str | None = None
    max_tokens: Annotated[int, Ge(1)] = 256
    temperature: Annotated[float, Ge(0), Lt(math.inf)] | None = None
    concurrency: Annotated[int, Ge(1)] = 8
    rate: Annotated[float, Ge(0), Lt(math.inf)] = 0.0
    retries: Annotated[int, Ge(0)] = 5
    timeout: Annotated[float, Gt(0), Lt(math.inf)] = 300.0
    retry_failed: bool = True
    overwrite: bool = False
    limit: Annotated[int, Ge(1)] | None = None
