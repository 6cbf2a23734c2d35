"""A tree of plain values (YAML, JSON) -> frozen dataclasses, by their annotations. Messages name what is wrong by its
path."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

T = TypeVar("T")


def read(kind: type[T], value: Any, where: str, *, base: T | None = None) -> T:
    """`value` as a `kind`: a dataclass, a number, a string, a Literal, a Path, or tuples, mappings and unions of these.

    Args:
        where: what the value is, for messages.
        base: a dataclass's values where the mapping has none.

    Raises:
        ValueError: unknown keys (with the nearest that there is), missing ones, values of another type, and whatever
            the dataclasses refuse. The message begins with where.
    """
    return _read(kind, value, where, base)


def check_keys(given: Collection[Any], known: Collection[str], where: str) -> None:
    """Raises ValueError for the first key that there is not, with the nearest that there is."""
    for key in given:
        if key in known:
            continue
        nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(sorted(known))}"
        raise ValueError(f"{where}: unknown key {key!r}; {hint}")


def _read(kind: Any, value: Any, where: str, base: Any = None) -> Any:
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where, base)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        return _read_union(arguments, value, where, base)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where}: expected one of {', '.join(map(repr, arguments))}, got {value!r}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where}: expected a list, got {value!r}")
        return tuple(_read(arguments[0], item, f"{where}[{number}]") for number, item in enumerate(value))
    if origin is Mapping or origin is dict:
        return {key: _read(arguments[1], item, f"{where}.{key}") for key, item in _mapping(value, where).items()}
    if kind is Any:
        return value
    if kind is Mapping:
        return _mapping(value, where)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where}: expected {_NAMES.get(kind, kind.__name__)}, got {value!r}")
    return value


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{where}: expected a mapping of names to values, got {value!r}")
    return value


def _read_dataclass(kind: Any, value: Any, where: str, base: Any) -> Any:
    given = _mapping(value, where)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    check_keys(given, fields, where)
    hints = typing.get_type_hints(kind)
    read = {
        name: _read(hints[name], item, f"{where}.{name}", getattr(base, name, None)) for name, item in given.items()
    }
    if base is None:
        missing = [
            name
            for name, field in fields.items()
            if name not in read
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise ValueError(f"{where}: {', '.join(missing)} must be given")
    try:
        return dataclasses.replace(base, **read) if base is not None else kind(**read)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _read_union(kinds: tuple[Any, ...], value: Any, where: str, base: Any) -> Any:
    if value is None and type(None) in kinds:
        return None
    of_value = [kind for kind in kinds if kind is not type(None)]
    for kind in of_value[:-1]:
        try:
            return _read(kind, value, where, base)
        except ValueError:
            continue
    return _read(of_value[-1], value, where, base)
