"""OpenAI messages in the one normal form that chat templates take, and the images and videos among their parts.

No I/O.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from omni_jax.requests import InvalidRequest, MediaModality

MAX_NESTING = 100  # levels in arguments, schemas and other objects; templates and json.dumps recurse over them


def clean_text(text: str, param: str | None = None) -> str:
    """Join surrogate pairs in the text; raise InvalidRequest for an unpaired one, which UTF-8 cannot encode."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError as error:
            lone = int.from_bytes(error.object[error.start : error.start + 2], "little")
            raise InvalidRequest(
                f"text must be valid Unicode, got the unpaired surrogate U+{lone:04X}; write a character outside the "
                "basic plane as a pair, e.g. \\ud83d\\ude00",
                param=param,
            ) from None
    return text


def map_strings(value: Any, change: Callable[[str], str], *, param: str | None = None, depth: int = 0) -> Any:
    """Copy JSON-like data with `change` applied to every string, including keys."""
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MediaPart:
    """An image or video in a message, before it is fetched or opened.

    Attributes:
        modality: "image" or "video".
        source: a URL or path as text, bytes of a file, a Pillow image, or an array; for a video also a list of frames.
        where: the part's place in the request for error messages, for example "messages[0].content[1]".
        options: min_pixels, max_pixels, fps, num_frames, not validated: from fields of the part (qwen-vl-utils' names)
            and its mm_processor_kwargs, which come first.
        low_detail: whether the part has OpenAI's detail "low".
    """

    modality: MediaModality
    source: Any
    where: str
    options: Mapping[str, Any]
    low_detail: bool = False


# Part type, which is also the key of its source -> (modality, whether the source is a URL as in OpenAI's parts).
_MEDIA_PARTS: dict[str, tuple[MediaModality, bool]] = {
    "image_url": ("image", True),
    "image": ("image", False),
    "video_url": ("video", True),
    "video": ("video", False),
}
# Fields of a part, or of the object with its URL, that select pixels and frames: qwen-vl-utils' names -> ours.
_OPTION_FIELDS = {
    "min_pixels": "min_pixels",
    "max_pixels": "max_pixels",
    "fps": "fps",
    "sample_fps": "fps",  # of a list of frames
    "nframes": "num_frames",
    "num_frames": "num_frames",
}
# Its other fields. Ignoring them would show the model something else than was asked for.
_REFUSED_FIELDS = (
    *("resized_height", "resized_width", "total_pixels", "min_frames", "max_frames", "video_start", "video_end"),
    "raw_fps",
)
_DETAILS = ("auto", "high", "low", "original")  # OpenAI's
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # OpenAI's
_SPOKEN = ("system", "developer", "user")  # roles whose messages must have content
# Roles whose messages may have images and video: user as in OpenAI's API, and tool, for example for screenshots.
# Models were not trained on images in system or assistant messages.
_MEDIA_ROLES = ("user", "tool")

_SOURCES = (str, os.PathLike, bytes, Image.Image, np.ndarray)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallFormat:
    """How a chat template takes tool calls.

    Attributes:
        arguments_as_text: arguments are JSON text, for templates that concatenate them (DeepSeek-R1), instead of an
            object for templates that use tojson or items().
        null_content: a message with calls and no text has the content null instead of "", which some templates test.
    """

    arguments_as_text: bool = False
    null_content: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemplateForm:
    """What a chat template writes of a conversation; see chat_templates.template_form.

    Attributes:
        calls: how it takes tool calls; None: it leaves them out.
        left_out: roles whose messages it leaves out, and no other role stands for them.
        written_as: role -> the role under which its messages are written instead.
        tools: whether it writes tools.
    """

    calls: CallFormat | None = CallFormat()
    left_out: frozenset[str] = frozenset()
    written_as: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tools: bool = True


