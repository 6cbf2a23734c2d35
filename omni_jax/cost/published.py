"""Fields of some published models' config.json that the planner needs, so that a model can be planned for before it is
downloaded."""

import functools
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


@functools.cache
def _published() -> Mapping[str, Mapping[str, Any]]:
    return json.loads(files("omni_jax.cost").joinpath("published.json").read_text(encoding="utf-8"))


def published_names() -> tuple[str, ...]:
    """Short names of the models, in the order of the file."""
    return tuple(_published())


def published_config(name: str) -> Mapping[str, Any]:
    """The config.json of a model, by its short name or its repository's name, ignoring case.

    Raises:
        ValueError: the name is unknown.
    """
    return _entry(name)["config"]


def published_repository(name: str) -> str:
    """The repository of a model on the hub, by the same names."""
    return _entry(name)["of"]


def _entry(name: str) -> Mapping[str, Any]:
    for short, entry in _published().items():
        if name.lower() in (short.lower(), entry["of"].lower()):
            return entry
    raise ValueError(
        f"unknown model {name!r}: give a directory with a config.json, a config.json, or one of "
        f"{', '.join(published_names())}"
    )
