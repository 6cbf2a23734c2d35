"""How an interrupted study goes on: each part of it is a file, which is kept if its settings are the same."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_jax.lab.fingerprint import code_digests


class OtherSettings(ValueError):
    """The directory holds results of other settings."""


def stamped(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, plain values, with digests of the custom functions that they name, and their own digest."""
    whole = {**settings, "code": code_digests(settings)}
    return {**whole, "digest": digest(whole)}


def digest(settings: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal characters of the settings' SHA-256."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_kept(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any], *, overwrite: bool) -> bool:
    """Return whether a file with the settings `found` is a result of the `wanted` ones.

    Args:
        overwrite: return False, instead of raising, where they differ.

    Raises:
        OtherSettings: they differ; the message names the first that does.
    """
    if found == wanted:
        return True
    if overwrite:
        return False
    raise OtherSettings(
        f"{path} was run with other settings ({difference(found, wanted)}): choose another directory, or --overwrite "
        "to run it again"
    )


def difference(found: Any, wanted: Any, where: str = "") -> str:
    """Describe the first setting that differs."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for key in [*wanted, *(key for key in found if key not in wanted)]:
            if key != "digest" and found.get(key) != wanted.get(key):
                return difference(found.get(key), wanted.get(key), f"{where}.{key}" if where else key)
    return f"{where} was {found!r} and is now {wanted!r}"
