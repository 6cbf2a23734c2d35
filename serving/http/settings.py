"""Settings of the HTTP server, by panel. Names are vLLM's where it has them."""

import contextlib
import dataclasses
import ipaddress
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, cast

from annotated_types import Ge, Gt, Le, Lt

from omni_jax.settings import Settings
from omni_jax.yaml_file import read_json

MODALITIES = ("image", "video")
DEFAULT_LIMITS: Mapping[str, int] = {"image": 16, "video": 1}  # parts in a request


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings(Settings):
    """The address and the limits of the server.

    Attributes:
        host: Address to listen on; 0.0.0.0 is every interface.
        port: Port to listen on; 0 takes a free one.
        served_model_name: Names of the model in the API. Default: the name of the model's directory.
        max_body_size: Maximum number of bytes of a request's body. An image in it takes a third more than its file.
        api_server_count: Number of processes that serve HTTP: they read requests, fetch images, tokenize, and write
            answers. The engine runs beside them, in processes of its own.
        shutdown_timeout: Seconds that running requests get to finish after SIGTERM or SIGINT. The process ends at most
            five seconds later.
        header_timeout: Seconds in which the head of a request must arrive, from the connection or from its first byte.
        body_timeout: Seconds in which the body of a request must arrive.
        keep_alive_timeout: Seconds after which a connection without a request is closed.
        send_timeout: Seconds after which a connection is closed whose client reads nothing of its response.
        engine_core: Where the engine runs: in a process of its own for each replica, or in a thread of the server,
            which is slower and for debugging.
        access_log: Log a line for each request.
        disable_log_requests: Accepted for vLLM's command lines. Prompts are never logged.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65535)] = 8000
    served_model_name: tuple[str, ...] = ()
    max_body_size: Annotated[int, Ge(1)] = 64 * 2**20
    api_server_count: Annotated[int, Ge(1), Le(64)] = 1
    shutdown_timeout: Annotated[float, Ge(0), Lt(math.inf)] = 20.0
    header_timeout: Annotated[float, Gt(0), Lt(math.inf)] = 20.0
    body_timeout: Annotated[float, Gt(0), Lt(math.inf)] = 120.0
    keep_alive_timeout: Annotated[float, Gt(0), Lt(math.inf)] = 75.0
    send_timeout: Annotated[float, Gt(0), Lt(math.inf)] = 60.0
    engine_core: Literal["process", "thread"] = "process"
    access_log: bool = True
    disable_log_requests: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not all(self.served_model_name):
            raise ValueError("served_model_name must not be empty")
        if self.api_server_count > 1 and self.engine_core != "process":
            raise ValueError("api_server_count above 1 needs engine_core process")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaSettings(Settings):
    """Images and videos in requests.

    Attributes:
        limit_mm_per_prompt: Maximum number of images and videos in a request: image=16,video=1 or JSON. A modality that
            is left out keeps its default.
        allow_mm_processor_kwargs: Let requests set min_pixels, max_pixels, fps and num_frames, within the limits of the
            server.
    """

    limit_mm_per_prompt: str | Mapping[str, int] = "image=16,video=1"
    allow_mm_processor_kwargs: bool = True

    def __post_init__(self):
        super().__post_init__()
        limits = self.limit_mm_per_prompt
        limits = _parse_limits(limits) if isinstance(limits, str) else limits
        for name, limit in limits.items():
            if name not in MODALITIES or type(limit) is not int or limit < 0:
                raise ValueError(
                    f"a media limit must be 'image' or 'video' and a number from 0, got {name!r}: {limit!r}"
                )
        self._replace("limit_mm_per_prompt", {**DEFAULT_LIMITS, **limits})

    @property
    def limits(self) -> Mapping[str, int]:
        """The limit of each modality."""
        return cast(Mapping[str, int], self.limit_mm_per_prompt)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaAccessSettings(Settings):
    """Where images and videos may be fetched from, and how large one of them may be.

    Attributes:
        allowed_media_domains: Host names that media may be fetched from, also by redirects, without their subdomains. A
            host with a private address needs allow_private_media_addresses, too. Default: any host.
        allowed_local_media_path: Directory of files that requests may name. Default: none.
        allow_private_media_addresses: Fetch media also from this machine and from private networks.
        media_timeout: Seconds to fetch one image or video, including redirects.
        max_media_bytes: Maximum number of bytes of one image or video.
        max_media_redirects: Maximum number of redirects for one image or video.
    """

    allowed_media_domains: tuple[str, ...] = ()
    allowed_local_media_path: Path | None = None
    allow_private_media_addresses: bool = False
    media_timeout: Annotated[float, Gt(0), Lt(math.inf)] = 5.0
    max_media_bytes: Annotated[int, Ge(1)] = 64 * 2**20
    max_media_redirects: Annotated[int, Ge(0)] = 5

    def __post_init__(self):
        super().__post_init__()
        self._replace("allowed_media_domains", tuple(map(_domain, self.allowed_media_domains)))
        if self.allowed_local_media_path is not None:
            real = Path(os.path.realpath(self.allowed_local_media_path))
            if not real.is_dir():
                raise ValueError(f"allowed_local_media_path must be a directory, got {self.allowed_local_media_path}")
            self._replace("allowed_local_media_path", real)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecuritySettings(Settings):
    """Which clients may use the server, and what requests may make it do.

    Attributes:
        api_key: Keys of which a request must send one as its bearer token. Default: no key is needed.
        allow_request_segment_policy: Let requests set segment_policy.
        allowed_origins: Origins of web pages that may use the server from a browser (CORS), such as
            https://chat.example.com; * is any. Default: none.
        allowed_methods: Methods that such pages may use; * is any.
        allowed_headers: Headers that such pages may send; * is any.
        allow_credentials: Let browsers send cookies and the like with the requests of such pages.
    """

    api_key: tuple[str, ...] = ()
    allow_request_segment_policy: bool = False
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not all(self.api_key):  # an unset shell variable must not open the server
            raise ValueError("api_key must not be empty")
        for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
            self._replace(name, _json_list(name, getattr(self, name)))
        for origin in self.allowed_origins:
            if origin not in ("*", "null") and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s*]+", origin):
                raise ValueError(
                    f"allowed_origins must be *, null or origins such as https://chat.example.com:8080, got {origin!r}"
                )


def _json_list(name: str, given: tuple[str, ...]) -> tuple[str, ...]:
    """The values, which may be given as one JSON list, as vLLM takes them."""
    if len(given) != 1 or not given[0].lstrip().startswith("["):
        return given
    with contextlib.suppress(ValueError):
        values = json.loads(given[0])
        if all(isinstance(value, str) for value in values):
            return tuple(values)
    raise ValueError(f"{name} must be a JSON list of strings, got {given[0]!r}")


def _parse_limits(text: str) -> dict[str, int]:
    """The limits in `image=4,video=1` or, as in vLLM, `{"image": 4, "video": 1}`.

    Raises:
        ValueError: another format. MediaSettings checks names and numbers.
    """
    try:
        if text.lstrip().startswith("{"):
            return read_json(text)
        limits = [(name.strip(), int(count)) for name, count in (pair.split("=") for pair in text.split(","))]
        if len(dict(limits)) < len(limits):
            raise ValueError
        return dict(limits)
    except ValueError:
        raise ValueError(
            f'media limits must be like image=4,video=1 or {{"image": 4, "video": 1}}, each once, got {text!r}'
        ) from None


def _domain(given: str) -> str:
    """The normal form of a host name. Raises ValueError for anything else, such as a URL."""
    from yarl import URL  # here, since `--help` need not wait for it

    with contextlib.suppress(ValueError):
        name = URL.build(scheme="http", host=given.strip().rstrip(".")).raw_host
        if name and not re.search(r"[\s/@*%]", name) and (":" not in name or ipaddress.ip_address(name)):
            return name.lower()
    raise ValueError(f"an allowed media domain must be a host name such as images.example.com, got {given!r}")