def normal_messages(
    messages: Sequence[Mapping[str, Any]],
    *,
    modalities: Collection[MediaModality] = (),
    form: TemplateForm | None = None,
) -> list[dict[str, Any]]:
    """Normalise messages for a chat template.

    For a text model, `content` becomes a string: null, missing and [] become "", where the role allows them (an
    assistant that calls tools says nothing); text parts are joined by newlines (as in vLLM). For a model that reads
    media, a list of parts stays a list of {"type": "text", "text"}, {"type": "image"} and {"type": "video"},
    in the same order; media_parts returns their sources. A refusal of the assistant, a part or a message's, is a text.

    A message of a role that the template does not know gets the one that stands for it, as `form` says: developer
    becomes system, function becomes tool, and an assistant's function_call one of its tool_calls.

    Arguments of tool calls become objects or JSON text, as `form` says; "" and "null" become {}. Other keys with the
    value null and an empty tool_calls are dropped, since templates test whether a key exists.

    Args:
        modalities: what the model reads besides text.
        form: what the template writes. Default: everything, with arguments as objects.

    Raises:
        InvalidRequest: there are no messages, a message has no role or an unknown one, or has no content as system,
            developer or user, a part is of a type that the model does not read or lacks its field, media is in a
            message of another role than user or tool, arguments are not an object, or the template would leave out a
            message or its tool calls.
    """
    _check_list(messages)
    if not messages:
        raise InvalidRequest("messages must hold at least one message, got none", param="messages")
    return [
        _normal_message(message, f"messages[{i}]", modalities, form or TemplateForm())
        for i, message in enumerate(messages)
    ]


def media_parts(
    messages: Sequence[Mapping[str, Any]], *, modalities: Collection[MediaModality] = ("image", "video")
) -> list[MediaPart]:
    """The images and videos of a conversation, in the order of the template's placeholders.

    Args:
        modalities: what the model reads besides text.

    Raises:
        InvalidRequest: as in normal_messages, for parts and their roles.
    """
    _check_list(messages)
    found = []
    for i, message in enumerate(messages):
        if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple):
            parts = _parts(message["content"], f"messages[{i}].content", message.get("role"), modalities)
            found += [part for part in parts if isinstance(part, MediaPart)]
    return found


def _check_list(messages: Any) -> None:
    if not isinstance(messages, list | tuple):
        raise _invalid(f"messages must be a list of messages, got {type(messages).__name__}")


