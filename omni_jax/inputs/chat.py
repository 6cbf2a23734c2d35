"""OpenAI messages -> the one shape a chat template is given, whichever of the allowed ones a client chose. No I/O."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omni_jax.requests import InvalidRequest

MAX_NESTING = 100  # of arguments, schemas and the like; templates and json.dumps recurse over them


def clean_text(text: str, param: str | None = None) -> str:
    """The text with surrogate pairs joined, or InvalidRequest for half a pair: it has no UTF-8, and no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError as error:
            lone = int.from_bytes(error.object[error.start : error.start + 2], "little")
            raise InvalidRequest(
                f"text must be valid Unicode, got the unpaired surrogate U+{lone:04X}; a character outside the basic "
                "plane is written as a pair of two, e.g. \\ud83d\\ude00",
                param=param,
            ) from None
    return text


def map_strings(value: Any, change: Callable[[str], str], *, param: str | None = None, depth: int = 0) -> Any:
    """A copy of JSON-like data with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if not isinstance(value, Mapping | list | tuple):
        return value
    if depth >= MAX_NESTING:
        raise InvalidRequest(f"{param} is nested more than {MAX_NESTING} levels deep", param=param)
    if isinstance(value, Mapping):
        return {
            map_strings(key, change, param=param, depth=depth + 1): map_strings(
                item, change, param=param, depth=depth + 1
            )
            for key, item in value.items()
        }
    return [map_strings(item, change, param=param, depth=depth + 1) for item in value]


def normal_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them.

    `content` is always a string: null, absent and [] are "", text parts are joined by newlines (as in vLLM). Arguments
    of tool calls are objects, not JSON text: "" and "null" are {}. Keys with the value null, and an empty tool_calls,
    are left out, since templates ask whether a key is there.

    Raises:
        InvalidRequest: no messages, a message without a role, a part that is not text, arguments that are no object.
    """
    if not messages:
        raise InvalidRequest("messages must hold at least one message, got none", param="messages")
    return [_normal_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normal_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _invalid(f"{where} must be an object, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _invalid(f"{where}.role must be a non-empty string, got {role!r}")
    normal = {key: value for key, value in message.items() if value is not None}
    normal["content"] = _text(message.get("content"), f"{where}.content")
    calls = normal.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list | tuple):
            raise _invalid(f"{where}.tool_calls must be a list, got {type(calls).__name__}")
        normal["tool_calls"] = [_normal_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return normal


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise _invalid(f"{where} must be a string or a list of parts, got {type(content).__name__}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            given = repr(kind) if isinstance(part, Mapping) else type(part).__name__
            raise _invalid(f"{where}[{i}] is a part of type {given}; this model reads parts of type 'text' only")
        if not isinstance(part.get("text"), str):
            raise _invalid(f"{where}[{i}].text must be a string, got {type(part.get('text')).__name__}")
        texts.append(part["text"])
    return "\n".join(texts)


def _normal_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _invalid(f"{where} must be an object with a function that has a name")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(arguments: Any, where: str) -> Mapping[str, Any]:
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments, parse_constant=_no_constant) if arguments.strip() else None
        except (ValueError, RecursionError):
            raise _invalid(f"{where} must be the JSON text of an object, got {_short(arguments)}") from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _invalid(f"{where} must be the JSON text of an object, got {_short(arguments)}")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _short(value: Any, limit: int = 80) -> str:
    text = ascii(value)
    return text if len(text) <= limit else text[:limit] + "..."


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")
