"""Settings of the batch client."""

import dataclasses
import math
import urllib.parse
from pathlib import Path
from typing import Annotated, Any

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
    max_tokens: Annotated[int, Ge(1)] | None = 256
    temperature: Annotated[float, Ge(0), Lt(math.inf)] | None = None
    concurrency: Annotated[int, Ge(1)] = 8
    rate: Annotated[float, Ge(0), Lt(math.inf)] = 0.0
    retries: Annotated[int, Ge(0)] = 5
    timeout: Annotated[float, Gt(0), Lt(math.inf)] = 300.0
    retry_failed: bool = True
    overwrite: bool = False
    limit: Annotated[int, Ge(1)] | None = None

    def __post_init__(self):
        super().__post_init__()
        try:
            address = urllib.parse.urlsplit(self.server)
            valid = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
        except ValueError:  # invalid brackets or port
            valid = False
        if not valid:
            raise ValueError(f"server must be a URL such as http://127.0.0.1:8000/v1, got {self.server!r}")
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("api_key must be printable ASCII; remove line feeds and other control characters")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(DescribeSettings):
    """A job: what to ask about which images, and where the answers go.

    Attributes:
        source: Folder, image, URL, or .txt file with a path or URL in each line.
        prompt: What to ask about each image.
        out: JSONL file for the results.
    """

    source: str
    prompt: str
    out: Path

    def __post_init__(self):
        super().__post_init__()
        if not self.prompt.strip():
            raise ValueError("prompt must not be empty")

    def settings(self, model: str | None) -> dict[str, Any]:
        """The settings that determine the texts, which all rows of a file share."""
        return {
            "prompt": self.prompt,
            "system": self.system,
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
