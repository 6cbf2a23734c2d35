"""Reads frozen dataclasses from plain values (YAML, JSON), strictly; errors name the path of the key."""

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


def read(kind: type[T], tree: Any, where: str) -> T:
    """Return `tree` as a `kind`. Types are not converted, except that a whole number may stand for a float.

    Args:
        kind: a dataclass.
        tree: plain values, as JSON has them.
        where: path of `tree`, with which each line of an error begins.

    Raises:
        ValueError: unknown keys (with the nearest valid one), missing keys, values of another type, and whatever the
            dataclasses refuse. Each has its line.
    """
    try:
        return TypeAdapter(kind).validate_json(json.dumps(tree), strict=True, extra="forbid")
    except ValidationError as error:
        raise ValueError("\n".join(_message(kind, tree, where, fault) for fault in error.errors())) from None


def check_keys(given: Collection[str], known: Collection[str], where: str) -> None:
    """Raise ValueError for the first unknown key, with the nearest known one."""
    for key in given:
        if key not in known:
            raise ValueError(f"{where}: {_unknown(key, known)}")


def _unknown(key: str, known: Collection[str]) -> str:
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"expected one of {', '.join(sorted(known))}"
    return f"unknown key {key!r}; {hint}"


def _message(kind: Any, tree: Any, where: str, fault: Mapping[str, Any]) -> str:
    loc, unknown = list(fault["loc"]), fault["type"] == "unexpected_keyword_argument"
    for key in loc[:-1] if unknown else loc:
        if isinstance(tree, Mapping) and key in tree:
            where += f".{key}"
        elif isinstance(tree, (list, tuple)) and isinstance(key, int):
            where += f"[{key}]"
        else:
            break  # a missing key, or the name of a union's member
        kind, tree = _member(kind, key), tree[key]
    match fault["type"]:
        case "unexpected_keyword_argument":
            return f"{where}: {_unknown(loc[-1], [field.name for field in dataclasses.fields(kind)])}"
        case "missing":
            return f"{where}: the key {loc[-1]!r} is missing"
        case "value_error":
            return f"{where}: {fault['ctx']['error']}"
    return f"{where}: {fault['msg']}, got {fault['input']!r}"


def _member(kind: Any, key: Any) -> Any:
    """The type of a member of a dataclass, a Mapping[str, ...] or a tuple."""
    if not dataclasses.is_dataclass(kind):
        return next(argument for argument in typing.get_args(kind) if argument is not str)
    kind = typing.get_type_hints(kind)[key]
    optional = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind)[0] if optional else kind
