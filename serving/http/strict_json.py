"""A strict JSON parser for request bodies. It rejects what Python's parser accepts and later code cannot handle."""

import json
import math
import re
from typing import Any

from omni_jax.requests import InvalidRequest

MAX_DEPTH = 64  # levels of nested arrays and objects; a chat with tools needs about ten
MAX_DIGITS = 300  # digits of an integer, so that it converts to a float

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def loads(raw: bytes) -> Any:
    """Parses one JSON document.

    Raises:
        InvalidRequest: bytes that are not UTF-8, with or without a byte order mark; text that is not JSON (RFC 8259);
            NaN, Infinity and numbers that overflow a float, such as 1e400; integers of more than MAX_DIGITS digits;
            objects with a duplicate key (parsers disagree on which one counts); nesting deeper than MAX_DEPTH; unpaired
            surrogate escapes, which cannot be encoded again.
    """
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        value = json.loads(
            text,
            parse_constant=_reject_constant,
            parse_float=_finite_float,
            parse_int=_bounded_int,
            object_pairs_hook=_unique_keys,
        )
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise InvalidRequest(_too_deep()) from None
    # Other texts cannot fail the check; nearly all bodies skip it.
    if _SURROGATE_ESCAPE.search(text) or text.count("[") + text.count("{") > MAX_DEPTH:
        _check(value)
    return value


def _reject_constant(name: str):
    raise InvalidRequest(f"the body contains {name}, which is not JSON; numbers must be finite")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise InvalidRequest(f"the body contains the number {digits[:40]}, which is too large; numbers must be finite")
    return value


def _bounded_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise InvalidRequest(f"the body contains an integer of {len(digits)} digits; at most {MAX_DIGITS} are allowed")
    return int(digits)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        duplicate = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise InvalidRequest(f"the body has the key {ascii(duplicate)[:60]} twice in one object")
    return value


def _too_deep() -> str:
    return f"the body is nested too deeply; at most {MAX_DEPTH} levels are allowed"


def _check(value: Any) -> None:
    """Rejects nesting beyond MAX_DEPTH and strings that cannot be encoded. Iterative, so that no depth overflows it."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str):
                _check_string(item)
            elif isinstance(item, dict):
                for key in item:
                    _check_string(key)
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        if not inner:
            return
        level = inner
    raise InvalidRequest(_too_deep())


def _check_string(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the body contains an unpaired surrogate, \\u{ord(text[error.start]):04x}, which is half a character; "
            "send both halves or the character itself"
        ) from None
