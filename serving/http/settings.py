"""Settings of the HTTP server, by panel. Names are vLLM's where it has them."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

from omni_jax.settings import Settings

Seconds = Annotated[float, Gt(0), Lt(math.inf)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings(Settings):
    """The address and the limits of the server.

    Attributes:
        host: Address to listen on; 0.0.0.0 is every interface.
        port: Port to listen on; 0 takes a free one.
        served_model_name: Names of the model in the API. Default: the name of the model's directory.
        max_body_size: Maximum number of bytes of a request's body. An image in it takes a third more than its file.
        shutdown_timeout: Seconds that running requests get to finish after SIGTERM or SIGINT.
        access_log: Log a line for each request.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65535)] = 8000
    served_model_name: tuple[str, ...] = ()
    max_body_size: Annotated[int, Ge(1)] = 64 * 2**20
    shutdown_timeout: Annotated[float, Ge(0), Lt(math.inf)] = 30.0
    access_log: bool = True

    def __post_init__(self):
        super().__post_init__()
        if not all(self.served_model_name):
            raise ValueError("served_model_name must not be empty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaSettings(Settings):
    """Images and videos in requests.

    Attributes:
        limit_mm_per_prompt: Maximum number of images and videos in a request: image=16,video=1 or JSON. A modality that
            is left out keeps its default.
        media_timeout: Seconds to fetch an image or a video, redirects included.
        allow_mm_processor_kwargs: Let requests set min_pixels, max_pixels, fps and num_frames.
    """

    limit_mm_per_prompt: str | Mapping[str, int] = "image=16,video=1"
    media_timeout: Seconds = 5.0
    allow_mm_processor_kwargs: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecuritySettings(Settings):
    """Who may use the server, and what requests may make it do.

    Attributes:
        api_key: Keys of which a request must send one as its bearer token. Default: none is needed.
        allowed_media_domains: Host names that images and videos may be fetched from. Default: any public host.
        allowed_local_media_path: Directory of files that requests may name. Default: none.
        allow_private_media_addresses: Fetch images and videos also from this machine and private networks.
        allow_request_segment_policy: Let requests set segment_policy.
    """

    api_key: tuple[str, ...] = ()
    allowed_media_domains: tuple[str, ...] = ()
    allowed_local_media_path: Path | None = None
    allow_private_media_addresses: bool = False
    allow_request_segment_policy: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not all(self.api_key):  # an unset shell variable must not open the server
            raise ValueError("api_key must not be empty")