def _normal_message(
    message: Any, where: str, modalities: Collection[MediaModality], form: TemplateForm
) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _invalid(f"{where} must be an object, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _invalid(f"{where}.role must be a non-empty string, got {role!r}")
    if role not in _ROLES:  # many templates would drop such a message in silence
        raise _invalid(f"{where}.role must be one of {', '.join(_ROLES)}, got {_shorten(role)}")
    if role in _SPOKEN and message.get("content") is None:
        raise _invalid(f"{where}.content is missing: a message with the role {role} needs a text or a list of parts")
    if role in form.left_out:
        raise _invalid(
            f"{where}: this model's chat template leaves out messages with the role {role}; send the text in a message "
            "of another role"
        )
    normal = {key: value for key, value in message.items() if value is not None}
    normal["role"] = form.written_as.get(role, role)
    content = message.get("content")
    refusal = normal.pop("refusal", None) if role == "assistant" else None
    if refusal is not None and not content:  # what an answer of OpenAI's API has instead of a text
        if not isinstance(refusal, str):
            raise _invalid(f"{where}.refusal must be a string, got {type(refusal).__name__}")
        content = refusal
    normal["content"] = _content(content, f"{where}.content", role, modalities)
    calls, field = normal.pop("tool_calls", None), f"{where}.tool_calls"
    if (older := normal.pop("function_call", None)) and not calls:
        calls, field = [{"type": "function", "function": older}], f"{where}.function_call"
    if calls:
        if not isinstance(calls, list | tuple):
            raise _invalid(f"{field} must be a list, got {type(calls).__name__}")
        if form.calls is None:
            raise _invalid(f"{field}: this model's chat template cannot render tool calls; send them as text")
        normal["tool_calls"] = [_normal_call(call, f"{field}[{i}]", form.calls) for i, call in enumerate(calls)]
        if form.calls.null_content and not normal["content"]:
            normal["content"] = None
    return normal


def _content(content: Any, where: str, role: str, modalities: Collection[MediaModality]) -> str | list[dict[str, str]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise _invalid(f"{where} must be a string or a list of parts, got {type(content).__name__}")
    parts = _parts(content, where, role, modalities)
    if not modalities:
        return "\n".join(part for part in parts if isinstance(part, str))
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": part.modality} for part in parts]


def _parts(content: Sequence, where: str, role: Any, modalities: Collection[MediaModality]) -> list[str | MediaPart]:
    return [_part(part, f"{where}[{i}]", role, modalities) for i, part in enumerate(content)]


def _part(part: Any, where: str, role: Any, modalities: Collection[MediaModality]) -> str | MediaPart:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" or (kind == "refusal" and role == "assistant"):
        if not isinstance(part.get(kind), str):
            raise _invalid(f"{where}.{kind} must be a string, got {type(part.get(kind)).__name__}")
        return part[kind]
    modality, is_url = _MEDIA_PARTS.get(kind, (None, False)) if isinstance(kind, str) else (None, False)
    if modality is None or modality not in modalities:
        given = _shorten(kind) if isinstance(part, Mapping) else type(part).__name__
        read = ["text", *(name for name, (modality, _) in _MEDIA_PARTS.items() if modality in modalities)]
        raise _invalid(
            f"{where} is a part of type {given}; this model reads parts of type {', '.join(map(repr, read))} only"
        )
    if role not in _MEDIA_ROLES:
        raise _invalid(
            f"{where} is a part of type {kind!r} in a message with the role {_shorten(role)}; only messages with the "
            f"role {' or '.join(_MEDIA_ROLES)} may have images and video"
        )
    options = part.get("mm_processor_kwargs")
    if not isinstance(options, Mapping | None):
        raise _invalid(f"{where}.mm_processor_kwargs must be an object, got {type(options).__name__}")
    given = part.get(kind)
    fields = {**given, **part} if isinstance(given, Mapping) else part
    source = _url(given, f"{where}.{kind}") if is_url else _source(given, f"{where}.{kind}", modality)
    return MediaPart(
        modality=modality,
        source=source,
        where=where,
        options=_option_fields(fields, where) | dict(options or {}),
        low_detail=modality == "image" and _detail(fields, where) == "low",
    )


def _option_fields(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    for name in _REFUSED_FIELDS:
        if fields.get(name) is not None:
            raise _invalid(f"{where}.{name} is not supported; supported are {', '.join(_OPTION_FIELDS)}")
    return {ours: fields[name] for name, ours in _OPTION_FIELDS.items() if fields.get(name) is not None}


def _detail(fields: Mapping[str, Any], where: str) -> str:
    detail = fields.get("detail")
    if detail is not None and detail not in _DETAILS:
        raise _invalid(f"{where}: detail must be {', '.join(map(repr, _DETAILS))}, got {_shorten(detail)}")
    return detail or "auto"


def _url(value: Any, where: str) -> str:
    if isinstance(value, Mapping):
        value, where = value.get("url"), f"{where}.url"
    if not isinstance(value, str) or not value:
        given = repr(value) if isinstance(value, str) else type(value).__name__
        raise _invalid(f"{where} must be a URL as a non-empty string, got {given}")
    return value


def _source(value: Any, where: str, modality: MediaModality) -> Any:
    if modality == "video" and isinstance(value, list | tuple):
        if not value:
            raise _invalid(f"{where} must hold at least one frame, got none")
        return [_source(frame, f"{where}[{i}]", "image") for i, frame in enumerate(value)]
    if not isinstance(value, _SOURCES) or (isinstance(value, str | bytes) and not value):
        given = repr(value) if isinstance(value, str | bytes) else type(value).__name__
        several = ", or a list of frames" if modality == "video" else ""
        raise _invalid(f"{where} must be a URL, a path, bytes, a Pillow image or an array{several}, got {given}")
    return value


def _normal_call(call: Any, where: str, form: CallFormat) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _invalid(f"{where} must be an object with a function that has a name")
    given = function.get("arguments")
    arguments: Any = _arguments(given, f"{where}.function.arguments")
    if form.arguments_as_text:
        plain = map_strings(arguments, str, param="messages")  # checks the depth, over which dumps recurses
        arguments = given if isinstance(given, str) and arguments else json.dumps(plain, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(arguments: Any, where: str) -> Mapping[str, Any]:
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments, parse_constant=_no_constant) if arguments.strip() else None
        except (ValueError, RecursionError):
            raise _invalid(f"{where} must be the JSON text of an object, got {_shorten(arguments)}") from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _invalid(f"{where} must be the JSON text of an object, got {_shorten(arguments)}")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _shorten(value: Any, limit: int = 80) -> str:
    text = ascii(value)
    return text if len(text) <= limit else text[:limit] + "..."


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")
