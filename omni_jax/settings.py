"""The base of all settings: frozen dataclasses whose values are checked against their annotations.

Command-line flags, YAML keys, environment variables and docs/configuration.md are made from these classes
(serving/cli/options.py, serving/cli/reference.py): a setting's name, type, limits, default and description stand in one
place.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, get_args, get_type_hints

_PLAIN = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Checks every field's type and limits when an instance is made.

    Raises:
        ValueError: a value does not fit its annotation; the message names the field, the value and what is expected.
    """

    def __post_init__(self):
        from pydantic import ValidationError  # here, since `--help` need not wait for it

        for name, adapter in _adapters(type(self)).items():
            value = getattr(self, name)
            try:
                adapter.validate_python(value, strict=True)
            except ValidationError as error:
                raise ValueError(f"{name} must {expected(error)}, got {value!r}") from None
            if str(value).startswith("~") and Path in get_args(get_type_hints(type(self))[name]):
                self._replace(name, Path(value).expanduser())

    def values(self) -> dict[str, Any]:
        """Field names to values, of this class and its bases."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def _replace(self, name: str, value: Any) -> None:
        """Sets a field to the normal form of its value; for `__post_init__` only."""
        object.__setattr__(self, name, value)


def expected(error: Any) -> str:
    """What a pydantic.ValidationError says a value should be, without its heading and links."""
    text = " or ".join(dict.fromkeys(fault["msg"].removeprefix("Input should ") for fault in error.errors()))
    for words, plain in _PLAIN.items():
        text = text.replace(words, plain)
    return text


@functools.cache
def _adapters(settings: type[Settings]) -> dict[str, Any]:
    from pydantic import TypeAdapter

    hints = get_type_hints(settings, include_extras=True)
    return {field.name: TypeAdapter(hints[field.name]) for field in dataclasses.fields(settings)}
