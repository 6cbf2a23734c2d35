"""What the config.json of some published models says, as far as it is needed to plan: for who has no copy yet."""

import functools
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


@functools.cache
def _published() -> Mapping[str, Mapping[str, Any]]:
    return json.loads(files("omni_jax.cost").joinpath("published.json").read_text(encoding="utf-8"))


def published_names() -> tuple[str, ...]:
    """The short names, in the order of the file."""
    return tuple(_published())


def published_config(name: str) -> Mapping[str, Any]:
    """A config.json by a model's short name or that of its repository, in any case.

    Raises:
        ValueError: none is kept under that name.
    """
    for short, entry in _published().items():
        if name.lower() in (short.lower(), entry["of"].lower()):
            return entry["config"]
    raise ValueError(
        f"no model is known as {name!r}: give a directory with a config.json, such a file, or one of "
        f"{', '.join(published_names())}"
    )
