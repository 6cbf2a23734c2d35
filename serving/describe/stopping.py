"""When a run of `describe-images` stops early, because what failed would fail for every image; and how to resume it."""

import dataclasses
import os
import shlex
from collections.abc import Mapping
from typing import Any

from serving.describe.settings import DescribeSettings, Options

SERVER_LIMIT = 5  # rows in a row with a failure that is the server's or the key's
IMAGE_LIMIT = 20  # rows in a row with one message, from the first answer on; it may be the images' fault

_KEY = "give the right key with --api-key or OPENAI_API_KEY"
_ADDRESS = "is --server right (it ends in /v1), and --model?"
_BUSY = "lower --concurrency or --rate"
# Status, or type of a failure without a response -> what to do. None of these is about one image.
_REMEDIES: dict[int | str, str] = {
    401: _KEY,
    403: _KEY,
    404: _ADDRESS,
    405: _ADDRESS,
    429: _BUSY,
    502: "is the server running?",
    503: f"is it starting or overloaded? If so, wait, or {_BUSY}",
    504: _BUSY,
    "connection_error": "is the server running?",
    "timeout": f"raise --timeout, or {_BUSY}",
}


class Stopped(Exception):
    """All further requests would fail, too; the message says why, and what to do."""


class Failures:
    """Counts equal failures in a row."""

    def __init__(self) -> None:
        self._last: object = None
        self._count = 0
        self._any_good = False

    def check(self, row: Mapping[str, Any]) -> None:
        """Count a row that was written.

        Raises:
            Stopped: this and the rows before it show that the others would fail, too.
        """
        error = row.get("error")
        if error is None:
            self._last, self._any_good = None, True
            return
        if error.get("type") == "unreadable":  # it was not sent
            return
        kind = error.get("type") if error["status"] is None else error["status"]
        of_server = kind in _REMEDIES
        # Messages of a broken server differ where they have an id of the request.
        alike = of_server or (isinstance(kind, int) and kind >= 500)
        this = kind if alike else (kind, error["message"])
        self._count = self._count + 1 if this == self._last else 1
        self._last = this
        given = error["message"] if error["status"] is None else f"{kind}: {error['message']}"
        if of_server and self._count >= SERVER_LIMIT:
            raise Stopped(f"{self._count} requests in a row failed ({given}); {_REMEDIES[kind]}")
        if not of_server and not self._any_good and self._count >= IMAGE_LIMIT:
            raise Stopped(
                f"the first {self._count} requests failed alike ({given}), so the others most likely would, too. If it "
                "is the fault of these images, --no-retry-failed goes on behind them"
            )


def resume_command(options: Options) -> str:
    """The command that goes on where a run stopped: without --overwrite, and without showing a key."""
    words = ["omni-jax", "describe-images", options.source, "--prompt", options.prompt, "--out", str(options.out)]
    for field in dataclasses.fields(DescribeSettings):
        name, value = field.name.replace("_", "-"), getattr(options, field.name)
        if field.name in ("api_key", "overwrite") or value in (None, field.default):
            continue
        words += [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
    if options.api_key and options.api_key != os.environ.get("OPENAI_API_KEY"):
        words += ["--api-key", "KEY"]
    return shlex.join(words)
