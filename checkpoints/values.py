"""Values of a checkpoint's JSON files, checked like values from a client: an error has file, key, value and limits."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

from checkpoints.errors import CheckpointError

LARGEST = 2**24  # of sizes, by default: above any published model, far below what overflows when sizes are multiplied
_REQUIRED: Any = object()
_SHOWN = 80  # characters of a wrong value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Values:
    """The values of one JSON object. A key whose value is null counts as missing.

    Every method returns the value of a key, or `default` if the key is missing.

    Raises (all methods):
        CheckpointError: the value has another type or lies outside the limits, or a required key is missing.

    Attributes:
        content: the object.
        file: its file's name, for errors; for an object inside another one also its key: "config.json: text_config".
    """

    content: Mapping[str, Any]
    file: str = "config.json"

    def integer(self, key: str, default: Any = _REQUIRED, *, low: int = 1, high: int = LARGEST) -> int:
        value = self._get(key, default)
        if value is not default and not (type(value) is int and low <= value <= high):
            self.refuse(key, value, f"an integer from {low:,} to {high:,}")
        return value

    def number(self, key: str, default: Any = _REQUIRED, *, low: float, high: float) -> float:
        """A number from `low` to `high`, both included; an integer is one, NaN and infinity are not."""
        value = self._get(key, default)
        if value is not default and not (type(value) in (int, float) and low <= value <= high):
            self.refuse(key, value, f"a number from {low:,} to {high:,}")
        return value

    def boolean(self, key: str, default: Any = _REQUIRED) -> bool:
        value = self._get(key, default)
        if value is not default and type(value) is not bool:
            self.refuse(key, value, "true or false")
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        value = self._get(key, default)
        if value is not default and not isinstance(value, str):
            self.refuse(key, value, "a text")
        return value

    def integers(self, key: str, default: Any = _REQUIRED, *, low: int = 0, high: int = LARGEST) -> tuple[int, ...]:
        """A list of integers from `low` to `high`."""
        value = self._get(key, default)
        if value is default:
            return value
        if not isinstance(value, list) or not all(type(item) is int and low <= item <= high for item in value):
            self.refuse(key, value, f"a list of integers from {low:,} to {high:,}")
        return tuple(value)

    def numbers(self, key: str, default: Any = _REQUIRED, *, low: float, high: float, count: int) -> tuple[float, ...]:
        """A list of `count` numbers from `low` to `high`."""
        value = self._get(key, default)
        if value is default:
            return value
        if not (
            isinstance(value, list)
            and len(value) == count
            and all(type(item) in (int, float) and low <= item <= high for item in value)
        ):
            self.refuse(key, value, f"a list of {count} numbers from {low:,} to {high:,}")
        return tuple(value)

    def object(self, key: str, default: Any = _REQUIRED) -> "Values":
        """A nested object; `default` is one, too."""
        value = self._get(key, default)
        if not isinstance(value, Mapping):
            self.refuse(key, value, "an object")
        return Values(content=value, file=f"{self.file}: {key}")

    def refuse(self, key: str, value: Any, expected: str) -> NoReturn:
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
        raise CheckpointError(f"{self.file}: {key} must be {expected}, got {shown}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.content.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(f"{self.file} has no {key}")
        return default
